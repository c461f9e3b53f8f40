"""The spectrum of the query-key operator of attention heads, from thin factors, in float64.

M = W_Q W_K^T is d_model x d_model and of rank at most d_head. One thin QR of [W_Q | W_K] gives M in the coordinates of
the joint column space (at most 2 d_head of them), and everything here is read from that small matrix.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Complex128, Float64, Int64
from torch import Tensor

from tlspectral.algebra.records import one_line
from tlspectral.errors import BadWeights

EPSILON = torch.finfo(torch.float64).eps

# Below this share of ||M|| the eigenvalues are rounding: the core is nilpotent to working precision.
NILPOTENT_SHARE = 1e-6

# Above this eigenvector condition Bauer-Fike leaves fewer than half of the digits of an eigenvalue.
DEFECTIVE_CONDITION = EPSILON**-0.5

# Eigenvalues of M_S below this share of the largest are dropped from content_pos_frac.
SYMMETRIC_DROP = 1e-9


@dataclass(frozen=True)
class ThinProduct:
    """A matrix `left @ right.T` of rank at most r, kept as its factors."""

    left: Float64[Tensor, "rows r"]
    right: Float64[Tensor, "cols r"]

    __repr__ = one_line

    def dense(self) -> Float64[Tensor, "rows cols"]:
        """Return the matrix itself, [rows, cols]."""
        return self.left @ self.right.T

    def norm(self) -> float:
        """Return the Frobenius norm, from r x r triangles.

        Gram matrices would lose half of the digits where the terms cancel, as in M_A of a nearly symmetric M.
        """
        left, right = (torch.linalg.qr(factor, mode="r").R for factor in (self.left, self.right))
        return float(torch.linalg.norm(left @ right.T))


def thin_svd(
    product: ThinProduct,
) -> tuple[Float64[Tensor, "rows r"], Float64[Tensor, " r"], Float64[Tensor, "cols r"]]:
    """Return left singular vectors, singular values (descending) and right singular vectors, from r x r triangles.

    r is at most the number of rows and of columns. Vectors of a singular value that is 0 are arbitrary.
    """
    left, right = (torch.linalg.qr(factor) for factor in (product.left, product.right))
    u, values, v = torch.linalg.svd(left.R @ right.R.T, full_matrices=False)
    return left.Q @ u, values, right.Q @ v.T


def symmetric_part(w_q: Float64[Tensor, "d_model d_head"], w_k: Float64[Tensor, "d_model d_head"]) -> ThinProduct:
    """Return M_S = (M + M^T) / 2 of M = `w_q @ w_k.T`, as factors of width 2 d_head (FP section 3)."""
    return ThinProduct(torch.cat([w_q, w_k], dim=1) / 2, torch.cat([w_k, w_q], dim=1))


def antisymmetric_part(w_q: Float64[Tensor, "d_model d_head"], w_k: Float64[Tensor, "d_model d_head"]) -> ThinProduct:
    """Return M_A = (M - M^T) / 2 of M = `w_q @ w_k.T`, as factors of width 2 d_head (FP section 3)."""
    return ThinProduct(torch.cat([w_q, w_k], dim=1) / 2, torch.cat([w_k, -w_q], dim=1))


@dataclass(frozen=True)
class ThinCore:
    """Heads in the coordinates of their joint column space, r = min(2 d_head, d_model), m = min(d_head, d_model).

    `query` and `key` are W_Q and W_K there, and `matrix` holds the first m rows of M = query @ key^T; its other rows
    are zero, since W_Q comes first in the QR and spans the first m coordinates.
    """

    query: Float64[Tensor, "heads r d_head"]
    key: Float64[Tensor, "heads r d_head"]
    matrix: Float64[Tensor, "heads m r"]

    @property
    def core(self) -> Float64[Tensor, "heads m m"]:
        """The square matrix that has the non-zero eigenvalues of M."""
        return self.matrix[:, :, : self.matrix.shape[1]]

    def square(self) -> Float64[Tensor, "heads r r"]:
        """Return M in the r coordinates, with its zero rows."""
        heads, rows, width = self.matrix.shape
        return torch.cat([self.matrix, self.matrix.new_zeros(heads, width - rows, width)], dim=1)

    def norms(self) -> Float64[Tensor, " heads"]:
        """Return ||M||_F of each head."""
        return torch.linalg.norm(self.matrix, dim=(1, 2))


def thin_core(w_q: Float64[Tensor, "heads d_model d_head"], w_k: Float64[Tensor, "heads d_model d_head"]) -> ThinCore:
    """Return M = `w_q @ w_k^T` of each head in the coordinates of the column space of [W_Q | W_K].

    `w_k` has one entry per query head (grouped keys already repeated). Rounding is about 1e-16 ||W_Q|| ||W_K||, so it
    grows with the condition of the two factors, as M itself does. Raises TypeError unless both are float64.
    """
    if w_q.dtype != torch.float64 or w_k.dtype != torch.float64:
        raise TypeError(f"the factors of M must be float64, found {w_q.dtype} and {w_k.dtype}; call .double() first")
    d_model, d_head = w_q.shape[1:]
    # Head by head: LAPACK loops over a batch anyway, and the joined factors of a whole layer would double its memory.
    triangle = torch.stack(
        [torch.linalg.qr(torch.cat(factors, dim=1), mode="r").R for factors in zip(w_q, w_k, strict=True)]
    )
    query, key = triangle[..., :d_head], triangle[..., d_head:]
    return ThinCore(query, key, query[:, : min(d_head, d_model)] @ key.mT)


def singular_values(core: ThinCore) -> Float64[Tensor, "heads m"]:
    """Return the singular values of M, descending."""
    return torch.linalg.svdvals(core.matrix)


def symmetric_eigenvalues(core: ThinCore) -> Float64[Tensor, "heads r"]:
    """Return the eigenvalues of M_S on the joint column space, ascending; all others are 0."""
    square = core.square()
    return torch.linalg.eigvalsh((square + square.mT) / 2)


def _regular_core(matrix: Float64[Tensor, "m r"]) -> Float64[Tensor, "p p"]:
    """Return diag(S) V^T U on the p singular directions above our own rounding.

    Its eigenvalues are M's without the null space, whose LAPACK noise can look like a Jordan block.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((values > max(matrix.shape) * EPSILON * values[0]).sum())
    return values[:rank, None] * (right[:rank, : matrix.shape[0]] @ left[:, :rank])


