"""The proof that edits reach the output: models that discard them are refused, and nobody sees the probe."""

import gc
import weakref

import pytest
import torch
import zoo
from ablation_runs import DELEGATED, SCORES, ablated, intact, logits, some_models
from attention_models import make_deaf
from model_state import assert_unchanged, state_of, warm

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.hooks.parts import RopePhase
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import bridge as bridge_reader
from tlspectral.models.reading.view import AttentionView

DEAF = [
    ("bridge", "llama", "symmetric", "scores"),
    ("bridge", "gemma2", "output", "z"),
    pytest.param("hooked", "qwen2", "rope_phase", "scores", marks=zoo.needs_hooked),
    *(("bridge", name, "symmetric", "z") for name in DELEGATED),
]


@pytest.mark.parametrize(("backend", "name", "part", "point"), DEAF)
def test_a_model_that_discards_edits_is_refused(backend, name, part, point):
    model = getattr(zoo, backend)(name)
    hook = attention_view(model).hook_names(1)[point]
    make_deaf(model, hook)
    before = state_of(warm(model))
    for _ in range(2):  # a refusal is not remembered as a proof
        with pytest.raises(EditNotHonored, match=f"an edit of {hook}"), ablate(model, [(1, 1)], part):
            pytest.fail("entered")
    assert_unchanged(model, before)
    assert not torch.equal(ablated(model, [(0, 1)], part), intact(backend, name))


@pytest.mark.slow
def test_the_probe_runs_once_per_layer_and_route(spied):
    model, other = zoo.bridge("llama"), zoo.bridge("llama")
    runs = spied(AttentionView, "logits")

    def probes(model, heads, part):
        runs.clear()
        ablation_hooks(model, heads, part)
        assert all(view.model is model for view in runs)
        return len(runs)

    each = probes(model, [(0, 0)], "symmetric")
    assert 1 <= each <= 2  # with and without the edit
    assert probes(model, [(0, 1), (0, 2)], "rope_phase") == 0
    assert probes(model, [(0, 0), (1, 0)], "antisymmetric") <= 2
    assert probes(model, [(0, 0), (1, 0)], "symmetric") == 0
    assert probes(model, [(0, 0)], "output") >= 1  # another hook point
    assert probes(model, [(0, 3)], "output") == 0
    assert probes(other, [(0, 0)], "symmetric") == each
    assert probes(model, [], "symmetric") == 0
    assert probes(zoo.bridge("llama"), [(0, 0)], RopePhase([])) == 0


def test_the_probe_keeps_no_model_alive():
    model = zoo.bridge("gpt2")
    ablation_hooks(model, [(0, 0)], "symmetric")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@some_models
def test_the_probe_is_invisible_to_hooks_of_the_user(backend, name):
    model = getattr(zoo, backend)(name).train()  # the flag is part of the state
    logits(model)
    calls = []

    def note(label):
        return lambda activation, hook: calls.append(label)

    point = attention_view(model).hook_names(0)["z"]
    model.add_perma_hook(point, note("permanent"))
    model.add_hook(point, note("added"))
    with model.hooks(fwd_hooks=[(point, note("context")), (point, lambda z, hook: 0 * z)]):
        before = state_of(model)
        ablation_hooks(model, [(1, 1)], "symmetric")
        assert_unchanged(model, before)
        hooks = ablation_hooks(model, [(0, 0), (1, 1)], "symmetric")  # a layer whose z is wiped is no refusal
        assert calls == []
        assert_unchanged(model, before)
        assert torch.is_grad_enabled()
        logits(model)
        assert calls == ["permanent", "added", "context"]
    calls.clear()
    model.run_with_hooks(zoo.prompt(), fwd_hooks=[(point, note("last")), *hooks])
    assert calls == ["permanent", "added", "last"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("pad", [0, 1])
def test_the_probe_does_not_depend_on_padding_conventions(backend, pad):
    # With left padding TransformerLens masks leading pad tokens, and the probe's own first token may be one.
    model = getattr(zoo, backend)("llama")
    tokenizer = zoo._tokenizer()
    model.tokenizer = tokenizer
    sides, pads = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side, tokenizer.pad_token = "left", ["<pad>", "<s>"][pad]
    try:
        assert len(ablation_hooks(model, [(0, 0)], "symmetric")) >= 3
    finally:
        tokenizer.padding_side, tokenizer.pad_token = sides, pads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "gemma2", *zoo.READ_WRONG])
def test_a_model_whose_scores_are_not_those_of_its_operators_is_refused(monkeypatch, name):
    real = bridge_reader._score_scale
    if name not in zoo.READ_WRONG:
        monkeypatch.setattr(bridge_reader, "_score_scale", lambda *arguments: 1.01 * real(*arguments))
    model = zoo.bridge(name)
    before = state_of(warm(model))
    with (
        pytest.raises(EditNotHonored, match=r"layer 1, head \d: the model's scores are not those of .*verify_scores"),
        ablate(model, [(1, 1)], "antisymmetric" if name == "bloom" else "rope_phase"),
    ):
        pytest.fail("entered")
    assert_unchanged(model, before)


@pytest.mark.parametrize(("backend", "name"), SCORES)
def test_an_edit_of_queries_after_the_ablation_is_refused(backend, name):
    model = zoo.shared(backend, name)
    late = [(attention_view(model).hook_names(0)["query"], lambda q, hook: q.flip(1))]
    message = r"layer 0, head 1: .*enter the ablation after hooks that edit queries or keys"
    with ablate(model, [(0, 1)], "symmetric"), pytest.raises(EditNotHonored, match=message):
        model.run_with_hooks(zoo.prompt(), fwd_hooks=late)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT)
def test_past_a_switch_angles_that_are_not_those_of_the_run_are_refused(monkeypatch, name):
    model = zoo.bridge(name)

    def short_tables(self, index, n_positions, captured):
        return self.rotary(index).position_tables(n_positions)

    with ablate(model, [(0, 1)], "rope_phase"):
        logits(model, zoo.prompt(length=48))  # the tables of the run
        monkeypatch.setattr(AttentionView, "rotary_tables", short_tables)
        logits(model, zoo.prompt())
        with pytest.raises(EditNotHonored, match="layer 0, head 1: the model's scores are not those of"):
            logits(model, zoo.prompt(length=48))
