"""Spectrum of the query-key operator M = W_Q W_K^T of attention heads, from its two factors, in float64.

M is d_model x d_model with rank at most d_head. One QR of [W_Q | W_K] gives M in the coordinates of the joint column
space (at most 2 d_head of them). All numbers here come from this small matrix.
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
    """The matrix `left @ right.T`, stored as its two factors; its rank is at most their number of columns r."""

    left: Float64[Tensor, "rows r"]
    right: Float64[Tensor, "cols r"]

    __repr__ = one_line

    def dense(self) -> Float64[Tensor, "rows cols"]:
        """Return the matrix itself, [rows, cols]."""
        return self.left @ self.right.T

    def norm(self) -> float:
        """Return the Frobenius norm of the matrix; only r x r matrices are formed."""
        # Gram matrices would lose half of the digits where terms cancel, as in M_A of a nearly symmetric M.
        left, right = (torch.linalg.qr(factor, mode="r").R for factor in (self.left, self.right))
        return float(torch.linalg.norm(left @ right.T))


def thin_svd(
    product: ThinProduct,
) -> tuple[Float64[Tensor, "rows r"], Float64[Tensor, " r"], Float64[Tensor, "cols r"]]:
    """Return left singular vectors, singular values (descending) and right singular vectors of a `ThinProduct`.

    Shapes: [rows, r], [r], [cols, r]. r must not exceed the number of rows or columns. Vectors of a zero singular value
    are arbitrary.
    """
    left, right = (torch.linalg.qr(factor) for factor in (product.left, product.right))
    u, values, v = torch.linalg.svd(left.R @ right.R.T, full_matrices=False)
    return left.Q @ u, values, right.Q @ v.T


def symmetric_part(w_q: Float64[Tensor, "d_model d_head"], w_k: Float64[Tensor, "d_model d_head"]) -> ThinProduct:
    """Return M_S = (M + M^T) / 2 of M = `w_q @ w_k.T` as a `ThinProduct`, two factors [d_model, 2 d_head]. `w_q`,
    `w_k`: the weights of one head.
    """
    return ThinProduct(torch.cat([w_q, w_k], dim=1) / 2, torch.cat([w_k, w_q], dim=1))


def antisymmetric_part(w_q: Float64[Tensor, "d_model d_head"], w_k: Float64[Tensor, "d_model d_head"]) -> ThinProduct:
    """Return M_A = (M - M^T) / 2 of M = `w_q @ w_k.T` as a `ThinProduct`, two factors [d_model, 2 d_head]. `w_q`,
    `w_k`: the weights of one head.
    """
    return ThinProduct(torch.cat([w_q, w_k], dim=1) / 2, torch.cat([w_k, -w_q], dim=1))


@dataclass(frozen=True)
class ThinCore:
    """Query-key matrices M = W_Q W_K^T of a layer, in coordinates of the joint column space of W_Q and W_K.

    There are r = min(2 d_head, d_model) coordinates. `query`, `key`: W_Q and W_K in these coordinates. `matrix`: the
    first m = min(d_head, d_model) rows of M = query @ key^T. The other rows are zero, because W_Q comes first in the QR
    and spans the first m coordinates.
    """

    query: Float64[Tensor, "heads r d_head"]
    key: Float64[Tensor, "heads r d_head"]
    matrix: Float64[Tensor, "heads m r"]

    @property
    def core(self) -> Float64[Tensor, "heads m m"]:
        """Square matrix [heads, m, m] with the eigenvalues of M that can differ from 0."""
        return self.matrix[:, :, : self.matrix.shape[1]]

    def square(self) -> Float64[Tensor, "heads r r"]:
        """Return M = W_Q W_K^T in the r coordinates of the joint column space, including its zero rows."""
        heads, rows, width = self.matrix.shape
        return torch.cat([self.matrix, self.matrix.new_zeros(heads, width - rows, width)], dim=1)

    def norms(self) -> Float64[Tensor, " heads"]:
        """Return the Frobenius norm of M = W_Q W_K^T for each head."""
        return torch.linalg.norm(self.matrix, dim=(1, 2))


def thin_core(w_q: Float64[Tensor, "heads d_model d_head"], w_k: Float64[Tensor, "heads d_model d_head"]) -> ThinCore:
    """Return a `ThinCore`: M = `w_q @ w_k^T` of each head in coordinates of the column space of [W_Q | W_K].

    `w_k` has one entry per query head (shared keys are already repeated). Rounding is about 1e-16 ||W_Q|| ||W_K||.
    Raises TypeError unless both are float64.
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
    """Return the singular values of M = W_Q W_K^T for each head of `core`, descending, in units of M."""
    return torch.linalg.svdvals(core.matrix)


