"""CPU cost of a head table's spectra and null, against bare LAPACK, a careful plain route and the paper's text.

Run `python benchmarks/heads.py`; about five minutes on an idle core. All sides take the same random factors, in the
same run, on one thread, alternately; the unit is CPU seconds (process_time) a head and ratios are medians over the
repeats. Every side reports dir_frac, D_head, lam_mass, imag_mass, henrici, content_pos_frac, spectral_radius, principal
angles, rank and four null means, deviations, z and percentiles. Ours computes cond_eig as well.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import typer

from tlspectral.algebra.nulls import (
    NULL_COLUMNS,
    block_generator,
    controlled_moments,
    haar_blocks,
    null_draws,
    null_statistics,
)
from tlspectral.algebra.spectra import head_metrics

DRAWS = 300


@dataclass(frozen=True)
class Shape:
    """One attention layer, and how much of it the slow side times."""

    d_model: int
    d_head: int
    centred: bool
    heads: int
    plain_draws: int
    repeats: int
    target: float

    @property
    def n(self) -> int:
        """Dimension of the space that the frames live in."""
        return self.d_model - self.centred

    @property
    def name(self) -> str:
        """Short label."""
        return f"{self.d_model}/{self.d_head} {'LayerNorm' if self.centred else 'RMSNorm'}"


SHAPES = (
    Shape(576, 64, False, heads=12, plain_draws=60, repeats=5, target=4),
    Shape(768, 64, True, heads=12, plain_draws=60, repeats=5, target=6),
    Shape(2048, 128, True, heads=8, plain_draws=20, repeats=3, target=12),
    Shape(4096, 128, False, heads=8, plain_draws=10, repeats=3, target=15),
)


def factors(shape: Shape, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian W_Q and W_K. For LayerNorm each side centres them itself, as that is part of its cost."""
    rng = np.random.default_rng(0)
    size = (heads, shape.d_model, shape.d_head)
    w_q, w_k = (torch.from_numpy(rng.standard_normal(size) / np.sqrt(shape.d_model)) for _ in range(2))
    return w_q, w_k


def centre(factor: torch.Tensor) -> torch.Tensor:
    """Subtract column means."""
    return factor - factor.mean(dim=-2, keepdim=True)


