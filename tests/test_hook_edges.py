"""Edges: a part of source heads taken only out of what target heads read, against plain recomputation."""

import doctest
import gc
import inspect
import warnings

import pytest
import torch
import zoo
from ablation_runs import (
    DELEGATED,
    a_part,
    in_dtype,
    intact,
    logits,
    recorded,
    some_models,
)
from edge_recomputation import POINTS, edge_of, read_from, recomputed, removed_from_stream, run_with
from model_state import assert_unchanged, state_of
from spectral_zoo import moved
from test_hook_proof import make_deaf
from test_native_bridges import native
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, EditNotHonored
from tlspectral.hooks import ablate, ablation, ablation_hooks, edge_reach, heads_reached
from tlspectral.hooks.edge_reach import check_edge
from tlspectral.hooks.edges import EdgeRun, _ledgers
from tlspectral.models.attention import attention_view
from tlspectral.models.attention.writes import LayerReads

# What the warning says has tests of its own, at the end.
pytestmark = pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
GROUPED = [("bridge", "llama"), ("bridge", "gemma2"), ("bridge", "olmo2")]
GROUPED += [pytest.param("hooked", "qwen3", marks=zoo.needs_hooked)]
grouped_models = pytest.mark.parametrize(("backend", "name"), GROUPED)
every_input = pytest.mark.parametrize("what", ["q", "k", "v"])
# Logits of size 2 in float32. Measured over the zoo, on TransformerLens 3.9 and 4.3: at most 9e-7.
NOISE = 1e-5
SEEN = 1e-3  # what an edge moves them by, at least (median 0.1)


def furthest(found, expected):
    return float((found - expected).abs().max())


def edge(backend, name):
    model = shared(backend, name)
    return model, attention_view(model), *edge_of(attention_view(model))


def with_edge(model, sources, part, into, what, tokens=None, **options):
    with ablate(model, sources, part, into=into, input=what, **options):
        return logits(model, tokens)


# --- against plain recomputation ---


@grouped_models
@pytest.mark.parametrize(
    "options", [{"replace": "mean"}, {"replace": "resample", "seed": 1}, {"window": 3, "sinks": 1}]
)
def test_what_is_removed_is_what_ablate_removes(backend, name, options):
    model, _, sources, layer, target = edge(backend, name)
    part = "long_range" if "window" in options else "output"
    if "replace" in options:
        options = {**options, "reference": zoo.prompt(batch=5, seed=3)}
    found = with_edge(model, sources, part, (layer, target), "v", **options)
    assert furthest(found, recomputed(model, backend, sources, part, layer, target, "v", **options)) < NOISE
    assert furthest(found, with_edge(model, sources, "output", (layer, target), "v")) > SEEN


@pytest.mark.parametrize("name", ["gptj", "llama"])
@pytest.mark.parametrize("options", [{"frequencies": [0, 2]}, {"include_bias": True}])
def test_parts_of_scores_take_their_own_arguments(name, options):
    model, _, sources, layer, target = edge("bridge", name)
    part = "rotary_band" if "frequencies" in options else "symmetric"
    found = with_edge(model, sources, part, (layer, target), "k", **options)
    assert furthest(found, recomputed(model, "bridge", sources, part, layer, target, "k", **options)) < NOISE


def test_several_targets_read_one_after_the_other():
    model, view, sources, *_ = edge("bridge", "gemma2")
    sources, targets = sources[:1], [(1, 1), (2, 0), (2, 3)]
    found = with_edge(model, sources, "output", targets, "k")
    removed = removed_from_stream(model, "bridge", sources, "output")
    hooks = []
    for layer, columns in ((1, [0]), (2, [0, 1])):
        with model.hooks(fwd_hooks=hooks):
            values = read_from(model, layer, "k", removed)

        def patch(k, hook, values=values, columns=columns):
            edited = k.clone()
            edited[:, :, columns] = values[:, :, columns]
            return edited

        hooks.append((view.hook_names(layer)["key"], patch))
    assert furthest(found, run_with(model, hooks)) < NOISE


