"""Writes of heads that are held by z: rebuilt as they were, in any pieces and windows, in as few numbers as z takes."""

import numpy as np
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits import held_writes
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of, written_by
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import head_writes, z_of


def pairs_for(name):
    clean, other = prompt_pairs(3, 11, seed=0)
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    return pairs_of(attention_view(zoo.shared("bridge", name)), task)


FAMILIES = ["llama", "gemma2", *zoo.also_slow("gpt2", "olmo2", "gptj", "deepseek_v3", "falcon", "cohere")]


@pytest.mark.parametrize("name", FAMILIES)
def test_rebuilt_writes_are_z_times_w_o(name):
    pairs = pairs_for(name)
    graph, tokens = pairs.graph, pairs.sequences.tokens
    held = written_by(graph, tokens)
    found = held.written(slice(0, len(graph.senders)))
    points = [graph.view.hook_names(layer)["z"] for layer in graph.view.layers]
    with torch.no_grad():
        captured = capture_until(graph.view, tokens, points, last=points[-1])
        for layer, point in zip(graph.view.layers, points, strict=True):
            writes, first = head_writes(graph.view, layer, widened), graph.n_before_layer[layer]
            z = z_of(captured[point], writes.w_o)
            expected = writes.written(z, writes.token_scale(z))
            # Rounding of float32: 1e-7 of the largest measured. The scale of a norm is off by tenths.
            torch.testing.assert_close(
                found[first : first + len(expected)], expected, rtol=0, atol=1e-6 * float(expected.abs().max())
            )


def test_a_head_is_held_by_d_head_numbers_for_a_token():
    pairs = pairs_for("llama")
    held = pairs.differences(slice(None))
    numbers = sum(part.untyped_storage().nbytes() // 4 for part in (*held.z.values(), *held.whole.values()))
    assert numbers == pairs.graph.numbers_held * pairs.sequences.tokens.numel()
    # Two layers of four heads of 12, the embedding and two MLPs of 48.
    assert pairs.graph.numbers_held == 2 * 4 * 12 + 3 * 48 < len(pairs.graph.senders) * 48


@pytest.mark.parametrize("senders", [slice(0, 11), slice(3, 9), slice(5, 6)])
@pytest.mark.parametrize("tokens", [2, 11, 25])
def test_pieces_are_all_that_is_written(senders, tokens, monkeypatch, batch_size):
    pairs = pairs_for("llama")
    held = pairs.differences(slice(None))
    monkeypatch.setattr(held_writes, "_TOKENS", tokens)
    monkeypatch.setattr(held_writes, "_SENDERS", 2)
    batch_size(held=1)
    expected, found = held.written(senders), torch.full((senders.stop - senders.start, 3, 11, 48), torch.nan)
    for some, rows, at, written in held.pieces(senders):
        place = slice(some.start - senders.start, some.stop - senders.start)
        assert found[place, rows, at].isnan().all()  # each once
        found[place, rows, at] = written
    # Products of fewer tokens round otherwise: 1e-7 measured.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_and_pieces_change_no_number(name, monkeypatch, batch_size):
    """As long prompts of a large model have them: windows of one layer, pieces of some tokens of one layer."""
    pairs = pairs_for(name)
    kept = pairs.graph.possible & (np.random.default_rng(0).random(pairs.graph.possible.shape) < 0.6)
    at = [torch.tensor([5, 7, 4]), torch.tensor([10, 2, 9])]
    found = []
    for small in (False, True):
        if small:
            batch_size(held=1)
            for constant, value in (("_LAYERS", 1), ("_TOKENS", 4), ("_SENDERS", 1)):
                monkeypatch.setattr(held_writes, constant, value)
        values = pairs.circuit_values([kept, pairs.graph.possible])
        found.append((values, *(edge_estimates(pairs, "EAP", places).terms.sum(0) for places in ((), at))))
    for one, two in zip(*found, strict=True):
        # Sums of float32 in another order: 4e-6 of the largest measured. A layer that is left out is off by tenths.
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-4 * np.abs(one).max())
        assert np.abs(one).max() > 0
