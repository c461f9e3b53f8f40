"""Circuits and estimates beside those of TransformerLens 4, on a model without grouped heads."""

import numpy as np
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.models.reading import attention_view

if zoo.HAS_HOOKED:  # edges are there from 4.3 on
    pytest.skip("TransformerLens 3 scores no edges", allow_module_level=True)
analysis = pytest.importorskip(
    "transformer_lens.tools.analysis.attribution_patching", reason="TransformerLens 4 has it"
)

KINDS = {"q": "q_input", "k": "k_input", "v": "v_input"}


def nodes(sender, receiver, position, last):
    """An edge as TransformerLens has it, at one position."""
    Node = analysis.Node
    writer = {
        "embedding": lambda: Node("embed", position),
        "head": lambda: Node("attn_head_out", position, sender.layer, sender.head),
        "mlp": lambda: Node("mlp_out", position, sender.layer),
    }[sender.kind]()
    if receiver.input in KINDS:
        return writer, Node(KINDS[receiver.input], position, receiver.layer, receiver.head)
    if receiver.input == "mlp":
        return writer, Node("mlp_in", position, receiver.layer)
    return writer, Node("logits", position, last)


CLEAN = torch.tensor([[5, 17, 60, 33, 21, 48, 70]])
OTHER = torch.tensor([[5, 17, 44, 33, 21, 48, 70]])
TASK = tls.logit_difference(CLEAN, 7, 10, counterfactual=OTHER)


def margin(logits):
    return logits[0, -1, 7] - logits[0, -1, 10]


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_a_circuit_recovers_what_it_does_in_transformer_lens(name):
    model = zoo.bridge(name)  # its hook points are switched over
    pairs = pairs_of(attention_view(model), TASK)
    graph = pairs.graph
    kept = graph.possible & (np.random.default_rng(0).random(graph.possible.shape) < 0.7)
    circuit = [
        nodes(graph.senders[column], graph.receivers[row], position, graph.view.n_layers - 1)
        for row, column in np.argwhere(kept)
        for position in range(CLEAN.shape[1])
    ]
    found = analysis.faithfulness(model, CLEAN, OTHER, margin, circuit)
    intact, none = pairs.plain_values()[:, 0]
    [value] = pairs.circuit_values([kept])[0]
    # Both are exact, in float32: 3e-6 measured of a share that is .2 to .9.
    assert (value - none) / (intact - none) == pytest.approx(found.recovered, abs=1e-4)


def test_estimates_are_those_of_transformer_lens_at_the_counterfactual_run():
    """TransformerLens takes gradients at the corrupt run, so the two sides are exchanged here."""
    model = zoo.bridge("gpt2")
    config = analysis.EdgeAttributionConfig(granularity="edge")
    theirs = analysis.attribution_patch(model, CLEAN, OTHER, margin, config=config)
    edges = dict((edge[:2], edge[2]) for edge in theirs.top_edges(k=10**6))
    pairs = pairs_of(attention_view(model), TASK.denoising())
    [estimates], graph = edge_estimates(pairs, "EAP").terms.sum(0), pairs.graph
    for row, column in np.argwhere(graph.possible):
        summed = sum(
            edges.get(nodes(graph.senders[column], graph.receivers[row], position, graph.view.n_layers - 1), 0.0)
            for position in range(CLEAN.shape[1])
        )
        # Float32 gradients: 1e-8 measured, effects of 1e-4 to 1e-2.
        assert estimates[row, column] == pytest.approx(summed, abs=1e-6)
