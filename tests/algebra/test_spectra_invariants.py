"""Spectra of the query-key operator: what changes no metric, and what operators of one kind must give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spectra import ANGLES, SCALE_FREE, SHAPES, factors, measure

from tlspectral.algebra.spectra import HeadMetrics, ThinProduct, antisymmetric_part, symmetric_part

pytestmark = pytest.mark.lowest

EPSILON = np.finfo(np.float64).eps
invariant = settings(max_examples=25, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from(SHAPES)


def assert_same(found: HeadMetrics, expected: HeadMetrics, noise=EPSILON, scale=1.0):
    """Equal up to `noise` relative to ||M||, times what each number's own condition makes of it."""
    for head in range(len(found.status)):
        # Bauer-Fike: eigenvalues move by noise x cond_eig; D_head divides by sum |l|. Measured: below 5 of these
        # units over all cases here. A wrong factor or a lost term moves the metrics by more than 1e-3.
        unit = noise * expected.cond_eig[head] / expected.lam_mass[head] * 50
        for column in SCALE_FREE:
            # henrici is the root of a difference: near 0 it holds the root of the noise.
            limit = min(np.sqrt(unit), unit / max(expected.henrici[head], 1e-30)) if column == "henrici" else unit
            assert getattr(found, column)[head] == pytest.approx(getattr(expected, column)[head], abs=limit), column
        for column in ANGLES:
            # In degrees; the spaces turn by noise times the condition of the factors, which is below 1e3 here.
            assert getattr(found, column)[head] == pytest.approx(getattr(expected, column)[head], abs=noise * 1e6)
        radius = scale * expected.spectral_radius[head]
        assert found.spectral_radius[head] == pytest.approx(radius, rel=unit * 10)
        top = scale * expected.singular_values[head, 0]
        np.testing.assert_allclose(
            found.singular_values[head], scale * expected.singular_values[head], rtol=0, atol=top * noise * 200
        )


@invariant
@given(seeds, shapes, st.floats(0, 4))
def test_gauge_of_the_head_changes_nothing(seed, shape, exponent):
    w_q, w_k = factors(seed, *shape)
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((shape[1], shape[1])))[0] for _ in range(2))
    spread = np.geomspace(1, 10**-exponent, shape[1])
    gauge, inverse = torch.from_numpy(left * spread @ right), torch.from_numpy((right.T / spread) @ left.T)
    # Changing the gauge in float64 itself perturbs M by eps times its condition, and the QR by as much again.
    noise = EPSILON * 10 ** (2 * exponent)
    assert_same(measure(w_q @ gauge, w_k @ inverse.T), measure(w_q, w_k), noise=noise)


@pytest.mark.slow
@invariant
@given(seeds, shapes, st.floats(-30, 30), st.sampled_from([-1.0, 1.0]))
def test_transpose_and_basis_change_nothing_and_scaling_only_what_has_a_unit(seed, shape, exponent, sign):
    w_q, w_k = factors(seed, *shape)
    expected, scale = measure(w_q, w_k), 10**exponent
    basis = torch.linalg.qr(factors(seed + 1, shape[0], shape[0], heads=1)[0][0]).Q
    assert_same(measure(w_k, w_q), expected)
    assert_same(measure(basis @ w_q, basis @ w_k), expected)
    scaled = measure(sign * scale * w_q, sign * w_k)
    assert_same(scaled, expected, scale=scale)
    assert scaled.status == expected.status
    # A negative operator mirrors content.
    negative = measure(-w_q, w_k)
    np.testing.assert_allclose(negative.content_pos_frac, 1 - expected.content_pos_frac, rtol=0, atol=1e-12)
    np.testing.assert_allclose(negative.D_head, expected.D_head, rtol=0, atol=1e-10)


@invariant
@given(seeds, shapes)
def test_symmetric_operator_has_no_direction(seed, shape):
    w_q, _ = factors(seed, *shape)
    signs = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], shape[1]))
    found = measure(w_q, w_q * signs)
    # Rounding in M is 1e-16; it moves a double eigenvalue of a symmetric core by as much. dir_frac = 1 - tr/F2 would
    # show 1e-8 here.
    assert np.all(found.dir_frac < 1e-14)
    assert np.all(found.D_head < 1e-13)
    assert np.all(found.imag_mass < 1e-13)
    # A symmetric M is normal; henrici resolves 1e-8.
    assert np.all(found.henrici < 1e-7)


@invariant
@given(seeds, st.sampled_from([(20, 4), (12, 8), (9, 8)]))
def test_skew_operator_is_all_direction(seed, shape):
    a, b = factors(seed, shape[0], shape[1] // 2)
    found = measure(torch.cat([a, b], 2), torch.cat([b, -a], 2))
    np.testing.assert_allclose(found.dir_frac, 1, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found.D_head, 1, rtol=0, atol=1e-12)
    assert np.all(found.henrici < 1e-7)
    # The signs of a vanishing M_S are rounding.
    assert np.all(np.isnan(found.content_pos_frac))


@invariant
@given(seeds, st.sampled_from([(20, 4), (12, 8), (9, 9)]))
def test_normal_operator_has_no_henrici_departure(seed, shape):
    d_model, d_head = shape
    rng = np.random.default_rng(seed)
    frame = np.linalg.qr(rng.standard_normal((d_model, d_head)))[0]
    core = np.zeros((d_head, d_head))
    for i in range(0, d_head - 1, 2):
        real, imaginary = rng.standard_normal(2)
        core[i : i + 2, i : i + 2] = [[real, imaginary], [-imaginary, real]]
    if d_head % 2:
        core[-1, -1] = rng.standard_normal()
    found = measure(torch.from_numpy(frame[None]), torch.from_numpy((frame @ core.T)[None]))
    # The root of an eps-sized difference: 1.5e-8 times a small factor. Random heads are at 0.9.
    assert found.henrici[0] < 1e-7
    assert found.lam_mass[0] == pytest.approx(1, abs=1e-12)
    assert found.cond_eig[0] == pytest.approx(1, abs=1e-6)


@invariant
@given(seeds, shapes)
def test_parts_sum_to_the_operator(seed, shape):
    w_q, w_k = (factor[0] for factor in factors(seed, *shape))
    symmetric, antisymmetric, whole = symmetric_part(w_q, w_k), antisymmetric_part(w_q, w_k), ThinProduct(w_q, w_k)
    dense = whole.dense()
    torch.testing.assert_close(symmetric.dense() + antisymmetric.dense(), dense, rtol=0, atol=1e-13)
    torch.testing.assert_close(symmetric.dense(), symmetric.dense().T, rtol=0, atol=1e-13)
    torch.testing.assert_close(antisymmetric.dense(), -antisymmetric.dense().T, rtol=0, atol=1e-13)
    for part in (symmetric, antisymmetric, whole):
        assert part.norm() == pytest.approx(float(torch.linalg.norm(part.dense())), rel=1e-13)
    assert symmetric.norm() ** 2 + antisymmetric.norm() ** 2 == pytest.approx(whole.norm() ** 2, rel=1e-13)
