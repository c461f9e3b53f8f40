"""Spectra of the query-key operator: exact invariants, a dense reference, known answers."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.errors import BadWeights
from tlspectral.spectra import (
    HeadMetrics,
    ThinProduct,
    antisymmetric_part,
    eigen,
    head_metrics,
    principal_angles,
    rank_tolerance,
    schur_angles,
    singular_values,
    spectrum,
    symmetric_part,
    thin_core,
)

EPSILON = np.finfo(np.float64).eps
SCALE_FREE = ("dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac")
ANGLES = ("prin_angle_mean", "prin_angle_max")
# (d_model, d_head): narrow, joint space fills the stream, square, wider than the stream, one column.
SHAPES = [(20, 4), (12, 8), (9, 9), (7, 11), (10, 1)]

invariant = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from(SHAPES)


def factors(seed, d_model, d_head, heads=2):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal((heads, d_model, d_head))) for _ in range(2)]


def measure(w_q, w_k, storage=torch.float64, centred=False):
    return head_metrics(w_q, w_k, storage_dtype=storage, effective_dimension=w_q.shape[1] - centred)


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


# --- invariants ---


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


@invariant
@given(seeds, shapes)
def test_transpose_changes_nothing(seed, shape):
    w_q, w_k = factors(seed, *shape)
    assert_same(measure(w_k, w_q), measure(w_q, w_k))


@invariant
@given(seeds, shapes, st.floats(-30, 30), st.sampled_from([-1.0, 1.0]))
def test_scaling_changes_only_what_has_a_unit(seed, shape, exponent, sign):
    w_q, w_k = factors(seed, *shape)
    scale = 10**exponent
    found, expected = measure(sign * scale * w_q, sign * w_k), measure(w_q, w_k)
    assert_same(found, expected, scale=scale)
    assert found.status == expected.status


@invariant
@given(seeds, shapes)
def test_a_negative_operator_mirrors_content(seed, shape):
    w_q, w_k = factors(seed, *shape)
    found, expected = measure(-w_q, w_k), measure(w_q, w_k)
    np.testing.assert_allclose(found.content_pos_frac, 1 - expected.content_pos_frac, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.D_head, expected.D_head, rtol=0, atol=1e-10)


@invariant
@given(seeds, shapes)
def test_orthogonal_basis_of_the_stream_changes_nothing(seed, shape):
    w_q, w_k = factors(seed, *shape)
    basis = torch.linalg.qr(factors(seed + 1, shape[0], shape[0], heads=1)[0][0]).Q
    assert_same(measure(basis @ w_q, basis @ w_k), measure(w_q, w_k))


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


@invariant
@given(seeds, shapes)
def test_eigenvalues_sum_to_the_trace(seed, shape):
    w_q, w_k = factors(seed, *shape)
    spectra = spectrum(thin_core(w_q, w_k))
    trace = (w_q * w_k).sum((1, 2))
    size = spectra.singular_values.sum(1)
    # The trace is a sum of eps-perturbed eigenvalues whose errors cancel: no eigenvector condition enters.
    assert torch.all((spectra.eigenvalues.sum(1).real - trace).abs() < 1e-13 * size)
    assert torch.all(spectra.eigenvalues.sum(1).imag.abs() < 1e-13 * size)
    assert torch.all((spectra.symmetric_eigenvalues.sum(1) - trace).abs() < 1e-13 * size)


@invariant
@given(seeds, shapes, st.permutations(range(4)))
def test_permuting_heads_permutes_rows(seed, shape, order):
    w_q, w_k = factors(seed, *shape, heads=4)
    whole, shuffled = measure(w_q, w_k), measure(w_q[order], w_k[order])
    # To rounding, not to the bit: BLAS takes other paths at other memory alignments.
    expected = {column: getattr(whole, column)[order] for column in HeadMetrics.__annotations__ if column != "status"}
    assert_same(shuffled, HeadMetrics(status=[whole.status[head] for head in order], **expected))


# --- against a dense d_model x d_model reference ---


def dense_reference(w_q, w_k, k):
    m = w_q @ w_k.T
    norm = np.linalg.norm(m)
    values, vectors = np.linalg.eig(m)
    kept = np.argsort(-np.abs(values))[:k]
    values, vectors = values[kept], vectors[:, kept]
    signed = np.linalg.eigvalsh((m + m.T) / 2)
    signed = signed[np.abs(signed) > 1e-9 * np.abs(signed).max()]
    s = np.linalg.svd(m, compute_uv=False)[:k]
    angles = np.rad2deg(scipy.linalg.subspace_angles(w_q, w_k))
    return {
        "dir_frac": np.linalg.norm((m - m.T) / 2) / norm,
        "D_head": np.abs(values.imag).sum() / np.abs(values).sum(),
        "lam_mass": np.abs(values).sum() / s.sum(),
        "imag_mass": np.abs(values.imag).sum() / norm,
        "henrici": np.sqrt(norm**2 - (np.abs(values) ** 2).sum()) / norm,
        "content_pos_frac": signed[signed > 0].sum() / np.abs(signed).sum(),
        "spectral_radius": np.abs(values).max(),
        "cond_eig": np.linalg.cond(vectors),
        "prin_angle_mean": angles.mean(),
        "prin_angle_max": angles.max(),
        "singular_values": s,
    }


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("d_model", "d_head"), [*SHAPES, (40, 16), (17, 16), (64, 16)])
def test_metrics_equal_the_dense_reference(d_model, d_head, centred):
    w_q, w_k = factors(7, d_model, d_head, heads=3)
    if centred:
        w_q, w_k = (factor - factor.mean(1, keepdim=True) for factor in (w_q, w_k))
    k = min(d_head, d_model - centred)
    found = measure(w_q, w_k, centred=centred)
    assert found.status == ["ok"] * 3
    assert found.rank.tolist() == [k] * 3
    for head in range(3):
        expected = dense_reference(w_q[head].numpy(), w_k[head].numpy(), k)
        for column, value in expected.items():
            # Measured over 480 heads of these shapes: 5e-14 for the metrics, of which the d x d eigenvalues of the
            # reference are the larger part, 1e-11 relative for cond_eig. Leaving out the centring moves them by 1e-2.
            # Angles: 1e-6 degrees where the reference's are 0, which it takes from cosines alone.
            limit = {"cond_eig": 1e-9 * value, "spectral_radius": 1e-12 * expected["singular_values"][0]}.get(
                column, 1e-12
            )
            limit = 1e-5 if column in ANGLES else limit
            size = 1e-12 if column == "singular_values" else 0
            np.testing.assert_allclose(getattr(found, column)[head], value, rtol=size, atol=limit, err_msg=column)


def test_spectra_equal_the_dense_reference():
    w_q, w_k = factors(3, 30, 6)
    spectra = spectrum(thin_core(w_q, w_k))
    for head in range(2):
        m = (w_q[head] @ w_k[head].T).numpy()
        eigenvalues = np.linalg.eigvals(m)
        eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues))][:6]
        found = spectra.eigenvalues[head].numpy()
        assert np.all(np.diff(np.abs(found)) <= 0)
        np.testing.assert_allclose(np.sort_complex(found), np.sort_complex(eigenvalues), rtol=0, atol=1e-12)
        signed = np.linalg.eigvalsh((m + m.T) / 2)
        signed = np.sort(signed[np.argsort(-np.abs(signed))[:12]])
        np.testing.assert_allclose(spectra.symmetric_eigenvalues[head], signed, rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            spectra.singular_values[head], np.linalg.svd(m, compute_uv=False)[:6], rtol=0, atol=1e-12
        )


def test_no_matrix_of_the_stream_is_built():
    # d_model x d_model would be 20 GB.
    w_q, w_k = factors(0, 50_000, 2)
    assert measure(w_q, w_k).status == ["ok", "ok"]
    assert len(schur_angles(thin_core(w_q, w_k))) == 2
    assert antisymmetric_part(w_q[0], w_k[0]).norm() > 0


# --- principal and Schur angles ---


def test_principal_angles_are_accurate_at_both_ends():
    angles = np.array([1e-9, 1e-4, 0.3, np.pi / 2 - 1e-9])
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((20, 8)))[0]
    w_q = frame[:, :4]
    w_k = w_q * np.cos(angles) + frame[:, 4:] * np.sin(angles)
    core = thin_core(torch.from_numpy(w_q[None].copy()), torch.from_numpy(w_k[None]))
    # Cosines alone would lose everything below 1e-8 rad.
    np.testing.assert_allclose(principal_angles(core)[0], np.rad2deg(angles), rtol=0, atol=1e-13)


def test_schur_angles_are_those_of_the_eigenvalues():
    w_q, w_k = factors(5, 24, 9, heads=3)
    core = thin_core(w_q, w_k)
    for found, eigenvalues in zip(schur_angles(core), eigen(core, singular_values(core))[0].numpy(), strict=True):
        expected = np.angle(eigenvalues[eigenvalues.imag >= 0])
        np.testing.assert_allclose(np.sort(found), np.sort(np.abs(expected)), rtol=0, atol=1e-11)


def test_schur_angles_of_known_blocks():
    core = scipy.linalg.block_diag([[0, -2.0], [2.0, 0]], [[3.0]], [[-1.0]], [[1.0, -1.0], [1.0, 1.0]])
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((15, 6)))[0]
    angles = schur_angles(thin_core(torch.from_numpy(frame[None].copy()), torch.from_numpy((frame @ core.T)[None])))[0]
    np.testing.assert_allclose(np.sort(angles), [0, np.pi / 4, np.pi / 2, np.pi], rtol=0, atol=1e-13)


def test_schur_angles_of_a_zero_head_are_empty():
    w_q, w_k = factors(0, 10, 3)
    assert schur_angles(thin_core(w_q * 0, w_k))[0].shape == (0,)


# --- known answers ---


def test_zero_head_is_nan_beside_a_whole_one():
    w_q, w_k = factors(0, 20, 4)
    w_q[0] = 0
    found, expected = measure(w_q, w_k), measure(w_q[1:], w_k[1:])
    assert found.status == ["zero", "ok"]
    assert found.rank.tolist() == [0, 4]
    for column in (*SCALE_FREE, *ANGLES, "cond_eig", "spectral_radius", "singular_values"):
        assert np.all(np.isnan(getattr(found, column)[0]))
        np.testing.assert_array_equal(getattr(found, column)[1], getattr(expected, column)[0])


def test_nilpotent_head_has_no_d_head():
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((40, 16)))[0]
    w_q, w_k = (torch.from_numpy(frame[None, :, part].copy()) for part in (slice(0, 8), slice(8, 16)))
    found = measure(w_q, w_k)
    # Rounding alone would give 0.48 to 0.66, which reads as "at the null".
    assert found.status == ["defective"]
    assert np.isnan(found.D_head[0])
    assert found.lam_mass[0] < 1e-14
    assert found.imag_mass[0] < 1e-14
    assert found.henrici[0] == pytest.approx(1)
    assert found.dir_frac[0] == pytest.approx(np.sqrt(0.5))


@pytest.mark.parametrize("eigenvalue", [0.0, 1.0])
def test_jordan_block_is_defective(eigenvalue):
    size = 8
    block = torch.diag(torch.ones(size - 1, dtype=torch.float64), 1) + eigenvalue * torch.eye(size, dtype=torch.float64)
    frame = torch.linalg.qr(factors(0, 40, size, heads=1)[0]).Q
    found = measure(frame, frame @ block.T)
    assert found.status == ["defective"]
    assert found.cond_eig[0] > 1e8
    # The eigenvalues are off by eps^(1/8) = 0.01, and nothing built on them is reported.
    for column in ("D_head", "imag_mass", "henrici", "spectral_radius"):
        assert np.isnan(getattr(found, column)[0])
    assert np.isfinite(found.lam_mass[0])
    assert found.rank.tolist() == [size - (eigenvalue == 0)]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rank_of_stored_weights(storage, both):
    rng = np.random.default_rng(1)
    gain = torch.from_numpy(np.exp(rng.standard_normal((64, 1)) / 2))
    # One row space for both factors: with two, s_7 itself falls to 0.5 % of s_0, below what bfloat16 can tell.
    rows = np.linalg.qr(rng.standard_normal((16, 8)))[0].T
    low = [rng.standard_normal((2, 64, 8)) @ rows for _ in range(2)]
    if not both:
        low[1] = rng.standard_normal((2, 64, 16))
    w_q, w_k = (gain * torch.from_numpy(factor).to(storage).double() for factor in low)
    found = measure(w_q, w_k, storage=storage)
    assert found.status == ["rank_deficient"] * 2
    assert found.rank.tolist() == [8, 8]
    for head in range(2):
        # The metrics are those of the stored weights, rounding included.
        expected = dense_reference(w_q[head].numpy(), w_k[head].numpy(), 16)
        for column in (*SCALE_FREE, "spectral_radius"):
            np.testing.assert_allclose(getattr(found, column)[head], expected[column], rtol=1e-11, atol=0)
        exact = [factor[head] for factor in low]
        angles = np.rad2deg(scipy.linalg.subspace_angles(*(gain.numpy() * factor for factor in exact)))
        # Measured over 20 seeds: rounding to bfloat16 turns the mean by 0.014 degrees, float16 by 0.0025. Counting the
        # directions of pure rounding would move it by 12 to 15.
        assert found.prin_angle_mean[head] == pytest.approx(angles[:8].mean(), abs=0.1)


def test_columns_of_zeros_do_not_look_defective():
    w_q, w_k = factors(2, 24, 8)
    w_q[..., 4:] = 0
    w_k[..., :2] = 0
    found = measure(w_q, w_k)
    assert found.status == ["rank_deficient"] * 2
    assert found.rank.tolist() == [2, 2]
    for head in range(2):
        expected = dense_reference(w_q[head, :, 2:4].numpy(), w_k[head, :, 2:4].numpy(), 2)
        for column in (*SCALE_FREE, "cond_eig", "spectral_radius"):
            np.testing.assert_allclose(getattr(found, column)[head], expected[column], rtol=1e-11)


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
def test_full_rank_head_of_real_size_is_ok(storage):
    w_q, w_k = (factor.to(storage).double() for factor in factors(0, 576, 64))
    found = measure(w_q, w_k, storage=storage)
    assert found.status == ["ok", "ok"]
    assert found.rank.tolist() == [64, 64]


def test_skew_head_stored_in_bfloat16_has_no_content():
    a, b = (factor.to(torch.bfloat16).double() for factor in factors(0, 64, 8))
    found = measure(torch.cat([a, b], 2), torch.cat([b, -a], 2), storage=torch.bfloat16)
    assert np.all(np.isnan(found.content_pos_frac))
    assert found.status == ["ok", "ok"]


def test_head_that_is_skew_to_the_bit_has_no_content():
    identity = torch.eye(6, dtype=torch.float64)[None]
    found = measure(identity[..., :2], torch.stack([identity[..., 1], -identity[..., 0]], 2))
    assert np.isnan(found.content_pos_frac[0])
    assert (found.dir_frac[0], found.D_head[0], found.status) == (1, 1, ["ok"])


def test_weights_that_ask_for_gradients_are_read():
    w_q, w_k = (factor.requires_grad_() for factor in factors(0, 10, 3))
    assert measure(w_q, w_k).status == ["ok", "ok"]
    assert len(schur_angles(thin_core(w_q, w_k))) == 2


def test_single_precision_is_refused():
    # Run-time shape checks refuse it in the tests, the function itself elsewhere.
    w_q, w_k = (factor.float() for factor in factors(0, 10, 3))
    with pytest.raises(TypeError):
        thin_core(w_q, w_k)


def test_rank_tolerance_stays_below_one():
    assert rank_tolerance(torch.float32, 4096, 128) == 4096 * torch.finfo(torch.float32).eps
    assert rank_tolerance(torch.float64, 8, 16) == 16 * torch.finfo(torch.float64).eps
    assert rank_tolerance(torch.bfloat16, 4096, 128) == torch.finfo(torch.bfloat16).eps
    assert rank_tolerance(torch.float16, 4096, 128) == torch.finfo(torch.float16).eps


def test_nearly_symmetric_head_keeps_the_digits_of_dir_frac():
    w_q, noise = factors(0, 20, 4)
    w_k = w_q + 1e-10 * noise
    found = measure(w_q, w_k)
    for head in range(2):
        # M_A comes from the perturbation alone: exact to 1e-5 of itself, where 1 - tr(M^2)/||M||^2 has no digit left.
        skew = 1e-10 * (w_q[head] @ noise[head].T - noise[head] @ w_q[head].T).numpy() / 2
        expected = np.linalg.norm(skew) / np.linalg.norm((w_q[head] @ w_k[head].T).numpy())
        assert found.dir_frac[head] == pytest.approx(expected, rel=1e-4)
        part = antisymmetric_part(w_q[head], w_k[head]).norm()
        assert part == pytest.approx(np.linalg.norm(skew), rel=1e-4)


# --- refusals ---


def test_weights_that_are_not_finite_are_named():
    w_q, w_k = factors(0, 10, 3)
    w_k[1, 2, 0] = torch.nan
    with pytest.raises(BadWeights, match=r"heads \[1\]"):
        measure(w_q, w_k)


def test_importing_does_not_load_transformerlens():
    code = "import sys, tlspectral.spectra, tlspectral.nulls; sys.exit('transformer_lens' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