def eigen(
    core: ThinCore, values: Float64[Tensor, "heads m"]
) -> tuple[Complex128[Tensor, "heads m"], Float64[Tensor, " heads"]]:
    """Return M's eigenvalues, largest modulus first, and cond_2 of their unit eigenvectors.

    `values` are the singular values. A head whose rank in float64 is below m is projected on that rank first; the
    eigenvalues of its null space are then exactly 0 and its eigenvectors do not enter the condition.
    """
    eigenvalues, vectors = torch.linalg.eig(core.core)
    spread = torch.linalg.svdvals(vectors)
    condition = spread[:, 0] / spread[:, -1]
    deficient = values[:, -1] <= max(core.matrix.shape[1:]) * EPSILON * values[:, 0]
    for head in torch.nonzero(deficient).flatten().tolist():
        regular = _regular_core(core.matrix[head])
        regular_values, vectors = torch.linalg.eig(regular)
        spread = torch.linalg.svdvals(vectors)
        eigenvalues[head] = 0
        eigenvalues[head, : len(regular_values)] = regular_values
        condition[head] = spread[0] / spread[-1] if len(regular_values) else torch.nan
    order = torch.sort(eigenvalues.abs(), dim=1, descending=True, stable=True).indices
    return eigenvalues.gather(1, order), condition


@dataclass(frozen=True)
class Spectrum:
    """The spectra of the heads of a layer; m = min(d_head, d_model), r = min(2 d_head, d_model).

    `singular_values` descend; `eigenvalues` are the m of M that can be non-zero, largest modulus first;
    `eigenvector_condition` is cond_2 of LAPACK's unit eigenvectors, a flag of non-normality that is at least 1;
    `symmetric_eigenvalues` are the eigenvalues of M_S, ascending. Units are M's.
    """

    singular_values: Float64[Tensor, "heads m"]
    eigenvalues: Complex128[Tensor, "heads m"]
    eigenvector_condition: Float64[Tensor, " heads"]
    symmetric_eigenvalues: Float64[Tensor, "heads r"]


def spectrum(core: ThinCore) -> Spectrum:
    """Return all spectra of M (FP section 3, Decompositions).

    Eigenvalues of a head with a large `eigenvector_condition` are not determined by its weights: their error is up to
    that condition times 1e-16 ||M||.
    """
    values = singular_values(core)
    return Spectrum(values, *eigen(core, values), symmetric_eigenvalues(core))


def schur_angles(core: ThinCore) -> list[Float64[np.ndarray, " blocks"]]:
    """Return for each head the rotation angle, in radians, of every block of the real Schur form (FP section 3).

    A 2 x 2 block gives the argument of its eigenvalue in (0, pi), a 1 x 1 block 0 or pi by its sign. The order is
    LAPACK's. An angle is a property of M on the residual stream, not an angle of RoPE.
    """
    angles = []
    for matrix in core.matrix.detach().cpu():
        regular = _regular_core(matrix)
        form = np.asarray(scipy.linalg.schur(regular.numpy(), output="real")[0]) if len(regular) else np.zeros((0, 0))
        below = np.append(np.diag(form, -1), 0.0)[: len(form)] != 0
        head, i = [], 0
        while i < len(form):
            # LAPACK's standard 2 x 2 block has equal diagonal entries and off-diagonal entries of opposite sign.
            imaginary = np.sqrt(abs(form[i, i + 1] * form[i + 1, i])) if below[i] else 0.0
            head.append(np.arctan2(imaginary, form[i, i]))
            i += 2 if below[i] else 1
        angles.append(np.array(head, dtype=np.float64))
    return angles


