"""What PS proves about heads and canonical tasks: who can solve what, and where in the prompt the weight is lost."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_prompts import random_head, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.positional_symbolic.canonical_tasks import TASKS, CanonicalTask
from tlspectral_studies.positional_symbolic.exact_heads import ExactHead, mixed_head, positional_head, symbolic_head
from tlspectral_studies.positional_symbolic.peak_weights import positional_peak_weight, symbolic_peak_weight

from tlspectral.positional.exclusion import exclusion_split

INDEX, RETRIEVAL, INDUCTION = (CanonicalTask(name) for name in ("index", "retrieval", "partial_induction"))
SMALL = {name: CanonicalTask(name, 4, 3, 3) for name in TASKS}


@pytest.mark.parametrize("as_printed", [False, True])
def test_the_positional_and_the_symbolic_head_are_that_on_every_input(as_printed):
    split = exclusion_split(positional_head(INDEX, as_printed=as_printed).logit_matrix(sampled(INDEX, 50)[0]))
    assert (split.pos == 0).all()
    assert (split.index == 1).all()
    split = exclusion_split(symbolic_head(RETRIEVAL, as_printed=as_printed).logit_matrix(sampled(RETRIEVAL, 50)[0]))
    assert (split.sym == 0).all()
    assert (split.index == 0).all()


def test_a_turning_symbolic_head_and_the_mixed_head_are_neither():
    for head in (symbolic_head(RETRIEVAL, theta=math.pi / (16 * 31)), mixed_head(INDUCTION)):
        split = exclusion_split(head.logit_matrix(sampled(INDUCTION, 50)[0]))
        # Measured 2e-3 to .05: both move the logits far more than rounding does.
        assert ((split.index > 1e-5) & (split.index < 0.5)).all()
        assert (split.variance < split.pos + split.sym).all()


@settings(max_examples=15, derandomize=True)
@given(st.integers(0, 2**31), st.floats(0.01, 3))
def test_heads_without_positions_are_symbolic_and_heads_with_equal_keys_are_positional(seed, theta):
    """PS section 3.1; with both, attention is uniform."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 10, (5, 8)))
    nope = exclusion_split(random_head(seed, 10, theta=0.0).logit_matrix(tokens))
    assert (nope.sym == 0).all()
    equal = exclusion_split(random_head(seed, 10, theta=theta, equal_keys=True).logit_matrix(tokens))
    assert (equal.pos == 0).all()
    assert (equal.sym > 0).all()
    both = random_head(seed, 10, theta=0.0, equal_keys=True)
    assert exclusion_split(both.logit_matrix(tokens)).variance.abs().max() == 0
    torch.testing.assert_close(both.attention(tokens), torch.full((5, 8), 1 / 8, dtype=torch.float64))


def permuted(tokens):
    """The prompt under every permutation of its context, [permutations, pos]."""
    order = torch.tensor(list(itertools.permutations(range(len(tokens) - 1))))
    return torch.cat([tokens[order], tokens[-1:].expand(len(order), 1)], dim=1)


@pytest.mark.parametrize("seed", range(2))
def test_symbolic_heads_fail_index(seed):
    """PS Theorem 2 and Lemma 1: their output is the same for every order of the context."""
    task = SMALL["index"]
    for head in (random_head(seed, task.n_tokens, theta=0.0), symbolic_head(task)):
        tokens, position, _ = sampled(task, 20, seed)
        for prompt, j in zip(tokens, position, strict=True):
            orders = permuted(prompt)
            outputs = head.attended(orders)
            torch.testing.assert_close(outputs, outputs[:1].expand_as(outputs), rtol=0, atol=1e-14)
            # The same numbers added in another order could decide a tie otherwise.
            answers = outputs.round(decimals=12).argmax(-1)
            assert len(answers.unique()) == 1
            if len(prompt[:-1].unique()) > 1:
                assert (answers != orders[:, j]).any()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["retrieval", "partial_induction"])
def test_positional_heads_fail_retrieval_and_partial_induction(name, seed):
    """PS Theorem 4 and Corollary 1: weights stay where they are, so some order of the context gets another answer."""
    task = SMALL[name]
    head = random_head(seed, task.n_tokens, theta=0.8, equal_keys=True)
    tokens, position, _ = sampled(task, 20, seed)
    for prompt, at in zip(tokens, position, strict=True):
        orders = permuted(prompt)
        weights = head.attention(orders)
        torch.testing.assert_close(weights, weights[:1].expand_as(weights), rtol=0, atol=0)
        asked = orders[:, :-1] // task.n_integers == prompt[at] // task.n_integers
        last = (asked * torch.arange(1, 5)).argmax(1)
        right = orders.gather(1, last[:, None])[:, 0]
        assert (head.answer(orders) != right).any()


def counterexample_head(task):
    """The positional head of PS C.6: logits 1, -1 and 0 on first pair, second pair and query, whatever they are."""
    key = torch.zeros(task.n_tokens, 1, dtype=torch.complex128)
    key[: task.n_pairs] = 1
    query = torch.zeros_like(key)
    query[-task.n_symbols :] = 1
    return ExactHead(query, key, torch.tensor([math.pi], dtype=torch.float64))


