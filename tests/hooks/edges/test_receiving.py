"""Edges: a part of senders taken only out of what receivers read, against plain recomputation.

`conformance` asks every architecture for an edge of each part and input; here are the arguments and forms of a model
that are no rows there, what is left behind, other hooks beside an edge, gradients, and what is refused.
"""

import functools
import re
import warnings

import pytest
import torch
import zoo
from ablation_runs import DELEGATED, a_part, ablated, in_dtype, intact, interrupt, left_padded, logits, recorded
from attention_models import make_deaf
from edge_recomputation import (
    POINTS,
    edge_of,
    furthest,
    patch_of,
    patched,
    read_from,
    recomputed,
    removed_from_stream,
)
from gradient_checks import in_float64, loss_of, slopes
from native_models import native
from spectral_zoo import moved
from zoo import shared

import tlspectral as tls
from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.hooks.edges.reached import reached
from tlspectral.hooks.edges.receiving import EdgeRun
from tlspectral.hooks.parts import Band, LongRange, Output, RopePhase, Symmetric
from tlspectral.models.reading import attention_view

# What the warning says has tests of its own, at the end.
pytestmark = pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
# Grouped keys with a norm behind the attention and a softcap, a delegating bridge, a HookedTransformer.
some_models = pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "gemma2"), ("bridge", "gptj"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)],
)
and_latents = pytest.mark.parametrize(("backend", "name"), [*some_models.args[1], ("bridge", "deepseek_v3")])
GROUPED = [("bridge", "llama"), ("bridge", "olmo2"), pytest.param("hooked", "qwen3", marks=zoo.needs_hooked)]
grouped_models = pytest.mark.parametrize(("backend", "name"), GROUPED)
# Logits of size 2 in float32. Measured over the zoo, on TransformerLens 3.9 and 4.3: at most 9e-7.
NOISE = 1e-5
SEEN = 1e-3  # what an edge moves them by, at least (median 0.1)


def edge(backend, name):
    """Model, view, two senders, and layer and head of a receiver."""
    model = shared(backend, name)
    return model, attention_view(model), *edge_of(attention_view(model))


def into_of(layer, head, what):
    return f"L{layer}H{head}.{what}"


def with_edge(model, senders, part, into, tokens=None):
    return ablated(model, senders, part, tokens, into=into)


# --- against plain recomputation ---


@pytest.mark.slow
@grouped_models
@pytest.mark.parametrize(
    ("part", "what"),
    [
        (Output("mean", zoo.prompt(batch=5, seed=3)), "v"),
        (Output("resample", zoo.prompt(batch=5, seed=3), seed=1), "v"),
        (LongRange(3, sinks=1), "v"),
        (Band([0, 2]), "k"),
        (Symmetric(include_bias=True), "k"),
        (Symmetric(static=True), "q"),
    ],
    ids=["mean", "resample", "long_range", "band", "bias", "static"],
)
def test_what_is_removed_is_what_ablate_removes(backend, name, part, what):
    model, _, senders, layer, head = edge(backend, name)
    into = into_of(layer, head, what)
    found = with_edge(model, senders, part, into)
    assert furthest(found, recomputed(model, senders, part, layer, head, what)) < NOISE
    assert furthest(found, with_edge(model, senders, "output", into)) > SEEN


@pytest.mark.slow
def test_several_receivers_read_one_after_the_other():
    model, view, senders, *_ = edge("bridge", "gemma2")
    senders = senders[:1]
    found = with_edge(model, senders, "output", ["L1KV0.k", "L2H0.k", "L2H3.k"])
    removed = removed_from_stream(model, senders, "output")
    with model.hooks(fwd_hooks=[patch_of(view, 1, "k", [0], read_from(model, 1, "k", removed))]):
        expected = patched(model, 2, "k", [0, 1], read_from(model, 2, "k", removed))
    assert furthest(found, expected) < NOISE