def symmetric_eigenvalues(core: ThinCore) -> Float64[Tensor, "heads r"]:
    """Return for each head in `core` the eigenvalues of M_S = (M + M^T) / 2 on the joint column space, ascending; all
    others of M_S are 0.
    """
    square = core.square()
    return torch.linalg.eigvalsh((square + square.mT) / 2)


def _regular_core(matrix: Float64[Tensor, "m r"]) -> Float64[Tensor, "p p"]:
    """Return a small matrix [p, p] of one head with the eigenvalues of M, without the null space.

    `matrix`: the first m rows of M in thin coordinates. The result is diag(S) V^T U, restricted to the p singular
    directions above float64 rounding. Rounding noise of the null space can look like a Jordan block.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((values > max(matrix.shape) * EPSILON * values[0]).sum())
    return values[:rank, None] * (right[:rank, : matrix.shape[0]] @ left[:, :rank])


def eigen(
    core: ThinCore, values: Float64[Tensor, "heads m"]
) -> tuple[Complex128[Tensor, "heads m"], Float64[Tensor, " heads"]]:
    """Return the eigenvalues of M, largest modulus first, and the condition number (2-norm) of their unit eigenvectors.

    Both are per head of `core`. `values`: the singular values of M. If a head's rank in float64 is below m, M is first
    restricted to its range. Eigenvalues of the null space are then exactly 0, and their eigenvectors do not enter the
    condition number.
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
    """Spectra of the heads of a layer, in units of M; m = min(d_head, d_model), r = min(2 d_head, d_model).

    `singular_values`: descending. `eigenvalues`: the m eigenvalues of M that can be non-zero, largest modulus first.
    `eigenvector_condition`: condition number (2-norm, at least 1) of the unit eigenvectors; large for a non-normal M.
    `symmetric_eigenvalues`: of M_S, ascending.
    """

    singular_values: Float64[Tensor, "heads m"]
    eigenvalues: Complex128[Tensor, "heads m"]
    eigenvector_condition: Float64[Tensor, " heads"]
    symmetric_eigenvalues: Float64[Tensor, "heads r"]


def spectrum(core: ThinCore) -> Spectrum:
    """Return the `Spectrum` of the heads in `core`: singular values, eigenvalues with their condition, and eigenvalues
    of M_S.

    See "Fingerprint, Not Blueprint", section 3. The error of an eigenvalue is up to `eigenvector_condition` times 1e-16
    ||M||, so a large condition means that the weights do not determine it.
    """
    values = singular_values(core)
    return Spectrum(values, *eigen(core, values), symmetric_eigenvalues(core))