def principal_angles(core: ThinCore) -> Float64[Tensor, "heads m"]:
    """Return the principal angles between the column spaces of W_Q and W_K, in degrees, ascending.

    Both are taken to have full rank. From cosine and sine together, so small and right angles are equally accurate.
    """
    rows = core.matrix.shape[1]
    basis = torch.linalg.qr(core.key).Q
    cosines = torch.linalg.svdvals(basis[:, :rows])
    sines = torch.zeros_like(cosines)
    if basis.shape[1] > rows:
        ascending = torch.linalg.svdvals(basis[:, rows:]).flip(1)
        sines[:, rows - ascending.shape[1] :] = ascending
    return torch.rad2deg(torch.atan2(sines, cosines))


def _trimmed_angles(
    query: Float64[Tensor, "r d_head"], key: Float64[Tensor, "r d_head"], tolerance: float
) -> Float64[np.ndarray, " angles"]:
    """Return the principal angles, in degrees, of factors that lack full rank."""
    bases = []
    for factor in (query, key):
        left, values, _ = torch.linalg.svd(factor, full_matrices=False)
        bases.append(left[:, values > tolerance * values[0]].numpy())
    return np.rad2deg(scipy.linalg.subspace_angles(*bases))


def rank_tolerance(storage_dtype: torch.dtype, d_model: int, d_head: int) -> float:
    """Return the share of the largest singular value below which another one is the rounding of storage.

    max(d_model, d_head) eps for 32-bit storage and wider; eps alone for 16 bits and less, where the product passes 1.
    """
    limits = torch.finfo(storage_dtype)
    # Measured on random factors of rank 8 to 100 with uneven gains, rounded to 16 bits: the first singular value that
    # should be 0 is 3e-5 to 1e-3 of the largest in bfloat16 and 2e-7 to 1.4e-4 in float16, at most eps/7. Random heads
    # of full rank end at 0.2 to 0.6 of the largest.
    return limits.eps if limits.bits <= 16 else max(d_model, d_head) * limits.eps


_STATUSES = ("zero", "defective", "rank_deficient")


@dataclass(frozen=True)
class HeadMetrics:
    """Scalar metrics per head, arrays over heads (FP section 3; each is without unit unless said).

    `status` is `ok`, `rank_deficient`, `defective` or `zero`. `dir_frac` = ||M_A|| / ||M||, 0 symmetric to 1 skew.
    `D_head` = sum |Im l| / sum |l| over the eigenvalues. `lam_mass` = sum |l| / sum s, in [0, 1]: near 0, D_head is
    rounding. `imag_mass` = sum |Im l| / ||M||. `henrici` = sqrt(||M||^2 - sum |l|^2) / ||M||, resolved to 1e-8.
    `content_pos_frac` = share of positive eigenvalues in sum |l| of M_S. `cond_eig`: cond_2 of the unit eigenvectors.
    `spectral_radius` = max |l|, in units of M. `prin_angle_*`: degrees between the column spaces of W_Q and W_K.
    `singular_values` [heads, k], k = min(d_head, n), in units of M. NaN where a number has no meaning.

    None of them says what a head does: a random M has dir_frac about 0.707 and D_head about 0.61 at d_head 64, so read
    them against the matched null. Biases, RoPE phase and per-token norms lie outside M.
    """

    status: list[str]
    rank: Int64[np.ndarray, " heads"]
    dir_frac: Float64[np.ndarray, " heads"]
    D_head: Float64[np.ndarray, " heads"]
    lam_mass: Float64[np.ndarray, " heads"]
    imag_mass: Float64[np.ndarray, " heads"]
    henrici: Float64[np.ndarray, " heads"]
    content_pos_frac: Float64[np.ndarray, " heads"]
    cond_eig: Float64[np.ndarray, " heads"]
    spectral_radius: Float64[np.ndarray, " heads"]
    prin_angle_mean: Float64[np.ndarray, " heads"]
    prin_angle_max: Float64[np.ndarray, " heads"]
    singular_values: Float64[np.ndarray, "heads k"]


