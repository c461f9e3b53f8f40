"""The canonical tasks against their definitions in the paper, row by row, and against the counts they should have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import generator

from tlspectral.studies.positional_symbolic.canonical_tasks import TASKS, CanonicalTask

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
