"""The rows of a task: read by place and kept apart from the caller, noted where text becomes what may not be meant,
and one observation where they are equal."""

import itertools

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import transformers
import zoo
from tokenizer_kinds import save_tokenized
from zoo import shared

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.metrics import LogitDifference
from tlspectral.tasks.task_sequences import task_sequences

IDS = torch.tensor([[1, 4, 9, 3, 8], [1, 5, 5, 6, 2], [1, 8, 2, 6, 7], [1, 9, 9, 4, 4]])
PAIRS = torch.tensor([[1, 4, 8, 3, 8], [1, 5, 6, 6, 2], [1, 8, 3, 6, 7], [1, 9, 4, 4, 4]])
RIGHT, WRONG, AT = [11, 12, 13, 14], [21, 22, 23, 24], [2, 1, 0, 2]
SHUFFLED = [3, 0, 1, 2]  # labels of an index, by which another row would be taken


def series(values):
    return pd.Series([*values], index=SHUFFLED)


def objects(values):
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


PROMPT_KINDS = {
    "list": lambda rows: rows.tolist(),
    "tuple": lambda rows: tuple(rows.unbind()),
    "array": lambda rows: rows.numpy(),
    "objects": lambda rows: objects(rows.tolist()),
    "series": lambda rows: series(rows.tolist()),
    "column": lambda rows: pd.DataFrame({"ids": rows.tolist()}, index=SHUFFLED)["ids"],
    "tensor": lambda rows: rows.clone(),
    "generator": lambda rows: (row for row in rows),
    "batch": lambda rows: transformers.BatchEncoding({"input_ids": rows.tolist(), "attention_mask": [[1] * 5] * 4}),
    "batch of tensors": lambda rows: transformers.BatchEncoding({"input_ids": rows, "attention_mask": rows > 0}),
    "batch without a mask": lambda rows: {"input_ids": rows.numpy()},
}
VALUE_KINDS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "numpy integers": lambda values: [np.int64(value) for value in values],
    "objects": objects,
    "series": series,
    "index": pd.Index,
    "nullable": lambda values: pd.Series(values, index=SHUFFLED, dtype="Int64"),
    "tensor": torch.tensor,
    "scalars": lambda values: [torch.tensor(value) for value in values],
    "generator": iter,
}


def of_rows(task):
    """All that a task has per prompt, as plain numbers, once it meets a model."""
    sequences = task_sequences(attention_view(shared("bridge", "llama")), task)
    named = {name: at.tolist() for name, at in sequences.positions.items()}
    pairs = sequences.counterfactual.tokens.tolist()
    return [sequences.tokens.tolist(), pairs, sequences.metric.correct, sequences.metric.wrong, named, task.attention]


@pytest.mark.parametrize(
    ("prompts", "values"), itertools.zip_longest(PROMPT_KINDS, VALUE_KINDS, fillvalue="series"), ids=str
)
def test_all_that_is_per_prompt_is_read_by_place_also_in_a_split(prompts, values):
    of, numbers = PROMPT_KINDS[prompts], VALUE_KINDS[values]
    labels = pd.DataFrame({"kind": [*"abcd"]}, index=SHUFFLED)
    made = tls.logit_difference(of(IDS), numbers(RIGHT), numbers(WRONG), counterfactual=of(PAIRS))
    positions = {"S": numbers(AT), "END": np.int64(-1)}
    task = tls.Task(
        made.prompts, made.metric, counterfactual=made.counterfactual, positions=positions, labels=labels,
        predict=-1, attention=pd.DataFrame({"query": [3] * 4, "key": AT}, index=SHUFFLED),
    )  # fmt: skip

    def expected(rows):
        values = [[IDS, PAIRS][side][rows].tolist() for side in (0, 1)]
        values += [[[answers[row]] for row in rows] for answers in (RIGHT, WRONG)]
        return [*values, {"S": [AT[row] for row in rows], "END": [4] * len(rows)}, [[3, AT[row]] for row in rows]]

    assert of_rows(task) == expected([0, 1, 2, 3])
    halves = task.split(0.5, seed=2)
    chosen = [["abcd".index(kind) for kind in half.labels["kind"]] for half in halves]
    assert sorted(itertools.chain(*chosen)) == [0, 1, 2, 3]
    for half, rows in zip(halves, chosen, strict=True):
        assert of_rows(half) == expected(rows)