@pytest.mark.parametrize("feature", ["grouped keys", "softcap", "no norm", "gated MLP"])
@every_input
def test_native_models_without_and_with_an_mlp(feature, what):
    model = native(feature)
    sources, layer, target = edge_of(attention_view(model))
    tokens = torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(0))
    for part in ("output", "symmetric"):
        found = with_edge(model, sources, part, (layer, target), what, tokens)
        assert furthest(found, recomputed(model, "bridge", sources, part, layer, target, what, tokens)) < NOISE
        assert furthest(found, logits(model, tokens)) > SEEN


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@every_input
def test_models_with_learnable_rotary_positions(backend, what):
    model = moved(backend, "llama")
    sources, layer, target = edge_of(attention_view(model))
    found = with_edge(model, sources, "rope_phase", (layer, target), what)
    assert furthest(found, recomputed(model, backend, sources, "rope_phase", layer, target, what)) < NOISE
    assert furthest(found, logits(model)) > SEEN


# --- a known circuit ---


def test_the_previous_token_head_acts_by_the_keys_of_the_induction_heads():
    model = tls.load_model("tiny-rope")
    induction = [(1, head) for head in range(4)]

    def loss(head, part, what):
        with ablate(model, head, part, into=induction, input=what):
            return tls.tasks.induction_loss(model, n_sequences=20).value

    # Measured: 0.11 intact; 1.69 (rope phase) and 3.27 (output) by keys; at most 0.10 by queries and values.
    assert tls.tasks.induction_loss(model, n_sequences=20).value < 0.15
    assert loss("L0H3", "rope_phase", "k") > 1
    assert loss("L0H3", "output", "k") > 2
    for what in ("q", "v"):
        assert loss("L0H3", "output", what) < 0.15
    assert loss("L0H0", "output", "k") < 0.2  # another head of the layer


def test_the_examples_run():
    for module in (ablation, edge_reach):
        found = doctest.testmod(module)
        assert found.attempted >= 4
        assert found.failed == 0


# --- wrong ways, which the comparison above would show ---


def test_a_frozen_norm_is_seen(monkeypatch):
    model, _, sources, layer, target = edge("bridge", "llama")
    expected = recomputed(model, "bridge", sources, "output", layer, target, "k")

    def frozen(self, x, removed):
        return -self._projected(self.norm.centred(removed)) * self.norm.token_scale(x)[..., None, None]

    monkeypatch.setattr(LayerReads, "change", frozen)
    assert furthest(with_edge(model, sources, "output", (layer, target), "k"), expected) > 100 * NOISE


def test_another_group_and_another_input_are_seen():
    model, _, sources, layer, target = edge("bridge", "llama")
    expected = recomputed(model, "bridge", sources, "output", layer, target, "k")
    for other, what in ((target + 2, "k"), (target, "q"), (target, "v")):
        assert furthest(with_edge(model, sources, "output", (layer, other), what), expected) > 100 * NOISE
    # The other head of the group reads the same key.
    assert furthest(with_edge(model, sources, "output", (layer, target - 1), "k"), expected) < NOISE


