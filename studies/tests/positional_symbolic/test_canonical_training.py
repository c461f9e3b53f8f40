"""The canonical tasks against their definitions, and the training of heads against attention written out."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from canonical_preset import SHORT
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.positional_symbolic.canonical import (
    PRESETS,
    CanonicalHeads,
    CanonicalRun,
    accuracy_by_position,
    query_key_trajectories,
    train_canonical,
)
from tlspectral_studies.positional_symbolic.canonical.trainer import training_prompts, validation_prompts
from tlspectral_studies.positional_symbolic.canonical_tasks import TASKS, CanonicalBatch, CanonicalTask
from zoo import generator

invariant = settings(max_examples=25, derandomize=True)
sizes = st.tuples(st.integers(2, 9), st.integers(2, 5), st.integers(2, 6))


def rows(task, n, seed):
    """Each prompt in plain Python: (symbol, integer) pairs, query id, position, answer."""
    batch = task.sample(n, generator(seed))
    assert batch.context.shape == (n, task.length)
    assert {one.dtype for one in batch} == {torch.int64}
    for context, query, position, answer in zip(*(one.tolist() for one in batch), strict=True):
        assert all(0 <= token < task.n_symbols * task.n_integers for token in context)
        yield [divmod(token, task.n_integers) for token in context], query, position, answer


@invariant
@given(sizes, st.integers(0, 2**32))
def test_answers_are_those_of_the_definitions(size, seed):
    """The symbol at the queried position; the integer of the only such symbol; that of the last of exactly two."""
    task = CanonicalTask("index", *size)
    for pairs, query, position, answer in rows(task, 8, seed):
        assert query == task.n_symbols * task.n_integers + position
        assert pairs[position][0] == answer
    for name, times in (("retrieval", 1), ("partial_induction", 2)):
        task = CanonicalTask(name, *size)
        for pairs, query, position, answer in rows(task, 8, seed):
            symbol = query - task.n_symbols * task.n_integers - task.length
            assert 0 <= symbol < task.n_symbols
            places = [place for place, pair in enumerate(pairs) if pair[0] == symbol]
            assert len(places) == times
            assert places[-1] == position
            assert pairs[position][1] == answer
            assert len({pairs[place][1] for place in places}) == times


def chi_square(values, expected):
    counts = torch.bincount(values, minlength=len(expected)).double()
    return float(((counts - expected) ** 2 / expected).sum())


def uniform(values, n_kinds):
    """Whether counts are within 4 standard deviations of what uniform draws give; the seeds are fixed."""
    expected = torch.full((n_kinds,), len(values) / n_kinds, dtype=torch.float64)
    return abs(chi_square(values, expected) - (n_kinds - 1)) < 4 * (2 * (n_kinds - 1)) ** 0.5


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", TASKS)
def test_everything_is_drawn_uniformly(name):
    task, n = CanonicalTask(name), 20_000
    batch = task.sample(n, generator(3))
    assert uniform(batch.answer, task.n_answers)
    first = task.n_pairs if name == "index" else task.n_pairs + task.length
    assert uniform(batch.query - first, task.length if name == "index" else task.n_symbols)
    if name == "partial_induction":
        # Of the 32 * 31 / 2 pairs of positions, p end at position p: never the first.
        assert int(batch.answer_position.min()) == 1
        expected = torch.arange(1, 32) * n / 496
        assert abs(chi_square(batch.answer_position - 1, expected) - 30) < 4 * 60**0.5
    else:
        assert uniform(batch.answer_position, task.length)
    # All pairs occur, and at any one place no symbol and no integer is favoured, whatever the query says.
    assert uniform(batch.context[:, 5] // 32, 16)
    assert uniform(batch.context[:, 5] % 32, 32)
    elsewhere = batch.answer_position != 5
    if name == "retrieval":
        off = (batch.context[:, 5] // 32 - (batch.query - first)) % 16
        assert uniform(off[elsewhere] - 1, 15)
    if name == "partial_induction":
        symbol = batch.query - first
        other = torch.tensor(
            [int((row // 32 == one).nonzero()[0]) for row, one in zip(batch.context, symbol, strict=True)]
        )
        apart = (batch.answer - batch.context[torch.arange(n), other] % 32) % 32
        assert uniform(apart - 1, 31)


@pytest.mark.parametrize("name", TASKS)
def test_the_draw_is_decided_by_its_generator_alone(name):
    before = torch.get_rng_state()
    first, again, other = (CanonicalTask(name).sample(50, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first.context, other.context)
    assert CanonicalTask(name).n_tokens == 560  # as in the paper


# --- heads and their training ---

SMALL = {name: CanonicalTask(name, length=6, n_symbols=3, n_integers=4) for name in TASKS}


def stacked(batch, n_runs):
    return CanonicalBatch(*(one.expand(n_runs, *one.shape) for one in batch))


def written_out(model, run, batch, frequencies):
    """Logits of one run by plain causal attention over whole prompts, every position turned on its own."""
    tokens = torch.cat([batch.context, batch.query[:, None]], dim=1)
    x = model.W_E[run][tokens]  # batch pos d_model
    n = tokens.shape[1]
    q, k = x @ model.W_Q[run], x @ model.W_K[run]
    turned = []
    for vectors in (q, k):
        rows = []
        for position in range(n):
            blocks = []
            for w in frequencies:
                c, s = torch.cos(position * w), torch.sin(position * w)
                blocks.append(torch.stack([torch.stack([c, -s]), torch.stack([s, c])]))
            rows.append(vectors[:, position] @ torch.block_diag(*blocks).T)
        turned.append(torch.stack(rows, dim=1))
    scores = turned[0] @ turned[1].mT
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    residual = x + scores.softmax(-1) @ (x @ model.W_V[run])
    return (residual @ model.W_U[run])[:, -1]


@pytest.mark.parametrize(
    ("name", "frequencies", "learned"),
    [("index", (0.4,), True), ("retrieval", (0.4,), False), ("partial_induction", (0.0, 0.7), True)],
)
def test_logits_and_gradients_are_those_of_attention_written_out(name, frequencies, learned):
    task = SMALL[name]
    runs = [CanonicalRun(frequencies, 0), CanonicalRun(tuple(w + 0.2 for w in frequencies), 1)]
    model = CanonicalHeads(task, runs, d_model=8, learn_frequencies=learned)
    # The fixed tables are float32 as in training: cos and sin are made again from the exact frequencies.
    model = model.double()
    angles = model.offsets[:, None] * model.fixed_frequencies[:, None]
    model.cos, model.sin = angles.cos(), angles.sin()
    for run, one in zip(runs, model.learned_frequencies, strict=False):
        one.data = torch.tensor(run.frequencies, dtype=torch.float64)
    batch = task.sample(20, generator())
    logits = model(*stacked(batch, 2)[:2])
    weights = [model.W_E, model.W_V, model.W_U, model.W_Q, model.W_K, *model.learned_frequencies]
    F.cross_entropy(logits.flatten(0, 1), batch.answer.repeat(2)).backward()
    found = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    w = list(model.learned_frequencies) if learned else model.fixed_frequencies
    dense = torch.stack([written_out(model, run, batch, w[run]) for run in range(2)])
    F.cross_entropy(dense.flatten(0, 1), batch.answer.repeat(2)).backward()
    # Measured: 3e-15 and 3e-16; logits differ between prompts by more than 1, gradients reach 0.1.
    torch.testing.assert_close(logits, dense, atol=1e-12, rtol=0)
    for one, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(one, weight.grad, atol=1e-13, rtol=0)
        assert one.abs().max() > 1e-4


def test_runs_of_one_seed_start_alike_whatever_their_frequencies():
    task = CanonicalTask("partial_induction")
    one, two = (CanonicalHeads(task, [CanonicalRun(w, 5)]) for w in ((0.1,), (0.0, 0.2)))
    other = CanonicalHeads(task, [CanonicalRun((0.1,), 6)])
    for name in ("W_E", "W_V", "W_U"):
        assert torch.equal(getattr(one, name), getattr(two, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(two.frequencies, torch.tensor([[0.0, 0.2]], dtype=torch.float64))
    # 35,840 and 4096 numbers of N(0, 1/64): standard errors 0.0005 and 0.0014.
    assert one.W_E.std().item() == pytest.approx(1 / 8, abs=0.003)
    assert one.W_V.std().item() == pytest.approx(1 / 8, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixed", "learned"), [("index", (), True), ("partial_induction", (0.0,), False)])
def test_a_stacked_run_is_the_same_run_alone_to_the_bit(name, fixed, learned):
    task = CanonicalTask(name)
    # Eleven runs are no multiple of a vector register, and seeds come in no order.
    runs = [CanonicalRun((*fixed, 0.01 + 0.05 * number), number * 7 % 3) for number in range(11)]
    together = train_canonical(task, runs, SHORT, learn_frequencies=learned)
    prompts = validation_prompts(task, SHORT)
    accuracy = accuracy_by_position(together.model, prompts)
    for place in (0, 4, 10):
        alone = train_canonical(task, [runs[place]], SHORT, learn_frequencies=learned)
        for parameter in ("W_E", "W_V", "W_U", "W_Q", "W_K"):
            stack, single = (getattr(one.model, parameter).detach() for one in (together, alone))
            assert torch.equal(stack[place], single[0]), parameter
        for stack, single in ((together.history, alone.history), (together.frequencies, alone.frequencies)):
            same = stack[stack["run"] == place].reset_index(drop=True).assign(run=0)
            pd.testing.assert_frame_equal(same, single, check_exact=True)
        counts = accuracy_by_position(alone.model, prompts)["correct"]
        assert accuracy.loc[accuracy["run"] == place, "correct"].tolist() == counts.tolist()


def test_training_is_adam_on_each_runs_mean_loss():
    """Two steps by hand, with attention written out and one optimizer per run; learned frequencies go at a tenth."""
    task, schedule = SMALL["retrieval"], replace(SHORT, steps=2, decay_share=0.0, warmup_steps=2, frequency_rate=0.1)
    runs = [CanonicalRun((0.4,), 3), CanonicalRun((0.9,), 1)]
    trained = train_canonical(task, runs, schedule, learn_frequencies=True)
    for place, run in enumerate(runs):
        model = CanonicalHeads(task, [run], learn_frequencies=True)
        weights = [model.W_E, model.W_V, model.W_U, model.W_Q, model.W_K]
        (frequency,) = model.learned_frequencies
        optimizer = torch.optim.Adam([{"params": weights, "lr": 0.0}, {"params": [frequency], "lr": 0.0}])
        stream = generator(10_000 + run.seed)
        for rate in (5e-3, 1e-2):
            batch = task.sample(32, stream)
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate / 10
            optimizer.zero_grad()
            F.cross_entropy(written_out(model, 0, batch, frequency), batch.answer).backward()
            optimizer.step()
        # Measured: 2e-7 (float32); steps are of size 1e-2.
        for name in ("W_E", "W_V", "W_U", "W_Q", "W_K"):
            one, hand = getattr(trained.model, name)[place], getattr(model, name)[0]
            torch.testing.assert_close(one, hand, atol=1e-5, rtol=0)
        path = trained.frequencies.query("run == @place")
        assert path["step"].tolist() == [0, 2]
        assert path["theta"].tolist() == pytest.approx([run.frequencies[0], frequency.item()], abs=1e-6)


def test_fixed_frequencies_stay_and_losses_are_means_since_the_row_before():
    task, runs = SMALL["partial_induction"], [CanonicalRun((0.0, 0.3), 0), CanonicalRun((0.0, 0.3), 1)]
    before = torch.get_rng_state()
    training = train_canonical(task, runs, SHORT)
    often = train_canonical(task, runs, replace(SHORT, log_every=1)).history
    assert torch.equal(torch.get_rng_state(), before)
    assert training.frequencies["step"].tolist() == [step for step in (0, 5, 10, 12) for _ in range(4)]
    assert training.frequencies["theta"].tolist() == [0.0, 0.3] * 8
    assert not list(training.model.learned_frequencies)
    assert training.history["step"].tolist() == [5, 5, 10, 10, 12, 12]
    for run in range(2):
        each = often.loc[often["run"] == run, "loss"].to_numpy()
        expected = [each[:5].mean(), each[5:10].mean(), each[10:].mean()]
        found = training.history.loc[training.history["run"] == run, "loss"]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)  # rounding of float64
        assert len(set(each)) == 12
        with torch.no_grad():
            batch = next(training_prompts(task, SHORT, run))
            logits = CanonicalHeads(task, [runs[run]])(*stacked(batch, 1)[:2])[0]
        assert each[0] == pytest.approx(F.cross_entropy(logits, batch.answer).item(), abs=1e-6)  # float32


def test_fresh_prompts_never_come_back_and_a_fixed_set_comes_once_in_an_epoch():
    task = CanonicalTask("retrieval")

    def drawn(schedule, n_batches, seed=0):
        stream = training_prompts(task, schedule, seed)
        return [[tuple(row) for row in next(stream).context.tolist()] for _ in range(n_batches)]

    fresh = drawn(SHORT, 6)
    assert len({row for batch in fresh for row in batch}) == 6 * 32
    epochs = drawn(replace(SHORT, training_samples=64), 6)
    whole = [frozenset(first + second) for first, second in zip(epochs[::2], epochs[1::2], strict=True)]
    assert len(whole[0]) == 64
    assert len(set(whole)) == 1
    assert epochs[0] != epochs[2]
    other = drawn(replace(SHORT, training_samples=64), 2, seed=1)
    assert {row for batch in other for row in batch}.isdisjoint(whole[0])
    # 70 prompts fill two batches of 32; the six of each epoch that are left over differ.
    uneven = drawn(replace(SHORT, training_samples=70), 8)
    assert all(len(set(one + two)) == 64 for one, two in zip(uneven[::2], uneven[1::2], strict=True))
    assert len({row for batch in uneven for row in batch}) == 70


def test_the_learning_rate_warms_up_and_falls_linearly_and_the_papers_is_constant():
    quick = PRESETS["quick"]
    assert [quick.learning_rate_at(step) for step in (0, 49, 99)] == pytest.approx([1e-4, 5e-3, 1e-2])
    assert {quick.learning_rate_at(step) for step in range(100, 841)} == {1e-2}
    assert [quick.learning_rate_at(step) for step in (1020, 1199)] == pytest.approx([5e-3, 1e-2 / 360])

    paper = PRESETS["paper"]
    assert paper.steps * paper.batch_size == 100 * paper.training_samples == 100 * 40_960
    assert {paper.learning_rate_at(step) for step in (0, 1, 63_999)} == {1e-3}


def test_accuracy_by_position_counts_right_answers():
    task = SMALL["partial_induction"]
    runs = [CanonicalRun((0.3,), seed) for seed in (4, 2)]
    model, batch = CanonicalHeads(task, runs), task.sample(2049, generator(1))  # the last prompt is a piece of its own
    found = accuracy_by_position(model, batch)
    assert found["n"].tolist() == 2 * torch.bincount(batch.answer_position, minlength=6).tolist()
    assert found["seed"].tolist() == [4] * 6 + [2] * 6
    with torch.no_grad():
        right = model(*stacked(batch, 2)[:2]).argmax(-1) == batch.answer
    assert (right[0] != right[1]).any()
    for run in range(2):
        counts = torch.bincount(batch.answer_position[right[run]], minlength=6)
        assert found.loc[found["run"] == run, "correct"].tolist() == counts.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_training_on_another_device_is_the_same_training(learned, device):
    task, runs = CanonicalTask("index"), [CanonicalRun((0.1,), 0), CanonicalRun((0.2,), 1)]
    here, there = (
        train_canonical(task, runs, SHORT, learn_frequencies=learned, **options) for options in ({}, {"device": device})
    )
    assert str(there.model.W_E.device) == device
    counts = [accuracy_by_position(one.model, validation_prompts(task, SHORT)) for one in (here, there)]
    paths = [query_key_trajectories((1.0,), preset=SHORT, **options) for options in ({}, {"device": device})]
    for one, other in ((here.history, there.history), (here.frequencies, there.frequencies), counts, paths):
        assert one.equals(other)
