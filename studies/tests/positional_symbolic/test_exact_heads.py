"""Exact heads: the corrected ones solve their tasks on any prompt, the printed ones do not."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_prompts import random_head, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral_studies.positional_symbolic.exact_heads import (
    mixed_head,
    positional_head,
    symbolic_head,
)

from tlspectral.positional.shares import split_logits

# PS reads the index task over bare symbols; pairs of one integer are that.
INDEX = CanonicalTask("index", n_integers=1)
INDEX_OF_PAIRS = CanonicalTask("index")
RETRIEVAL = CanonicalTask("retrieval")
INDUCTION = CanonicalTask("partial_induction")
N, M = 32, 16
# Below this angle H_SYM^theta is right.
STEEPEST = 2 * math.pi / (M * (N - 1))


def solved(head, tokens, position):
    """Share of prompts answered with the token at the answer's position."""
    return (head.answer(tokens) == tokens.gather(-1, position[:, None])[:, 0]).double().mean().item()


def most_attended(head, tokens, position):
    """Share of prompts whose largest weight on the context is at the answer's position."""
    return (head.logits(tokens)[:, :-1].argmax(-1) == position).double().mean().item()


def one_against_equals(task, answers, others, queries):
    """The answer at every position in turn, one equal token at all others: [length, length + 1]."""
    tokens = others.repeat(task.length, task.length + 1)
    tokens.diagonal()[:] = answers
    tokens[:, -1] = queries
    return tokens, torch.arange(task.length)


def test_logits_are_those_of_real_rotation_matrices():
    """`x_i K^T R_theta^{n - i} Q x_n` (PS, equation 1 and C.3), one matrix at a time."""
    head = replace(random_head(0, 7, theta=0.4), logit_scale=1.7)
    tokens = torch.tensor([3, 6, 0, 3, 5])
    expected = []
    for i, token in enumerate(tokens):
        logit = 0.0
        for t, theta in enumerate(head.theta.tolist()):
            angle = theta * (len(tokens) - 1 - i)
            rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            key, query = (torch.view_as_real(part[at, t]) for part, at in ((head.key, token), (head.query, tokens[-1])))
            logit += 1.7 * float(key @ rotation.double() @ query)
        expected.append(logit)
    # `rotation` is built in float32: 1e-7.
    np.testing.assert_allclose(head.logits(tokens), expected, atol=1e-6)
    weights = np.exp(expected) / np.exp(expected).sum()
    np.testing.assert_allclose(head.attention(tokens), weights, atol=1e-6)
    by_token = [weights[(tokens == token).numpy()].sum() for token in range(7)]
    np.testing.assert_allclose(head.attended(tokens), by_token, atol=1e-6)
    assert head.answer(tokens) == np.argmax(by_token)


def test_the_logit_matrix_holds_the_logits_of_every_permutation():
    head = random_head(3, 9, theta=0.7)
    tokens = torch.tensor([4, 1, 7, 1, 0])
    matrix = head.logit_matrix(tokens)
    for permutation in itertools.permutations(range(4)):
        permuted = head.logits(torch.cat([tokens[list(permutation)], tokens[-1:]]))
        assert torch.equal(permuted[:-1], matrix[list(permutation), range(4)])


CORRECTED = {
    "index": (INDEX, positional_head(INDEX)),
    "index of pairs": (INDEX_OF_PAIRS, positional_head(INDEX_OF_PAIRS)),
    "index, twice as fast": (INDEX, positional_head(INDEX, theta=1.9 * math.pi / N)),
    "index, more than a lap": (INDEX, positional_head(INDEX, theta=2.5 * math.pi / N)),
    "retrieval": (RETRIEVAL, symbolic_head(RETRIEVAL)),
    "retrieval, turning": (RETRIEVAL, symbolic_head(RETRIEVAL, theta=0.9 * STEEPEST)),
    "retrieval, mixed": (RETRIEVAL, mixed_head(RETRIEVAL)),
    "partial induction": (INDUCTION, mixed_head(INDUCTION)),
}


def test_the_sufficient_scales_are_those_of_the_closed_form():
    assert positional_head(INDEX).logit_scale == pytest.approx(math.log(32) / (1 - math.cos(math.pi / 32)), rel=1e-9)
    assert symbolic_head(RETRIEVAL).logit_scale == pytest.approx(45.53, abs=0.01)
    # 2.8e4 with a further factor of 1.1.
    assert mixed_head(INDUCTION).logit_scale == pytest.approx(2.52e4, rel=0.01)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_heads_solve_their_task(name):
    task, head = CORRECTED[name]
    tokens, position, batch = sampled(task)
    assert solved(head, tokens, position) == 1.0
    # As a trained model reads the task, with the weights of all tokens of a class added up.
    pairs = head.attended(tokens)[:, : task.n_pairs].unflatten(-1, (task.n_symbols, task.n_integers))
    assert torch.equal(pairs.sum(2 if task.name == "index" else 1).argmax(-1), batch.answer)