def test_everything_else_is_as_before():
    model, _, sources, layer, target = edge("bridge", "gemma2")
    before = recorded(model, ("query", "key", "value", "z", "residual"))
    with ablate(model, sources, "output", into=(layer, target), input="k"):
        after = recorded(model, ("query", "key", "value", "z", "residual"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {(layer, "key"), (layer, "z")}
    old, new = before[layer, "key"], after[layer, "key"]
    assert not torch.equal(old[:, :, 0], new[:, :, 0])
    assert torch.equal(old[:, :, 1], new[:, :, 1])


# --- zero changes, and what is left behind ---


@some_models
@every_input
def test_nothing_removed_changes_no_bit(backend, name, what):
    model, _, sources, layer, target = edge(backend, name)
    plain = intact(backend, name)
    assert torch.equal(with_edge(model, [], "output", (layer, target), what), plain)
    assert torch.equal(with_edge(model, sources, "output", [], what), plain)
    wide = {"window": zoo.PROMPT_LENGTH}  # measured, and found to be 0
    assert torch.equal(with_edge(model, sources, "long_range", (layer, target), what, **wide), plain)
    if a_part(name) == "rope_phase":
        assert torch.equal(with_edge(model, sources, "rope_phase", (layer, target), what, frequencies=[]), plain)


@some_models
def test_the_model_is_as_before(backend, name):
    model = getattr(zoo, backend)(name)
    plain = logits(model)
    sources, layer, target = edge_of(attention_view(model))
    before = state_of(model)
    for what in POINTS:
        with ablate(model, sources, a_part(name), into=(layer, target), input=what) as yielded:
            assert yielded is model
            assert not torch.equal(logits(model), plain)
        assert_unchanged(model, before)
    assert torch.equal(logits(model), plain)


@some_models
def test_no_tensor_of_a_run_is_kept(backend, name, monkeypatch):
    runs = []
    real = EdgeRun.take
    monkeypatch.setattr(EdgeRun, "take", lambda self, *given: (runs.append(self), real(self, *given))[1])
    model, view, sources, layer, target = edge(backend, name)
    for what in POINTS:
        with_edge(model, sources, a_part(name), (layer, target), what)
        assert runs.pop().removed == {}
    ledgers = _ledgers[model.hook_dict[view.hook_names(layer)["residual"]]]
    assert all(not ledger.taken for ledger in ledgers.values())


def test_ledgers_keep_no_model_alive():
    model = zoo.bridge("llama")
    sources, layer, target = edge_of(attention_view(model))
    with_edge(model, sources, "output", (layer, target), "q")
    points = len(_ledgers)
    del model
    gc.collect()
    assert len(_ledgers) < points


# --- together with other hooks ---


@some_models
@every_input
def test_nested_blocks_are_one_block_with_both_sources(backend, name, what):
    model, _, (one, other), layer, target = edge(backend, name)
    part, into = a_part(name), (layer, target)
    together = with_edge(model, [one, other], part, into, what)
    with ablate(model, [one], part, into=into, input=what):
        nested = with_edge(model, [other], part, into, what)
    assert furthest(nested, together) < NOISE
    assert furthest(with_edge(model, [one], part, into, what), together) > SEEN


@grouped_models
def test_blocks_of_two_targets_of_a_group_see_each_other(backend, name):
    model, _, (one, other), layer, _ = edge(backend, name)
    with ablate(model, [one], "output", into=(layer, 0), input="k"):
        nested = with_edge(model, [other], "output", (layer, 1), "k")
        with pytest.raises(EditNotHonored, match=rf"layer {layer}: two open blocks take L{one[0]}H{one[1]} out of"):
            with_edge(model, [one], "output", (layer, 1), "k")
    assert furthest(nested, with_edge(model, [one, other], "output", (layer, 1), "k")) < NOISE


@some_models
def test_the_target_can_lose_a_part_besides(backend, name):
    model, view, sources, layer, target = edge(backend, name)
    part = a_part(name)
    removed = removed_from_stream(model, backend, sources, "output")
    values = read_from(model, layer, "k", removed)
    group = [view.layer(layer).kv_head(target)]
    with ablate(model, sources, "output", into=(layer, target), input="k"), ablate(model, (layer, target), part):
        found = logits(model)

    def patch(k, hook):
        edited = k.clone()
        edited[:, :, group] = values[:, :, group]
        return edited

    with model.hooks(fwd_hooks=[(view.hook_names(layer)["key"], patch)]), ablate(model, (layer, target), part):
        assert furthest(found, logits(model)) < NOISE
    assert furthest(found, with_edge(model, sources, "output", (layer, target), "k")) > SEEN
    # The other way round the ablation has held keys that the edge then edits.
    with (
        ablate(model, (layer, target), part),
        ablate(model, sources, "output", into=(layer, target), input="k"),
        pytest.raises(EditNotHonored, match=f"layer {layer}"),
    ):
        logits(model)


@some_models
def test_a_source_that_an_earlier_block_ablates_has_nothing_to_take_out(backend, name):
    model, _, sources, layer, target = edge(backend, name)
    with ablate(model, sources, "output"):
        expected = logits(model)
        assert furthest(with_edge(model, sources, "output", (layer, target), "k"), expected) == 0
    with (
        ablate(model, sources, "output", into=(layer, target), input="k"),
        ablate(model, sources, "output"),
        pytest.raises(
            EditNotHonored, match=f"layer {sources[0][0]}: the attention adds something else .*enter the block after"
        ),
    ):
        logits(model)


@some_models
@every_input
def test_caches_lists_and_hooks_of_the_user(backend, name, what):
    model, view, sources, layer, target = edge(backend, name)
    part, point = a_part(name), view.hook_names(layer)[POINTS[what]]
    with ablate(model, sources, part, into=(layer, target), input=what):
        expected = logits(model)
        with torch.no_grad():
            cached, cache = model.run_with_cache(zoo.prompt())
        shown = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    assert torch.equal(cached, expected)
    assert torch.equal(cache[point], shown)
    hooks = ablation_hooks(model, sources, part, into=(layer, target), input=what)
    prompts = [zoo.prompt(), zoo.prompt(batch=1, length=11, seed=3), zoo.prompt()]
    with torch.no_grad():
        found = [model.run_with_hooks(tokens, fwd_hooks=hooks) for tokens in prompts]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[2], expected)
    assert torch.equal(found[1], with_edge(model, sources, part, (layer, target), what, prompts[1]))

    # An edit of the user's that acts first is kept, and the edge is added to it.
    def add(activation, hook):
        return activation + 0.25

    plain = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    with model.hooks(fwd_hooks=[(point, add)]), ablate(model, sources, part, into=(layer, target), input=what):
        both = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    torch.testing.assert_close(both - plain - 0.25, shown - plain, rtol=0, atol=1e-5)  # rounding of values of size 10


def test_generation_runs_without_a_cache():
    model, _, sources, layer, target = edge("bridge", "llama")
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
    tokens = zoo.prompt(batch=1, length=9)
    with ablate(model, sources, "output", into=(layer, target), input="k"):
        found = model.generate(tokens, **options)
        for _ in range(3):
            tokens = torch.cat([tokens, logits(model, tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)


@some_models
@pytest.mark.parametrize("part", ["output", "scores"])
def test_left_padding(backend, name, part):
    model, _, sources, layer, target = edge(backend, name)
    pad, tokens = 5, zoo.prompt(length=19)
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), tokens], 1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    part = part if part == "output" else a_part(name)
    with ablate(model, sources, part, into=(layer, target), input="k"):
        expected = logits(model, tokens)
        if part != "output" and backend == "bridge" and name in DELEGATED:
            with pytest.raises(EditNotHonored, match=r"padding.*ablate on another backend"):
                logits(model, padded, attention_mask=mask)
            return
        assert furthest(logits(model, padded, attention_mask=mask)[:, pad:], expected) < NOISE


def test_a_run_that_broke_off_does_not_disturb_the_next():
    model, view, sources, layer, target = edge("bridge", "llama")
    with ablate(model, sources, "output", into=(layer, target), input="k"):
        expected = logits(model)

        def interrupt(activation, hook):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(zoo.prompt(), fwd_hooks=[(view.hook_names(layer)["residual"], interrupt)])
        assert torch.equal(logits(model), expected)
        assert logits(model, zoo.prompt(length=9)).shape[1] == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("backend", "name"), [("bridge", "llama"), ("bridge", "gemma2"), ("bridge", "gptj")])
