"""Spectra of the query-key operator: those of the dense matrix, of heads with known answers, and what is refused."""

from inspect import unwrap

import numpy as np
import pytest
import scipy.linalg
import torch
from reference_spectra import ANGLES, SCALE_FREE, SHAPES, dense_reference, factors, measure

from tlspectral.algebra.spectra import (
    antisymmetric_part,
    eigen,
    principal_angles,
    rank_tolerance,
    schur_angles,
    singular_values,
    spectrum,
    thin_core,
)
from tlspectral.errors import BadWeights

pytestmark = pytest.mark.lowest


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


@pytest.mark.parametrize(("storage", "both"), [(torch.float64, True), (torch.float32, False), (torch.float16, True),
                                               (torch.bfloat16, True), (torch.bfloat16, False)])  # fmt: skip
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


def test_skew_heads_have_no_content():
    a, b = (factor.to(torch.bfloat16).double() for factor in factors(0, 64, 8))
    found = measure(torch.cat([a, b], 2), torch.cat([b, -a], 2), storage=torch.bfloat16)
    assert np.all(np.isnan(found.content_pos_frac))
    assert found.status == ["ok", "ok"]
    identity = torch.eye(6, dtype=torch.float64)[None]
    found = measure(identity[..., :2], torch.stack([identity[..., 1], -identity[..., 0]], 2))
    assert np.isnan(found.content_pos_frac[0])
    assert (found.dir_frac[0], found.D_head[0], found.status) == (1, 1, ["ok"])


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


# --- angles ---


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
    core = thin_core(w_q.requires_grad_(), w_k)
    for found, eigenvalues in zip(schur_angles(core), eigen(core, singular_values(core))[0].detach(), strict=True):
        expected = np.angle(eigenvalues[eigenvalues.imag >= 0])
        np.testing.assert_allclose(np.sort(found), np.sort(np.abs(expected)), rtol=0, atol=1e-11)
    blocks = scipy.linalg.block_diag([[0, -2.0], [2.0, 0]], [[3.0]], [[-1.0]], [[1.0, -1.0], [1.0, 1.0]])
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((15, 6)))[0]
    known = thin_core(torch.from_numpy(frame[None].copy()), torch.from_numpy((frame @ blocks.T)[None]))
    np.testing.assert_allclose(np.sort(schur_angles(known)[0]), [0, np.pi / 4, np.pi / 2, np.pi], rtol=0, atol=1e-13)
    assert schur_angles(thin_core(w_q * 0, w_k))[0].shape == (0,)


# --- refusals ---


def test_weights_that_are_not_finite_are_named():
    w_q, w_k = factors(0, 10, 3)
    w_k[1, 2, 0] = torch.nan
    with pytest.raises(BadWeights, match=r"heads \[1\]"):
        measure(w_q, w_k)


def test_single_precision_is_refused():
    w_q, w_k = (factor.float() for factor in factors(0, 10, 3))
    with pytest.raises(TypeError, match="must be float64"):
        unwrap(thin_core)(w_q, w_k)  # past the check of annotations


# --- the dense operator, which is never built ---


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("d_model", "d_head"), [*SHAPES, (40, 16), (17, 16)])
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


@pytest.mark.parametrize(("d_model", "d_head"), [(30, 6), *SHAPES])
def test_spectra_equal_the_dense_reference(d_model, d_head):
    w_q, w_k = factors(3, d_model, d_head)
    rank, joint = min(d_head, d_model), min(2 * d_head, d_model)
    spectra = spectrum(thin_core(w_q, w_k))
    for head in range(2):
        m = (w_q[head] @ w_k[head].T).numpy()
        eigenvalues = np.linalg.eigvals(m)
        eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues))][:rank]
        found = spectra.eigenvalues[head].numpy()
        assert np.all(np.diff(np.abs(found)) <= 0)
        np.testing.assert_allclose(np.sort_complex(found), np.sort_complex(eigenvalues), rtol=0, atol=1e-12)
        signed = np.linalg.eigvalsh((m + m.T) / 2)
        signed = np.sort(signed[np.argsort(-np.abs(signed))[:joint]])
        np.testing.assert_allclose(spectra.symmetric_eigenvalues[head], signed, rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            spectra.singular_values[head], np.linalg.svd(m, compute_uv=False)[:rank], rtol=0, atol=1e-12
        )


def test_no_matrix_of_the_stream_is_built():
    # d_model x d_model would be 20 GB.
    w_q, w_k = factors(0, 50_000, 2)
    assert measure(w_q, w_k).status == ["ok", "ok"]
    assert len(schur_angles(thin_core(w_q, w_k))) == 2
    assert antisymmetric_part(w_q[0], w_k[0]).norm() > 0