def test_several_answers_of_a_prompt_are_read_by_place():
    given = pd.DataFrame({"answers": [[11, 12], [12], np.array([13, 15]), torch.tensor([14])]}, index=SHUFFLED)
    task = tls.logit_difference(IDS, given["answers"], np.array([[21, 31], [22, 32], [23, 33], [24, 34]]))
    assert task.metric.correct == [[11, 12], [12], [13, 15], [14]]
    assert task.metric.wrong == [[21, 31], [22, 32], [23, 33], [24, 34]]


def test_prompts_of_unequal_length_in_a_tokenizers_batch_of_lists():
    rows = [[1, 4, 9], [1, 5], [1, 8, 2, 6]]
    batch = transformers.BatchEncoding({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    view = attention_view(shared("bridge", "llama"))
    for given in (batch, {"input_ids": rows}):
        packed = packed_prompts(view, given)
        assert [row[:n].tolist() for row, n in zip(packed.tokens, packed.lengths, strict=True)] == rows
    with pytest.raises(ValueError, match="attention_mask has rows of other lengths than input_ids"):
        packed_prompts(view, {"input_ids": rows, "attention_mask": [[1]] * 3})


def test_what_was_given_may_change_afterwards():
    """A task, and a part with a reference, keep what they were made from."""
    prompts, pairs, answers, at = IDS.clone(), PAIRS.clone(), torch.tensor(RIGHT), np.array(AT)
    labels, reference = pd.DataFrame({"kind": [*"abcd"]}), IDS.clone()
    made = tls.logit_difference(prompts, answers, 5, counterfactual=pairs, positions={"S": at})
    labelled = tls.Task(prompts, made.metric, predict=-1, labels=labels)
    part = tls.parts.Output("mean", reference=reference)
    repeated = torch.cat([IDS[:, :1], IDS[:, 1:3], IDS[:, 1:3]], 1)
    ready = [tls.tasks.induction(repeated), tls.tasks.language(repeated)]
    before = of_rows(made)[:5], labelled.labels.copy(), [tls.evaluate(shared("bridge", "llama"), one) for one in ready]
    for given in (prompts, pairs, answers, at, reference, repeated):
        given[:] = 0
    labels["kind"] = "z"
    assert of_rows(made)[:5] == before[0]
    assert labelled.labels.equals(before[1])
    assert torch.equal(torch.as_tensor(part.reference), IDS)
    for one, score in zip(ready, before[2], strict=True):
        assert tls.evaluate(shared("bridge", "llama"), one).per_sequence.tolist() == score.per_sequence.tolist()


def test_the_position_of_a_part_is_read_by_place_and_kept():
    model, at = shared("bridge", "llama"), torch.tensor(AT)
    parts = [tls.parts.Output(at=series(AT)), tls.parts.RopePhase(at=np.array(AT)), tls.parts.LongRange(2, at=at)]
    at[:] = 0
    assert [torch.as_tensor(part.at).tolist() for part in parts] == [AT] * 3
    with tls.ablate(model, "L0H1", parts[0]), torch.no_grad():
        found = model(IDS)
    with tls.ablate(model, "L0H1", tls.parts.Output(at=AT)), torch.no_grad():
        assert torch.equal(found, model(IDS))


def ban(logits, tokens, mask):
    """A metric that writes into all that it is given."""
    logits[:, -1, [7, 8]] = -20.0
    tokens[:], mask[:] = 1, False
    return logits[:, -1].log_softmax(-1)[:, 5]


def ban_copies(logits, tokens, mask):
    return ban(logits.clone(), tokens.clone(), mask.clone())


@pytest.mark.parametrize("screen", [None, "gradient"])
def test_a_metric_may_edit_what_it_is_given(screen):
    """Also under the gradient screen, where an edit of a leaf would end in an error of torch."""
    model = shared("bridge", "llama")
    found, expected = (
        tls.ablation_sweep(model, "output", heads="L1", task=tls.Task(IDS, metric, predict=-1), screen=screen)
        for metric in (ban, ban_copies)
    )
    pd.testing.assert_frame_equal(found, expected)
    sequences = task_sequences(attention_view(model), tls.Task(IDS, ban, predict=-1))
    tls.evaluate(model, tls.Task(IDS, ban, predict=-1))
    logits = torch.randn(4, 1, 97)
    kept = logits.clone()
    sequences.measured(logits)
    assert torch.equal(logits, kept)
    assert torch.equal(sequences.tokens, IDS)


# --- answers, metrics and counterfactuals ---


@pytest.mark.parametrize("answer", [15.7, True, np.bool_(True), None, float("nan"), b"w5", torch.tensor(1.5), {}])
def test_what_is_no_answer_is_refused_where_the_task_is_made(answer):
    with pytest.raises(TypeError, match=r"correct of prompt 1 is .*: give a token as text"):
        tls.logit_difference(IDS, [7, answer, 8, 9], 5)
    with pytest.raises(TypeError, match=r"^wrong"):
        tls.logit_difference(IDS, 5, answer)


TEXTS = [f"w{number}" for number in RIGHT]


@pytest.mark.parametrize(
    "answers",
    [
        pd.Series(TEXTS, index=SHUFFLED), np.array(TEXTS), pa.array(TEXTS), pa.chunked_array([TEXTS[:1], TEXTS[1:]]),
        pl.Series(TEXTS), pd.Series(TEXTS, dtype="category"), [pa.scalar(text) for text in TEXTS], pa.array(RIGHT),
        pl.Series(RIGHT), [pa.scalar(number) for number in RIGHT],
    ],
    ids=lambda answers: type(answers).__module__,
)  # fmt: skip
def test_answers_of_every_library(answers):
    expected = RIGHT if not isinstance(answers[0], str) and str(answers[0]).isdigit() else TEXTS
    assert tls.logit_difference(IDS, answers, 5).metric.correct == expected
    assert tls.logit_difference(IDS, pa.scalar(7), np.array("w5")).metric == LogitDifference(7, "w5")
    several = pa.array([[text, "w3"] for text in TEXTS])
    assert tls.logit_difference(IDS, several, 5).metric.correct == [[text, "w3"] for text in TEXTS]


@pytest.mark.parametrize(
    "answers",
    [(np.array([11, 12]), np.array([13, 14])), ([11, 12], [13, 14]), [torch.tensor([11, 12]), torch.tensor([13, 14])]],
)
def test_first_and_second_answers_side_by_side_have_two_readings(answers):
    """Of two prompts, 11 and 13 of the first one, or 11 and 12."""
    with pytest.raises(TypeError, match=r"correct has two readings: .* of 2 arrays or lists is a first and a second"):
        tls.logit_difference(IDS[:2], answers, 5)


@pytest.mark.parametrize(
    "frame", [pd.DataFrame, pl.DataFrame, pa.table, dict], ids=["pandas", "polars", "pyarrow", "dict"]
)
def test_answers_are_no_frame(frame):
    with pytest.raises(TypeError, match=r"correct=.* is not an answer: give a token"):
        tls.logit_difference(IDS, frame({"a": [1, 2], "b": [3, 4]}), 5)


def test_answers_of_other_numbers_of_prompts_are_refused_where_the_task_is_made():
    with pytest.raises(ValueError, match=r"wrong lists the answers of 2 prompts, and there are 4 prompts"):
        tls.logit_difference(IDS, 5, pd.Series([6, 7]))
    for per_prompt, said in (
        ({"positions": {"S": [1, 2]}}, "positions 'S' has 2 rows, and there are 4 prompts"),
        ({"counterfactual": PAIRS[:3]}, "counterfactual has 3 rows, and there are 4 prompts"),
    ):
        with pytest.raises(ValueError, match=said):
            tls.logit_difference(IDS, 5, 6, **per_prompt).split()


def test_numbers_of_every_library_are_ids():
    """A column of ids with a missing cell is of floats, which hold whole numbers."""
    model = shared("bridge", "llama")
    expected = tls.evaluate(model, tls.logit_difference(IDS, 7, 8)).per_sequence.tolist()
    for right in (np.int64(7), np.uint8(7), torch.tensor(7), np.array(7), 7.0):
        assert tls.evaluate(model, tls.logit_difference(IDS, right, 8)).per_sequence.tolist() == expected


@pytest.mark.parametrize("metric", [lambda logits, tokens: logits[:, -1, 0], lambda logits, *, answers: logits])
def test_a_metric_of_other_arguments_is_refused_where_the_task_is_made(metric):
    with pytest.raises(TypeError, match=r"metric is a function of logits, tokens and mask.*found <lambda>\(logits"):
        tls.Task(IDS, metric)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (pd.Series([1.0] * 4), r"shape \(4,\) of Series"),
        (np.ones(4), r"shape \(4,\) of ndarray"),
        (None, "found NoneType"),
        (torch.ones(4, 1), r"shape \(4, 1\) of torch.float32"),
        (torch.ones(4, dtype=torch.complex64), r"of torch.complex64"),
    ],
)
def test_what_a_metric_returned_is_named(scores, said):
    with pytest.raises(ValueError, match=said):
        tls.evaluate(shared("bridge", "llama"), tls.Task(IDS, lambda *_: scores))