def test_the_positional_head_resists_any_repetition():
    head = positional_head(INDEX)
    tokens, position = one_against_equals(INDEX, torch.tensor(3), torch.tensor(4), INDEX.n_pairs + torch.arange(N))
    assert solved(head, tokens, position) == 1.0
    # Neighbours at scale 100: e^(-100 (1 - cos(pi / 32))) = .62 of the answer each.
    assert solved(replace(head, logit_scale=100.0), tokens, position) < 0.1


@pytest.mark.parametrize("theta", [0.0, STEEPEST / 2, 0.99 * STEEPEST])
def test_the_symbolic_head_resists_any_repetition(theta):
    head = symbolic_head(RETRIEVAL, theta=theta)
    for symbol, neighbour in itertools.product(range(M), (1, -1)):
        query = torch.tensor(RETRIEVAL.n_tokens - M + symbol)
        answer, other = torch.tensor(N * symbol + 5), torch.tensor(N * ((symbol + neighbour) % M) + 5)
        tokens, position = one_against_equals(RETRIEVAL, answer, other, query)
        assert solved(head, tokens, position) == 1.0
        if theta == 0:
            # The scale is all but necessary: 31 neighbours at distance 1 need ln 31 instead of ln 32.
            assert solved(replace(head, logit_scale=0.98 * head.logit_scale), tokens, position) == 0.0


@pytest.mark.parametrize("last", [1, 2, 31])
def test_the_mixed_head_takes_the_last_of_many_occurrences(last):
    """The answer stands last; every earlier token is its symbol with another integer, every later one a neighbour."""
    head = mixed_head(INDUCTION)
    for symbol in range(M):
        tokens = torch.full((1, N + 1), N * ((symbol + 1) % M))
        tokens[:, :last] = N * symbol + 7
        tokens[:, last] = N * symbol + 3
        tokens[:, -1] = INDUCTION.n_tokens - M + symbol
        assert solved(head, tokens, torch.tensor([last])) == 1.0
        if last > 1:
            assert solved(replace(head, logit_scale=100.0), tokens, torch.tensor([last])) == 0.0


@settings(max_examples=20, derandomize=True)
@given(st.integers(2, 14), st.integers(2, 7), st.integers(2, 5), st.integers(0, 2**31))
def test_any_size(length, n_symbols, n_integers, seed):
    size = (length, n_symbols, n_integers)
    index, retrieval, induction = (CanonicalTask(name, *size) for name in ("index", "retrieval", "partial_induction"))
    steep = 0.9 * 2 * math.pi / (n_symbols * (length - 1))
    for task, head in (
        (index, positional_head(index)),
        (retrieval, symbolic_head(retrieval)),
        (retrieval, symbolic_head(retrieval, theta=steep)),
        (induction, mixed_head(induction)),
    ):
        tokens, position, _ = sampled(task, 50, seed)
        assert solved(head, tokens, position) == 1.0


# --- as printed: the share of prompts that each head solves is in the table of replication ---


def test_the_printed_positional_head_finds_the_position_at_half_the_logits():
    tokens, position, _ = sampled(INDEX)
    printed, unit = positional_head(INDEX, as_printed=True), replace(positional_head(INDEX), logit_scale=1.0)
    assert most_attended(printed, tokens, position) == most_attended(unit, tokens, position) == 1.0
    torch.testing.assert_close(printed.logits(tokens[:9]), unit.logits(tokens[:9]) / 2)


@pytest.mark.parametrize("build", [symbolic_head, mixed_head])
@pytest.mark.parametrize("as_printed", [True, False])
def test_the_printed_first_and_last_symbol_coincide(build, as_printed):
    """The first symbol against 31 of the last; no scale helps."""
    answer, last = torch.tensor(0), torch.tensor(N * (M - 1))
    tokens, position = one_against_equals(RETRIEVAL, answer, last, torch.tensor(RETRIEVAL.n_tokens - M))
    head = replace(build(RETRIEVAL, as_printed=as_printed), logit_scale=1e5)
    assert solved(head, tokens, position) == (0.0 if as_printed else 1.0)