FORMS = {
    **{feature: lambda feature=feature: native(feature) for feature in ("softcap", "no norm", "gated MLP")},
    "learnable rotary positions": lambda: moved("bridge", "llama"),
    "hooked learnable rotary positions": lambda: moved("hooked", "llama"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=zoo.needs_hooked if form.startswith("hooked") else []) for form in FORMS]
)
def test_native_and_spectral_models(form):
    model = FORMS[form]()
    senders, layer, head = edge_of(attention_view(model))
    tokens = torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(0))
    for what in POINTS:
        for part in ("output", "rope_phase" if "rotary" in form else "symmetric"):
            found = with_edge(model, senders, part, into_of(layer, head, what), tokens)
            assert furthest(found, recomputed(model, senders, part, layer, head, what, tokens)) < NOISE
            assert furthest(found, logits(model, tokens)) > SEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),  # rounding of the model itself: measured 0.04, and 0.013 behind latents
    [
        ("gemma2", 0.15),
        ("deepseek_v3", 0.04),
        *zoo.also_slow(("gptj", 0.15), ("deepseek_v2_lite", 0.04)),
    ],
)
def test_in_bfloat16(name, most):
    model = in_dtype("bridge", name, torch.bfloat16)
    senders, layer, head = edge_of(attention_view(model))
    plain = logits(model)
    for what in POINTS:
        found = with_edge(model, senders, "output", into_of(layer, head, what))
        reference = with_edge(shared("bridge", name), senders, "output", into_of(layer, head, what))
        assert found.dtype == plain.dtype
        assert furthest(found.float() - plain.float(), reference - intact("bridge", name)) < most


# --- what else changes, and what is left behind ---


@pytest.mark.slow
@grouped_models
def test_the_heads_that_are_reached_are_those_that_change(backend, name):
    model, view, senders, layer, head = edge(backend, name)
    points = ("query", "key", "value", "z", "residual")
    before = recorded(model, points)
    for what in POINTS:
        with ablate(model, senders, "output", into=into_of(layer, head, what)):
            after = recorded(model, points)
        assert {key for key in before if not torch.equal(before[key], after[key])} == {
            (layer, POINTS[what]),
            (layer, "z"),
        }
        changed = (before[layer, "z"] != after[layer, "z"]).any(dim=-1).any(dim=1).any(dim=0).nonzero().flatten()
        (found,) = reached(view, into_of(layer, head, what))
        assert changed.tolist() == list(found.heads)
        assert found.asked == (head,)


@pytest.mark.slow
@and_latents
def test_nothing_removed_changes_no_bit(backend, name):
    model, _, senders, layer, head = edge(backend, name)
    plain = intact(backend, name)
    for what in POINTS:
        into = into_of(layer, head, what)
        assert torch.equal(with_edge(model, [], "output", into), plain)
        assert torch.equal(with_edge(model, senders, "output", []), plain)
        wide = LongRange(zoo.PROMPT_LENGTH)  # measured, and found to be 0
        assert torch.equal(with_edge(model, senders, wide, into), plain)
        assert torch.equal(with_edge(model, senders, RopePhase([]), into), plain)


@pytest.mark.slow
@some_models
def test_no_tensor_of_a_run_is_kept(backend, name, spied):
    runs = spied(EdgeRun, "take")
    model, _, senders, layer, head = edge(backend, name)
    for what in POINTS:
        with_edge(model, senders, a_part(name), into_of(layer, head, what))
        assert runs.pop().removed == {}


def test_a_run_that_broke_off_does_not_disturb_the_next():
    model, view, senders, layer, head = edge("bridge", "llama")
    with ablate(model, senders, "output", into=into_of(layer, head, "k")):
        expected = logits(model)
        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(zoo.prompt(), fwd_hooks=[(view.hook_names(layer)["residual"], interrupt)])
        assert torch.equal(logits(model), expected)
        assert logits(model, zoo.prompt(length=9)).shape[1] == 9


# --- together with other hooks ---


