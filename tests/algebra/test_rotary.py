"""Rotary pairs: exact invariants of the rotation and of M_t, a dense complex reference, closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spectra import complex_pairs, dense_phase

import tlspectral as tls
from tlspectral.algebra.rotary import (
    PhaseNorms,
    RotaryGeometry,
    in_float64_on_cpu,
    pair_columns,
    pair_mask,
    phase_metrics,
    phase_norms,
    rotate,
    summed,
    turned_further,
    with_gain_and_phase,
)

invariant = settings(max_examples=40, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
layouts = st.booleans()
# (d_head, rotary_dim): the whole head, NeoX's quarter, one pair, a head with one column left over.
heads = st.sampled_from([(8, 8), (16, 4), (2, 2), (7, 6)])
D_MODEL = 11


def geometry_of(head, adjacent, *, seed=0, scaling=1.0):
    d_head, rotary_dim = head
    theta = torch.from_numpy(np.random.default_rng(seed).uniform(0, 1, rotary_dim // 2))
    real, imag = pair_columns(rotary_dim, adjacent=adjacent)
    return RotaryGeometry(theta, real, imag, d_head, scaling)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def turn(x, geometry, positions):
    """`rotate` at any positions: the angles of `positions` instead of 0, 1, 2, ..."""
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * geometry.theta
    return rotate(x, angle.cos(), angle.sin(), geometry)


# --- columns ---


def test_columns_of_pairs():
    for adjacent, real, imag in ((False, [0, 1, 2, 3], [4, 5, 6, 7]), (True, [0, 2, 4, 6], [1, 3, 5, 7])):
        assert [columns.tolist() for columns in pair_columns(8, adjacent=adjacent)] == [real, imag]
    geometry = geometry_of((16, 4), adjacent=False)
    assert (geometry.n_pairs, geometry.rotary_fraction) == (2, 0.25)


# --- rotation ---


@invariant
@given(seeds, heads, layouts)
def test_rotation_is_multiplication_by_a_phase(seed, head, adjacent):
    """So it keeps the norm of a pair, and rotations add."""
    geometry = geometry_of(head, adjacent, seed=seed)
    x = normal(seed, 6, head[0])
    phase = np.exp(1j * np.arange(6)[:, None] * geometry.theta.numpy())
    cos, sin = geometry.position_tables(6)
    turned = rotate(x, cos, sin, geometry)
    # Noise 1e-15. Turning in the other direction, or by mismatched cos and sin, is off by tenths.
    expected = complex_pairs(x, geometry) * phase
    np.testing.assert_allclose(complex_pairs(turned, geometry), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(turned, cos, -sin, geometry), x, rtol=0, atol=1e-13)


def test_columns_in_no_pair_stay_to_the_bit_and_scaling_is_in_the_tables():
    geometry, plain = (geometry_of((16, 4), adjacent=True, scaling=scaling) for scaling in (1.5, 1.0))
    x = normal(0, 2, 5, 16)
    before = x.clone()
    turned = rotate(x, *geometry.position_tables(5), geometry)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(x, before)
    for scaled, unit in zip(geometry.position_tables(7), plain.position_tables(7), strict=True):
        assert torch.equal(scaled, 1.5 * unit)


# --- scores ---


@invariant
@given(seeds, heads, layouts, st.integers(0, 60), st.integers(0, 60))
def test_score_of_two_positions(seed, head, adjacent, m, n):
    """Its odd part in the offset is FP equation 5, whose D is the position of the key minus that of the query."""
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 1, D_MODEL, head[0]), normal(seed + 1, 1, D_MODEL, head[0])
    x_m, x_n = normal(seed + 2, D_MODEL), normal(seed + 3, D_MODEL)
    score = turn((x_m @ w_q[0])[None], geometry, [m]) @ turn((x_n @ w_k[0])[None], geometry, [n]).T
    content = np.einsum("i,tij,j->t", x_m, dense_phase(w_q, w_k, geometry)[0], x_n)
    angle = (m - n) * geometry.theta.numpy()
    still = [c for c in range(head[0]) if c not in {*geometry.real_index.tolist(), *geometry.imag_index.tolist()}]
    expected = (np.cos(angle) * content.real - np.sin(angle) * content.imag).sum()
    expected += float((x_m @ w_q[0])[still] @ (x_n @ w_k[0])[still])
    # Noise 1e-13 at |content| of up to 1e2 and angles of up to 60 rad; the other sign of the sine is off by units.
    assert float(score) == pytest.approx(expected, abs=1e-10)


# --- phase norms ---


def limit(norms):
    """Rounding of a difference of squares: 1e-8 of ||M_t||; measured up to 2e-8 where a part vanishes."""
    return 1e-7 * float(torch.hypot(norms.re, norms.im).max())


@invariant
@given(seeds, heads, layouts)
def test_phase_norms_are_those_of_dense_complex_matrices(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 2, D_MODEL, head[0]), normal(seed + 1, 2, D_MODEL, head[0])
    norms = phase_norms(w_q, w_k, geometry)
    dense = dense_phase(w_q, w_k, geometry)
    np.testing.assert_allclose(norms.re, np.linalg.norm(dense.real, axis=(2, 3)), rtol=1e-12)  # noise 1e-15
    np.testing.assert_allclose(norms.im, np.linalg.norm(dense.imag, axis=(2, 3)), rtol=1e-12)


# --- phase metrics ---


def norms_of(real, imag):
    return PhaseNorms(*(torch.tensor([values], dtype=torch.float64) for values in (real, imag)))


NAN = float("nan")


@pytest.mark.parametrize(
    ("theta", "real", "imag", "share", "centroid", "fast"),
    [
        ([1.0, 0.5, 0.25, 0.0], [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], 10 / 20, (4.0 + 1.5 + 0.5) / 10, 7 / 10),
        # Of an odd number of pairs the middle one is slow.
        ([1.0, 0.5, 0.25], [0.0] * 3, [1.0, 1.0, 2.0], 1.0, 2.0 / 4, 1 / 4),
        # Pairs that do not turn count in the share and pull the centroid to 0.
        ([0.0, 0.0], [1.0, 1.0], [1.0, 1.0], 0.5, 0.0, 0.5),
        # Without phase there is no centroid, and of no operator there is nothing.
        ([1.0, 0.5], [1.0, 1.0], [0.0, 0.0], 0.0, NAN, NAN),
        ([1.0, 0.5], [0.0, 0.0], [0.0, 0.0], NAN, NAN, NAN),
    ],
)
def test_metrics_in_closed_form(theta, real, imag, share, centroid, fast):
    columns = pair_columns(2 * len(theta), adjacent=False)
    geometry = RotaryGeometry(torch.tensor(theta, dtype=torch.float64), *columns, 2 * len(theta))
    metrics = phase_metrics(norms_of(real, imag), geometry)
    # Sums of small integers and binary fractions: exact.
    found = [metrics.rope_imag_frac.item(), metrics.freq_centroid.item(), metrics.hi_freq_dir.item()]
    np.testing.assert_array_equal(found, [share, centroid, fast])


# --- spectral layers: frequencies, gain and phase per head ---


def spectral_geometry_of(head, adjacent, *, seed=0, n_heads=3):
    d_head, rotary_dim = head
    rng = np.random.default_rng(seed)
    theta, phase = (torch.from_numpy(rng.uniform(-1, 1, (n_heads, rotary_dim // 2))) for _ in range(2))
    gain = torch.from_numpy(rng.uniform(-2, 2, (n_heads, rotary_dim // 2)))
    return RotaryGeometry(theta, *pair_columns(rotary_dim, adjacent=adjacent), d_head, 1.3, gain=gain, phase=phase)


def of_head(geometry, index):
    """The geometry of one head as an ordinary layer's, without gain and phase."""
    return RotaryGeometry(
        geometry.theta[index], geometry.real_index, geometry.imag_index, geometry.d_head, geometry.attention_scaling
    )