def test_the_bound_of_the_turning_symbolic_head_is_sharp():
    """Just above 2 pi / (m (n - 1)) a neighbour at the other end of the context has the largest logit."""
    tokens = torch.full((1, N + 1), 8 * N)
    tokens[0, 0], tokens[0, -2], tokens[0, -1] = 3 * N, 4 * N, RETRIEVAL.n_tokens - M + 3
    mirrored = tokens.clone()
    mirrored[0, -2] = 2 * N
    position = torch.tensor([0])
    for factor, right in ((0.999, 1.0), (1.001, 0.0)):
        found = [
            most_attended(symbolic_head_beyond(factor * STEEPEST), prompt, position) for prompt in (tokens, mirrored)
        ]
        assert min(found) == right
    # The printed bound is 2 pi / m = .39.
    assert most_attended(symbolic_head(RETRIEVAL, theta=0.2, as_printed=True), *sampled(RETRIEVAL)[:2]) < 0.05


def symbolic_head_beyond(theta):
    """`symbolic_head` at scale 45 for any theta, with the printed query and the corrected symbols."""
    head = symbolic_head(RETRIEVAL)
    centre = torch.polar(torch.ones(1, dtype=torch.float64), torch.tensor([-theta * (N + 1) / 2], dtype=torch.float64))
    return replace(head, query=head.query * centre, theta=torch.tensor([theta], dtype=torch.float64))


def test_the_gaps_of_the_printed_mixed_head_are_below_float32():
    twice = torch.full((1, N + 1), 5 * N + 3)
    twice[0, -1] = INDUCTION.n_tokens - M + 5
    printed, corrected = mixed_head(INDUCTION, as_printed=True), replace(mixed_head(INDUCTION), logit_scale=1.0)
    gaps = [(head.logits(twice)[0, -2] - head.logits(twice)[0, -3]).item() for head in (printed, corrected)]
    # Float32 near 1.5 has steps of 1.2e-7.
    assert 0 < gaps[0] < 1.2e-7
    assert gaps[1] > 1e-4


# --- shares of content, position and interaction, which follow from the formulas ---


def shares(build, name, n_prompts=4, **options):
    """The task, prompts, and [prompts, 3] of the head. Exact by formula in float64: measured 1e-15."""
    task = CanonicalTask(name, length=16, n_symbols=8, n_integers=4)
    tokens = sampled(task, n_prompts, seed=2)[0]
    return task, tokens, split_logits(build(task, **options).logit_matrix(tokens)).shares().mT


def test_the_positional_head_is_position_and_the_symbolic_head_content():
    assert shares(positional_head, "index")[2] == pytest.approx(torch.tensor([[0.0, 1.0, 0.0]] * 4), abs=1e-10)
    assert shares(symbolic_head, "retrieval")[2] == pytest.approx(torch.tensor([[1.0, 0.0, 0.0]] * 4), abs=1e-10)


def test_the_mixed_head_is_a_sum_of_both():
    """PS section 6 in its simplest case: `cos(a_s - a_query) + c cos(theta (n - t))` has no interaction."""
    task, tokens, found = shares(mixed_head, "partial_induction")
    angle, n = 2 * math.pi / task.n_symbols, task.length
    query = tokens[:, -1] - task.query_ids.start
    by_symbol = torch.cos(angle * (tokens[:, :-1] // task.n_integers - query[:, None]).double())
    by_place = (1 - math.cos(angle)) / 2 * torch.cos(math.pi / (2 * n) * (n - torch.arange(n)).double())
    content, position = by_symbol.var(-1, correction=0), by_place.var(correction=0).expand(len(tokens))
    expected = torch.stack([content, position, torch.zeros(len(tokens))], dim=1) / (content + position)[:, None]
    assert found == pytest.approx(expected, abs=1e-10)
    assert float(found[:, 1].min()) > 1e-3  # small: it only decides between equal symbols


@pytest.mark.parametrize("theta", [0.0, 0.045])
def test_a_symbolic_head_that_rotates_has_the_rest_in_the_interaction(theta):
    """Over all symbols alike, `cos(a + theta x)` has the content `m cos a`, m the mean of cos(theta x) over places."""
    task = CanonicalTask("retrieval", length=16, n_symbols=8, n_integers=4)
    context = torch.arange(16) % task.n_symbols * task.n_integers  # every symbol twice
    tokens = torch.cat([context, torch.tensor([task.query_ids.start + 3])])[None]
    m = 1.0 if theta == 0 else math.sin(8 * theta) / (16 * math.sin(theta / 2))
    found = split_logits(symbolic_head(task, theta=theta).logit_matrix(tokens)).shares().mT
    assert found == pytest.approx(torch.tensor([[m**2, 0.0, 1 - m**2]], dtype=torch.float64), abs=1e-10)