@pytest.mark.slow
@grouped_models
def test_two_open_blocks_on_one_receiver_are_refused(backend, name):
    model, _, (one, other), layer, _ = edge(backend, name)
    with ablate(model, [one], "output", into=f"L{layer}H0.k"):
        expected = logits(model)
        for into in (f"L{layer}H0.k", f"L{layer}H1.k", f"L{layer}KV0.k"):
            with pytest.raises(EditNotHonored, match=SECOND):
                with_edge(model, [other], "output", into)
        assert furthest(with_edge(model, [other], "output", f"L{layer}H0.v"), expected) > SEEN  # another receiver
        assert torch.equal(logits(model), expected)
    hooks = ablation_hooks(model, [one], "output", into=f"L{layer}KV0.k")  # a list of hooks is a block too
    with model.hooks(fwd_hooks=hooks), pytest.raises(EditNotHonored, match=SECOND):
        with_edge(model, [other], "output", f"L{layer}H0.k")


SECOND = r"an open context edits head 0 there already: give all senders of a receiver in one context, and"


def test_no_table_of_edges_under_an_open_block_on_its_receiver():
    model = shared("bridge", "llama")
    measured = functools.partial(tls.edge_effects, model, measure="ind")
    with ablate(model, "L0H1", "output", into="L1KV0.k"):
        for alias in ("L1H0.k", "L1H1.k", "L1KV0.k", ["L1H2.k", "L1H1.k"]):
            with pytest.raises(EditNotHonored, match=SECOND):
                measured(alias)
        measured("L1H2.k")
        measured("L1H1.q")


@pytest.mark.slow
@some_models
def test_the_receiving_head_can_lose_a_part_besides(backend, name):
    model, view, senders, layer, head = edge(backend, name)
    part = a_part(name)
    values = read_from(model, layer, "k", removed_from_stream(model, senders, "output"))
    group = [view.layer(layer).kv_head(head)]
    with ablate(model, senders, "output", into=into_of(layer, head, "k")), ablate(model, (layer, head), part):
        found = logits(model)
    with model.hooks(fwd_hooks=[patch_of(view, layer, "k", group, values)]), ablate(model, (layer, head), part):
        assert furthest(found, logits(model)) < NOISE
    assert furthest(found, with_edge(model, senders, "output", into_of(layer, head, "k"))) > SEEN
    # The other way round the ablation has held keys that the edge then edits.
    with (
        ablate(model, (layer, head), part),
        ablate(model, senders, "output", into=into_of(layer, head, "k")),
        pytest.raises(EditNotHonored, match=f"layer {layer}"),
    ):
        logits(model)


@pytest.mark.slow
@some_models
@pytest.mark.parametrize("what", ["q", "v"])
def test_lists_and_hooks_of_the_user(backend, name, what):
    model, view, senders, layer, head = edge(backend, name)
    part, point = a_part(name), view.hook_names(layer)[POINTS[what]]
    with ablate(model, senders, part, into=into_of(layer, head, what)):
        expected = logits(model)
        shown = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    hooks = ablation_hooks(model, senders, part, into=into_of(layer, head, what))
    prompts = [zoo.prompt(), zoo.prompt(batch=1, length=11, seed=3), zoo.prompt()]
    with torch.no_grad():
        found = [model.run_with_hooks(tokens, fwd_hooks=hooks) for tokens in prompts]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[2], expected)
    assert torch.equal(found[1], with_edge(model, senders, part, into_of(layer, head, what), prompts[1]))

    # An edit of the user's that acts first is kept, and the edge is added to it.
    def add(activation, hook):
        return activation + 0.25

    plain = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    with model.hooks(fwd_hooks=[(point, add)]), ablate(model, senders, part, into=into_of(layer, head, what)):
        both = recorded(model, (POINTS[what],), layers=[layer])[layer, POINTS[what]]
    torch.testing.assert_close(both - plain - 0.25, shown - plain, rtol=0, atol=1e-5)  # rounding of values of size 10


