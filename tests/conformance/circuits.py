"""Circuits: both ends are plain runs, and a single cut edge is its circuit."""

import numpy as np
import torch
import zoo
from pair_prompts import prompt_pairs, single_cuts

import tlspectral as tls
from tlspectral.hooks.circuits.pairs import cut_logits, pairs_of, written_by
from tlspectral.models.reading import attention_view

from .rows import asked


@asked(every=9, forms=True)
def all_edges_are_the_clean_run_none_the_counterfactual_one_and_a_cut_edge_its_circuit(row):
    clean, other = prompt_pairs(3, 11, seed=0)
    task = tls.logit_difference(clean, [7, 8, 9], [10, 11, 12], counterfactual=other)
    pairs = pairs_of(attention_view(row.model), task)
    possible, (intact, none) = pairs.graph.possible, pairs.plain_values()
    edges = np.argwhere(possible)
    edges = edges[np.random.default_rng(1).permutation(len(edges))[:6]]
    without = np.repeat(possible[None], len(edges), axis=0)
    without[range(len(edges)), edges[:, 0], edges[:, 1]] = False
    found = pairs.circuit_values([possible, np.zeros_like(possible), *without])
    # In float32, scores of 0.1 to 1 that differ by hundredths: 0 and 5e-7 measured.
    np.testing.assert_allclose(found[:2], [intact, none], atol=1e-5)
    assert np.abs(intact - none).max() > 1e-3
    np.testing.assert_allclose(single_cuts(pairs, edges), found[2:] - intact, atol=5e-6)


@asked(every=6)
def receivers_that_lead_nowhere_need_no_edit(row):
    clean, other = prompt_pairs(2, 11, seed=0)
    pairs = pairs_of(attention_view(row.model), tls.logit_difference(clean, 7, 10, counterfactual=other))
    possible, rng = pairs.graph.possible, np.random.default_rng(3)
    few = possible & (rng.random(possible.shape) < 0.1)
    few[-1] = possible[-1] & (rng.random(possible.shape[1]) < 0.5)  # some writers are read by the logits
    assert not pairs.graph.useful(few).all()
    then, circuits = written_by(pairs.graph, other), np.stack([few, few])
    found, whole = (
        cut_logits(pairs.graph, clean, then, circuits, slice(-1, None), whole=all_) for all_ in (False, True)
    )
    # Rounding of float32: 1e-6 measured. A norm behind all heads moves logits by 1e-3 where one head is left as it is.
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@asked(lambda row: row.backend == "hooked", every=6, forms=True)
def edges_and_their_estimates_are_those_of_the_raw_bridge(row):
    clean, other = prompt_pairs(8, 9, seed=0)
    task = tls.logit_difference(clean, [*range(7, 15)], [*range(20, 28)], counterfactual=other)
    found, expected = (
        tls.edge_effects(model, task=task, screen=20, method="EAP-IG").set_index(["receiver", "sender"])
        for model in (row.model, zoo.shared("bridge", row.name))
    )
    assert set(found.index) == set(expected.index)
    found, both = found.loc[expected.index], found["delta"].notna() & expected["delta"].notna()
    assert both.sum() > 10
    for column, rows in (("estimate", slice(None)), ("delta", both)):
        one, largest = expected.loc[rows, column], expected[column].abs().max()
        # Measured: 6e-6 (estimates) and 2.5e-5 of the largest, in float32. The gain of a norm that acts twice, or not
        # at all, on what an MLP reads is off by hundredths and more.
        np.testing.assert_allclose(found.loc[rows, column], one, rtol=0, atol=1e-4 * largest, err_msg=column)
