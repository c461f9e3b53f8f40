"""`qk_attribution` by modes and frequencies: sums, plain recomputations, removal, and the mean of several scores."""

import copy

import numpy as np
import pytest
import scipy.stats
import torch
from attention_models import fresh
from score_terms import KEY, PARTS, PROMPT, QUERY
from zoo import shared

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until

OTHER = torch.randint(30, PROMPT.shape, generator=torch.Generator().manual_seed(7)) + 2


def dense_modes(view, layer, head):
    """U, s and V of the whole d_model x d_model matrix."""
    folded = view.layer(layer)
    w_q, w_k = (factors[head] for factors in folded.operator_factors())
    u, s, v = torch.linalg.svd(w_q @ w_k.T)
    rank = folded.d_head
    return u[:, :rank], s[:rank], v.T[:, :rank]


def rows_of(table):
    return table.set_index(["query_term", "key_term"])["total"].to_dict()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "qwen3", "olmo2"])
def test_modes_and_frequencies_sum_to_the_score(name):
    model = shared("bridge", name)
    score = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY).attrs["score"]
    for by in ("mode", "frequency"):
        if by == "frequency" and name in ("gpt2", "bloom"):
            with pytest.raises(UnsupportedArchitecture, match="layer 1 has no rotary positions"):
                tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by=by)
            continue
        table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by=by)
        # Measured: 1.4e-6, the rounding of the model's own scores in float32. A mode left out is off by hundredths.
        assert table["total"].sum() == pytest.approx(score, abs=1e-5)
        np.testing.assert_allclose(table[PARTS].sum(axis=1), table["total"], rtol=0, atol=1e-12)
        assert table.attrs["by"] == by
        assert "query_source" not in table


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_without_rotation_a_mode_meets_its_own_alone(name):
    model = shared("bridge", name)
    view = attention_view(model)
    rows = {
        tuple(row[:2]): row[2:]
        for row in tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by="mode").itertuples(index=False)
    }
    u, s, v = dense_modes(view, 1, 1)
    x = capture_until(view, PROMPT, [view.hook_names(1)["residual"]], last=view.hook_names(1)["pattern"])
    n = view.raw(1).norm.normalized(x[view.hook_names(1)["residual"]][0].double())
    scale = view.raw(1).score_scale
    for k in range(len(s)):
        expected = scale * s[k] * (n[QUERY] @ u[:, k]) * (v[:, k] @ n[KEY])
        # float64 on both sides; measured 3e-15. The sign of a pair of vectors is free and drops out.
        assert rows[f"mode {k}", f"mode {k}"][-1] == pytest.approx(float(expected), abs=1e-10)
        assert abs(rows[f"mode {k}", f"mode {(k + 1) % len(s)}"][-1]) < 1e-10


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_under_rotation_the_rows_of_a_mode_are_what_its_removal_from_w_q_takes(name):
    model = fresh("bridge", name)
    view = attention_view(model)
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by="mode")
    u, _, _ = dense_modes(view, 1, 1)
    edited = copy.deepcopy(model)
    raw, gain = attention_view(edited).raw(1), view.raw(1).norm.gain
    gain = torch.ones(len(u), dtype=torch.float64) if gain is None else gain.double()
    with torch.no_grad():
        folded = gain[:, None] * raw.w_q[1].double()
        raw.w_q[1] -= ((u[:, [2]] @ u[:, [2]].T @ folded) / gain[:, None]).to(raw.w_q)
    lost = table.attrs["score"] - tls.qk_attribution(edited, PROMPT, "L1H1", QUERY, KEY).attrs["score"]
    # Float32 of the two models: measured 2e-6. GPT-J's norm has a bias, folded into b_Q, which the edit changes too.
    if view.raw(1).norm.bias is None:
        assert table.loc[table["query_term"] == "mode 2", "total"].sum() == pytest.approx(lost, abs=2e-5)
    others = table[(table["query_term"] == "mode 2") & (table["key_term"] != "mode 2")]
    assert others["total"].abs().max() > 1e-3, "under rotation modes of two numbers meet"


def test_a_frequency_has_what_the_parts_of_its_band_remove():
    model = shared("bridge", "llama")
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by="frequency").set_index("query_term")
    for number in range(len(table)):
        row = table.loc[f"frequency {number}"]
        parts = tls.parts
        for part, found in (
            (parts.Band([number]), row["total"] - row["outside_m"]),
            (parts.RopePhase([number]), row["phase"]),
        ):
            whole = tls.scores(model, PROMPT, "L1H1", part).iloc[QUERY, KEY]
            assert found == pytest.approx(whole, abs=1e-10)  # float64 on both sides


def test_a_mode_that_is_removed_takes_what_its_row_says_where_no_norm_notices():
    table = tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", QUERY, KEY, by="mode", remove=3)
    # The norm in front shrinks by less than a hundredth where one of twelve directions of 48 goes.
    np.testing.assert_allclose(table["measured"][:3], table["total"][:3], rtol=0.3)
    assert table["measured"][3:].isna().all()