@pytest.mark.slow
@some_models
@pytest.mark.parametrize("part", ["output", "rope_phase"])
def test_left_padding(backend, name, part):
    model, _, senders, layer, head = edge(backend, name)
    tokens, padded, mask = left_padded()
    with ablate(model, senders, part, into=into_of(layer, head, "k")):
        expected = logits(model, tokens)
        if part != "output" and backend == "bridge" and name in DELEGATED:
            with pytest.raises(EditNotHonored, match=r"padding.*with another backend"):
                logits(model, padded, attention_mask=mask)
            return
        assert furthest(logits(model, padded, attention_mask=mask)[:, -tokens.shape[1] :], expected) < NOISE


# --- gradients ---


# In float64, norms and all: LayerNorms of bridges, and HookedTransformers. Gemma 2, with its norm behind the attention
# and its softcap, computes RMS norms in float32, so there the effect has to be large.
GRADIENTS = [
    ("bridge", "gpt2", "antisymmetric", "k"),
    ("bridge", "neox", "rope_phase", "q"),
    ("bridge", "gemma2", "output", "v"),
    pytest.param("hooked", "llama", "rope_phase", "v", marks=zoo.needs_hooked),
    pytest.param("hooked", "qwen3", "rope_phase", "k", marks=zoo.needs_hooked),
]


def weights_of(model, backend, layer):
    """Of the sender's scores, of what it writes, and of what the receiver reads."""
    first, last = model.blocks[0], model.blocks[layer]
    if backend == "hooked":
        return {"sender": first.attn.W_Q, "written": first.attn.W_O, "read": last.attn._W_K}
    inside = {"sender": first.attn.q, "written": first.attn.o, "read": last.attn.k, "norm": last.ln1}
    return {role: module.original_component.weight for role, module in inside.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name", "part", "what"), GRADIENTS)
def test_gradients_are_those_of_finite_differences(backend, name, part, what):
    model = in_float64(backend, name)
    view = attention_view(model)
    senders, layer = [(0, head) for head in range(view.n_heads(0))], view.n_layers - 1
    into = tls.hooks.receivers([(layer, head) for head in range(view.n_heads(layer))], what)

    def effect():
        """What the edge does to a sum of logits."""
        with ablate(model, senders, part, into=into):
            edged = loss_of(model)
        return edged - loss_of(model)

    # Slopes of 0.01 to 15. Measured off by at most 5e-7 of themselves in float64, and by 0.06 in gemma2.
    step, allowed, floor = (1e-2, 0.05, 0.2) if name == "gemma2" else (1e-4, 1e-5, 0.0)
    parameters = weights_of(model, backend, layer)
    gradients = torch.autograd.grad(effect(), list(parameters.values()), allow_unused=True)
    for (role, weight), gradient in zip(parameters.items(), gradients, strict=True):
        if role == "read" and (what != "k" or backend == "bridge"):
            continue  # a bridge may read W_K out of a joint weight
        size = float(weight.detach().abs().mean())
        found, expected = (size * slope for slope in slopes(effect, weight, gradient, step * size))
        assert found == pytest.approx(expected, rel=allowed, abs=floor), role


# --- what is said of the heads, and refused as the model runs (arguments: test_hook_arguments) ---


@pytest.mark.parametrize(
    ("name", "into", "said"),
    [
        ("llama", "L1H1.k", "the keys of L1H1 cannot be edited alone: the edit also reaches L1H0 ("),
        ("llama", ["L1H1.v", "L1H2.v"], "the values of L1H1, L1H2 .* also reaches L1H0, L1H3 .*L1KV0.v, L1KV1.v"),
        ("llama", ["L1H1.k", "L1H0.k"], None),
        ("llama", "L1KV0.k", None),
        ("llama", "L1H1.q", None),
        ("gpt2", "L1H1.k", None),
        # A query/key norm over all heads.
        ("olmo2", "L1H1.q", "the queries of L1H1 .* also reaches L1H0, L1H2, L1H3 "),
        ("olmo2", "L1KV0.v", None),
        # A latent that all heads read.
        (
            "deepseek_v3",
            "L1H1.k",
            "the keys of L1H1 .* reaches L1H0, L1H2, L1H3 .* latent .* name the receiver L1KV0.k",
        ),
        ("deepseek_v3", "L1KV0.v", None),
        ("deepseek_v3", "L1H1.q", None),
    ],
)
def test_a_warning_names_the_heads_that_are_reached_besides(name, into, said):
    model = shared("bridge", name)

    def said_by(*senders):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ablate(model, senders, "output", into=into):
                logits(model)
                logits(model)
        return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]

    found = said_by("L0H1")
    assert len(found) == (said is not None)
    assert said is None or re.search(said.replace("(", "[(]"), found[0])
    assert not said_by()  # nothing is edited