@invariant
@given(seeds, heads, layouts)
def test_a_head_of_a_spectral_layer_turns_as_it_would_alone(seed, head, adjacent):
    geometry = spectral_geometry_of(head, adjacent, seed=seed)
    assert geometry.n_pairs == head[1] // 2
    assert geometry.rotary_fraction == head[1] / head[0]
    x = normal(seed, 2, 3, 5, head[0])
    tables = geometry.position_tables(5)
    assert tables[0].shape == (3, 5, head[1] // 2)
    turned = rotate(x, *tables, geometry)
    for index in range(3):
        alone = of_head(geometry, index)
        for table, own in zip(tables, alone.position_tables(5), strict=True):
            assert torch.equal(table[index], own)
        assert torch.equal(turned[:, index], rotate(x[:, index], *alone.position_tables(5), alone))


@invariant
@given(seeds, heads, layouts)
def test_gain_and_phase_multiply_m_by_a_complex_number(seed, head, adjacent):
    """M_t <- gain exp(i phase) M_t: real and imaginary parts mix."""
    geometry = spectral_geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 3, D_MODEL, head[0]), normal(seed + 1, 3, D_MODEL, head[0])
    factor = (geometry.gain * torch.exp(1j * geometry.phase)).numpy()[..., None, None]
    expected = factor * dense_phase(w_q, w_k, geometry)
    folded = with_gain_and_phase(w_q, geometry)
    # Noise 1e-15. A phase of the other sign, on the key, or without the gain is off by units.
    np.testing.assert_allclose(dense_phase(folded, w_k, geometry), expected, rtol=0, atol=1e-12)
    norms = phase_norms(folded, w_k, geometry)
    np.testing.assert_allclose(norms.re, np.linalg.norm(expected.real, axis=(2, 3)), rtol=0, atol=limit(norms))
    np.testing.assert_allclose(norms.im, np.linalg.norm(expected.imag, axis=(2, 3)), rtol=0, atol=limit(norms))