def test_other_types(backend, name, dtype):
    model = in_dtype(backend, name, dtype)
    sources, layer, target = edge_of(attention_view(model))
    plain = logits(model)
    for what in POINTS:
        found = with_edge(model, sources, "output", (layer, target), what)
        reference = with_edge(shared(backend, name), sources, "output", (layer, target), what)
        assert found.dtype == plain.dtype
        # Rounding of the model itself: measured 0.04 in bfloat16, 6e-7 in float64 (norms and softmaxes in float32).
        assert furthest((found - plain).double(), (reference - intact(backend, name)).double()) < (
            0.15 if dtype == torch.bfloat16 else NOISE
        )


# --- gradients ---


# In float64, norms and all: LayerNorms of bridges, and HookedTransformers. Gemma 2, with its norm behind the attention
# and its softcap, computes RMS norms in float32, so there the effect has to be large.
GRADIENTS = [("bridge", "gpt2", "antisymmetric"), ("bridge", "neox", "rope_phase"), ("bridge", "gemma2", "output")]
GRADIENTS += [pytest.param("hooked", name, "rope_phase", marks=zoo.needs_hooked) for name in ("llama", "qwen3")]


def weights_of(model, backend, layer):
    """Of the source's scores, of what it writes, and of what the target reads."""
    first, target = model.blocks[0], model.blocks[layer]
    if backend == "hooked":
        return {"source": first.attn.W_Q, "written": first.attn.W_O, "read": target.attn._W_K}
    inside = {"source": first.attn.q, "written": first.attn.o, "read": target.attn.k, "norm": target.ln1}
    return {role: module.original_component.weight for role, module in inside.items()}


