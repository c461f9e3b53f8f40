"""Random null of a head's spectrum: its singular values with random (Haar) directions instead of its own.

"Fingerprint, Not Blueprint" (FP), section 3. A draw is M_null = U diag(s) V^T. It needs only the k x k block V^T U of a
random orthogonal n x n matrix, so the cost does not depend on d_model.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

NULL_COLUMNS = ("dir_frac", "D_head", "imag_mass", "henrici")

# Blocks are drawn, and their eigenvalues taken, this many at a time: small enough for the cache, and bounded memory.
CHUNK = 16

# Eigenvalues in float32 take .65 of the time at this size and .5 at 256 on one processor; on another they are slower up
# to 112. One number for all, so that a table does not depend on the processor that made it.
FLOAT32_FROM = 64

# All blocks are kept at a time, in float64. 2^33 bytes are 262,144 draws of size 64, whose error of z is .002.
MOST_BYTES = 2**33

# Draws of a head that are made in both precisions, and the share of the Monte-Carlo error that rounding may have there.
COMPARED_DRAWS = 8
ROUNDING_SHARE = 0.01

# A spread below half of the digits of float64 is rounding: henrici of orthogonal draws is 0 up to this.
SPREAD_FLOOR = float(np.sqrt(np.finfo(np.float64).eps))


class _Blocks(threading.local):
    """Counts of open `one_thread` blocks: `depth` in this thread, `of_all` in all threads.

    `lock`: guards the counts. `outside`: torch's number of threads before the first block was opened.
    """

    lock = threading.Lock()
    of_all = 0
    outside = 1
    depth = 0


_BLOCKS = _Blocks()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run a `with` block with one torch thread; at its end, also after an error, restore the previous number of
    threads.

    Two BLAS threads on 64 x 64 matrices are slower than one, and many times slower on a busy machine.
    """
    with _Blocks.lock:
        # torch keeps a number for each Python thread. A new thread starts with the number set last by any thread: if
        # another thread is inside a block, this is 1, so the number from outside of all blocks is restored instead.
        before = torch.get_num_threads()
        if not _Blocks.of_all:
            _Blocks.outside = before
        elif not _BLOCKS.depth and before == 1:
            before = _Blocks.outside
        _Blocks.of_all += 1
        _BLOCKS.depth += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.of_all -= 1
            _BLOCKS.depth -= 1
            torch.set_num_threads(before)


def block_generator(seed: int, n: int, k: int, *layer_and_head: int) -> np.random.Generator:
    """Return the random generator for Haar k x k blocks of n x n matrices; equal arguments give equal draws.

    `seed`: the user's seed. Without `layer_and_head` all heads share the draws. With layer and head, each head has
    draws of its own.
    """
    key = (n, k, *layer_and_head)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=key)))


def haar_blocks(n: int, k: int, draws: int, rng: np.random.Generator) -> Float64[Tensor, "draws k k"]:
    """Return the top-left k x k blocks of `draws` independent random (Haar) orthogonal n x n matrices. The generator
    `rng` advances.

    Raises ValueError unless 1 <= k <= n and draws >= 0, and if the blocks take more than 8 GiB.
    """
    if not 1 <= k <= n or draws < 0:
        raise ValueError(f"a block needs 1 <= k <= n and draws >= 0, found k={k}, n={n}, draws={draws}")
    most = MOST_BYTES // (8 * k * k)
    if draws > most:
        raise ValueError(
            f"null_draws={draws:,} needs {8 * draws * k * k / 2**30:,.1f} GiB of memory (a {k} x {k} float64 block "
            f"per draw), and the limit is 8 GiB: give null_draws={most:,} or less. The default is 100; the error of z "
            "is about sqrt((1 + z^2/2) / null_draws)"
        )
    # The block comes from the sign-fixed QR of an n x k Gaussian. G is its first k rows; the other n - k rows enter
    # only through their Gram matrix T^T T. So their Bartlett triangle T is drawn instead, with T_ii^2 ~
    # chi2(n - k - i) and min(k, n - k) non-zero rows. The block is G L^-T, where L L^T = G^T G + T^T T.
    rows = min(k, n - k)
    upper = torch.triu_indices(rows, k, offset=1)
    freedom = n - k - np.arange(rows)
    blocks = torch.empty(draws, k, k, dtype=torch.float64)
    with one_thread():
        for start in range(0, draws, CHUNK):
            count = min(CHUNK, draws - start)
            gaussian = torch.from_numpy(rng.standard_normal((count, k, k)))
            triangle = torch.zeros(count, rows, k, dtype=torch.float64)
            triangle.diagonal(dim1=1, dim2=2).copy_(torch.from_numpy(np.sqrt(rng.chisquare(freedom, (count, rows)))))
            triangle[:, upper[0], upper[1]] = torch.from_numpy(rng.standard_normal((count, upper.shape[1])))
            if n >= 2 * k:
                lower = torch.linalg.cholesky(gaussian.mT @ gaussian + triangle.mT @ triangle)
                # X L^T = G, solved from the right.
                block = torch.linalg.solve_triangular(lower.mT, gaussian, upper=True, left=False)
            else:
                # The Gram matrix can be nearly singular here, and Cholesky would square its condition.
                frame, factor = torch.linalg.qr(torch.cat([gaussian, triangle], dim=1))
                block = frame[:, :k] * factor.diagonal(dim1=1, dim2=2).sign()[:, None, :]
            blocks[start : start + count] = block
    return blocks


