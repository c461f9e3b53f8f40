"""The exclusion split: all permutations written out, the inequality and when it is tight, exact zeros."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.positional.exclusion import exclusion_split, exclusion_split_factored

invariant = settings(max_examples=60, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 9)

# Sums of at most some hundred numbers near 1 round by 1e-14; every mutation of an index changes the split by more than
# 1e-2 of it.
ROUNDING = 1e-12


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def over_all_permutations(logits):
    """PS section 3.2 as it stands: squared norms of delta_pos and delta_sym over (n-1)! (n-1)."""
    n = len(logits)
    pos, sym = [], []
    for permutation in itertools.permutations(range(n)):
        for j in range(n):
            pos.append(logits[permutation[j], j] - logits[j, j])
            sym.append(logits[j, permutation[j]] - logits[j, j])
    return torch.stack(pos).square().mean(), torch.stack(sym).square().mean()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_the_mean_over_pairs_is_the_mean_over_permutations(n):
    logits = normal(n, n, n)
    split = exclusion_split(logits)
    pos, sym = over_all_permutations(logits)
    torch.testing.assert_close(split.pos, pos, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(split.sym, sym, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(
        split.variance, logits.diagonal().var(unbiased=False) if n > 1 else torch.zeros_like(pos)
    )


@invariant
@given(seeds, sizes, st.floats(-6, 6))
def test_the_variance_is_at_most_the_sum(seed, n, exponent):
    split = exclusion_split(normal(seed, n, n) * 10**exponent)
    assert split.variance <= (split.pos + split.sym) * (1 + ROUNDING)
    assert n == 1 or 0 < split.index < 1


@invariant
@given(seeds, st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-1, 2))
def test_content_and_position_weighted_by_c(seed, n, c):
    """A = c l_k + (1 - c) l_j: pos = 2 c^2 var and sym = 2 (1 - c)^2 var, hence equality in Theorem 1 at c = 1/2."""
    own = normal(seed, n)
    split = exclusion_split(c * own[:, None] + (1 - c) * own[None, :])
    variance = own.var(unbiased=False)
    # Relative to the variance, as one part vanishes at c = 0 and at c = 1.
    torch.testing.assert_close(split.variance / variance, torch.ones_like(variance), rtol=ROUNDING, atol=0)
    torch.testing.assert_close(split.pos / variance, torch.full_like(variance, 2 * c**2), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(
        split.sym / variance, torch.full_like(variance, 2 * (1 - c) ** 2), rtol=ROUNDING, atol=ROUNDING
    )


@invariant
@given(seeds, sizes)
def test_exchanging_contents_and_places_exchanges_the_two(seed, n):
    logits = normal(seed, 3, n, n)
    split, exchanged = exclusion_split(logits), exclusion_split(logits.mT.contiguous())
    torch.testing.assert_close(split.pos, exchanged.sym, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(split.sym, exchanged.pos, rtol=ROUNDING, atol=0)


@invariant
@given(seeds, sizes, st.integers(1, 12), st.sampled_from([(), (2,), (2, 3)]))
def test_factored_is_full(seed, n, rank, batch):
    contents, places = normal(seed, *batch, n, rank), normal(seed + 1, *batch, n, rank)
    full, factored = exclusion_split(contents @ places.mT), exclusion_split_factored(contents, places)
    for one, other in zip(full, factored, strict=True):
        assert one.shape == batch
        # n = 1 is 0 in both.
        torch.testing.assert_close(one, other, rtol=1e-10, atol=ROUNDING)


def test_factored_keeps_its_digits_beside_a_large_common_part():
    """Contents that share an offset of 1e6, as keys with a large bias do: uncentred covariances would lose digits."""
    contents, places = normal(0, 40, 6), normal(1, 40, 6)
    plain = exclusion_split_factored(contents, places).pos
    shifted = exclusion_split_factored(contents + 1e6, places).pos
    # Measured 2e-11; rounding the contents themselves at 1e6 costs 1e-10 of each.
    torch.testing.assert_close(plain, shifted, rtol=1e-8, atol=0)


@invariant
@given(seeds)
def test_a_part_that_vanishes_does_not_round_to_below_zero(seed):
    """Places orthogonal to all that contents differ in; half of these quadratic forms round to about -1e-17."""
    basis = torch.linalg.qr(normal(seed, 6, 6)).Q
    contents, places = normal(seed + 1, 9, 2) @ basis[:2] + basis[3], normal(seed + 2, 9, 1) @ basis[3:4]
    for split, vanishing in (
        (exclusion_split_factored(contents, places), "pos"),
        (exclusion_split_factored(places, contents), "sym"),
    ):
        assert 0 <= getattr(split, vanishing) < 1e-14
        assert 0 <= split.index <= 1


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.7], [1 / 3, -2.7, 1e5]])
@pytest.mark.parametrize("n", [2, 3, 7, 159])
def test_equal_contents_are_exactly_positional_and_equal_places_exactly_symbolic(values, n):
    equal = torch.tensor(values, dtype=torch.float64).expand(n, -1)
    other = normal(3, n, len(values))
    positional, symbolic = exclusion_split_factored(equal, other), exclusion_split_factored(other, equal)
    assert positional.pos == 0 < positional.sym
    assert symbolic.sym == 0 < symbolic.pos
    assert positional.index == 1
    assert symbolic.index == 0


def test_a_uniform_head_is_both_and_has_no_index():
    equal = torch.full((5, 3), 0.1, dtype=torch.float64)
    for split in (exclusion_split_factored(equal, equal), exclusion_split((equal @ equal.mT)[:1, :1].expand(5, 5))):
        assert split.pos == split.sym == split.variance == 0
        assert split.index.isnan()