def schur_angles(core: ThinCore) -> list[Float64[np.ndarray, " blocks"]]:
    """Return an array per head in `core`: rotation angles in radians, one for each block of the real Schur form of M.

    A 2 x 2 block gives the argument of its eigenvalue, in (0, pi). A 1 x 1 block gives 0 or pi by its sign. Blocks are
    in LAPACK's order. The angles belong to M on the residual stream; they are not angles of RoPE. See "Fingerprint, Not
    Blueprint", section 3.
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
    """Return for each head the m principal angles between the column spaces of W_Q and W_K (of full rank), in degrees,
    ascending.
    """
    # Cosine and sine together make small and right angles equally accurate.
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
    """Return the principal angles between the column spaces of two factors of one head without full rank, in degrees.
    `query`, `key`: W_Q and W_K in coordinates of their joint column space.

    Directions with a singular value below `tolerance` times the largest are dropped.
    """
    bases = []
    for factor in (query, key):
        left, values, _ = torch.linalg.svd(factor, full_matrices=False)
        bases.append(left[:, values > tolerance * values[0]].numpy())
    return np.rad2deg(scipy.linalg.subspace_angles(*bases))


def rank_tolerance(storage_dtype: torch.dtype, d_model: int, d_head: int) -> float:
    """Return the share of the largest singular value below which a singular value counts as rounding of weights that
    were stored as `storage_dtype`.

    It is max(d_model, d_head) eps for storage in 32 bits or more, and eps for 16 bits or less.
    """
    limits = torch.finfo(storage_dtype)
    # With the factor, the 16-bit tolerance would exceed 1.
    # Measured on random factors of rank 8 to 100 with uneven gains, rounded to 16 bits: the first singular value that
    # should be 0 is 3e-5 to 1e-3 of the largest in bfloat16 and 2e-7 to 1.4e-4 in float16, at most eps/7. Random heads
    # of full rank end at 0.2 to 0.6 of the largest.
    return limits.eps if limits.bits <= 16 else max(d_model, d_head) * limits.eps


_STATUSES = ("zero", "defective", "rank_deficient")


@dataclass(frozen=True)
class HeadMetrics:
    """Scalar metrics of the heads of a layer, as arrays over heads (FP section 3).

    λ are the eigenvalues of M and s its singular values.

    * `status`: `zero` (M is 0), `defective` (the weights do not determine the eigenvalues), `rank_deficient` (rank
      below k) or `ok`.
    * `rank`: number of singular values above the rank tolerance.
    * `dir_frac` = ||M_A|| / ||M||: 0 for a symmetric M, 1 for an antisymmetric M.
    * `D_head` = sum |Im λ| / sum |λ|.
    * `lam_mass` = sum |λ| / sum s, in [0, 1]; near 0, D_head is rounding.
    * `imag_mass` = sum |Im λ| / ||M||.
    * `henrici` = sqrt(||M||^2 - sum |λ|^2) / ||M||, resolved to 1e-8.
    * `content_pos_frac`: share of the positive eigenvalues of M_S in the sum of their moduli.
    * `cond_eig`: condition number (2-norm) of the unit eigenvectors.
    * `spectral_radius` = max |λ|, in units of M.
    * `prin_angle_mean`, `prin_angle_max`: principal angles between the column spaces of W_Q and W_K, in degrees.
    * `singular_values`: [heads, k] in units of M, k = min(d_head, n).

    NaN where a number has no meaning. Metrics without a stated unit are ratios.

    Not established: the function of a head. A random M has dir_frac of about 0.707 and D_head of about 0.61 at d_head
    64, so compare with the matched null. Biases, RoPE phase and the norms of tokens are not in M.
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
    """Return for each head the sum of the positive eigenvalues of M_S over the sum of all their moduli.

    `values`: eigenvalues of M_S. `norms`: ||M||. NaN where M_S is below `tolerance` times ||M||, or all zero.
    """
    sizes = np.abs(values)
    sizes = np.where(sizes < SYMMETRIC_DROP * sizes.max(axis=1, keepdims=True), 0.0, sizes)
    total = sizes.sum(axis=1)
    share = np.where(values > 0, sizes, 0.0).sum(axis=1) / np.where(total > 0, total, np.nan)
    # If M is antisymmetric up to storage precision, the signs of these eigenvalues are rounding.
    return np.where(np.sqrt((values**2).sum(axis=1)) < tolerance * norms, np.nan, share)


def head_metrics(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    *,
    storage_dtype: torch.dtype,
    effective_dimension: int,
) -> HeadMetrics:
    """Return the scalar metrics of the heads of a layer, as `HeadMetrics` (arrays over heads).

    See "Fingerprint, Not Blueprint", section 3. M = W_Q W_K^T, and λ are its eigenvalues.

    Args:
        w_q, w_k: norm-folded and, for LayerNorm, centred; `w_k` has one entry per query head.
        storage_dtype: type in which the weights were stored. It only decides the rank; rounding of storage is part of
            M.
        effective_dimension: n, which is d_model, or d_model - 1 for LayerNorm.

    Status of a head:
    * `zero`: M is 0. The rank is 0 and every other number NaN.
    * `defective`: sum |λ| < 1e-6 ||M||, and D_head is NaN; or cond_eig > 1/sqrt(eps), and D_head, imag_mass, henrici
      and spectral_radius are NaN, because the weights do not determine the eigenvalues.
    * `rank_deficient`: rank < k = min(d_head, n). Principal angles then use only directions above the rank tolerance.
    * `ok`: none of these.

    Raises:
        TypeError: the weights are not float64.
        BadWeights: a weight is NaN or infinite.
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