def test_the_metric_of_a_counterfactual_task_scores_its_prompts():
    model = shared("bridge", "llama")
    other = tls.logit_difference(PAIRS, 31, 32)
    task = tls.logit_difference(IDS, 11, 12, counterfactual=other, positions={"S": AT})
    swapped = task.denoising()
    assert tls.evaluate(model, swapped).per_sequence.tolist() == tls.evaluate(model, other).per_sequence.tolist()
    back = swapped.denoising()
    assert tls.evaluate(model, back).per_sequence.tolist() == tls.evaluate(model, task).per_sequence.tolist()
    assert swapped.positions == {"S": AT}
    fit, held_out = task.split()
    assert sorted(
        map(tuple, [*fit.counterfactual.prompts.tolist(), *held_out.counterfactual.prompts.tolist()])
    ) == sorted(map(tuple, PAIRS.tolist()))


# --- text ---


def words(**special):
    """A word tokenizer: `w3` is the id 3."""
    made = zoo._tokenizer.__wrapped__()
    raw = made.backend_tokenizer
    given = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>", "pad_token": "<pad>", **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **given)


def packed_notes(model, prompts):
    with pytest.warns() as caught:
        packed = packed_prompts(attention_view(model), prompts)
    return packed.noted["prompt_notes"], [str(one.message) for one in caught]


