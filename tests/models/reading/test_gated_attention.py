"""Edges into the queries of gated attention: the gate of a head reads the stream that its queries read.

By plain recomputation: the model's own norm and projections, of the stream without what is cut.
"""

import functools
import tempfile
from importlib.metadata import version

import pytest
import torch
from ablation_runs import logits, recorded
from edge_recomputation import removed_from_stream, run_with
from families import save
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view

on_4 = pytest.mark.skipif(
    version("transformer-lens").startswith("3."), reason="TransformerLens 3.9 cannot split their gated queries"
)
ON_4 = [pytest.param(one, marks=[on_4, pytest.mark.tl4, pytest.mark.slow]) for one in ("qwen3_next", "qwen3_5_text")]
each_family = pytest.mark.parametrize("family", ["afmoe", *ON_4])


@functools.cache
def gated(family):
    with tempfile.TemporaryDirectory() as folder:
        save(family, {}, folder)
        return tls.load_model(folder)


def patched_queries(model, layer, head, removed):
    """Hooks that give one head queries and gate of the stream without what is removed."""
    attention = model.blocks[layer].attn
    with torch.no_grad():
        read = model.blocks[layer].ln1(recorded(model, ("residual",), None, [layer])[layer, "residual"] - removed)
        projections = {f"blocks.{layer}.attn.hook_q": attention.q.original_component(read)}
        if "gate" in attention._modules:
            projections[f"blocks.{layer}.attn.gate.hook_out"] = attention.gate.original_component(read)

    def of_head(projected, seen, hook):
        n_heads = attention_view(model).n_heads(layer)
        edited = seen.reshape(*seen.shape[:2], n_heads, -1).clone()
        edited[:, :, head] = projected.reshape(edited.shape)[:, :, head]
        return edited.reshape(seen.shape)

    return [(name, functools.partial(of_head, projected)) for name, projected in projections.items()]


@each_family
def test_a_cut_into_queries_cuts_what_the_gate_reads(family):
    model = gated(family)
    first, last = attention_view(model).layers[0], attention_view(model).layers[-1]
    removed = removed_from_stream(model, [(first, 1)], "output")
    expected = run_with(model, patched_queries(model, last, 1, removed))
    with torch.no_grad(), ablate(model, (first, 1), "output", into=f"L{last}H1.q"):
        found = logits(model)
    # Allowed is a hundredth of the effect, far above float32 rounding; with a gate that reads the uncut stream the
    # difference is larger.
    effect = float((expected - logits(model)).abs().max())
    assert effect > 1e-4
    assert float((found - expected).abs().max()) < 0.01 * effect


@each_family
def test_a_circuit_that_keeps_nothing_into_its_heads_is_the_empty_one(family):
    model = gated(family)
    view = attention_view(model)
    clean, other = prompt_pairs(3, 10, seed=0)
    pairs = tls.logit_difference(clean, 7, 10, counterfactual=other)
    heads = [(f"L{layer}H{head}", "logits") for layer in view.layers for head in range(view.n_heads(layer))]
    found, empty = (tls.run_circuit(model, edges, pairs).per_sequence for edges in (heads, []))
    intact = tls.evaluate(model, pairs).per_sequence
    assert abs(intact - empty).max() > 1e-2
    # Equal but for the order of sums in float32; with gates that read the uncut stream .02 and more.
    assert abs(found - empty).max() < 1e-4
