"""Batches follow a device's total memory, are halved where memory runs out, and change no number."""

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running import batches
from tlspectral.models.running.batches import batch_on, in_batches, rows_of_pass, rows_of_scores

GIB = 2**30


def on_card(monkeypatch, gib, kind="cuda"):
    """The batch of a device that says it has so much memory."""
    has = SimpleNamespace(total_memory=int(gib * GIB))
    monkeypatch.setattr(getattr(torch, kind), "get_device_properties", lambda device: has)
    return batch_on(torch.device(kind, 0))


def test_a_batch_follows_the_total_memory_rounded_down_to_a_power_of_two(monkeypatch):
    card = on_card(monkeypatch, 79.1)
    assert card == on_card(monkeypatch, 64) == on_card(monkeypatch, 79.6, "xpu")
    assert card == batches.Batch(tokens=2**15, logits=2**30, held=8 * GIB, copied=2 * GIB, scores=16 * GIB)
    assert on_card(monkeypatch, 23.6) == tuple(one // 4 for one in card)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * GIB)
    assert batch_on(torch.device("mps")) == on_card(monkeypatch, 16)


def test_on_a_cpu_it_is_the_same_on_every_machine():
    expected = batches.Batch(tokens=2**11, logits=2**26, held=2**29, copied=2**20, scores=2**30)
    assert batch_on(torch.device("cpu")) == batch_on(torch.device("lazy:0")) == expected


# --- scores of long prompts ---


def large(device, n_layers=32, n_heads=32):
    """What is asked of a model of 8B parameters."""
    weight = SimpleNamespace(device=torch.device(device))
    model: Any = SimpleNamespace(cfg=SimpleNamespace(n_heads=n_heads), parameters=lambda: iter([weight]))
    return AttentionView(model, "bridge", n_layers, d_model=4096, d_vocab=128256, n_ctx=131072)


def test_rows_of_long_prompts_are_as_many_as_their_scores_have_room_for(monkeypatch):
    on_card(monkeypatch, 79.1)
    rows = {length: rows_of_pass(large("cuda:0"), length) for length in (129, 1024, 2048, 4096, 8192, 32768)}
    by_tokens = {length: 2**15 // length for length in rows}
    assert rows == by_tokens | {2048: 8, 4096: 2, 8192: 1, 32768: 1}
    # All copies of them take a quarter of 64 GiB, in float32 with four at a time.
    assert all(4 * 4 * 32 * length**2 * rows[length] <= 16 * GIB for length in (129, 1024, 2048, 4096))
    # Of one query behind a long cache there is one row of scores; a backward pass keeps those of all layers.
    assert rows_of_scores(large("cuda:0"), 1, 32768) == 2**34 // (16 * 32 * 32768)
    assert rows_of_scores(large("cuda:0"), 1024, backward=True) == 2**34 // ((16 + 8 * 32) * 32 * 1024**2) == 1
    assert rows_of_scores(large("cuda:0"), 8192) == 0


@pytest.mark.parametrize("n_heads", [9, 32])
def test_on_a_cpu_rows_of_usual_lengths_follow_their_tokens_alone(n_heads):
    view = large("cpu", 30, n_heads)
    assert all(rows_of_pass(view, length) == 2**11 // length for length in (18, 129, 256, 512, 1024))
    assert all(rows_of_scores(view, length) >= 25 for length in (18, 129))  # of detectors
    assert all(rows_of_scores(view, length, backward=True) >= 2**11 // 4 // length for length in (18, 129, 256))


# --- out of memory ---


def refusing_beyond(rows, seen):
    """A run that fits up to so many rows."""

    def run(some):
        seen.append(some)
        if some.stop - some.start > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return list(range(some.start, some.stop))

    return run


@pytest.mark.parametrize(("n", "at_once", "fits"), [(10, 4, 4), (10, 4, 3), (13, 13, 1), (7, 100, 2)])
def test_a_batch_that_does_not_fit_is_halved_and_what_was_made_is_kept(n, at_once, fits):
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [row for rows in in_batches(n, at_once, refusing_beyond(fits, seen)) for row in rows]
    assert found == list(range(n))  # each row once, in order
    assert [str(one.message)[:24] for one in caught] == ["the device ran out of me"] * (at_once > fits)
    assert caught == [] or caught[0].filename == __file__
    # After the first that fits none is larger, and none is tried twice at one size.
    sizes = [some.stop - some.start for some in seen]
    assert all(later <= size for size, later in itertools.pairwise(sizes))
    assert len({(some.start, some.stop) for some in seen}) == len(seen)


def test_a_row_that_does_not_fit_alone_raises_as_it_is():
    with pytest.warns(UserWarning, match="halved"), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        list(in_batches(4, 2, refusing_beyond(0, [])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            list(in_batches(4, 1, refusing_beyond(0, [])))
        with pytest.raises(RuntimeError, match="of another kind"):
            list(in_batches(4, 2, lambda rows: (_ for _ in ()).throw(RuntimeError("of another kind"))))


CLEAN, OTHER = prompt_pairs(5, 9, seed=3)
PAIRS = tls.logit_difference(CLEAN, 7, 10, counterfactual=OTHER)
TASK = tls.logit_difference(CLEAN, 7, 10)


def circuit_scores(model):
    pairs = pairs_of(attention_view(model), PAIRS)
    rng = np.random.default_rng(0)
    kept = np.stack([pairs.graph.possible & (rng.random(pairs.graph.possible.shape) < 0.7) for _ in range(3)])
    return pd.DataFrame(pairs.circuit_values(list(kept)))


def estimates(model):
    return pd.DataFrame(edge_estimates(pairs_of(attention_view(model), PAIRS), "EAP").terms.sum(0)[0])


MEASURED = {
    "sweep": lambda model: tls.ablation_sweep(model, "antisymmetric", task=TASK, heads="L0", control="random", draws=2),
    "screen": lambda model: tls.ablation_sweep(model, "symmetric", task=TASK, screen="gradient"),
    "induction": lambda model: tls.ablation_sweep(model, "output", heads="L1H2"),
    "reference": lambda model: tls.ablation_sweep(model, tls.parts.Output("mean"), task=TASK, heads=["L0H1"]),
    "evaluate": lambda model: pd.DataFrame({"score": tls.evaluate(model, TASK).per_sequence}),
    "circuits": circuit_scores,
    "estimates": estimates,
    "edges": lambda model: tls.edge_effects(model, "L1H2.q", task=PAIRS, senders=["L0H1", "L0H2", "embedding"]),
}


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("what", [*MEASURED])
def test_no_number_moves_where_memory_ran_out_in_the_middle_of_a_pass(what, monkeypatch):
    """The last layer refuses more than two rows, so that hooks in front of it have acted when the pass breaks off."""
    model = zoo.bridge("llama")
    expected = MEASURED[what](model)

    def refuse(block, given, output):
        if output[0].shape[0] > 2 if isinstance(output, tuple) else output.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = model.blocks[-1].register_forward_hook(refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = MEASURED[what](model)
    handle.remove()
    assert any("ran out of memory" in str(one.message) for one in caught)
    numbers = [table.select_dtypes("number").drop(columns=["batch"], errors="ignore") for table in (found, expected)]
    # Rounding of float32 in other batches: 1e-6 measured; what is counted twice is off by its whole size.
    pd.testing.assert_frame_equal(*numbers, rtol=0, atol=5e-6)


LONG = {
    **{what: MEASURED[what] for what in MEASURED if what != "induction"},
    "position": lambda model: tls.ablation_sweep(model, "output", task=TASK, at=6),
    "detectors": lambda model: tls.detect_heads(model, n_sequences=5, segment_length=4),
    "sinks": lambda model: tls.heads.attention_sinks(model, CLEAN),
    "top pairs": lambda model: tls.top_pairs(model, "L1H2", CLEAN),
    "kernel": lambda model: tls.relative_position_kernel(model, "L1H2", CLEAN),
    "directions": lambda model: tls.head_directions(
        model, "L1H2", task=tls.Task(CLEAN, TASK.metric, attention=(8, 4)), draws=9
    ),
}
BACKWARD = {"screen", "estimates"}


@pytest.mark.fast(2)
@pytest.mark.parametrize("what", [*LONG])
def test_every_pass_counts_its_scores(what, batch_size):
    """A llama of two layers and four heads, with room for the scores of two rows of nine tokens."""
    model, seen = zoo.bridge("llama"), []
    batch_size(scores=2 * 16 * 4 * 9**2)

    def note(block, given, output):
        x = output[0] if isinstance(output, tuple) else output
        if x.shape[1] == 9:  # probes have fewer tokens, replays from a position too
            seen.append((len(x), torch.is_grad_enabled()))

    handle = model.blocks[0].register_forward_hook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hook is on the model
        LONG[what](model)
    handle.remove()
    assert max(rows for rows, _ in seen) == 2
    # A backward pass keeps those of both layers: 32 bytes of a score in place of 16.
    assert {rows for rows, backward in seen if backward} == ({1} if what in BACKWARD else set())


def test_the_batch_is_noted_and_tables_of_different_batches_are_one_measurement(batch_size, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_jobs, "TOKENS_OF_JOB", 1)  # a job of each layer
    model = zoo.shared("bridge", "llama")
    options = {"task": TASK, "heads": ["L0H1", "L1H2"], "folder": tmp_path}
    whole = tls.ablation_sweep(model, "output", **options)
    assert whole.attrs["batch"] == 2**11 // 9
    (tmp_path / "output_L001.parquet").unlink()
    batch_size(tokens=18)
    resumed = tls.ablation_sweep(model, "output", **options)  # is not refused
    assert resumed.attrs["batch"] == 2
    pd.testing.assert_frame_equal(resumed, whole, rtol=0, atol=1e-6)  # float32 in other batches: 1e-7
    assert tls.detect_heads(model, n_sequences=4, segment_length=8).attrs["batch"] == 2
