"""Random heads, their metrics, and the same metrics from a dense d_model x d_model operator."""

import numpy as np
import scipy.linalg
import torch

from tlspectral.algebra.spectra import head_metrics

SCALE_FREE = ("dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac")
ANGLES = ("prin_angle_mean", "prin_angle_max")
# (d_model, d_head): narrow, joint space fills the stream, square, wider than the stream, one column.
SHAPES = [(20, 4), (12, 8), (9, 9), (7, 11), (10, 1)]


def factors(seed, d_model, d_head, heads=2):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal((heads, d_model, d_head))) for _ in range(2)]


def measure(w_q, w_k, storage=torch.float64, centred=False):
    return head_metrics(w_q, w_k, storage_dtype=storage, effective_dimension=w_q.shape[1] - centred)


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


def complex_pairs(w, geometry):
    """Columns w_t of each pair, straight from the definition: [..., d_model, pairs], complex."""
    w = w.numpy()
    return w[..., geometry.real_index.numpy()] + 1j * w[..., geometry.imag_index.numpy()]


def dense_phase(w_q, w_k, geometry):
    """M_t of every head and pair, [heads, pairs, d_model, d_model], complex."""
    return np.einsum("hit,hjt->htij", complex_pairs(w_q, geometry), complex_pairs(w_k, geometry).conj())
