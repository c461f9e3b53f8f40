"""Norms of queries and keys: of each head by itself, and of all heads of a token at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlspectral.models.reading.norms import QueryKeyNorm


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms_norm(x, gain, eps):
    """As modules compute it, over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


@given(heads=st.integers(1, 4), d_head=st.integers(1, 6), eps=st.sampled_from([1e-6, 0.5]), seed=st.integers(0, 99))
def test_both_forms_are_what_the_modules_compute(heads, d_head, eps, seed):
    x, shared, own = drawn(2, 3, heads, d_head, seed=seed), drawn(d_head, seed=seed + 1), drawn(heads, d_head, seed=7)
    # float64 rounds at 2e-16; a mean over the wrong columns moves values by tenths.
    per_head = QueryKeyNorm(shared, eps, over_heads=False).applied(x)
    torch.testing.assert_close(per_head, rms_norm(x, shared, eps), rtol=1e-13, atol=1e-13)
    over_heads = QueryKeyNorm(own, eps, over_heads=True).applied(x)
    flat = rms_norm(x.flatten(-2), own.flatten(), eps).unflatten(-1, (heads, d_head))
    torch.testing.assert_close(over_heads, flat, rtol=1e-13, atol=1e-13)


@given(heads=st.integers(1, 4), d_head=st.integers(2, 6), eps=st.sampled_from([1e-6, 0.5]), seed=st.integers(0, 99))
def test_a_centred_norm_is_the_layer_norm_of_each_head(heads, d_head, eps, seed):
    x, gain = drawn(2, 3, heads, d_head, seed=seed), drawn(heads, d_head, seed=7)
    found = QueryKeyNorm(gain, eps, over_heads=False, centred=True).applied(x)
    expected = torch.nn.functional.layer_norm(x, (d_head,), eps=eps) * gain
    # With two columns of nearly one value, 1e-6 in the root magnifies rounding: measured 2e-14.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("over_heads", "centred"), [(False, False), (True, False), (False, True)])
def test_the_norm_is_the_folded_gain_times_one_number_per_token(over_heads, centred):
    """What makes M the operator: `norm(n W) = (n W') * scale`."""
    n, weight = drawn(5, 8), drawn(3, 8, 4, seed=1)
    norm = QueryKeyNorm(drawn(3, 4, seed=2) if over_heads else drawn(4, seed=2), 1e-6, over_heads, centred)
    x = torch.einsum("pd,hdk->phk", n, weight)
    folded = torch.einsum("pd,hdk->phk", n, norm.folded_into(weight))
    scale = norm.token_scale(x)
    torch.testing.assert_close(norm.applied(x), folded * scale[..., None], rtol=1e-13, atol=1e-13)
    alike = bool((scale == scale[:, :1]).all())
    assert alike == over_heads


def test_some_heads_keep_the_scale_of_all_and_repeated_keys_the_gain_of_their_group():
    x, norm = drawn(5, 2, 4), QueryKeyNorm(drawn(2, 4, seed=2), 1e-6, True)
    whole = norm.applied(x)
    assert torch.equal(norm.of_heads([1]).applied(x[:, [1]], norm.token_scale(x)[:, [1]]), whole[:, [1]])
    repeated = norm.applied(x.repeat_interleave(3, dim=1))
    # The mean over repeated heads sums the same numbers in another order.
    torch.testing.assert_close(repeated, whole.repeat_interleave(3, dim=1), rtol=1e-13, atol=1e-13)
