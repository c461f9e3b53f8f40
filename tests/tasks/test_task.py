"""Tasks of one's own: prompts in every form, the positions that a metric gets, and scores that are used as numbers."""

import inspect
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from conformance.scoring import padded
from zoo import shared

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.positional import BlockPrompt
from tlspectral.tasks import MetricValue, paired_effect
from tlspectral.tasks.metrics import _token_id, next_token_loss
from tlspectral.tasks.task_sequences import predicted_positions, task_sequences

PROMPTS = [[1, 4, 9, 3], [1, 5], [1, 8, 2, 6, 7]]
# Logits of a whole pass and of a pass over other rows differ by 1e-6 in float32; another position moves them by 0.1.
NOISE = 1e-5


def last_margin(logits, tokens, mask):
    return logits[:, -1, 3] - logits[:, -1, 5]


def logits_of(model, prompts=PROMPTS, at=-1):
    """Those of one token of each prompt, run by itself and without filling."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt]), return_type="logits")[0, at] for prompt in prompts])


def by_hand(*given, **options):
    rows = logits_of(*given, **options)
    return (rows[:, 3] - rows[:, 5]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "llama"), ("bridge", "gpt2"), pytest.param("hooked", "llama", marks=zoo.needs_hooked)],
)
@pytest.mark.parametrize("predict", [None, -1, [-1], [0, -1], slice(-2, None)], ids=str)
def test_a_metric_gets_the_last_real_token_of_each_prompt(backend, name, predict):
    """A position that a short prompt does not have is its last real token, whatever the metric asks for."""
    model = shared(backend, name)
    score = tls.evaluate(model, tls.Task(PROMPTS, last_margin, predict=predict))
    np.testing.assert_allclose(score.per_sequence, by_hand(model), rtol=0, atol=NOISE)


def padded_on(side):
    ids, mask = padded([torch.tensor([prompt]) for prompt in PROMPTS], (side,))
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "prompts",
    [
        [torch.tensor(prompt) for prompt in PROMPTS],
        [np.array(prompt) for prompt in PROMPTS],
        [torch.tensor([prompt]) for prompt in PROMPTS],
        padded_on("left"),
        padded_on("right"),
    ],
    ids=["tensors", "arrays", "rows", "left", "right"],
)
def test_prompts_in_every_form_are_the_same_prompts(prompts):
    model = shared("bridge", "llama")
    expected = tls.evaluate(model, tls.Task(PROMPTS, last_margin, predict=-1)).per_sequence
    score = tls.evaluate(model, tls.Task(prompts, last_margin, predict=-1))
    assert score.per_sequence.tolist() == expected.tolist()


def test_strings_are_tokenised_as_by_the_model(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    texts = ["w4 w9 w3", "w5"]
    rows = [model.to_tokens(text)[0].tolist() for text in texts]
    score = tls.evaluate(model, tls.Task(texts, last_margin, predict=-1))
    np.testing.assert_allclose(score.per_sequence, by_hand(model, rows), rtol=0, atol=NOISE)
    answers = tls.evaluate(model, tls.logit_difference(texts, "w3", "w5"))
    np.testing.assert_allclose(answers.per_sequence, score.per_sequence, rtol=0, atol=NOISE)
    with pytest.raises(
        ValueError, match=r"correct: 'w3 w4' is 2 tokens, \['w3', 'w4'\]; an answer is one token: give the id"
    ):
        tls.evaluate(model, tls.logit_difference(texts, "w3 w4", "w5"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_text_past_the_context_is_refused_and_not_cut(tmp_path, backend):
    """`to_tokens` cuts a text at the context without a word. Such a text is refused before the model runs."""
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True), backend=backend)
    fits = " ".join(["w4"] * (zoo.CONTEXT - len(model.to_tokens("w4")[0]) + 1))
    assert len(tls.evaluate(model, tls.logit_difference([fits], "w3", "w5")).per_sequence) == 1
    for text in (f"{fits} w4", "w4 " * 200_000):
        with pytest.raises(ValueError, match=rf"has \d+ tokens, and the model's context is {zoo.CONTEXT}"):
            tls.evaluate(model, tls.logit_difference(["w3", text], "w3", "w5"))


def test_a_metric_gets_all_prompts_at_once_in_their_order(batch_size):
    """So that answers of each prompt may be closed over, however the model is run."""
    batch_size(tokens=5)  # one prompt at a time
    answers, sizes = torch.tensor([3, 5, 7]), []

    def metric(logits, tokens, mask):
        sizes.append((tuple(logits.shape[:2]), tokens.tolist(), mask.sum(1).tolist()))
        return logits[torch.arange(3), -1, answers]

    model = shared("bridge", "llama")
    found = tls.evaluate(model, tls.Task(PROMPTS, metric, predict=-1)).per_sequence
    assert sizes == [((3, 1), [[1, 4, 9, 3, 3], [1, 5, 5, 5, 5], [1, 8, 2, 6, 7]], [4, 2, 5])]
    expected = logits_of(model)[torch.arange(3), answers]
    np.testing.assert_allclose(found, expected, rtol=0, atol=NOISE)


def test_several_answers_are_averaged():
    model = shared("bridge", "llama")
    logits = logits_of(model)
    task = tls.logit_difference(PROMPTS, [[3, 4], 5, torch.tensor(6)], [1, [2, 3], [7, 8, 9]])
    expected = [
        logits[0, [3, 4]].mean() - logits[0, 1],
        logits[1, 5] - logits[1, [2, 3]].mean(),
        logits[2, 6] - logits[2, [7, 8, 9]].mean(),
    ]
    found = tls.evaluate(model, task)
    np.testing.assert_allclose(found.per_sequence, [float(value) for value in expected], rtol=0, atol=NOISE)
    assert task.higher_is_better
    sequences = task_sequences(attention_view(model), task)
    last = logits[:, None]
    assert torch.equal(pickle.loads(pickle.dumps(sequences)).measured(last), sequences.measured(last))  # as in workers


def answered(correct, wrong):
    return tls.logit_difference(PROMPTS, correct, wrong)


def asked(prompts=PROMPTS, metric=last_margin, **options):
    return tls.Task(prompts, metric, **options)


REFUSED = {
    "an answer that is both": (lambda: answered(3, 3), "prompt 0: token 3 is a correct and a wrong answer"),
    "two answers": (lambda: answered([3, 4], 5), "answers of 2 prompts, and there are 3 prompts"),
    "no answer": (lambda: answered([3, [], 4], 5), "correct is an empty list for prompt 1"),
    "an id too large": (lambda: answered(3, 999), "wrong: token ids are 0 to"),
    "a word": (lambda: answered("w3", 4), "correct is 'w3', and this model has no tokenizer"),
    "no token": (lambda: asked([[1, 2], []]), "prompt 1 has no token"),
    "an id of a prompt": (lambda: asked([[1, 999]]), "token ids are 0 to"),
    "too long": (lambda: asked([[1] * 200]), "prompt 0 has 200 tokens, and the model's context is"),
    "text": (lambda: asked("w3"), "has no tokenizer"),
    "one number": (lambda: asked(metric=lambda logits, *_: logits.mean()), r"shape \(3,\); found shape \(\)"),
    "no tensor": (lambda: asked(metric=lambda *_: 1.0), "found float"),
    "two scores": (lambda: asked(metric=lambda logits, *_: logits[:2, -1, 0]), r"found shape \(2,\)"),
    "a column": (lambda: asked(metric=lambda logits, *_: logits[:, -1, :1]), r"found shape \(3, 1\)"),
    "numpy": (lambda: asked(metric=lambda logits, *_: logits[:, -1, 0].numpy()), r"found shape \(3,\) of ndarray"),
    "complex": (lambda: asked(metric=lambda logits, *_: logits[:, -1, 0] + 0j), "of torch.complex64"),
    "no data": (lambda: asked(metric=lambda logits, *_: logits[:, -1, 0].to("meta")), "on meta"),
    "nan": (lambda: asked(metric=lambda logits, *_: logits[:, -1, 0] / 0 * 0), "returned nan for sequence 0"),
    "infinite": (lambda: asked(metric=lambda logits, *_: logits[:, -1, 0] / torch.tensor([1, 0, 1])), "for sequence 1"),
    "a position too far": (lambda: asked(predict=4), "predict: prompt 0 has no position 4; it has 4 tokens"),
    "a position before the first": (lambda: asked(predict=-3), "prompt 1 has no position -3; it has 2 tokens"),
    "no positions": (lambda: asked(predict=slice(9, None)), "selects no position"),
    "one label": (lambda: asked(labels=pd.DataFrame({"kind": ["a"]})), "1 rows, and there are 3 sequences"),
    "one attention": (lambda: asked(attention=[[1, 0]]), r"give a query and a key position, .*per sequence, \[3, 2\]"),
    "a later key": (lambda: asked(attention=(0, 1)), "attention of sequence 0: its key comes after its query"),
    **{  # The loss of other positions would be that of wrong tokens.
        f"a loss at {predict}": (
            lambda predict=predict: asked(metric=next_token_loss, predict=predict),
            r"predict=slice\(start, -1\)",
        )
        for predict in (None, -1, [0, 1], slice(-3, -1))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    task, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        tls.evaluate(shared("bridge", "llama"), task())


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "prompts are strings"),
        (torch.tensor(5), "prompts are strings, .*; found one number, 5"),
        ({"input_ids": np.array(5)}, "prompts are strings, .*; found one number, 5"),
        (7, "found int 7"),
        ([[1, 2], "w3"], "found str 'w3' in the list"),
        ([[1, 2], [1.5]], "in the list"),
        (torch.rand(2, 3), r"a tensor of torch\.float32"),
        ({"ids": [[1]]}, "found a mapping with ids"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, said):
    with pytest.raises(TypeError, match=said):
        tls.evaluate(shared("bridge", "llama"), tls.Task(prompts, last_margin))


def made(returned):
    """A metric that is made when the model is known."""
    return SimpleNamespace(for_model=lambda view, prompts: returned)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": lambda logits: logits}, "metric is a function of logits, tokens and mask, in this"),
        ({"metric": SimpleNamespace(for_model=lambda view: view)}, "for_model of a metric is a function of view and"),
        ({"metric": made(None)}, "the result of for_model of the metric SimpleNamespace is None: give a function"),
        (
            {"metric": made(lambda logits: logits)},
            r"for_model of the metric SimpleNamespace is a .*; found <lambda>\(logits\)",
        ),
        ({"predict": lambda: -1}, r"predict is a function of the width of the prompts; found <lambda>\(\)"),
        ({"predict": lambda width: width / 2}, r"predict: give whole numbers, .*; found 2\.5"),
    ],
)
def test_functions_of_other_arguments_or_results_are_refused(options, said):
    with pytest.raises(TypeError, match=said):
        tls.evaluate(shared("bridge", "llama"), asked(**options))


def test_a_metric_may_return_a_view_or_the_same_tensor_again():
    model, stored = shared("bridge", "llama"), {}

    def viewing(logits, tokens, mask):
        return logits[:, -1].select(1, 3)

    def storing(logits, tokens, mask):
        return stored.setdefault("values", viewing(logits, tokens, mask).double())

    def writing(logits, tokens, mask):
        values = viewing(logits, tokens, mask).clone()
        for given in (logits, tokens, mask):
            given.zero_()
        return values

    tasks = [asked(metric=metric, predict=-1) for metric in (viewing, storing, writing)]
    for call in (
        lambda task: tls.evaluate(model, task).table()["value"],
        lambda task: tls.ablation_sweep(model, "output", task=task)["delta"],
        lambda task: tls.ablation_sweep(model, "output", task=task, screen="gradient")["estimate"],
    ):
        plain, _, written = (call(task) if task.metric is not storing else None for task in tasks)
        assert plain.equals(written)
    first = tls.evaluate(model, tasks[1])
    kept = stored["values"].clone()
    values = first.per_sequence.copy()
    tls.ablation_sweep(model, "output", task=tasks[1])
    assert torch.equal(stored["values"], kept)
    assert (first.per_sequence == values).all()


def test_a_metric_that_is_not_finite_is_refused_where_its_gradient_is_read():
    """Only `screen` calls it with logits that require a gradient."""

    def metric(logits, tokens, mask):
        return logits[:, -1, 3] * (torch.nan if logits.requires_grad else 1.0)

    with pytest.raises(ValueError, match="the metric metric returned nan for sequence 0"):
        tls.ablation_sweep(
            shared("bridge", "llama"), "output", task=asked(metric=metric, predict=-1), screen="gradient"
        )


def test_too_many_logits_and_fields_of_other_types_are_refused(monkeypatch):
    monkeypatch.setattr("tlspectral.tasks.task_sequences._MOST_LOGITS", 100)
    with pytest.raises(ValueError, match="all 3 prompts at once, 0 GiB: say with predict="):
        tls.evaluate(shared("bridge", "llama"), tls.Task(PROMPTS, last_margin))
    # Called within: while tests run, the annotations of the class refuse them first.
    check = inspect.unwrap(tls.Task.__post_init__)
    with pytest.raises(TypeError, match="'loss' is not a metric: give a function"):
        check(SimpleNamespace(metric="loss", labels=None))
    with pytest.raises(TypeError, match="labels are a DataFrame"):
        check(SimpleNamespace(metric=last_margin, labels=[1, 2, 3]))


REPEATED = torch.tensor([[1, 5, 6, 7, 5, 6, 7]] * 2)


READERS = {
    "induction": lambda model, tokens: tls.tasks.induction_loss(model, tokens),
    "language": lambda model, tokens: tls.tasks.language_loss(model, tokens),
    "prompts": lambda model, tokens: tls.detect_heads(model, prompts=tokens),
    "kernels": lambda model, tokens: tls.relative_position_kernel(model, prompts=tokens),
    "pairs": lambda model, tokens: tls.top_pairs(model, prompts=tokens),
    "scores": lambda model, tokens: tls.verify_scores(model, tokens),
    "attribution": lambda model, tokens: tls.qk_attribution(model, tokens[0], "L1H1", query=5, key=2),
    "writes": lambda model, tokens: tls.ov_attribution(model, tokens[0], "L1H1", query=5),
    "blocks": lambda model, tokens: BlockPrompt(tokens[0, :1], list(tokens[0, 1:4, None]), tokens[0, 4:]).tokenized(
        model
    ),
}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.where(REPEATED == 7, 999, REPEATED), "token ids are 0 to 96; found 1 to 999"),
        (torch.where(REPEATED == 7, -7, REPEATED), "token ids are 0 to 96; found -7 to 6"),
        (torch.cat([REPEATED[:, :1], zoo.prompt(2, 64).tile(1, 2)], dim=1), "has 129 tokens, and the model's context"),
    ],
    ids=["too large", "negative", "past the context"],
)
@pytest.mark.parametrize("measure", READERS.values(), ids=READERS)
def test_ids_that_the_model_cannot_read_are_refused_everywhere(measure, tokens, said):
    """A rotary model runs past its context without an error, and an id that it does not have ends in an IndexError."""
    with pytest.raises(ValueError, match=said):
        measure(shared("bridge", "llama"), tokens)


def test_positions_are_those_of_each_prompt():
    lengths = torch.tensor([4, 2, 5])
    assert predicted_positions(lengths, 5, None).tolist() == [[0, 1, 2, 3, 3], [0, 1, 1, 1, 1], [0, 1, 2, 3, 4]]
    assert predicted_positions(lengths, 5, [0, -1]).tolist() == [[0, 3], [0, 1], [0, 4]]
    assert predicted_positions(torch.tensor([5, 5]), 5, slice(1, -1)) == slice(1, 4)
    assert predicted_positions(lengths, 5, slice(-2, None)).tolist() == [[2, 3], [0, 1], [3, 4]]
    assert predicted_positions(lengths, 5, slice(-3, -1)).tolist() == [[1, 2], [0, 1], [2, 3]]  # one of prompt 1
    assert predicted_positions(lengths, 5, slice(0, -1)).tolist() == [[0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 2, 3]]
    assert predicted_positions(lengths, 5, slice(None, None, -2)).tolist() == [[3, 1, 3], [1, 1, 1], [4, 2, 0]]
    assert predicted_positions(lengths, 5, torch.tensor([[1], [0], [-2]])).tolist() == [[1], [0], [3]]


def test_a_slice_means_the_positions_that_a_list_means():
    model = shared("bridge", "llama")

    def margin_before_the_last(logits, tokens, mask):
        return logits[:, 0, 3] - logits[:, 0, 5]

    for predict in (slice(-2, None), [-2, -1], slice(-2, -1)):
        score = tls.evaluate(model, tls.Task(PROMPTS, margin_before_the_last, predict=predict))
        np.testing.assert_allclose(score.per_sequence, by_hand(model, at=-2), rtol=0, atol=NOISE)


def test_logits_of_other_positions_are_never_computed():
    """A vocabulary of 262,144 does not fill the memory."""
    model, seen = shared("bridge", "llama"), []
    handle = model.unembed.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
    try:
        tls.evaluate(model, tls.logit_difference(PROMPTS, 3, 5))
    finally:
        handle.remove()
    assert seen == [(3, 1)]


@pytest.mark.slow
def test_named_tasks_are_the_losses():
    model = shared("bridge", "llama")
    assert (
        tls.evaluate(model, "induction").per_sequence.tolist() == tls.tasks.induction_loss(model).per_sequence.tolist()
    )
    task = tls.tasks.induction(n_sequences=5, segment_length=6, seed=3)
    expected = tls.tasks.induction_loss(model, n_sequences=5, segment_length=6, seed=3)
    assert tls.evaluate(model, task).per_sequence.tolist() == expected.per_sequence.tolist()


def test_a_score_is_a_number():
    score = MetricValue(np.array([1.0, 2.0, 3.0]))
    assert float(score) == score == 2.0 == score.value
    assert f"{score:.1f}" == "2.0"
    assert f"{score}" == "2.0000 ± 0.5774"
    assert 1 < score < 3
    assert score <= 2 <= score
    assert score - 0.5 == 1.5
    assert 3 - score == 1.0
    assert abs(-score) == 2.0
    assert score == pytest.approx(2.0)
    assert sorted([score, MetricValue(np.array([0.0, 1.0]))])[0] == 0.5
    assert score != "2.0"
    assert len({score, 2.0}) == 1
    assert "2" in score._repr_html_()


def test_the_difference_of_scores_is_paired():
    before, after = MetricValue(np.array([1.0, 2.0, 3.0])), MetricValue(np.array([1.5, 2.5, 3.6]))
    effect, expected = after - before, paired_effect(after, before)
    assert (effect.value, effect.se, effect.pvalue) == (expected.value, expected.se, 0.25)
    assert effect > 0.5
    assert effect - 0.5 == pytest.approx(1 / 30)
    other = MetricValue(np.array([1.0, 2.0, 3.0]), sequences_sha256="a")
    with pytest.raises(ValueError, match="these two values have other tokens"):
        other - MetricValue(np.array([1.0, 2.0, 3.0]), sequences_sha256="b")


def test_scores_are_grouped_by_labels():
    labels = pd.DataFrame({"kind": ["a", "b", "a"]}, index=[7, 8, 9])
    score = tls.evaluate(shared("bridge", "llama"), tls.Task(PROMPTS, last_margin, predict=-1, labels=labels))
    means = score.table().groupby("kind")["value"].mean()
    assert means["a"] == pytest.approx(score.per_sequence[[0, 2]].mean())
    assert means["b"] == score.per_sequence[1]


def test_the_table_has_the_text_of_each_prompt():
    model = tls.load_model("tiny-rope")
    by_ids = tls.evaluate(model, tls.Task([[1, 2, 3], [4, 5]], last_margin, predict=-1)).table()
    assert list(by_ids) == ["text", "value"]
    assert by_ids["text"].tolist() == ["1 2 3", "4 5"]  # no tokenizer, and what fills up a row is not of the prompt

    class Words:
        bos_token_id = eos_token_id = pad_token_id = unk_token_id = None

        def __len__(self):
            return 32

        def decode(self, ids):
            return "".join(f"<{token}>" for token in ids)

        def __call__(self, text, **_):
            return SimpleNamespace(input_ids=[1, 2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "tokenizer", Words())
        patch.setattr(model, "to_tokens", lambda text, **_: torch.tensor([[7, 8, *map(ord, text)]]) % 32)
        labels = pd.DataFrame({"kind": ["a", "b"]})
        task = tls.Task(["ab", "c"], last_margin, predict=-1, labels=labels)
        given = tls.evaluate(model, task)
        assert list(given.table()) == ["text", "kind", "value"]
        assert given.table()["text"].tolist() == ["ab", "c"]  # as given, without what is put around text
        decoded = tls.evaluate(model, tls.Task([[1, 2, 3], [4, 5]], last_margin, predict=-1)).table()
        assert decoded["text"].tolist() == ["<1><2><3>", "<4><5>"]
        patch.delattr(Words, "__len__")  # a tokenizer of one's own that does not say how many tokens it knows
        unsized = tls.evaluate(model, tls.Task([[1, 2, 3], [4, 5]], last_margin, predict=-1)).table()
        assert unsized["text"].tolist() == ["1 2 3", "4 5"]
        patch.undo()
        patch.setattr(model, "tokenizer", Words())
        patch.setattr(model, "to_tokens", lambda text, **_: torch.tensor([[7, 8, *map(ord, text)]]) % 32)
        named = tls.evaluate(model, replace(task, labels=labels.rename(columns={"kind": "text"}))).table()
        assert named["text"].tolist() == ["a", "b"]
    assert "text" not in MetricValue(np.array([1.0, 2.0])).table()


def test_the_hash_is_of_tokens_lengths_and_positions():
    view = attention_view(shared("bridge", "llama"))
    tasks = [
        tls.Task(PROMPTS, last_margin),
        tls.Task(PROMPTS, last_margin, predict=-1),
        tls.Task([*PROMPTS[:2], PROMPTS[2][:4]], last_margin),
        tls.Task([PROMPTS[0], [*PROMPTS[1], 5], PROMPTS[2]], last_margin),
    ]
    assert len({task_sequences(view, task).digest for task in tasks}) == len(tasks)


# --- modes of PyTorch ---

MEASURED = {
    "evaluate": lambda model: tls.evaluate(model, tls.Task(PROMPTS, last_margin)),
    "head table": lambda model: tls.analyze_heads(model, null_draws=2),
    "detectors": lambda model: tls.detect_heads(model, n_sequences=2),
    "sweep": lambda model: tls.ablation_sweep(model, "output", task=tls.Task(PROMPTS, last_margin)),
    "edges": lambda model: tls.edge_effects(model, ["L1H0.q"], task=tls.Task(PROMPTS, last_margin), measure="task"),
    "scores": lambda model: tls.verify_scores(model),
}


@pytest.mark.parametrize("measure", MEASURED)
def test_autocast_is_refused_where_it_would_round_what_is_measured(measure):
    said = r"torch.autocast is on for cpu \(torch.bfloat16\) .*: call this outside of it"
    with pytest.raises(ValueError, match=said), torch.autocast("cpu", dtype=torch.bfloat16):
        MEASURED[measure](shared("bridge", "llama"))


@pytest.mark.fast(1)
@pytest.mark.parametrize(("part", "into"), [("antisymmetric", None), ("output", "L1H0.q")])
def test_a_block_may_be_opened_under_autocast(part, into):
    def run(*, inside):
        model, tokens = zoo.bridge("llama"), zoo.prompt()  # of its own, so that its edits are proved anew
        with (
            torch.no_grad(),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside),
            tls.ablate(model, "L0H1", part, into=into),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            return model(tokens)

    assert torch.equal(run(inside=True), run(inside=False))


SCREENS = {
    "sweep": lambda model, task: tls.ablation_sweep(model, "output", task=task, screen="gradient"),
    "edges": lambda model, task: tls.edge_effects(model, task=task, replace="counterfactual", screen="gradient"),
}


@pytest.mark.parametrize("screen", SCREENS)
def test_screens_without_gradients_are_refused_in_words(screen):
    pairs = tls.Task(PROMPTS, last_margin, counterfactual=[[9, 4, 9, 3], [9, 5], [9, 8, 2, 6, 7]])
    said = "torch.inference_mode records none: call this outside"
    with pytest.raises(ValueError, match=said), torch.inference_mode():
        SCREENS[screen](shared("bridge", "llama"), pairs)
    with torch.inference_mode():
        made = zoo.bridge("llama")
    with pytest.raises(ValueError, match=r"was loaded under torch.inference_mode, .*: load the model outside of it"):
        SCREENS[screen](made, pairs)


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (" A", "give 'A', or the id of the token that tells answers apart"),  # this tokenizer adds the space itself
        ("B", "give ' B', or the id of"),
        (" C ", "give 'C' or ' C', or the id of"),
        ("D", "give the id of"),
        ("E", "give the id of"),
    ],
)
def test_an_answer_of_several_tokens_is_refused_with_the_forms_that_are_one(answer, advice):
    one_token = {"A": [3], " B": [4], "C": [5], " C": [6], " E": [0]}  # 0 is unknown

    class Tokenizer:
        unk_token_id = 0

        def __call__(self, text, **options):
            return SimpleNamespace(input_ids=one_token.get(text, [1, 2]))

        def decode(self, ids):
            return "?"

    view = SimpleNamespace(model=SimpleNamespace(tokenizer=Tokenizer()))
    with pytest.raises(ValueError, match=f"^correct: {answer!r} is 2 tokens, .*; an answer is one token: {advice}"):
        inspect.unwrap(_token_id)(view, answer, "correct")
