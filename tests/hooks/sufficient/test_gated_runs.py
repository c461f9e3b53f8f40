"""Gated runs: a set of heads is the circuit of its edges, and slopes are those of finite differences."""

import numpy as np
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.hooks.sufficient import gated_runs as room
from tlspectral.hooks.sufficient.gated_runs import gated_runs
from tlspectral.models.reading import measured
from tlspectral.models.running.batches import ON_CPU
from tlspectral.tasks.task_sequences import task_sequences

CLEAN, OTHER = prompt_pairs(5, 9, seed=3)
TASK = tls.logit_difference(CLEAN, 7, 10, counterfactual=OTHER)
# A plain stream; a norm behind the attention; LayerNorm; a delegating bridge; a norm over all queries.
FAMILIES = [
    ("bridge", "llama"),
    ("bridge", "gemma3"),
    *zoo.also_slow(("bridge", "gpt2"), ("bridge", "gemma2"), ("bridge", "gptj"), ("bridge", "olmo2")),
    pytest.param("hooked", "qwen2", marks=[zoo.needs_hooked, pytest.mark.slow]),
]


def drawn_sets(n_heads, n=8, seed=0):
    """Random sets from no head to all heads."""
    return np.random.default_rng(seed).random((n, n_heads)) < np.linspace(0, 1.01, n)[:, None]


def without_heads(graph, heads, kept):
    """The mask of all edges but those of the heads that are not kept."""
    mask = graph.possible.copy()
    for (layer, head), own in zip(heads, kept, strict=True):
        if not own:
            mask[:, graph.sender_index[f"L{layer}H{head}"]] = False
    return mask


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
def test_a_set_of_heads_is_the_circuit_of_all_edges_but_those_of_the_other_heads(backend, name):
    with measured(zoo.shared(backend, name)) as view, torch.no_grad():
        runs, pairs = gated_runs(view, task_sequences(view, TASK)), pairs_of(view, TASK)
        sets = drawn_sets(len(runs.heads))
        found = runs.values(sets)
        circuits = pairs.circuit_values([without_heads(pairs.graph, runs.heads, kept) for kept in sets])
    # Measured: 6e-7 at most. A norm behind the attention at the scale of the mixed run differs by hundredths.
    np.testing.assert_allclose(found, circuits, atol=1e-5)
    assert np.abs(found[0] - found[-1]).max() > 0.01
    assert (found[0] == runs.none.values).all()
    assert (found[-1] == runs.every.values).all()


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
def test_slopes_are_those_of_finite_differences(backend, name):
    model = zoo.shared(backend, name)
    with measured(model) as view, torch.no_grad():
        runs = gated_runs(view, task_sequences(view, TASK))
        gates = torch.rand(2, len(runs.heads), generator=zoo.generator(0))
        direction = torch.randn(len(runs.heads), generator=zoo.generator(1))
        _, slopes = runs.slopes(gates)
        up, down = (runs.slopes(gates + sign * 1e-2 * direction)[0].mean(1) for sign in (1, -1))
        # Measured off by 3e-4 of values from .002 to .5 (float32); a path that is cut off costs 10 per cent and more.
        np.testing.assert_allclose(slopes @ direction.double(), (up - down) / 2e-2, rtol=1e-2, atol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batches_of_pairs_and_of_gates_change_nothing_but_rounding(monkeypatch):
    with measured(zoo.shared("bridge", "llama")) as view, torch.no_grad():
        sequences = task_sequences(view, TASK)
        whole = gated_runs(view, sequences)
        sets, gates = drawn_sets(len(whole.heads), 5), torch.rand(3, len(whole.heads), generator=zoo.generator(0))
        expected = [whole.values(sets), *whole.slopes(gates)]
        small = ON_CPU._replace(tokens=3 * 5)  # three prompts of a whole pass, less than one of a backward pass
        for module in ("batches", "continued_runs"):
            monkeypatch.setattr(f"tlspectral.models.running.{module}.batch_on", lambda device: small)
        batched = gated_runs(view, sequences)
        assert batched.none.run is None
        for found, wanted in zip([batched.values(sets), *batched.slopes(gates)], expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)  # float32: 5e-7 measured


@pytest.mark.parametrize("continued", [True, False])
def test_positions_before_the_first_difference_are_not_run_again(continued, monkeypatch):
    model = zoo.bridge("llama")
    if not continued:
        monkeypatch.setattr(room, "continued_run", lambda run, first: None)
    with measured(model) as view, torch.no_grad():
        runs = gated_runs(view, task_sequences(view, TASK))
        assert runs.first == 4
        assert runs.run.n_tokens == (5 if continued else 9)
        found = runs.values(drawn_sets(len(runs.heads)))
        other = gated_runs(view, task_sequences(view, TASK)) if continued else runs
        monkeypatch.setattr(room, "continued_run", lambda run, first: None)
        np.testing.assert_allclose(found, other.values(drawn_sets(len(runs.heads))), atol=1e-5)


@pytest.mark.parametrize("even", [True, False])
def test_without_pairs_closed_gates_give_the_mean_or_nothing(even):
    model = zoo.shared("bridge", "llama")
    prompts = [*CLEAN] if even else [CLEAN[0], CLEAN[1, :6], CLEAN[2]]
    task = tls.logit_difference(prompts, 7, 10)
    part = tls.parts.Output("mean" if even else "zero")
    with measured(model) as view, torch.no_grad():
        runs = gated_runs(view, task_sequences(view, task))
        assert runs.replace == part.replace
        kept = drawn_sets(len(runs.heads), 4)[2]
        value = runs.values(kept[None])[0]
    others = [head for head, own in zip(runs.heads, kept, strict=True) if not own]
    reference = tls.parts.Output("mean", reference=[*CLEAN]) if even else part
    with tls.ablate(model, others, reference):
        expected = tls.evaluate(model, task).per_sequence
    np.testing.assert_allclose(value, expected, atol=1e-5)  # float32: 5e-7 measured
