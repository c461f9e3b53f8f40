"""The noise of weight rounding in the head table, and in statistics of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.heads.weight_columns import measure_heads
from tlspectral.models.reading import measured
from tlspectral.models.reading.layer import RawAttention, fold_attention
from tlspectral.models.reading.view import AttentionView
from tlspectral.tables.head_columns import COLUMNS, HEAD, HEAD_COLUMNS
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.fingerprint.statistics.tables_with_draws import drawn_columns, tables_with_draws

# fmt: off
NOISE_COLUMNS = (
    "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "spectral_radius", "prin_angle_mean",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir",
)
"""The columns that rounding of the weights moves."""

# fmt: on

_BLOCK = 32  # weights that share one scale in the 4- and 5-bit formats of llama.cpp, along the input dimension


WEIGHT_NOISE_BAND = Schema(
    "weight_noise_band",
    (
        *HEAD,
        *(
            column
            for name in NOISE_COLUMNS
            for column in columns(f"""
                {name}_sd    | {COLUMNS[name].unit} | Standard deviation (ddof 1) of {name}; NaN where a draw has none.
                {name}_shift | {COLUMNS[name].unit} | Mean of {name} over draws less its value without noise.
            """)
        ),
    ),
)
WEIGHT_NOISE_DRAWS = Schema(
    "weight_noise_draws",
    columns(
        f"""
        draw | index | Number of the perturbed copy of the weights, from 0; -1 is the weights as they are.
        layer, head, name, {", ".join(NOISE_COLUMNS)}
        """,
        HEAD_COLUMNS,
    ),
)

STATISTIC_NOISE = Schema(
    "statistic_noise",
    columns("""
        statistic | label            | Name of the statistic, as it was given.
        value     | of the statistic | The statistic of the head table as it is.
        mean      | of the statistic | Its mean over draws, each with its spectral columns in place of the table's.
        sd        | of the statistic | Its standard deviation (ddof 1) over draws.
        low       | of the statistic | 2.5 % quantile over draws.
        high      | of the statistic | 97.5 % quantile over draws.
        draws     | count            | Number of draws.
    """),
)


class StorageSteps(NamedTuple):
    """The grid that stored weights lie on: its name, and the distance of neighbouring values at each weight."""

    kind: str
    step: Float[Tensor, "heads d_model d_head"]


def weight_noise_band(model: Any, *, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """Standard deviation of each spectral column when query and key weights move within their storage steps.

    Each draw adds to every weight of W_Q and W_K a uniform amount within half a step of the grid that the weight lies
    on, which is what rounding to that grid may have removed. The grid is read from the weights themselves: blocks of 32
    with at most 16 values (4-bit files, also after de-quantising) or with whole multiples of one step (5-bit files,
    Q5_0), bfloat16, float16, else the dtype of the tensor.

    Args:
        model: a TransformerBridge or HookedTransformer with raw weights. Folding moves weights off their grid; what is
            found is in `attrs["storage"]`, so look there for a model that should be quantised.
        draws: perturbed copies of each layer.
        seed: of the perturbations, keyed by layer.

    Returns:
        DataFrame, a head a row, with `_sd` and `_shift` of each spectral and phase column. Columns: `layer, head, name,
        dir_frac_sd, dir_frac_shift, D_head_sd, D_head_shift, lam_mass_sd, lam_mass_shift, imag_mass_sd,
        imag_mass_shift, henrici_sd, henrici_shift, content_pos_frac_sd, content_pos_frac_shift, spectral_radius_sd,
        spectral_radius_shift, prin_angle_mean_sd, prin_angle_mean_shift, rope_imag_frac_sd, rope_imag_frac_shift,
        freq_centroid_sd, freq_centroid_shift, hi_freq_dir_sd, hi_freq_dir_shift`.

    Raises:
        ValueError: fewer than two draws.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    What it does not establish: how far the unquantised model's numbers lie from these. Quantising is not independent
    noise, and weights elsewhere in the model moved too.
    """
    drawn_table = weight_noise_draws(model, draws=draws, seed=seed)
    table = drawn_table.loc[drawn_table["draw"] == -1, ["layer", "head"]].reset_index(drop=True)
    exact, *drawn = drawn_table[list(NOISE_COLUMNS)].to_numpy().reshape(draws + 1, len(table), -1)
    # NaN where a column has no value in some draw: the other draws alone would give another spread.
    spread, shift = np.std(drawn, axis=0, ddof=1), np.mean(drawn, axis=0) - exact
    for column, name in enumerate(NOISE_COLUMNS):
        table[f"{name}_sd"], table[f"{name}_shift"] = spread[:, column], shift[:, column]
    return WEIGHT_NOISE_BAND.frame(table, drawn_table.attrs)


def weight_noise_draws(model: Any, *, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """Compute the spectral columns under each of the perturbations that `weight_noise_band` summarises.

    Args:
        model, draws, seed: as of `weight_noise_band`.

    Returns:
        DataFrame sorted by draw, layer and head. Columns: `draw, layer, head, name, dir_frac, D_head, lam_mass,
        imag_mass, henrici, content_pos_frac, spectral_radius, prin_angle_mean, rope_imag_frac, freq_centroid,
        hi_freq_dir`. `attrs` hold the model and the grids.

    Raises:
        As `weight_noise_band`.

    What it does not establish: how behaviour (`prev`, `dup`, `ind`) moves; that takes a run of each perturbed model.
    """
    if draws < 2:
        raise ValueError(f"a standard deviation needs at least two draws, found draws={draws}")
    with measured(model, report_hooks=False) as view:
        layer_tables, kinds = [], set()
        with one_thread(), bar(len(view.layers), "noise", "layer") as shown:
            for index in view.layers:
                layer_table, kind = _layer_draws(view, index, draws, seed)
                layer_tables.append(layer_table)
                kinds |= kind
                shown.update()
        table = pd.concat(layer_tables).sort_values(["draw", "layer", "head"], ignore_index=True)
        return WEIGHT_NOISE_DRAWS.frame(
            table, {**view.origin(), "storage": sorted(kinds), "draws": draws, "seed": seed}
        )


def statistic_noise(
    heads: pd.DataFrame, draws: pd.DataFrame, statistics: Mapping[str, Callable[[pd.DataFrame], float]]
) -> pd.DataFrame:
    """Compute how far statistics of the head table move when the stored weights move within their rounding.

    Each statistic is computed again on the table with the spectral columns of each draw in place of its own. The
    detector scores (`prev`, `dup`, `ind`) and the columns of the null stay.

    Args:
        heads: table of `analyze_heads`.
        draws: table of `weight_noise_draws` on the same model.
        statistics: name -> function of a head table, which returns a number.

    Returns:
        DataFrame, a statistic a row. Columns: `statistic, value, mean, sd, low, high, draws`.

    Raises:
        ValueError: the two tables are not of the same model or heads.

    What it does not establish: a confidence interval over models, prompts or heads. Rounding is one source of
    uncertainty, and it moves all draws away from the stored weights alike, so `value` need not lie within low and high.
    """
    tables = list(tables_with_draws(heads, draws.loc[draws["draw"] >= 0]))
    rows = []
    for name, statistic in statistics.items():
        drawn = np.array([float(statistic(table)) for table in tables])
        low, high = np.quantile(drawn, [0.025, 0.975])
        row = {"statistic": name, "value": float(statistic(heads)), "mean": drawn.mean(), "sd": drawn.std(ddof=1)}
        rows.append(row | {"low": low, "high": high, "draws": len(drawn)})
    return STATISTIC_NOISE.frame(rows, {key: value for key, value in draws.attrs.items() if key != "columns"})


def storage_steps(weight: Float[Tensor, "heads d_model d_head"]) -> StorageSteps:
    """Find the grid of a stored weight from its values."""
    values = weight.detach().cpu().float()
    heads, d_model, d_head = values.shape
    if d_model % _BLOCK == 0:
        blocks = values.reshape(heads, d_model // _BLOCK, _BLOCK, d_head)
        for kind, step in (("4-bit", _sixteen_values(blocks)), ("5-bit", _centred_grid(blocks))):
            if step is not None:
                return StorageSteps(f"{kind} blocks of {_BLOCK}", step.repeat_interleave(_BLOCK, dim=1))
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values, values.to(dtype).float()):
            return StorageSteps(str(dtype).removeprefix("torch."), _float_steps(values, dtype))
    return StorageSteps(str(weight.dtype).removeprefix("torch."), _float_steps(values, weight.dtype))


def _sixteen_values(blocks: Float[Tensor, "heads blocks inputs d_head"]) -> Float[Tensor, "heads blocks d_head"] | None:
    """Return the step of blocks that hold at most 16 values each, which are taken to span their range; else None."""
    ordered = blocks.sort(dim=2).values
    if bool(((ordered.diff(dim=2) > 0).sum(2) >= 16).any()):
        return None
    return (ordered[:, :, -1] - ordered[:, :, 0]) / 15


def _centred_grid(blocks: Float[Tensor, "heads blocks inputs d_head"]) -> Float[Tensor, "heads blocks d_head"] | None:
    """Return the step of blocks that hold whole multiples, -16 .. 15, of a float16 step (Q5_0); else None.

    The largest weight is some multiple of the step, mostly the 16th: the coarsest step that fits a block is taken.
    """
    largest = blocks.abs().amax(2)
    coarsest = torch.full_like(largest, torch.nan)
    for multiple in range(16, 0, -1):
        step = (largest / multiple).to(torch.float16).float()
        multiples = blocks / step.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
        # De-quantising is exact to 1e-7 of the largest weight; values off any grid lie 0.25 steps from it on average.
        coarsest = torch.where(((multiples - multiples.round()).abs() < 1e-3).all(2), step, coarsest)
    return None if bool(coarsest.isnan().any()) else coarsest


def _float_steps(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance to the next representable number: eps times the power of two below."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp_min(limits.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(values, limits.eps), exponent)


def _layer_draws(view: AttentionView, index: int, draws: int, seed: int) -> tuple[pd.DataFrame, set[str]]:
    raw = view.raw(index)
    steps = storage_steps(raw.w_q), storage_steps(raw.w_k)
    # Keyed by layer, so that a layer's draws do not depend on other layers.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
    measure = partial(measure_heads, index=index, moments=None, directions=None)
    drawn = [measure(view.layer(index)).columns]
    drawn += [measure(fold_attention(_perturbed(raw, steps, generator), index)).columns for _ in range(draws)]
    table = drawn_columns(index, len(raw.w_q), drawn, first=-1)
    return table.reindex(columns=["draw", "layer", "head", *NOISE_COLUMNS]), {grid.kind for grid in steps}


def _perturbed(raw: RawAttention, steps: tuple[StorageSteps, StorageSteps], generator: torch.Generator) -> RawAttention:
    def moved(weight: Tensor, grid: StorageSteps) -> Tensor:
        shift = torch.rand(grid.step.shape, generator=generator, dtype=torch.float64) - 0.5
        return weight.detach().cpu().double() + shift * grid.step.double()

    return replace(raw, w_q=moved(raw.w_q, steps[0]), w_k=moved(raw.w_k, steps[1]))