@invariant
@given(seeds, heads, layouts, st.sampled_from([(), (2,)]))
def test_tables_that_are_turned_further_are_those_of_the_sum(seed, head, adjacent, batch):
    geometry = spectral_geometry_of(head, adjacent, seed=seed)
    own = of_head(geometry, 0)
    tables = [table.expand(*batch, -1, -1) for table in own.position_tables(6)]
    expected = [table.expand(*batch, -1, -1, -1) for table in geometry.position_tables(6)]
    found = turned_further(*tables, geometry.theta - own.theta)
    for table, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(table, wanted, rtol=0, atol=1e-13)  # noise 1e-15
    assert {table.dtype for table in turned_further(*(t.bfloat16() for t in tables), geometry.theta)} == {torch.float32}


@pytest.mark.parametrize("heads_of", [[2], [1, 0], [0, 0, 2]])
def test_some_heads_of_a_spectral_layer(heads_of):
    geometry = spectral_geometry_of((8, 8), adjacent=False)
    chosen = geometry.of_heads(heads_of)
    for name in ("theta", "gain", "phase"):
        assert torch.equal(getattr(chosen, name), torch.stack([getattr(geometry, name)[head] for head in heads_of]))
    assert (geometry.per_head, chosen.per_head) == (True, True)
    ordinary = geometry_of((8, 8), adjacent=False)
    assert ordinary.of_heads(heads_of) is ordinary
    x = normal(0, 2, 3, 8)
    assert with_gain_and_phase(x, ordinary) is x  # it has neither
    assert not ordinary.per_head


def test_centroid_of_a_spectral_layer_takes_each_heads_own_frequencies():
    norms = PhaseNorms(
        re=torch.zeros(2, 2, dtype=torch.float64), im=torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
    )
    theta = torch.tensor([[1.0, 0.5], [0.25, 2.0]], dtype=torch.float64)
    ones = torch.ones(2, 2, dtype=torch.float64)
    geometry = RotaryGeometry(theta, *pair_columns(4, adjacent=False), 4, gain=ones, phase=0 * ones)
    metrics = phase_metrics(norms, geometry)
    assert metrics.freq_centroid.tolist() == [2.5 / 4, 2.75 / 4]  # sums of small binary fractions: exact
    assert metrics.hi_freq_dir.tolist() == [1 / 4, 3 / 4]


# --- types on the CPU and on a device ---


def test_sums_are_in_float64_on_the_cpu_and_on_a_device(device):
    values = torch.tensor([[2.0**24, 1.0, 1.0], [0.5, 0.25, 2.0**-30]], dtype=torch.float32)  # float32 loses both ends
    for axes, keepdim in ((1, False), ((0, 1), True)):
        expected = values.double().sum(axes, keepdim=keepdim)
        for placed in (values, values.to(device)):
            found = summed(placed, axes, keepdim=keepdim).cpu()
            assert found.dtype == torch.float64
            assert torch.equal(found, expected)


def test_float64_is_for_the_cpu(device):
    for dtype, there in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        values = torch.ones(3, dtype=dtype)
        assert in_float64_on_cpu(values).dtype == torch.float64
        placed = in_float64_on_cpu(values.to(device))
        assert (placed.dtype, str(placed.device)) == (there, device)


# --- chosen pairs ---


@pytest.mark.parametrize(
    "frequencies",
    [[2, 0], (np.int64(2), 0), np.array([0, 2]), torch.tensor([[0], [2]]), np.where(np.array([1, 0, 1, 0]) > 0),
     torch.tensor([True, False, True, False]), [True, False, True, False]],
    ids=str,
)  # fmt: skip
def test_pairs_in_every_form(frequencies):
    assert pair_mask(frequencies, 4).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("frequencies", "said"),
    [
        ([1, 0, 1, 0], r"two readings: the pairs 0 and 1, or a mask of 4 pairs"),
        (torch.tensor([1, 0, 1, 0]), r"two readings: the pairs 0 and 1, or a mask of 4 pairs"),
        (torch.where(torch.eye(4) > 0), r"may be heads beside their pairs, as torch.where"),
        ((torch.eye(4) > 0).nonzero(), r"may be heads beside their pairs, as torch.where"),
    ],
)
def test_pairs_with_two_readings_are_refused(frequencies, said):
    for call in (lambda: pair_mask(frequencies, 4), lambda: tls.parts.Band(frequencies)):
        with pytest.raises(ValueError, match=said):
            call()