def test_text_that_becomes_what_may_not_be_meant_is_noted_once():
    model = tls.load_model(zoo.hf_model("llama"), tokenizer=words())
    notes, said = packed_notes(model, ["w5 w6", "<s> w5", "w5 Mary", "", "<s> w7"])
    assert notes == {"start_token_twice": [1, 4], "unknown_text": [2], "empty": [3]}
    assert len(said) == 3
    assert said[0].startswith("2 of 5 prompts begin with two start tokens '<s>'")
    assert not packed_prompts(attention_view(model), ["w5 w6", "w5"]).notes
    with pytest.warns(UserWarning, match="do not know|does not know"):
        sweep = tls.ablation_sweep(
            model, "output", heads="L0H0", task=tls.logit_difference(["w5 Tom", "w6"], "w3", "w4")
        )
    assert sweep.attrs["prompt_notes"] == {"unknown_text": [0]}
    with pytest.raises(ValueError, match="wrong of prompt 1: the tokenizer does not know 'Mary'"):
        tls.evaluate(model, tls.logit_difference(["w5", "w6"], "w3", ["w4", "Mary"]))


def test_an_end_token_in_front_of_text_is_noted():
    """TransformerLens puts it there for a tokenizer without a start token; of ids nothing is to be said."""
    model = tls.load_model(zoo.hf_model("llama"), tokenizer=words(bos_token=None))
    notes, said = packed_notes(model, ["w5 w6"])
    assert notes == {"end_token_in_front": "</s>"}
    assert "the tokenizer has no start token" in said[0]
    assert not packed_prompts(attention_view(model), model.to_tokens("w5 w6", prepend_bos=False)).notes