def test_of_several_scores_numbers_are_means_with_errors():
    model = shared("bridge", "llama")
    places = [(PROMPT, QUERY, KEY), (OTHER, QUERY, KEY), (OTHER, 15, 3)]
    singles = [tls.qk_attribution(model, prompt, "L1H1", query, key) for prompt, query, key in places]
    table = tls.qk_attribution(model, places, "L1H1", remove=2)
    totals = np.array(
        [
            [rows_of(single)[tuple(pair)] for single in singles]
            for pair in table[["query_term", "key_term"]].to_numpy().tolist()
        ]
    )
    np.testing.assert_allclose(table["total"], totals.mean(1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(table["total_se"], scipy.stats.sem(totals, axis=1), rtol=0, atol=1e-12)
    assert table.attrs["score"] == pytest.approx(np.mean([single.attrs["score"] for single in singles]), abs=1e-12)
    assert (table.attrs["n_prompts"], table.attrs["query"]) == (3, [QUERY, QUERY, 15])
    first = tuple(table.loc[0, ["query_term", "key_term"]])
    removed = [
        tls.qk_attribution(model, prompt, "L1H1", query, key, remove=len(single))
        for (prompt, query, key), single in zip(places, singles, strict=True)
    ]
    measured = [each.set_index(["query_term", "key_term"]).loc[first, "measured"] for each in removed]
    assert table.loc[0, "measured"] == pytest.approx(np.mean(measured), abs=1e-12)
    assert table.loc[0, "measured_se"] == pytest.approx(scipy.stats.sem(measured), abs=1e-12)


def test_equal_scores_are_one_observation():
    model = shared("bridge", "llama")
    table = tls.qk_attribution(model, [(PROMPT, QUERY, KEY)] * 3, "L1H1")
    single = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)
    np.testing.assert_allclose(table["total"], single["total"], rtol=1e-12)
    assert table["total_se"].isna().all()
    assert np.isnan(table.attrs["score_se"])
    # What follows the query changes nothing.
    continued = torch.cat([torch.atleast_2d(PROMPT).repeat(2, 1), torch.tensor([[5], [6]])], dim=1)
    table = tls.qk_attribution(model, [(row, QUERY, KEY) for row in continued], "L1H1")
    assert (table.attrs["n_prompts"], table.attrs["n_distinct"]) == (2, 1)
    assert table["total_se"].isna().all()
    mixed = [(PROMPT, QUERY, KEY)] * 2 + [(OTHER, QUERY, KEY)]
    apart = [tls.qk_attribution(model, prompt, "L1H1", QUERY, KEY).attrs["score"] for prompt in (PROMPT, OTHER)]
    deviations = np.array(apart) - (2 * apart[0] + apart[1]) / 3
    expected = np.sqrt(2 * ((2 * deviations[0]) ** 2 + deviations[1] ** 2)) / 3  # sqrt(G / (G - 1) sum) / n, G = 2
    assert tls.qk_attribution(model, mixed, "L1H1").attrs["score_se"] == pytest.approx(expected, rel=1e-9)


def test_a_task_gives_its_named_positions():
    model = shared("bridge", "llama")
    prompts = torch.cat([PROMPT, OTHER])
    task = tls.Task(
        prompts,
        lambda logits, tokens, mask: logits[:, -1, 0],
        positions={"END": -3, "S": [4, 7]},
        attention=[[9, 2], [12, 5]],
    )
    named = tls.qk_attribution(model, task, "L1H1", "END", "S")
    listed = tls.qk_attribution(model, [(PROMPT, -3, 4), (OTHER, -3, 7)], "L1H1")
    assert named.equals(listed)
    assert named.attrs == listed.attrs
    by_attention = tls.qk_attribution(model, task, "L1H1")
    assert (by_attention.attrs["query"], by_attention.attrs["key"]) == ([9, 12], [2, 5])


METRIC = tls.Task([[1, 2, 3]], lambda logits, tokens, mask: logits[:, -1, 0], positions={"A": 1})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "options", "error", "said"),
    [
        (PROMPT, {"query": QUERY, "key": KEY, "by": "feature"}, ValueError, "by= must be 'source', 'mode' or"),
        (PROMPT, {"query": QUERY, "key": KEY, "by": "frequency", "remove": 1}, ValueError, r"tls\.parts\.Band"),
        (PROMPT, {}, TypeError, "give query and key"),
        ([], {}, ValueError, "the list of .* is empty"),
        ([(PROMPT, 3)], {}, TypeError, "give query and key"),
        (METRIC, {}, ValueError, "the task has no attention="),
        (METRIC, {"query": "A"}, TypeError, "give both query and key"),
        (METRIC, {"query": "B", "key": "A"}, ValueError, "query='B' is not a named position, the task names 'A'"),
        (METRIC, {"query": 0, "key": "A"}, ValueError, "key 1 is behind query 0"),
        (
            PROMPT,
            {"query": QUERY, "key": KEY, "dictionary": 3},
            TypeError,
            "dictionary= must be a tls.Dictionary; found",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(given, options, error, said):
    with pytest.raises(error, match=said):
        tls.qk_attribution(shared("bridge", "llama"), given, "L1H1", **options)
