"""The proof that edits reach the output: models that discard them are refused, and nobody sees the probe."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import zoo
from ablation_runs import DELEGATED, SCORES, ablated, intact, logits, some_models
from attention_models import make_deaf
from model_state import assert_unchanged, state_of, warm

import tlspectral as tls
from tlspectral.errors import BadWeights, EditNotHonored, UnsupportedArchitecture
from tlspectral.hooks import ablate, ablation_hooks, probe
from tlspectral.hooks.parts import RopePhase
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import bridge as bridge_reader
from tlspectral.models.reading.blocks import output_map
from tlspectral.models.reading.view import AttentionView

DEAF = [
    ("bridge", "llama", "symmetric", "scores"),
    ("bridge", "gemma2", "output", "z"),
    pytest.param("hooked", "qwen2", "rope_phase", "scores", marks=zoo.needs_hooked),
    *(("bridge", name, "symmetric", "z") for name in DELEGATED),
]


@pytest.mark.fast(1)
@pytest.mark.tl4
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


def test_an_edit_that_is_discarded_since_it_was_proved_is_refused(monkeypatch):
    model = zoo.bridge("llama")
    with ablate(model, "L1H1", "output"):
        intact = zoo.logits(model)
    module = output_map(attention_view(model).blocks[1].module)
    monkeypatch.setitem(vars(module), "forward", lambda z: module.weight.sum() + 0 * z)
    for _ in range(2):
        with pytest.raises(EditNotHonored, match="does not change the logits"), ablate(model, "L1H1", "output"):
            pytest.fail("entered")
    monkeypatch.undo()
    with ablate(model, "L1H1", "output"):
        assert torch.equal(zoo.logits(model), intact)


def test_a_stream_that_is_no_sum_of_writes_since_it_was_checked_is_refused(monkeypatch):
    model = zoo.bridge("llama")

    def measured():
        with ablate(model, "L0H1", "output", into="L1H0.q"):
            return zoo.logits(model)

    before = measured()
    block = model.blocks[0].original_component
    forward = block.forward
    monkeypatch.setitem(vars(block), "forward", lambda *given, **named: 1.5 * forward(*given, **named))
    with pytest.raises(UnsupportedArchitecture, match="layer 0"):
        measured()
    monkeypatch.undo()
    assert torch.equal(measured(), before)


@pytest.mark.slow
def test_the_probe_runs_once_per_layer_and_route(spied):
    model, other = zoo.bridge("llama"), zoo.bridge("llama")
    runs = spied(probe, "whole_logits")

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


EVERY_LAYER = ["L0", "L1", "L2", "L3"]


@pytest.mark.parametrize("part", ["symmetric", "output"])
def test_all_layers_are_proved_by_the_runs_of_two(spied, part):
    model = zoo.bridge("smollm3")  # four layers
    logits(model)
    rows = [len(tokens) for tokens in runs(spied, model, lambda: ablation_hooks(model, EVERY_LAYER, part))]
    # Whether each layer runs once. The first layer with and without its edit. Then all: what is checked of scores, and
    # two rows of each.
    assert rows == ([1, 1, 1, 1, 8] if part == "symmetric" else [1, 1, 1, 8])
    assert runs(spied, model, lambda: ablation_hooks(model, EVERY_LAYER, part)) == []


def runs(spied, model, job):
    """The tokens of each pass of a model that a job makes."""
    seen = spied(torch.nn.functional, "embedding")  # a method of the model in its place would be proved anew each time
    job()
    return list(seen)


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize(("part", "point"), [("symmetric", "scores"), ("output", "z")])
def test_of_all_layers_the_one_that_discards_edits_is_refused_alone(part, point):
    model = zoo.bridge("smollm3")
    hook = attention_view(model).hook_names(2)[point]
    make_deaf(model, hook)
    message = f"an edit of {hook}"
    with pytest.raises(EditNotHonored, match=message):
        ablation_hooks(model, EVERY_LAYER, part)
    assert len(ablation_hooks(model, ["L0", "L1", "L3"], part)) >= 3
    with pytest.raises(EditNotHonored, match=message):  # a refusal is not remembered as a proof
        ablation_hooks(model, "L2", part)


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("into", [None, {"q": "L2"}, {"k": "L2"}])
def test_edits_are_proved_where_the_softmax_is_saturated(into):
    # A score of 1e6 leaves the other keys nothing, so that a shift of one is no edit that is seen.
    saturated, deaf = zoo.bridge("smollm3"), zoo.bridge("smollm3")
    point = attention_view(deaf).hook_names(2)["scores" if into is None else "query" if "q" in into else "key"]
    for model in (saturated, deaf):
        with torch.no_grad():
            for block in model.blocks:
                block.attn.q.weight *= 1e4
                block.attn.k.weight *= 1e4
    scores = attention_view(saturated).hook_names(2)["scores"]
    tokens = zoo.prompt(length=4)
    shifted = saturated.run_with_hooks(tokens, fwd_hooks=[(scores, shift_of_first_key)])
    assert torch.equal(shifted, logits(saturated, tokens))
    heads = EVERY_LAYER if into is None else ["L0", "L1"]
    assert ablation_hooks(saturated, heads, "symmetric", into=into)
    make_deaf(deaf, point)
    with pytest.raises(EditNotHonored, match=f"an edit of {point}"):
        ablation_hooks(deaf, heads, "symmetric", into=into)


def shift_of_first_key(scores, hook):
    scores = scores.clone()
    scores[..., 0] += 1.0
    return scores


def test_edits_of_large_outputs_are_not_rounded_away():
    model = zoo.bridge("smollm3").to(torch.bfloat16)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.v.weight *= 1e9
    z, tokens = attention_view(model).hook_names(1)["z"], zoo.prompt(length=4)
    added = model.run_with_hooks(tokens, fwd_hooks=[(z, lambda z, hook: z + 1.0)])
    assert torch.equal(added, logits(model, tokens))
    assert ablation_hooks(model, EVERY_LAYER, "output")


@pytest.mark.parametrize(
    ("error", "message"),
    [(EditNotHonored, r"layer 2, head \d: the model's scores do not follow"), (BadWeights, "layer 2 is not read")],
)
def test_of_all_layers_the_one_that_fails_its_check_is_refused_alone(monkeypatch, spied, error, message):
    model, real = zoo.bridge("smollm3"), AttentionView.layer

    def failing(self, index):
        if index == 2 and error is BadWeights:
            raise BadWeights(message)
        layer = real(self, index)
        return replace(layer, score_scale=1.01 * layer.score_scale) if index == 2 else layer

    monkeypatch.setattr(AttentionView, "layer", failing)
    passes = runs(spied, model, lambda: ablation_hooks(model, ["L0", "L1", "L3"], "symmetric"))
    assert len(passes) == 5  # whether each layer runs once, of the first layer, and of all
    with pytest.raises(error, match=message):
        ablation_hooks(model, "L2", "symmetric")


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
        pytest.raises(EditNotHonored, match=r"layer 1, head \d: the model's scores do not follow from .*verify_scores"),
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
        with pytest.raises(EditNotHonored, match="layer 0, head 1: the model's scores do not follow from"):
            logits(model, zoo.prompt(length=48))


@zoo.needs_hooked
@pytest.mark.parametrize("part", ["output", "symmetric"])
def test_the_probe_fits_a_context_of_two_tokens(part):
    from transformer_lens import HookedTransformer

    cfg = {"n_layers": 2, "d_model": 16, "d_head": 4, "n_heads": 4, "d_vocab": 20, "attn_only": True, "device": "cpu"}
    model = HookedTransformer(cfg | {"n_ctx": 2, "seed": 0})
    assert ablation_hooks(model, ["L0H1", "L1H2"], part)
    task = tls.logit_difference(torch.tensor([[3, 4], [5, 6]]), 0, 1)
    assert len(tls.ablation_sweep(model, part, task=task)) == 8
    edges = tls.edge_effects(model, "L1H0.k", measure="task", task=task)
    assert len(edges) == 4
    assert tls.hooks.check_hook(model, ablation_hooks(model, "L1H0", "output"), "L1H0").exact
