"""Principal angles between queries and keys, and Schur angles of the operator."""

import numpy as np
import scipy.linalg
import torch
from reference_spectra import factors

from tlspectral.spectra import eigen, principal_angles, schur_angles, singular_values, thin_core


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