@pytest.mark.parametrize(
    ("backend", "name", "what"),
    [("bridge", "llama", "q"), ("bridge", "gptj", "v"), pytest.param("hooked", "qwen2", "k", marks=zoo.needs_hooked)],
)
def test_a_model_that_discards_the_edit_is_refused(backend, name, what):
    model = getattr(zoo, backend)(name)
    senders, layer, head = edge_of(attention_view(model))
    hook = attention_view(model).hook_names(layer)[POINTS[what]]
    make_deaf(model, hook)
    with pytest.raises(EditNotHonored, match=f"an edit of {hook} does not change the logits of this model"):
        ablation_hooks(model, senders, "output", into=into_of(layer, head, what))


@pytest.mark.slow
@and_latents
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_an_input_that_is_not_read_from_the_stream_is_refused(backend, name, what):
    model, view, senders, layer, head = edge(backend, name)
    names = view.hook_names(layer)
    message = f"layer {layer}, head .: the {POINTS[what]} of this run does not follow"

    for tokens in (zoo.prompt(), zoo.prompt(length=1)):
        if len(tokens[0]) == 1 and what == "v":
            continue  # of one token an edit cannot be told from a bias, which a value has no record of
        # After the context has seen the stream, another hook changes it.
        with (
            ablate(model, senders, "output", into=into_of(layer, head, what)),
            model.hooks(fwd_hooks=[(names["residual"], lambda x, hook: x + torch.linspace(0, 3, x.shape[-1]) * x)]),
            pytest.raises(EditNotHonored, match=message),
        ):
            logits(model, tokens)
    # Before the context it is what the layer reads.
    with model.hooks(fwd_hooks=[(names["residual"], lambda x, hook: 0.5 * x)]):
        with_edge(model, senders, "output", into_of(layer, head, what))


@pytest.mark.slow
@some_models
def test_edits_of_a_sender_stand_in_front_of_the_block(backend, name):
    model, view, senders, layer, head = edge(backend, name)
    z = view.hook_names(senders[0][0])["z"]
    into = {"into": into_of(layer, head, "k")}

    def moved_z():
        return model.hooks(fwd_hooks=[(z, lambda z, hook: z + 0.3)])

    def silenced():
        return ablate(model, senders, "output")

    for part, edit in (("output", moved_z), (a_part(name), moved_z), ("output", silenced)):
        late = pytest.raises(EditNotHonored, match=f"layer {senders[0][0]}: the output of the attention is not the sum")
        with ablate(model, senders, part, **into), edit(), late:
            logits(model)
    # In front of the context: of the output it is what is measured; parts of scores are no longer those of z.
    with moved_z():
        with_edge(model, senders, "output", into_of(layer, head, "k"))
        with pytest.raises(EditNotHonored, match="does not follow from"):
            with_edge(model, senders, a_part(name), into_of(layer, head, "k"))
    with silenced():
        assert torch.equal(with_edge(model, senders, "output", into_of(layer, head, "k")), logits(model))


def test_a_run_that_skips_the_sender_is_refused():
    model, _, senders, *_ = edge("bridge", "gemma2")
    with (
        ablate(model, senders[:1], "output", into="L3H1.k"),
        pytest.raises(EditNotHonored, match=r"layer 3: the hook on the heads of layer 0 did not run"),
    ):
        tls.ablation_sweep(model, "output", heads=[(2, 0)])
