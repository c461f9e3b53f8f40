"""Edges into latent attention: receivers of a layer, the same edge in transformers, and what is refused.

`conformance` asks these models for everything that holds of edges and circuits of other architectures, test_hook_edges
for more.
"""

import pytest
import torch
import zoo
from ablation_runs import ablated, logits, recorded
from edge_recomputation import furthest
from gradient_checks import in_float64, slopes
from latent_reference import edge_in_transformers
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.errors import BadHead, EditNotHonored
from tlspectral.hooks import ablate
from tlspectral.hooks.edges.reached import reached
from tlspectral.models.reading import attention_view

# What the warning says is a case of test_hook_edges.
pytestmark = pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
SENDER = (0, 1)
EVERY = (0, 1, 2, 3)


def model_of(name="deepseek_v3"):
    return zoo.shared("bridge", name)


def with_edge(model, into):
    return ablated(model, [SENDER], "output", into=into)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.LATENTS)
def test_an_edge_is_what_the_modules_of_transformers_make_of_the_changed_stream(name):
    found, plain = {what: with_edge(model_of(name), f"L1H2.{what}") for what in "qkv"}, logits(model_of(name))
    model = zoo.hf_model(name)
    for what in "qkv":
        expected = edge_in_transformers(model, zoo.prompt(), SENDER, (1, what, 2))
        # Float32, logits of size 2: measured 4e-7. The edges move them by .07 and more.
        assert furthest(found[what], expected) < 5e-6, what
        assert furthest(found[what], plain) > 0.05, what


# --- receivers ---


def test_keys_and_values_are_one_receiver_of_the_layer_each():
    found = reached(attention_view(model_of()), ["L1H1.k", "L1H3.k", "L1KV0.v", "L1H2.q"])
    assert [(one.receiver.name, one.asked, one.heads) for one in found] == [
        ("L1KV0.k", (1, 3), EVERY),
        ("L1H2.q", (2,), (2,)),
        ("L1KV0.v", EVERY, EVERY),
    ]
    with pytest.raises(BadHead, match=r"L1KV1\.k does not exist: layer 1 has key/value heads 0 to 0"):
        reached(attention_view(model_of()), "L1KV1.k")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_the_heads_that_are_reached_are_those_that_change(what):
    model, points = model_of(), ("residual", "query", "query_up", "key", "value", "z")
    before = recorded(model, points)
    with ablate(model, [SENDER], "output", into=f"L1H1.{what}"):
        after = recorded(model, points)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {(1, point) for point in {"q": ["query_up"], "k": ["key", "value"], "v": ["value"]}[what]} | {
        (1, "z")
    }
    heads = (before[1, "z"] != after[1, "z"]).any(dim=-1).any(dim=1).any(dim=0).nonzero().flatten()
    assert tuple(heads.tolist()) == ((1,) if what == "q" else EVERY)


# --- together with other hooks ---


@pytest.mark.slow
def test_keys_and_values_can_be_cut_in_two_blocks_and_one_receiver_in_one_alone():
    model = model_of()
    expected = with_edge(model, ["L1KV0.k", "L1KV0.v", "L1H0.q"])
    with ablate(model, [SENDER], "output", into="L1KV0.k"), ablate(model, [SENDER], "output", into="L1KV0.v"):
        found = with_edge(model, "L1H0.q")
    assert torch.equal(found, expected)
    second = "an open context edits head .* there already"
    for what in "qkv":
        into = f"L1H1.{what}"
        with ablate(model, [SENDER], "output", into=into):
            with ablate(model, [(0, 2)], "output", into=into), pytest.raises(EditNotHonored, match=second):
                logits(model)
            with pytest.raises(EditNotHonored, match=second):
                tls.edge_effects(model, into, measure="task")


# --- gradients, and an indexer ---


@pytest.mark.slow
def test_gradients_pass_to_the_sender_and_to_both_projections_of_the_receiver():
    model = in_float64("bridge", "deepseek_v3")
    first, second = (block.original_component.self_attn for block in model.blocks[:2])
    weights = {
        "written": first.o_proj.weight,
        "down": second.kv_a_proj_with_mqa.weight,
        "up": second.kv_b_proj.weight,
        "norm": second.kv_a_layernorm.weight,
    }

    def effect():
        with ablate(model, [SENDER], "output", into="L1KV0.k"):
            return (model(zoo.prompt(), return_type="logits")[:, -1, :7] * torch.arange(7)).sum()

    gradients = torch.autograd.grad(effect(), list(weights.values()))
    for (role, weight), gradient in zip(weights.items(), gradients, strict=True):
        found, expected = slopes(effect, weight, gradient, 1e-4)
        assert found == pytest.approx(expected, rel=2e-2, abs=1e-2), role  # RMS norms compute in float32


def test_an_indexer_keeps_the_keys_that_it_picked_and_circuits_of_longer_prompts_are_refused():
    model = model_of("glm5_selecting")
    pattern = attention_view(model).hook_names(1)["pattern"]
    seen = {}
    keep = (pattern, lambda weights, hook: seen.setdefault("seen", []).append(weights > 0))
    with model.hooks(fwd_hooks=[keep]):
        logits(model)
        with_edge(model, ["L1KV0.k", "L1H0.q"])
    assert torch.equal(*seen["seen"])
    clean, other = prompt_pairs(3, 11, seed=0)
    task = tls.logit_difference(clean, [7, 8, 9], [10, 11, 12], counterfactual=other)
    with pytest.raises(
        ValueError, match="11 tokens, but an indexer of this model lets a query see 8 keys that it picks, by what"
    ):
        tls.run_circuit(model, [("L0H1", "L1H1.q")], task)