def _content_pos_frac(
    values: Float64[np.ndarray, "heads r"], norms: Float64[np.ndarray, " heads"], tolerance: float
) -> Float64[np.ndarray, " heads"]:
    sizes = np.abs(values)
    sizes = np.where(sizes < SYMMETRIC_DROP * sizes.max(axis=1, keepdims=True), 0.0, sizes)
    total = sizes.sum(axis=1)
    share = np.where(values > 0, sizes, 0.0).sum(axis=1) / np.where(total > 0, total, np.nan)
    # The signs of M_S are rounding where M is antisymmetric to the precision it was stored in.
    return np.where(np.sqrt((values**2).sum(axis=1)) < tolerance * norms, np.nan, share)


def head_metrics(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    *,
    storage_dtype: torch.dtype,
    effective_dimension: int,
) -> HeadMetrics:
    """Return the scalar metrics of the heads of a layer (FP section 3).

    `w_q`, `w_k`: norm-folded and, for LayerNorm, centred; `w_k` has one entry per query head. `storage_dtype` is what
    the weights were kept in, which decides the rank and nothing else of the spectrum: rounding of storage is part of
    the operator. `effective_dimension` is n: d_model, or d_model - 1 for LayerNorm.

    Status: `zero`: M is 0, all is NaN and the rank 0. `defective`: (a) sum |l| < 1e-6 ||M||, D_head is NaN; or else
    (b) cond_eig > 1/sqrt(eps), and D_head, imag_mass, henrici and spectral_radius are NaN, since the eigenvalues are
    not determined. `rank_deficient`: rank < k = min(d_head, n). The principal angles of a head of lower rank are those
    of the directions of W_Q and W_K above the rank tolerance.

    Raises TypeError unless float64, and BadWeights where a factor is NaN or infinite.
    """
    w_q, w_k = w_q.detach().cpu(), w_k.detach().cpu()
    broken = ~(torch.isfinite(w_q).flatten(1).all(1) & torch.isfinite(w_k).flatten(1).all(1))
    if broken.any():
        heads = torch.nonzero(broken).flatten().tolist()
        raise BadWeights(f"W_Q or W_K of heads {heads} hold NaN or infinite values; load the layer's weights again")
    d_model, d_head = w_q.shape[1:]
    k = min(d_head, effective_dimension)
    tolerance = rank_tolerance(storage_dtype, d_model, d_head)
    core = thin_core(w_q, w_k)
    spectra = spectrum(core)
    angles = [head.numpy() for head in principal_angles(core)]
    norms, values = core.norms().numpy(), spectra.singular_values.numpy()
    condition = spectra.eigenvector_condition.numpy()
    modulus, imaginary_parts = spectra.eigenvalues.abs().numpy(), spectra.eigenvalues.imag.abs().numpy()
    # A zero head divides by NaN, so that all its numbers are NaN without a warning.
    scale = np.where(norms > 0, norms, np.nan)
    rank = np.where(norms > 0, (values[:, :k] > tolerance * values[:, :1]).sum(axis=1), 0)
    for head in np.flatnonzero((norms > 0) & (rank < k)):
        angles[head] = _trimmed_angles(core.query[head], core.key[head], tolerance)
    total, imaginary = modulus.sum(axis=1), imaginary_parts.sum(axis=1)
    nilpotent = total < NILPOTENT_SHARE * norms
    unstable = ~nilpotent & ~(condition <= DEFECTIVE_CONDITION)
    rest = np.maximum(1 - ((modulus / scale[:, None]) ** 2).sum(axis=1), 0.0)
    symmetric = spectra.symmetric_eigenvalues.numpy()
    square = core.square()
    return HeadMetrics(
        status=np.select([norms == 0, nilpotent | unstable, rank < k], _STATUSES, "ok").tolist(),
        rank=rank.astype(np.int64),
        # Taken from M_A itself, which is accurate also where M is nearly symmetric.
        dir_frac=torch.linalg.norm((square - square.mT) / 2, dim=(1, 2)).numpy() / scale,
        D_head=np.where(nilpotent | unstable, np.nan, imaginary / np.where(total > 0, total, np.nan)),
        lam_mass=total / np.where(norms > 0, values.sum(axis=1), np.nan),
        imag_mass=np.where(unstable, np.nan, imaginary / scale),
        henrici=np.where(unstable, np.nan, np.sqrt(rest)),
        content_pos_frac=_content_pos_frac(np.where(norms[:, None] > 0, symmetric, np.nan), scale, tolerance),
        cond_eig=np.where(norms > 0, condition, np.nan),
        spectral_radius=np.where(unstable | (norms == 0), np.nan, modulus.max(axis=1)),
        prin_angle_mean=np.where(norms > 0, [head.mean() for head in angles], np.nan),
        prin_angle_max=np.where(norms > 0, [head.max() for head in angles], np.nan),
        singular_values=np.where(norms[:, None] > 0, values[:, :k], np.nan),
    )