def seconds(job: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    job()
    return time.process_time() - start


# --- ours ---


def metrics_only(shape: Shape, w_q: torch.Tensor, w_k: torch.Tensor):
    """Our metrics of a layer."""
    if shape.centred:
        w_q, w_k = centre(w_q), centre(w_k)
    return head_metrics(w_q, w_k, storage_dtype=torch.float32, effective_dimension=shape.n)


def whole_table(
    shape: Shape,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    blocks: torch.Tensor,
    dtype: Literal["float32", "float64"] = "float64",
):
    """Our metrics and null of a layer, given the table's blocks."""
    metrics = metrics_only(shape, w_q, w_k)
    observed = {column: getattr(metrics, column) for column in NULL_COLUMNS}
    return metrics, null_statistics(metrics.singular_values, observed, blocks, shape.n, dtype)


def bare_lapack(values: np.ndarray, blocks: torch.Tensor) -> None:
    """Compute only the eigenvalues of the same k x k matrices."""
    for head in torch.from_numpy(values):
        torch.linalg.eigvals(head[:, None] * blocks)


# --- the careful plain route ---


def summarise(core: torch.Tensor, norm: torch.Tensor, eigenvalues: torch.Tensor) -> list[float]:
    """dir_frac, D_head, imag_mass, henrici of one core."""
    modulus, mass = eigenvalues.abs().sum(), eigenvalues.imag.abs().sum()
    x = (core * core.T).sum() / norm**2
    departure = (1 - (eigenvalues.abs() ** 2).sum() / norm**2).clamp(min=0).sqrt()
    return [float(((1 - x) / 2).clamp(min=0).sqrt()), float(mass / modulus), float(mass / norm), float(departure)]


def table_row(
    real: list[float], draws: np.ndarray, rest: tuple[float, ...]
) -> tuple[list[float], np.ndarray, tuple[float, ...]]:
    """Null mean, std, z and percentile beside the metrics."""
    mean, deviation = draws.mean(0), draws.std(0)
    row = np.stack([mean, deviation, (np.array(real) - mean) / deviation, (draws <= np.array(real)).mean(0)])
    return real, row, rest


def angle_summary(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Mean and largest principal angle of two frames, degrees."""
    angles = torch.rad2deg(torch.acos(torch.linalg.svdvals(left.T @ right).clamp(max=1)))
    return float(angles.mean()), float(angles.max())


def plain_metrics(shape: Shape, w_q: torch.Tensor, w_k: torch.Tensor):
    """Metrics of one head from thin QRs."""
    if shape.centred:
        w_q, w_k = centre(w_q), centre(w_k)
    k = shape.d_head
    triangle = torch.linalg.qr(torch.cat([w_q, w_k], 1), mode="r").R
    core = triangle[:, :k] @ triangle[:, k:].T
    values = torch.linalg.svdvals(core)[:k]
    norm = torch.linalg.norm(core)
    eigenvalues = torch.linalg.eigvals(core[:k, :k])
    signed = torch.linalg.eigvalsh((core + core.T) / 2)
    frames = (torch.linalg.qr(factor).Q for factor in (w_q, w_k))
    rest = (
        float(eigenvalues.abs().sum() / values.sum()),
        float(eigenvalues.abs().max()),
        float(signed.clamp(min=0).sum() / signed.abs().sum()),
        float((values > shape.d_model * 1.2e-7 * values[0]).sum()),
        *angle_summary(*frames),
    )
    return summarise(core, norm, eigenvalues), values, norm, rest


def sign_fixed_frame(shape: Shape, rng: np.random.Generator, with_numpy: bool) -> torch.Tensor:
    """A Haar frame of d_model x k, in the centred space for LayerNorm, by torch's QR or by numpy's."""
    gaussian = torch.from_numpy(rng.standard_normal((shape.d_model, shape.d_head)))
    gaussian = centre(gaussian) if shape.centred else gaussian
    if with_numpy:
        frame, factor = (torch.from_numpy(part) for part in np.linalg.qr(gaussian.numpy()))
    else:
        frame, factor = torch.linalg.qr(gaussian)
    return frame * factor.diagonal().sign()


def plain_null(shape: Shape, values: torch.Tensor, norm: torch.Tensor, with_numpy: bool) -> np.ndarray:
    """Null draws of one head from explicit frames, eigenvalues only."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(shape.plain_draws):
        left, right = (sign_fixed_frame(shape, rng, with_numpy) for _ in range(2))
        core = values[:, None] * (left.T @ right)
        rows.append(summarise(core, norm, torch.linalg.eigvals(core)))
    return np.array(rows)


def plain_seconds(shape: Shape, w_q: torch.Tensor, w_k: torch.Tensor, with_numpy: bool) -> float:
    """CPU seconds of the plain route for one head, its draws scaled up to all."""
    results = []
    metrics = seconds(lambda: results.append(plain_metrics(shape, w_q, w_k)))
    real, values, norm, rest = results[0]
    null = seconds(lambda: table_row(real, plain_null(shape, values, norm, with_numpy), rest))
    return metrics + null * DRAWS / shape.plain_draws


# --- the route as the paper's text reads ---


def text_seconds(shape: Shape, w_q: torch.Tensor, w_k: torch.Tensor, draws: int) -> float:
    """CPU seconds for one head with C M C, a d x d SVD, and eigenvectors in each draw."""
    d, k = shape.d_model, shape.d_head
    centring = torch.eye(d, dtype=torch.float64) - 1 / d
    results = []

    def metrics() -> None:
        m = centring @ (w_q @ w_k.T) @ centring
        left, values, right = torch.linalg.svd(m)
        left, values, right = left[:, :k], values[:k], right[:k]
        core = values[:, None] * (right @ left)
        eigenvalues, _ = torch.linalg.eig(core)
        signed = torch.linalg.eigvalsh((m + m.T) / 2)
        rest = (
            float(eigenvalues.abs().sum() / values.sum()),
            float(eigenvalues.abs().max()),
            float(signed.clamp(min=0).sum() / signed.abs().sum()),
            float((values > d * 1.2e-7 * values[0]).sum()),
            *angle_summary(torch.linalg.qr(centring @ w_q).Q, torch.linalg.qr(centring @ w_k).Q),
        )
        norm = torch.linalg.norm(m)
        results.append((summarise(core, norm, eigenvalues), values, norm, rest))

    def null() -> None:
        real, values, norm, rest = results[0]
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(draws):
            left, right = (
                torch.linalg.qr(centring @ torch.from_numpy(rng.standard_normal((d, k)))).Q for _ in range(2)
            )
            core = values[:, None] * (left.T @ right)
            rows.append(summarise(core, norm, torch.linalg.eig(core)[0]))
        table_row(real, np.array(rows), rest)

    return seconds(metrics) + seconds(null) * DRAWS / draws


# --- reports ---


def compare(shape: Shape) -> None:
    """Time all sides alternately and print medians."""
    w_q, w_k = factors(shape, shape.heads)
    values = metrics_only(shape, w_q, w_k).singular_values
    with_text = shape.d_model == 768
    times: dict[str, list[float]] = {
        name: [] for name in ("blocks", "metrics", "bare", "table", "single", "torch", "numpy", "text")
    }
    drawn = []
    for _ in range(shape.repeats):
        rng = block_generator(0, shape.n, shape.d_head)
        drawn.clear()
        # The blocks are shared by a whole table; here their whole cost counts for this one layer.
        times["blocks"].append(
            seconds(lambda rng=rng: drawn.append(haar_blocks(shape.n, shape.d_head, DRAWS, rng))) / shape.heads
        )
        blocks = drawn[0]
        times["metrics"].append(seconds(lambda: metrics_only(shape, w_q, w_k)) / shape.heads)
        times["bare"].append(seconds(lambda blocks=blocks: bare_lapack(values, blocks)) / shape.heads)
        times["table"].append(seconds(lambda blocks=blocks: whole_table(shape, w_q, w_k, blocks)) / shape.heads)
        times["single"].append(
            seconds(lambda blocks=blocks: whole_table(shape, w_q, w_k, blocks, "float32")) / shape.heads
        )
        times["torch"].append(plain_seconds(shape, w_q[0], w_k[0], with_numpy=False))
        times["numpy"].append(plain_seconds(shape, w_q[0], w_k[0], with_numpy=True))
        if with_text:
            times["text"].append(text_seconds(shape, w_q[0], w_k[0], draws=20))
    by_side = {name: np.array(samples) for name, samples in times.items() if samples}
    ours = by_side["table"] + by_side["blocks"]
    middle = {name: float(np.median(samples)) for name, samples in by_side.items()}
    print(f"{shape.name}, {DRAWS} draws, layer of {shape.heads} heads, {shape.repeats} repeats; CPU s a head")
    print(
        f"  (i)   bare eigvals {middle['bare']:.4f}, metrics {middle['metrics']:.4f}, "
        f"Haar blocks {middle['blocks']:.4f} (per layer / heads), whole table with blocks {np.median(ours):.4f}"
    )
    share = (ours - by_side["metrics"]) / by_side["bare"]
    print(f"        (table - metrics) / bare = {np.median(share):.3f}   [at most 1.25]")
    single = (by_side["single"] + by_side["blocks"] - by_side["metrics"]) / by_side["bare"]
    print(f"        the same with null_dtype='float32', to bare float64: {np.median(single):.3f}")
    for library in ("torch", "numpy"):
        plain = by_side[library] / ours
        print(
            f"  (ii)  careful plain route, {library} QR, {middle[library]:.3f} "
            f"(1 head, {shape.plain_draws} draws timed, scaled to {DRAWS}): "
            f"{np.median(plain):.1f}x   [{plain.min():.1f} .. {plain.max():.1f}; target {shape.target:g}x]"
        )
    bound = by_side["torch"] / by_side["bare"]
    print(f"        bare eigvals alone would stand at {np.median(bound):.1f}x of the torch route")
    if with_text:
        text = by_side["text"] / ours
        print(
            f"  (iii) as the paper's text reads {middle['text']:.3f} (1 head, 20 draws timed, scaled to {DRAWS}): "
            f"{np.median(text):.1f}x   [{text.min():.1f} .. {text.max():.1f}; target 10x]"
        )


def control_variate(label: str, values: np.ndarray, n: int, pool: int = 30_000) -> None:
    """Print the replicated errors of 100 controlled and 300 plain draws of D_head."""
    draws, control = null_draws(values, haar_blocks(n, len(values), pool, np.random.default_rng(1)))
    sample = draws["D_head"]
    squares = values**2
    concentration = float((squares**2).sum() / squares.sum() ** 2)
    variance = (3 * (n + 1) - 6 * concentration) / (n * (n - 1) * (n + 2)) - 1 / n**2
    mean, deviation, *_ = controlled_moments(sample, control, 1 / n, variance)
    print(f"D_head null of {label}, n = {n}, k = {len(values)}: {mean:.4f} +- {deviation:.4f}; rms errors, replicated")
    for count, controlled in ((100, True), (300, False), (300, True)):
        parts = [slice(i, i + count) for i in range(0, pool - count + 1, count)]
        if controlled:
            moments = np.array([controlled_moments(sample[p], control[p], 1 / n, variance)[:2] for p in parts])
        else:
            moments = np.array([[sample[p].mean(), sample[p].std()] for p in parts])
        z = (mean - 8 * deviation - moments[:, 0]) / moments[:, 1]
        errors = [
            np.sqrt(np.mean((moments[:, 0] - mean) ** 2)) / deviation,
            np.sqrt(np.mean((moments[:, 1] / deviation - 1) ** 2)),
            np.sqrt(np.mean((z + 8) ** 2)),
        ]
        kind = "with control variate" if controlled else "plain"
        print(
            f"  {count} draws {kind:20s} ({len(parts)} repeats): mean {errors[0]:.4f} sd, sd {errors[1]:.2%}, "
            f"z at -8 {errors[2]:.2f}"
        )


def peak_memory() -> float:
    """Peak resident MiB of this process (Linux); ru_maxrss would start at the parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def memory() -> None:
    """Print what spectra and null of a GPT-2 layer add to the peak of a fresh process."""
    shape = SHAPES[1]
    w_q, w_k = factors(shape, 12)
    torch.linalg.eigvals(torch.eye(4, dtype=torch.float64))
    before = peak_memory()
    whole_table(shape, w_q, w_k, haar_blocks(shape.n, shape.d_head, DRAWS, block_generator(0, shape.n, shape.d_head)))
    after = peak_memory()
    held = DRAWS * shape.d_head**2 * 8 / 2**20
    print(
        f"memory, {shape.name}, 12 heads, {DRAWS} draws: peak {after:.0f} MiB resident, "
        f"{after - before:.0f} MiB above the process with its factors loaded, of which blocks {held:.0f} MiB"
    )


def main(only_memory: bool = False) -> None:
    """Run all comparisons on one thread."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # BLAS reads its thread count when it is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    if only_memory:
        memory()
        return
    for shape in SHAPES:
        compare(shape)
        sys.stdout.flush()
    random = metrics_only(SHAPES[0], *factors(SHAPES[0], 1)).singular_values[0]
    control_variate("random factors", random, SHAPES[0].n)
    control_variate("a decaying spectrum", np.exp(-np.linspace(0, 4, 64)), SHAPES[0].n)
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "--only-memory"], check=True)


if __name__ == "__main__":
    typer.run(main)