def test_a_space_at_the_end_belongs_to_the_answers_token(tmp_path):
    model = tls.load_model(save_tokenized("gpt2", tmp_path))
    for right in (" ab", "c"):  # two spaces; and `abba c` is `abba` and ` c` in text
        with pytest.warns(UserWarning, match="prompt 0 ends in a space, and .* does not follow a space"):
            sequences = task_sequences(attention_view(model), tls.logit_difference(["abba "], right, "x"))
        assert [note.name for note in sequences.notes] == ["space_at_end"]
    assert not task_sequences(attention_view(model), tls.logit_difference(["abba"], " ab", " c")).notes


# --- equal rows ---

TWICE = torch.cat([IDS, IDS[:1], IDS[:1]])


def sign_flips(sums):
    """The exact p of the sum under flips of signs."""
    flips = np.array([*itertools.product([1, -1], repeat=len(sums))])
    return float((np.abs(flips @ sums) >= abs(sums.sum()) * (1 - 1e-9)).mean())


def test_equal_rows_are_one_observation():
    model = shared("bridge", "llama")
    with pytest.warns(UserWarning, match=r"of 6 prompts 4 are distinct \(prompt 4 is prompt 0 again\)"):
        intact = tls.evaluate(model, tls.logit_difference(TWICE, 7, 8))
    values = intact.per_sequence
    assert float(intact) == values.mean()
    sizes = np.array([3, 1, 1, 1])
    deviations = sizes * (values[:4] - values.mean())  # rows run again differ by rounding, 1e-7
    assert intact.se == pytest.approx(np.sqrt(4 / 3 * np.square(deviations).sum()) / 6, rel=1e-4)
    with pytest.warns(UserWarning, match="4 are distinct"):
        sweep = tls.ablation_sweep(
            model, "output", heads="L0H1", task=tls.logit_difference(TWICE, 7, 8), control="random"
        )
    with tls.ablate(model, "L0H1", "output"):
        with pytest.warns(UserWarning, match="4 are distinct"):
            effect = tls.evaluate(model, tls.logit_difference(TWICE, 7, 8)) - intact
        delta = tls.evaluate(model, tls.logit_difference(IDS, 7, 8)).per_sequence - values[:4]
    assert effect.pvalue == sweep["delta_p"][0] == sign_flips(sizes * delta)
    assert effect.se == pytest.approx(sweep["delta_se"][0], rel=1e-4)
    assert sweep.attrs["prompt_notes"] == {"distinct_rows": 4}
    sums = sweep.attrs["sums_per_sequence"]["delta"]
    assert (len(sums), np.mean(sums)) == (4, pytest.approx(sweep["delta"][0]))
    assert standard_error(np.array(sums)) == pytest.approx(sweep["delta_se"][0])