@pytest.mark.parametrize(("backend", "name", "part"), GRADIENTS)
@every_input
def test_gradients_are_those_of_finite_differences(backend, name, part, what):
    model = getattr(zoo, backend)(name).to(torch.float64)
    if backend == "bridge":
        model.original_model.to(torch.float64)
    view = attention_view(model)
    sources, layer = [(0, head) for head in range(view.n_heads(0))], view.n_layers - 1
    targets = [(layer, head) for head in range(view.n_heads(layer))]
    weights = torch.randn(2, 12, zoo.VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def effect():
        """What the edge does to a sum of logits."""
        tokens = zoo.prompt(length=12)
        with ablate(model, sources, part, into=targets, input=what):
            edged = model(tokens, return_type="logits")
        return ((edged - model(tokens, return_type="logits")) * weights).sum()

    # Slopes of 0.01 to 15. Measured off by at most 5e-7 of themselves in float64, and by 0.06 in gemma2.
    step, allowed, floor = (1e-2, 0.05, 0.2) if name == "gemma2" else (1e-4, 1e-5, 0.0)
    parameters = weights_of(model, backend, layer)
    gradients = torch.autograd.grad(effect(), list(parameters.values()), allow_unused=True)
    for (role, weight), gradient in zip(parameters.items(), gradients, strict=True):
        if role == "read" and (what != "k" or backend == "bridge"):
            continue  # a bridge may read W_K out of a joint weight
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        direction, values = direction * weight.detach().abs().mean(), []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * step * direction
                values.append(float(effect()))
                weight -= sign * step * direction
        slope, expected = (values[0] - values[1]) / (2 * step), float((gradient * direction).sum())
        assert slope == pytest.approx(expected, rel=allowed, abs=floor), role


# --- what is said of the heads, and refused ---


def test_which_heads_an_edge_reaches():
    model = shared("bridge", "llama")
    assert heads_reached(model, "L1H1", "q").heads == ("L1H1",)
    found = heads_reached(model, ["L1H1", (0, 3)], "k")
    assert (found.targets, found.heads) == (("L0H3", "L1H1"), ("L0H2", "L0H3", "L1H0", "L1H1"))
    assert str(found) == "keys of L0H2, L0H3, L1H0, L1H1"
    olmo = shared("bridge", "olmo2")  # a query/key norm over all heads
    every = ("L1H0", "L1H1", "L1H2", "L1H3")
    assert heads_reached(olmo, "L1H1", "q").heads == every
    assert heads_reached(olmo, "L1H1", "k").heads == every
    assert heads_reached(olmo, "L1H1", "v").heads == ("L1H0", "L1H1")


@pytest.mark.parametrize(
    ("name", "into", "what", "others"),
    [
        ("llama", "L1H1", "k", "L1H0"),
        ("llama", ["L1H1", "L1H2"], "v", "L1H0, L1H3"),
        ("llama", ["L1H1", "L1H0"], "k", None),
        ("llama", "L1H1", "q", None),
        ("gpt2", "L1H1", "k", None),
        ("gptj", "L1H1", "v", None),
        ("olmo2", "L1H1", "q", "L1H0, L1H2, L1H3"),  # a query/key norm over all heads
        ("olmo2", ["L1H0", "L1H1"], "v", None),
    ],
)
def test_a_warning_names_the_heads_that_are_reached_besides(name, into, what, others):
    model = shared("bridge", name)

    def said_by(enter):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            enter()
        return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]

    def block():
        with ablate(model, "L0H1", "output", into=into, input=what):
            logits(model)
            logits(model)

    for enter in (block, lambda: ablation_hooks(model, "L0H1", "output", into=into, input=what)):
        said = said_by(enter)
        assert len(said) == (others is not None)
        if others is not None:
            assert f"cannot be edited alone: the edit also reaches {others} (" in said[0]
    assert not said_by(lambda: ablation_hooks(model, [], "output", into=into, input=what))  # nothing is edited


