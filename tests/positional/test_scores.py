"""Positional and symbolic scores as formulas: exact cases, limits of the weighting and the null."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.positional.scores import block_means, score_correlation, swap_scores

invariant = settings(max_examples=60, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
taus = st.sampled_from([None, 1e-3, 0.3, 1e9])


def weights(seed, *shape):
    """Positive numbers over some orders of magnitude, as attention weights are."""
    return torch.from_numpy(np.exp(np.random.default_rng(seed).normal(-4, 2, shape)))


def plain_scores(before, after, tau):
    """PS B.3 for one row, number by number."""
    differences = [abs(d_i - d_j) for d_i, d_j in before]
    tau = 0.1 * max(differences) if tau is None else tau
    exponentials = [math.exp((difference - max(differences)) / tau) for difference in differences]
    positional = symbolic = 0.0
    for exponential, v, moved in zip(exponentials, before, after, strict=True):
        alpha = exponential / sum(exponentials)
        size = math.hypot(*v) * math.hypot(*moved)
        positional += alpha * (moved[0] * v[0] + moved[1] * v[1]) / size
        symbolic += alpha * (moved[0] * v[1] + moved[1] * v[0]) / size
    return positional, symbolic


# --- the formulas ---


@invariant
@given(seeds, taus)
def test_weights_that_stay_are_positional_and_weights_that_follow_symbolic(seed, tau):
    before = weights(seed, 10, 3, 2)
    cosine = torch.cosine_similarity(before, before.flip(-1), dim=-1)
    for after, high, low in (
        (before, "s_pos", "s_sym"),
        (before.flip(-1), "s_sym", "s_pos"),
    ):
        scores = swap_scores(before, after, tau)
        # Rounding of cosines that are 1: measured 4e-16.
        assert (getattr(scores, high) - 1).abs().max() < 1e-14
        assert (getattr(scores, low) - (scores.alpha * cosine).sum(0)).abs().max() < 1e-14


@invariant
@given(seeds, taus)
def test_every_row_is_what_the_formula_says_number_by_number(seed, tau):
    before, after = weights(seed, 7, 4, 2), weights(seed + 1, 7, 4, 2)
    scores = swap_scores(before, after, tau)
    for row in range(4):
        expected = plain_scores(before[:, row].tolist(), after[:, row].tolist(), tau)
        assert (float(scores.s_pos[row]), float(scores.s_sym[row])) == pytest.approx(expected, abs=1e-13)


def test_a_mean_is_over_the_tokens_of_its_block():
    row = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]], dtype=torch.float64)
    assert block_means(row, [(0, 1), (1, 4), (4, 5)]).tolist() == [[0.1, pytest.approx(0.3), 0.0]]


# --- the weighting of swaps ---


def test_a_large_tau_weighs_all_swaps_alike_and_a_small_one_takes_the_largest():
    before, after = weights(0, 6, 3, 2), weights(1, 6, 3, 2)
    flat, peaked = swap_scores(before, after, 1e12), swap_scores(before, after, 1e-12)
    assert torch.allclose(flat.alpha, torch.full((6, 3), 1 / 6, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(flat.alpha_ess, torch.full((3,), 6.0, dtype=torch.float64))
    largest = (before[..., 0] - before[..., 1]).abs().argmax(0)
    assert torch.equal(peaked.alpha, torch.nn.functional.one_hot(largest, 6).T.double())
    assert peaked.alpha_ess.tolist() == [1, 1, 1]


@invariant
@given(seeds, st.floats(1e-200, 1e3))
def test_a_relative_tau_is_free_of_the_scale_of_the_weights(seed, scale):
    before, after = weights(seed, 6, 3, 2), weights(seed + 1, 6, 3, 2)
    scores, scaled = swap_scores(before, after), swap_scores(scale * before, scale * after)
    # Products of weights below 1e-154 would underflow: their cosine is taken after scaling.
    for name in ("s_pos", "s_sym", "alpha_ess"):
        assert torch.allclose(getattr(scores, name), getattr(scaled, name), rtol=1e-9)
    assert torch.allclose(scaled.tau, scale * scores.tau, rtol=1e-12)
    assert torch.allclose(scores.tau, 0.1 * (before[..., 0] - before[..., 1]).abs().amax(0), rtol=1e-15)


def test_swaps_that_move_nothing_are_weighed_alike_under_a_tau_of_zero():
    before, after = weights(0, 5, 1, 1).expand(5, 2, 2), weights(1, 5, 2, 2)
    scores = swap_scores(before, after)
    assert scores.tau.tolist() == [0, 0]
    assert torch.allclose(scores.alpha, torch.full((5, 2), 0.2, dtype=torch.float64))
    assert torch.allclose(scores.s_pos, scores.s_sym)


@pytest.mark.parametrize("hidden", ["before", "after"])
@pytest.mark.parametrize("tau", [None, 0.1])
def test_a_swap_without_any_weight_has_no_part_in_the_scores(hidden, tau):
    before, after = weights(0, 6, 3, 2), weights(1, 6, 3, 2)
    # The hidden swap would have the largest difference, and so nearly all of the weight.
    before[2, 1] = torch.tensor([5.0, 0.0])
    (before if hidden == "before" else after)[2, 1] = 0.0
    before[:, 2] = 0.0  # a row in which no swap shows
    rest = [0, 1, 3, 4, 5]
    scores, expected = swap_scores(before, after, tau), swap_scores(before[rest, 1:2], after[rest, 1:2], tau)
    for name in ("s_pos", "s_sym", "tau", "alpha_ess"):
        assert float(getattr(scores, name)[1]) == pytest.approx(float(getattr(expected, name)), rel=1e-14)
        assert math.isnan(getattr(scores, name)[2]) == (name != "tau" or tau is None)
    assert scores.alpha[2, 1] == 0
    assert scores.alpha[2, 0] > 0


# --- the correlation and its null ---


def coin_heads(seed, n_heads=200, swaps=20):
    """Heads that follow each swap with a probability of their own, and else stay: what the null draws."""
    generator = torch.Generator().manual_seed(seed)
    before = weights(seed, swaps, n_heads, 2)
    probability = torch.rand(n_heads, generator=generator)
    follows = torch.rand(swaps, n_heads, generator=generator) < probability
    return before, torch.where(follows[..., None], before.flip(-1), before)


@pytest.mark.slow
def test_heads_that_differ_in_how_often_they_follow_lie_inside_the_null():
    places = []
    for seed in range(12):
        before, after = coin_heads(seed)
        found = score_correlation(before, swap_scores(before, after), seed=seed + 100)
        assert found["pearson"] < -0.5  # strongly negative by geometry alone
        places.append(found["null_share"])
    # Uniform in [0, 1] if the null is right: the mean of 12 has a standard deviation of 0.083.
    assert 0.2 < np.mean(places) < 0.8
    assert found["draws"] == 200
    assert found["n_heads"] == 200


def test_the_null_is_that_of_one_coin_per_head_not_of_one_per_swap():
    before, _ = coin_heads(0)
    fair = torch.rand(before.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.5
    found = score_correlation(before, swap_scores(before, torch.where(fair[..., None], before.flip(-1), before)))
    # One fair coin for all: heads differ by chance alone, and the correlation is weaker than in the null.
    assert found["pearson"] > found["null_mean"] + 5 * found["null_sd"]
    assert found["null_share"] == 1.0


def test_the_null_follows_its_seed():
    before, after = coin_heads(1)
    scores = swap_scores(before, after)
    first, other = (score_correlation(before, scores, seed=seed) for seed in (3, 4))
    assert first == score_correlation(before, scores, seed=3)
    assert other["pearson"] == first["pearson"] == pytest.approx(np.corrcoef(scores.s_pos, scores.s_sym)[0, 1])
    assert other["null_mean"] != first["null_mean"]


def test_heads_without_a_score_are_left_out():
    before, after = coin_heads(2)
    before[:, 5] = 0.0
    found = score_correlation(before, swap_scores(before, after))
    kept = [head for head in range(before.shape[1]) if head != 5]
    expected = score_correlation(before[:, kept], swap_scores(before[:, kept], after[:, kept]))
    assert found == pytest.approx(expected, rel=1e-14)  # sums over another width round by 1e-16
    assert found["n_heads"] == 199


@pytest.mark.parametrize("case", ["two heads", "constant", "constant up to rounding"])
def test_there_is_no_correlation_of_too_few_or_equal_heads(case):
    before, after = coin_heads(3, n_heads=2 if case == "two heads" else 6)
    after = after if case == "two heads" else before * (1.0 if case == "constant" else 0.1)
    found = score_correlation(before, swap_scores(before, after))
    assert [found[name] for name in ("pearson", "null_mean", "null_sd", "null_share")] == [None] * 4