def haar_frame(n_rows: int, n_columns: int, key: Iterable[int]) -> Float64[Tensor, "rows columns"]:
    """Return random orthonormal columns [n_rows, n_columns], uniform over all such matrices.

    `key`: numbers that seed the draw; equal keys give equal columns.
    """
    state = np.random.SeedSequence(list(key)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(state))
    q, r = torch.linalg.qr(torch.randn(n_rows, n_columns, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()  # without the signs QR would favour some rotations


def _moments(singular_values: Float64[np.ndarray, "heads k"], n: int) -> tuple[float, Float64[np.ndarray, " heads"]]:
    """Return mean and variance of x = tr(M^2) / ||M||^2 for random directions: one mean, and a variance per head.

    `singular_values`: of M for each head. `n`: dimension of M. Both numbers are exact (orthogonal Weingarten calculus).
    The variance is NaN for a zero head.
    """
    top = singular_values.max(axis=1, keepdims=True)
    squares = (singular_values / np.where(top > 0, top, np.nan)) ** 2
    concentration = (squares**2).sum(axis=1) / squares.sum(axis=1) ** 2
    return 1 / n, (3 * (n + 1) - 6 * concentration) / (n * (n - 1) * (n + 2)) - 1 / n**2


def dir_frac_null(
    singular_values: Float64[np.ndarray, "heads k"], n: int
) -> tuple[Float64[np.ndarray, " heads"], Float64[np.ndarray, " heads"]]:
    """Return mean and standard deviation of dir_frac for random directions, two arrays over heads, without drawing.

    dir_frac = ||M_A|| / ||M|| is the antisymmetric share of a matrix M with the head's singular values. dir_frac^2 = (1
    - x) / 2, where x = tr(M^2) / ||M||^2 has the mean 1/n and a known variance. The square root is taken by the delta
    method; its relative error in the deviation is of order n^-2. The deviation is about 1/(2n), so nearly every trained
    head has a large z. `singular_values`: of each head's M. `n`: dimension of M, at least 2. NaN for a zero head.
    """
    mean, variance = _moments(singular_values, n)
    centre = np.sqrt((1 - mean) / 2)
    return centre - variance / (32 * centre**3), np.sqrt(variance) / (4 * centre)


def null_draws(
    singular_values: Float64[np.ndarray, " k"],
    blocks: Float64[Tensor, "draws k k"],
    dtype: Literal["float32", "float64"] = "float64",
) -> tuple[dict[str, Float64[np.ndarray, " draws"]], Float64[np.ndarray, " draws"]]:
    """Return metrics of random draws of one head: a dict of arrays (dir_frac, D_head, imag_mass, henrici), and x.

    `singular_values`: of the head's M. x = tr(M^2) / ||M||^2 of each draw. `blocks` come from `haar_blocks`. A draw has
    the eigenvalues of diag(s) B, with a block B and the singular values s scaled to norm 1. `dtype="float32"` takes
    eigenvalues in float32 if k >= FLOAT32_FROM and if a comparison on the first COMPARED_DRAWS draws shows that
    rounding is below ROUNDING_SHARE of the Monte-Carlo error of each mean. Otherwise all draws use float64.
    """
    if dtype == "float32" and len(singular_values) >= FLOAT32_FROM and len(blocks) > COMPARED_DRAWS:
        # The largest s lies between 1 / sqrt(k) and 1, so nothing overflows. A head of rank 1 falls back to float64:
        # its D_head has no spread but rounding.
        compared, rest = blocks[:COMPARED_DRAWS], blocks[COMPARED_DRAWS:]
        exact, control = metrics_of_draws(singular_values, compared, torch.float64)
        rounded, _ = metrics_of_draws(singular_values, compared, torch.float32)
        if all(_rounding_is_small(exact[column], rounded[column], len(blocks)) for column in NULL_COLUMNS):
            more, more_control = metrics_of_draws(singular_values, rest, torch.float32)
            draws = {column: np.concatenate([exact[column], more[column]]) for column in NULL_COLUMNS}
            return draws, np.concatenate([control, more_control])
    return metrics_of_draws(singular_values, blocks, torch.float64)


def _rounding_is_small(
    exact: Float64[np.ndarray, " compared"], rounded: Float64[np.ndarray, " compared"], draws: int
) -> bool:
    """Return True if float32 rounding of a metric is small beside the Monte-Carlo error of its mean over `draws` draws.

    `exact`, `rounded`: values of the metric in float64 and in float32 for the same draws.
    """
    error = float(np.sqrt(((rounded - exact) ** 2).mean()))
    spread = float(exact.std())
    return spread > SPREAD_FLOOR and error < ROUNDING_SHARE * spread / draws**0.5


def metrics_of_draws(
    singular_values: Float64[np.ndarray, " k"], blocks: Float64[Tensor, "draws k k"], dtype: torch.dtype
) -> tuple[dict[str, Float64[np.ndarray, " draws"]], Float64[np.ndarray, " draws"]]:
    """Return metrics of random draws of one head: a dict of arrays (dir_frac, D_head, imag_mass, henrici), and x.

    x = tr(M^2) / ||M||^2 of each draw. `singular_values`: of the head's M. `blocks`: from `haar_blocks`. `dtype`:
    precision in which eigenvalues are computed.
    """
    size = float(np.linalg.norm(singular_values))
    scaled = torch.from_numpy(singular_values / size)[:, None]
    with one_thread():
        by_chunk = [torch.linalg.eigvals((scaled * chunk).to(dtype)) for chunk in blocks.split(CHUNK)]
    eigenvalues = torch.cat(by_chunk).to(torch.complex128)
    real, imaginary = eigenvalues.real.numpy(), eigenvalues.imag.numpy()
    modulus, mass = eigenvalues.abs().sum(dim=1).numpy(), np.abs(imaginary).sum(axis=1)
    squares, signed = (real**2 + imaginary**2).sum(axis=1), (real**2 - imaginary**2).sum(axis=1)
    draws = {
        "dir_frac": np.sqrt(np.maximum((1 - signed) / 2, 0.0)),
        "D_head": mass / modulus,
        "imag_mass": mass,
        "henrici": np.sqrt(np.maximum(1 - squares, 0.0)),
    }
    return draws, signed


def controlled_moments(
    draws: Float64[np.ndarray, " draws"], control: Float64[np.ndarray, " draws"], mean: float, variance: float
) -> tuple[float, float, bool, bool]:
    """Return mean and standard deviation (ddof 0) of a metric's draws, with a control variate if it helps.

    Two flags follow: True if the control variate was used for the mean, and True if it was used for the deviation.
    `draws`: the metric of each draw. `control`: x = tr(M^2) / ||M||^2 of the same draws; its exact `mean` and
    `variance` are known. The control variate is used for a number only if its estimated variance is lower than without
    it, and only from four draws on.
    """
    count, centred, offset = len(draws), draws - draws.mean(), control - control.mean()
    plain_mean, plain_variance = float(draws.mean()), float((centred**2).mean())
    spread = float((offset**2).mean())
    if count < 4 or spread == 0 or not variance > 0:
        return plain_mean, float(np.sqrt(plain_variance)), False, False
    slope = float((centred * offset).mean()) / spread
    residual = centred - slope * offset
    residual_variance = float((residual**2).mean())
    # Variance of the mean, with the factor (R - 2) / (R - 3) for the fitted slope.
    mean_used = residual_variance / (count - 3) < plain_variance / (count - 1)
    # Variance of the influences of slope^2 Var[x] + residual variance, against the influences of the plain variance.
    influence = residual**2 + 2 * slope * offset * residual
    deviation_used = float(influence.var()) < float((centred**2).var())
    best_mean = plain_mean - slope * (float(control.mean()) - mean) if mean_used else plain_mean
    best_variance = slope**2 * variance + residual_variance if deviation_used else plain_variance
    return best_mean, float(np.sqrt(best_variance)), bool(mean_used), bool(deviation_used)


def null_statistics(
    singular_values: Float64[np.ndarray, "heads k"],
    observed: Mapping[str, Float64[np.ndarray, " heads"]],
    blocks: Float64[Tensor, "draws k k"] | Callable[[int], Float64[Tensor, "draws k k"]],
    n: int,
    dtype: Literal["float32", "float64"] = "float64",
) -> dict[str, Float64[np.ndarray, " heads"] | Bool[np.ndarray, " heads"]]:
    """Return null mean, null deviation, z and percentile of dir_frac, D_head, imag_mass and henrici for each head.

    Args:
        singular_values: of M, for each head; k = min(d_head, n).
        observed: the four metrics of the same heads, by column name.
        blocks: from `haar_blocks(n, k, ...)`, shared by all heads; or a function from a head's index to its own blocks.
        n: d_model, or d_model - 1 for LayerNorm.
        dtype: precision of the draws' eigenvalues. "float32" is used only where rounding is far below the Monte-Carlo
            error.

    Returns:
        Dict from column name to an array over heads. For each metric c:
        `{c}_null_mean`, `{c}_null_std`: moments of the null (ddof 0). Closed forms for dir_frac.
        `{c}_z`: (observed - mean) / std. NaN if std is 0.
        `{c}_null_pct`: share of the draws at or below the observed value; as a p value no finer than 1/(draws + 1).
        `{c}_null_mean_controlled`, `{c}_null_std_controlled`: whether x was used as control variate; not for dir_frac.
        A zero head has NaN everywhere. Without draws only dir_frac has a mean, a std and a z.

    The Monte-Carlo error of z is about sqrt((1 + z^2/2) / draws); with shared blocks it is the same error for all
    heads. The null depends on a head's own singular values, so z of heads with different spectra are not on one scale.

    Not established: that a head uses its directions. A large z says that they are not random ("Fingerprint, Not
    Blueprint", section 3).
    """
    heads = len(singular_values)
    result: dict[str, Float64[np.ndarray, " heads"] | Bool[np.ndarray, " heads"]] = {}
    for column in NULL_COLUMNS:
        for name in ("null_mean", "null_std", "z", "null_pct"):
            result[f"{column}_{name}"] = np.full(heads, np.nan)
        if column != "dir_frac":
            for name in ("null_mean_controlled", "null_std_controlled"):
                result[f"{column}_{name}"] = np.zeros(heads, dtype=bool)
    x_mean, x_variance = _moments(singular_values, n)
    result["dir_frac_null_mean"], result["dir_frac_null_std"] = dir_frac_null(singular_values, n)
    for head in np.flatnonzero(singular_values[:, 0] > 0).tolist():
        head_blocks = blocks(head) if callable(blocks) else blocks
        if len(head_blocks) == 0:
            continue
        draws, control = null_draws(singular_values[head], head_blocks, dtype)
        for column in NULL_COLUMNS:
            if column != "dir_frac":
                mean, deviation, *used = controlled_moments(draws[column], control, x_mean, float(x_variance[head]))
                result[f"{column}_null_mean"][head] = mean
                result[f"{column}_null_std"][head] = deviation
                result[f"{column}_null_mean_controlled"][head] = used[0]
                result[f"{column}_null_std_controlled"][head] = used[1]
            if not np.isnan(observed[column][head]):
                result[f"{column}_null_pct"][head] = (draws[column] <= observed[column][head]).mean()
    for column in NULL_COLUMNS:
        spread = result[f"{column}_null_std"]
        distance = observed[column] - result[f"{column}_null_mean"]
        result[f"{column}_z"] = distance / np.where(spread > SPREAD_FLOOR, spread, np.nan)
    return result