@grouped_models
@every_input
def test_the_heads_that_are_reached_are_those_that_change(backend, name, what):
    model, _, sources, layer, target = edge(backend, name)
    before = recorded(model, ("z",), layers=[layer])[layer, "z"]
    with ablate(model, sources, "output", into=(layer, target), input=what):
        after = recorded(model, ("z",), layers=[layer])[layer, "z"]
    changed = (before != after).any(dim=-1).any(dim=1).any(dim=0).nonzero().flatten().tolist()
    assert [f"L{layer}H{head}" for head in changed] == list(heads_reached(model, (layer, target), what).heads)


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        ((0, 1), {"into": (1, 1)}, "into needs input"),
        ((0, 1), {"input": "k"}, "input needs into"),
        ([(0, 1), (1, 2)], {"into": [(1, 3), (1, 1)], "input": "k"}, "L1H1 reads before L1H2 writes"),
        ((1, 0), {"into": (0, 1), "input": "v"}, "L0H1 reads before L1H0 writes"),
    ],
)
def test_arguments_that_make_no_edge_are_refused(heads, options, message):
    model = shared("bridge", "llama")
    with pytest.raises(ValueError, match=message):
        ablation_hooks(model, heads, "output", **options)
    with pytest.raises(ValueError, match=message), ablate(model, heads, "output", **options):
        pytest.fail("entered")


def test_an_input_that_does_not_exist_is_refused():
    # Under the check of annotations another error would come first.
    with pytest.raises(ValueError, match=r"input must be 'q', 'k' or 'v' .*not 'z'"):
        inspect.unwrap(check_edge)("L1H1", "z")


def test_targets_that_do_not_exist_are_refused():
    with pytest.raises(BadHead, match="L1H9 does not exist"):
        ablation_hooks(shared("bridge", "llama"), "L0H1", "output", into="L1H9", input="k")


@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "llama"), ("bridge", "gptj"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)],
)
@every_input
def test_a_model_that_discards_the_edit_is_refused(backend, name, what):
    model = getattr(zoo, backend)(name)
    sources, layer, target = edge_of(attention_view(model))
    hook = attention_view(model).hook_names(layer)[POINTS[what]]
    make_deaf(model, hook)
    for _ in range(2):
        with pytest.raises(EditNotHonored, match=f"an edit of {hook} does not change the logits of this model"):
            ablation_hooks(model, sources, "output", into=(layer, target), input=what)


@some_models
@every_input
def test_an_input_that_is_not_read_from_the_stream_is_refused(backend, name, what):
    model, view, sources, layer, target = edge(backend, name)
    names = view.hook_names(layer)
    message = f"layer {layer}, head .: the {POINTS[what]} of this run is not what the operators read"

    def halve(x, hook):
        return 0.5 * x

    for tokens in (zoo.prompt(), zoo.prompt(length=1)):
        if len(tokens[0]) == 1 and what == "v":
            continue  # of one token an edit cannot be told from a bias, which a value has no record of
        # After the block has seen the stream, another hook changes it.
        with (
            ablate(model, sources, "output", into=(layer, target), input=what),
            model.hooks(fwd_hooks=[(names["residual"], lambda x, hook: x + torch.linspace(0, 3, x.shape[-1]) * x)]),
            pytest.raises(EditNotHonored, match=message),
        ):
            logits(model, tokens)
    # Before the block it is what the layer reads.
    with model.hooks(fwd_hooks=[(names["residual"], halve)]):
        with_edge(model, sources, "output", (layer, target), what)


@some_models
def test_z_that_another_hook_edits_later_is_refused(backend, name):
    model, view, sources, layer, target = edge(backend, name)
    z = view.hook_names(sources[0][0])["z"]
    for part in ("output", a_part(name)):
        with (
            ablate(model, sources, part, into=(layer, target), input="k"),
            model.hooks(fwd_hooks=[(z, lambda z, hook: z + 0.3)]),
            pytest.raises(EditNotHonored, match=r"the attention adds something else than what was measured"),
        ):
            logits(model)
        # Before the block: of the output it is what is measured; parts of scores are no longer those of z.
        with model.hooks(fwd_hooks=[(z, lambda z, hook: z + 0.3)]):
            if part == "output":
                with_edge(model, sources, part, (layer, target), "k")
            else:
                with pytest.raises(EditNotHonored, match="is not that of"):
                    with_edge(model, sources, part, (layer, target), "k")


def test_a_run_that_skips_the_source_is_refused():
    model, _, sources, *_ = edge("bridge", "gemma2")
    with (
        ablate(model, sources[:1], "output", into=(3, 1), input="k"),
        pytest.raises(EditNotHonored, match=r"layer 3: what the heads of layer 0 write was not seen in this run"),
    ):
        tls.ablation_sweep(model, "output", heads=[(2, 0)], show_progress=False)
