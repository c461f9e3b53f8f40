"""Rotary pairs: exact invariants of the rotation and of M_t, a dense complex reference, closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.rotary import (
    PhaseNorms,
    RotaryGeometry,
    pair_columns,
    phase_metrics,
    phase_norms,
    rotate,
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


def complex_pairs(w, geometry):
    """Columns w_t of each pair, straight from the definition: [..., d_model, pairs], complex."""
    w = w.numpy()
    return w[..., geometry.real_index.numpy()] + 1j * w[..., geometry.imag_index.numpy()]


def dense_phase(w_q, w_k, geometry):
    """M_t of every head and pair, [heads, pairs, d_model, d_model], complex."""
    return np.einsum("hit,hjt->htij", complex_pairs(w_q, geometry), complex_pairs(w_k, geometry).conj())


# --- columns ---


def test_halves_pair_a_column_with_the_one_half_a_head_further():
    real, imag = pair_columns(8, adjacent=False)
    assert real.tolist() == [0, 1, 2, 3]
    assert imag.tolist() == [4, 5, 6, 7]


def test_adjacent_pairs_are_neighbours():
    real, imag = pair_columns(8, adjacent=True)
    assert real.tolist() == [0, 2, 4, 6]
    assert imag.tolist() == [1, 3, 5, 7]


@given(st.integers(1, 40), layouts)
def test_every_rotary_column_is_in_one_pair(pairs, adjacent):
    real, imag = pair_columns(2 * pairs, adjacent=adjacent)
    assert sorted([*real.tolist(), *imag.tolist()]) == list(range(2 * pairs))


def test_counts_follow_the_pairs_not_the_head():
    geometry = geometry_of((16, 4), adjacent=False)
    assert geometry.n_pairs == 2
    assert geometry.rotary_fraction == 0.25


# --- rotation ---


@invariant
@given(seeds, heads, layouts)
def test_rotation_keeps_the_norm_of_every_pair(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    x = normal(seed, 3, 5, head[0])
    before, after = (np.abs(complex_pairs(v, geometry)) for v in (x, rotate(x, *geometry.position_tables(5), geometry)))
    # Noise 1e-15; rotating by mismatched cos and sin changes the norm by tenths.
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-13)


@invariant
@given(seeds, heads, layouts)
def test_negated_sine_turns_back(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    x = normal(seed, 3, 5, head[0])
    cos, sin = geometry.position_tables(5)
    turned = rotate(x, cos, sin, geometry)
    torch.testing.assert_close(rotate(turned, cos, -sin, geometry), x, rtol=0, atol=1e-13)  # noise 1e-15
    assert (turned[:, 1:] - x[:, 1:]).abs().max() > 1e-3  # it did turn


@invariant
@given(seeds, heads, layouts, st.integers(-50, 50), st.integers(-50, 50))
def test_rotations_add(seed, head, adjacent, first, second):
    geometry = geometry_of(head, adjacent, seed=seed)
    x = normal(seed, 1, head[0])
    twice = turn(turn(x, geometry, [first]), geometry, [second])
    # cos of an angle of 100 rad is off by 1e-14; a wrong sign of either angle is off by tenths.
    torch.testing.assert_close(twice, turn(x, geometry, [first + second]), rtol=0, atol=1e-12)


@invariant
@given(seeds, heads, layouts)
def test_rotation_is_multiplication_by_a_phase(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    x = normal(seed, 6, head[0])
    phase = np.exp(1j * np.arange(6)[:, None] * geometry.theta.numpy())
    turned = complex_pairs(rotate(x, *geometry.position_tables(6), geometry), geometry)
    # Noise 1e-15. The norm, the inverse and the sum of angles do not see the direction of turning; this does.
    np.testing.assert_allclose(turned, complex_pairs(x, geometry) * phase, rtol=0, atol=1e-13)


@pytest.mark.parametrize("adjacent", [True, False])
def test_columns_in_no_pair_stay_to_the_bit_and_the_input_too(adjacent):
    geometry = geometry_of((16, 4), adjacent, scaling=1.3)
    x = normal(0, 2, 5, 16)
    before = x.clone()
    turned = rotate(x, *geometry.position_tables(5), geometry)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(x, before)


def test_attention_scaling_enters_the_tables_once_and_a_score_twice():
    geometry = geometry_of((8, 8), adjacent=False, scaling=1.5)
    plain = geometry_of((8, 8), adjacent=False)
    for scaled, unit in zip(geometry.position_tables(7), plain.position_tables(7), strict=True):
        assert torch.equal(scaled, 1.5 * unit)
    q, k = normal(0, 7, 8), normal(1, 7, 8)
    scores = [rotate(q, *g.position_tables(7), g) @ rotate(k, *g.position_tables(7), g).T for g in (geometry, plain)]
    torch.testing.assert_close(scores[0], 1.5**2 * scores[1], rtol=1e-13, atol=1e-13)  # rounding of the products


def test_tables_start_at_position_zero():
    cos, sin = geometry_of((8, 8), adjacent=True).position_tables(1)
    assert cos.tolist() == [[1.0] * 4]
    assert sin.tolist() == [[0.0] * 4]


# --- scores ---


@invariant
@given(seeds, heads, layouts, st.integers(0, 60), st.integers(0, 60))
def test_score_of_two_positions(seed, head, adjacent, m, n):
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


@invariant
@given(seeds, heads, layouts, st.integers(-30, 30))
def test_odd_part_of_the_score_is_fp_equation_5(seed, head, adjacent, offset):
    """s(D) - s(-D) = sum_t 2 sin(D theta_t) Im B_t, with D = key position minus query position."""
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 1, D_MODEL, head[0]), normal(seed + 1, 1, D_MODEL, head[0])
    x_m, x_n = normal(seed + 2, D_MODEL), normal(seed + 3, D_MODEL)

    def score(key_minus_query):
        query, key = (x_m @ w_q[0])[None], (x_n @ w_k[0])[None]
        return float(turn(query, geometry, [40]) @ turn(key, geometry, [40 + key_minus_query]).T)

    content = np.einsum("i,tij,j->t", x_m, dense_phase(w_q, w_k, geometry)[0], x_n)
    expected = (2 * np.sin(offset * geometry.theta.numpy()) * content.imag).sum()
    # Noise as above; query minus key instead flips the sign of numbers that are of order 1 to 100.
    assert score(offset) - score(-offset) == pytest.approx(expected, abs=1e-10)


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


@invariant
@given(seeds, heads, layouts)
def test_real_parts_and_the_still_block_add_up_to_m(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 1, D_MODEL, head[0]), normal(seed + 1, 1, D_MODEL, head[0])
    still = np.ones(head[0], dtype=bool)
    still[geometry.real_index] = still[geometry.imag_index] = False
    total = dense_phase(w_q, w_k, geometry)[0].real.sum(0) + w_q[0].numpy()[:, still] @ w_k[0].numpy()[:, still].T
    np.testing.assert_allclose(total, w_q[0] @ w_k[0].T, rtol=0, atol=1e-13)  # noise 5e-15


@invariant
@given(seeds, heads, layouts, st.floats(-7, 7))
def test_one_angle_on_a_pair_of_both_sides_changes_nothing(seed, head, adjacent, angle):
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 2, D_MODEL, head[0]), normal(seed + 1, 2, D_MODEL, head[0])
    constant = torch.full((D_MODEL, geometry.n_pairs), angle, dtype=torch.float64)
    turned = [rotate(w, constant.cos(), constant.sin(), geometry) for w in (w_q, w_k)]
    norms = phase_norms(w_q, w_k, geometry)
    for found, expected in zip(phase_norms(*turned, geometry), norms, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=limit(norms))


def test_an_angle_on_one_side_alone_trades_real_for_imaginary():
    geometry = geometry_of((8, 8), adjacent=False)
    w_q, w_k = normal(0, 2, D_MODEL, 8), normal(1, 2, D_MODEL, 8)
    quarter = torch.full((D_MODEL, 4), math.pi / 2, dtype=torch.float64)
    turned = phase_norms(rotate(w_q, quarter.cos(), quarter.sin(), geometry), w_k, geometry)
    norms = phase_norms(w_q, w_k, geometry)
    torch.testing.assert_close(turned.re, norms.im, rtol=0, atol=limit(norms))
    torch.testing.assert_close(turned.im, norms.re, rtol=0, atol=limit(norms))


@invariant
@given(seeds, heads, layouts)
def test_swapping_query_and_key_is_the_adjoint(seed, head, adjacent):
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 2, D_MODEL, head[0]), normal(seed + 1, 2, D_MODEL, head[0])
    adjoint = dense_phase(w_q, w_k, geometry).conj().swapaxes(2, 3)
    np.testing.assert_allclose(dense_phase(w_k, w_q, geometry), adjoint, rtol=0, atol=1e-14)
    norms = phase_norms(w_q, w_k, geometry)
    for found, expected in zip(phase_norms(w_k, w_q, geometry), norms, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=limit(norms))


@invariant
@given(seeds, heads, layouts)
def test_equal_query_and_key_have_no_phase_where_the_parts_are_parallel(seed, head, adjacent):
    """w_k = w_q with parallel real and imaginary columns: M_t = |.|^2 u u^T is real."""
    geometry = geometry_of(head, adjacent, seed=seed)
    w = normal(seed, 1, D_MODEL, head[0])
    w[..., geometry.imag_index] = 0.7 * w[..., geometry.real_index]
    norms = phase_norms(w, w, geometry)
    assert float(norms.im.max()) <= limit(norms)
    assert float(norms.re.min()) > 0


# --- phase metrics ---


def test_metrics_in_closed_form():
    real, imag = pair_columns(8, adjacent=False)
    theta = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    norms = PhaseNorms(
        re=torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64),
        im=torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64),
    )
    metrics = phase_metrics(norms, RotaryGeometry(theta, real, imag, 8))
    # Sums of small integers: exact.
    assert metrics.rope_imag_frac.tolist() == [10 / 20]
    assert metrics.freq_centroid.tolist() == [(4.0 + 1.5 + 0.5) / 10]
    assert metrics.hi_freq_dir.tolist() == [7 / 10]


def test_an_odd_number_of_pairs_counts_the_middle_one_as_slow():
    real, imag = pair_columns(6, adjacent=True)
    norms = PhaseNorms(re=torch.zeros(1, 3, dtype=torch.float64), im=torch.ones(1, 3, dtype=torch.float64))
    theta = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    metrics = phase_metrics(norms, RotaryGeometry(theta, real, imag, 6))
    assert metrics.hi_freq_dir.tolist() == pytest.approx([1 / 3], abs=1e-15)  # one rounding
    assert metrics.rope_imag_frac.tolist() == [1.0]


def test_zero_head_is_nan_and_its_neighbour_is_not():
    geometry = geometry_of((8, 8), adjacent=False)
    w_q, w_k = normal(0, 2, D_MODEL, 8), normal(1, 2, D_MODEL, 8)
    w_q[0] = 0
    for values in phase_metrics(phase_norms(w_q, w_k, geometry), geometry):
        assert torch.isnan(values).tolist() == [True, False]


def test_head_without_phase_has_share_zero_and_no_centroid():
    geometry = geometry_of((8, 8), adjacent=False)
    norms = PhaseNorms(re=torch.ones(1, 4, dtype=torch.float64), im=torch.zeros(1, 4, dtype=torch.float64))
    metrics = phase_metrics(norms, geometry)
    assert metrics.rope_imag_frac.tolist() == [0.0]
    assert torch.isnan(metrics.freq_centroid).all()
    assert torch.isnan(metrics.hi_freq_dir).all()


def test_pairs_that_do_not_turn_count_in_the_share_and_pull_the_centroid_to_zero():
    real, imag = pair_columns(4, adjacent=False)
    geometry = RotaryGeometry(torch.zeros(2, dtype=torch.float64), real, imag, 4)
    x = normal(0, 5, 4)
    assert torch.equal(rotate(x, *geometry.position_tables(5), geometry), x)
    metrics = phase_metrics(phase_norms(normal(1, 1, D_MODEL, 4), normal(2, 1, D_MODEL, 4), geometry), geometry)
    assert 0 < float(metrics.rope_imag_frac) < 1
    assert metrics.freq_centroid.tolist() == [0.0]


@invariant
@given(seeds, heads, layouts, st.floats(1e-6, 1e6))
def test_metrics_are_bounded_and_blind_to_the_scale_of_a_head(seed, head, adjacent, scale):
    geometry = geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 2, D_MODEL, head[0]), normal(seed + 1, 2, D_MODEL, head[0])
    metrics = phase_metrics(phase_norms(w_q, w_k, geometry), geometry)
    scaled = phase_metrics(phase_norms(scale * w_q, w_k, geometry), geometry)
    for found, expected in zip(scaled, metrics, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)  # noise 1e-15
    assert bool(((metrics.rope_imag_frac >= 0) & (metrics.rope_imag_frac <= 1)).all())
    assert bool(((metrics.hi_freq_dir >= 0) & (metrics.hi_freq_dir <= 1)).all())
    assert bool((metrics.freq_centroid <= geometry.theta.max() + 1e-15).all())


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
@given(seeds, heads, layouts, st.integers(0, 40), st.integers(0, 40))
def test_gain_and_phase_on_a_query_or_on_w_q_are_the_same_score(seed, head, adjacent, m, n):
    geometry = spectral_geometry_of(head, adjacent, seed=seed)
    w_q, w_k = normal(seed, 3, D_MODEL, head[0]), normal(seed + 1, 3, D_MODEL, head[0])
    x_m, x_n = normal(seed + 2, D_MODEL), normal(seed + 3, D_MODEL)
    on_query = with_gain_and_phase((x_m @ w_q)[:, None], geometry)[:, 0]
    on_weight = x_m @ with_gain_and_phase(w_q, geometry)
    torch.testing.assert_close(on_query, on_weight, rtol=0, atol=1e-12)  # noise 1e-14
    angle = (m - n) * geometry.theta.numpy()
    content = np.einsum("i,htij,j->ht", x_m, dense_phase(with_gain_and_phase(w_q, geometry), w_k, geometry), x_n)
    still = [c for c in range(head[0]) if c not in {*geometry.real_index.tolist(), *geometry.imag_index.tolist()}]
    expected = (np.cos(angle) * content.real - np.sin(angle) * content.imag).sum(1)
    expected += ((x_m @ w_q)[:, still] * (x_n @ w_k)[:, still]).sum(1).numpy()
    turns = [torch.tensor([position]) * geometry.theta[:, None] for position in (m, n)]  # heads 1 pairs
    queries, keys = (
        rotate(x[:, None], angle.cos(), angle.sin(), geometry)[:, 0]
        for x, angle in zip((on_query, x_n @ w_k), turns, strict=True)
    )
    # Noise 1e-12 at contents of up to 1e2 and angles of up to 40 rad.
    np.testing.assert_allclose((queries * keys).sum(1), expected, rtol=0, atol=1e-10)


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
    assert not ordinary.per_head


def test_an_ordinary_layer_has_neither_gain_nor_phase():
    x = normal(0, 2, 3, 8)
    assert with_gain_and_phase(x, geometry_of((8, 8), adjacent=False)) is x


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