def counterexample_answer(task, attended):
    """The pair with the symbol of the query and the weight of one occurrence: AND, OR and EQ, as an MLP can."""

    def equal(values, value):  # weights are 0.09 or more apart; rounding is 1e-16
        return (values - value).abs() < 1e-6

    first, second, query = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64).softmax(0)
    pairs = attended[..., : task.n_pairs]
    is_asked_for = equal(attended[..., -task.n_symbols :], query).repeat_interleave(task.n_integers, dim=-1)
    return (is_asked_for & (equal(pairs, first) | equal(pairs, second))).long().argmax(-1)


def test_an_mlp_after_a_positional_head_solves_retrieval():
    """PS C.6, all prompts with n = 3; the head's own most attended token is right only if it comes first."""
    task = CanonicalTask("retrieval", length=2, n_symbols=2, n_integers=2)
    head = counterexample_head(task)
    prompts, answers = [], []
    for first, second, symbol in itertools.product(range(4), range(4), range(2)):
        asked = [pair for pair in (first, second) if pair // task.n_integers == symbol]
        if len(asked) == 1:
            prompts.append([first, second, task.n_tokens - task.n_symbols + symbol])
            answers.append(asked[0])
    assert len(prompts) == 16
    tokens, answers = torch.tensor(prompts), torch.tensor(answers)
    np.testing.assert_allclose(head.logits(tokens), [[1.0, -1.0, 0.0]] * 16, atol=1e-12)
    assert (exclusion_split(head.logit_matrix(tokens)).pos == 0).all()
    assert torch.equal(counterexample_answer(task, head.attended(tokens)), answers)
    assert (head.answer(tokens) == answers).double().mean() == 0.5


def shape_of(weights):
    """Signs of the steps of log weights. Those below 1e-13, where rounding is 1e-15, are none; others exceed 3e-8."""
    steps = weights.log().diff()
    return torch.where(steps.abs() < 1e-13, 0.0, steps.sign())


def is_u_shaped(weights):
    """Falls, is level for at most one step in the middle, and rises."""
    signs = shape_of(weights)
    return signs[0] == -1 and signs[-1] == 1 and (signs.diff() >= 0).all() and (signs == 0).sum() <= 1


@pytest.mark.parametrize("of_half_a_lap", [0.01, 0.5, 1.0, 1.99])
def test_the_positional_head_loses_the_middle(of_half_a_lap):
    """PS Theorem 7, for n = 5 .. 69."""
    for n in range(5, 70):
        weights = positional_peak_weight(n, of_half_a_lap * math.pi / n)
        assert is_u_shaped(weights)
        assert (shape_of(weights) == 0).any() == (n % 2 == 0)


def test_exceptions_to_the_u_shape():
    """n = 4 does not rise at the end, a whole lap is flat, and more than a lap is not a U."""
    assert shape_of(positional_peak_weight(4, math.pi / 4)).tolist() == [-1, 0]
    for n in range(4, 70):
        assert (shape_of(positional_peak_weight(n, 2 * math.pi / n)) == 0).all()
        for of_half_a_lap in (2.5, 3.0):
            assert not is_u_shaped(positional_peak_weight(n, of_half_a_lap * math.pi / n))


def test_the_symbolic_head_loses_the_ends():
    """PS Theorem 8, for n = 4 .. 99, even and odd, with or without the query among the keys (a logit of 0)."""
    for n in range(4, 100):
        weights = symbolic_peak_weight(n)
        for one in (weights, 1 / (1 / weights + (-torch.arange(1, n).mul(math.pi / n).sin()).exp())):
            assert is_u_shaped(1 / one.double())


def test_the_closed_forms_are_attention_weights():
    n = 12
    task = CanonicalTask("index", n - 1, 3, 3)
    for theta in (0.02, math.pi / n, 0.5):
        head = replace(positional_head(task, theta=theta), logit_scale=1.0)
        tokens = torch.cat([torch.zeros(n - 1, n - 1).long(), task.n_pairs + torch.arange(n - 1)[:, None]], dim=1)
        torch.testing.assert_close(head.attention(tokens)[:, :-1].diagonal(), positional_peak_weight(n, theta))
    # Tokens 0 and 1 with angles -pi / 2 and pi / 2 to the query's, at positions 1 .. n - 1 from an origin at 0.
    key = torch.tensor([[1j], [-1j]], dtype=torch.complex128)
    origin = torch.polar(torch.ones((), dtype=torch.float64), torch.tensor(-math.pi, dtype=torch.float64))
    for answer in range(n - 1):
        tokens = torch.zeros(n, dtype=torch.long)
        tokens[answer] = 1
        head = ExactHead(origin.expand(2, 1), key, torch.tensor([math.pi / n], dtype=torch.float64))
        weights = head.logits(tokens)[:-1].softmax(0)
        assert weights.argmax() == answer
        torch.testing.assert_close(weights[answer], symbolic_peak_weight(n)[answer])


def test_the_weights_at_the_ends_and_in_the_middle():
    positional, symbolic = positional_peak_weight(33, math.pi / 33), symbolic_peak_weight(33)
    assert positional[[0, 15, -1]].tolist() == pytest.approx([0.063, 0.042, 0.060], abs=5e-4)
    assert symbolic[[0, 15, -1]].tolist() == pytest.approx([0.063, 0.138, 0.063], abs=5e-4)