def test_rows_repeated_alike_have_the_error_of_one_copy_each():
    model = shared("bridge", "llama")
    once = tls.evaluate(model, tls.logit_difference(IDS, 7, 8))
    with pytest.warns(UserWarning, match="of 12 prompts 4 are distinct"):
        thrice = tls.evaluate(model, tls.logit_difference(IDS.tile(3, 1), 7, 8))
    assert thrice.se == pytest.approx(once.se, rel=1e-4)
    with pytest.warns(UserWarning, match="of 3 prompts 1 are distinct"):
        same = tls.evaluate(model, tls.logit_difference(IDS[:1].tile(3, 1), 7, 8))
    assert np.isnan(same.se)
    assert np.isnan((same - same).pvalue)


def test_rows_that_differ_in_answers_or_pairs_are_distinct():
    view, rows = attention_view(shared("bridge", "llama")), IDS[:1].tile(2, 1)
    for options in (
        {"correct": [7, 9]},
        {"correct": 7, "counterfactual": PAIRS[:1].tile(2, 1) - torch.tensor([[0], [1]])},
    ):
        counterfactual = options.pop("counterfactual", None)
        if counterfactual is not None:
            counterfactual[:, 0] = 1
        task = tls.logit_difference(rows, options["correct"], 8, counterfactual=counterfactual)
        assert task_sequences(view, task).distinct is None


def test_equal_prompts_go_to_one_half_of_a_split():
    prompts = torch.cat([IDS, IDS])
    pairs = torch.cat([PAIRS, PAIRS])
    mirrored = torch.cat([IDS, PAIRS]), torch.cat([PAIRS, IDS])
    for seed in range(5):
        for task in (
            tls.logit_difference(prompts, 7, 8),
            tls.logit_difference(prompts, 7, 8, counterfactual=pairs),
            tls.logit_difference(mirrored[0], 7, 8, counterfactual=mirrored[1]),
        ):
            halves = [
                {frozenset(map(tuple, pair)) for pair in zip(*sides, strict=True)}
                for sides in (
                    [one.tolist() for one in (half.prompts, half.counterfactual) if one is not None]
                    for half in task.split(0.5, seed=seed)
                )
            ]
            assert not halves[0] & halves[1]
            assert len(halves[0] | halves[1]) == 4
    with pytest.raises(ValueError, match="equal prompts go to one half together"):
        tls.logit_difference(IDS[:1].tile(4, 1), 7, 8).split()


def test_detectors_count_equal_prompts_once():
    model, twice = shared("bridge", "llama"), torch.cat([IDS, IDS[:1]])
    alone = [tls.detect_heads(model, prompts=row[None]) for row in IDS]
    with pytest.warns(UserWarning, match="of 5 prompts 4 are distinct"):
        found = tls.detect_heads(model, prompts=twice)
    assert found.attrs["prompt_notes"] == {"distinct_rows": 4}
    for name, sizes in (("prev", [2, 1, 1, 1]), ("self", [2, 1, 1, 1])):
        values = np.array([one[name] for one in alone])
        weights = np.array(sizes)[:, None]
        mean = (weights * values).sum(0) / 5
        error = np.sqrt(4 / 3 * np.square(weights * (values - mean)).sum(0)) / 5
        np.testing.assert_allclose(found[name], mean, rtol=1e-5)  # float32, 1e-7 measured; the usual error is 20 % off
        np.testing.assert_allclose(found[f"{name}_se"], error, rtol=1e-4)
    with pytest.warns(UserWarning, match="of 3 prompts 1 are distinct"):
        assert tls.detect_heads(model, prompts=IDS[:1].tile(3, 1))["prev_se"].isna().all()


def test_a_string_is_one_prompt():
    task = tls.logit_difference("w5 w6", "w3", "w4")
    assert (task.prompts, repr(task)) == (["w5 w6"], "Task(logit difference, 1 prompts)")
