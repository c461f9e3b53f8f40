"""Phase metrics of every head under a rotary geometry that is not the model's own, and what they attenuate.

"Fingerprint, Not Blueprint" (FP, section 7, placebo controls) pairs the rotary columns of a RoPE model anew, and
assumes RoPE in models without it. The metrics need only inner products of columns. Each head is therefore reduced once
to the triangular factor of its QR decomposition, which has the same inner products, and every draw uses that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64

from tlspectral import stats
from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.rotary import PhaseMetrics, RotaryGeometry, pair_columns
from tlspectral.heads.weight_columns import phase_columns
from tlspectral.models.reading import measured
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.tables.head_columns import HEAD_COLUMNS
from tlspectral.tables.html_summary import html_summary
from tlspectral.tables.schema import Schema, columns, require
from tlspectral.tasks.control_tests import draws_floor
from tlspectral_studies.fingerprint.statistics.tables_with_draws import drawn_columns, tables_with_draws

PHASE_COLUMNS = PhaseMetrics._fields
"""The columns that a placebo gives: `rope_imag_frac`, `freq_centroid`, `hi_freq_dir`."""

PERMUTED_PAIRING = Schema(
    "permuted_pairing",
    columns(
        """
        draw           | index     | Number of the permutation of rotary columns, from 0.
        layer, head, name
        rope_imag_frac | share     | As in the head table, with the placebo's pairs and frequencies in place of the
                       |           | model's own. NaN on layers that have none.
        freq_centroid  | rad/token | The same.
        hi_freq_dir    | share     | The same.
        """,
        HEAD_COLUMNS,
    ),
    "`permuted_pairing` and, with one draw, `pseudo_rope` of `tlspectral_studies.fingerprint.statistics`",
)

_BASE = 10_000.0  # of the pretended frequencies, as in the paper


def permuted_pairing(model: Any, *, draws: int = 50, seed: int = 0) -> pd.DataFrame:
    """Phase metrics after the rotary columns of every head are paired anew, once per draw (FP section 7, placebo ii).

    A draw is one permutation of the rotary columns, the same for all heads and layers, and for queries and keys. The
    model's frequencies stay in their order, so that column `permutation[c]` replaces column c. Preserved are
    M of every head (hence `D_head`, `dir_frac` and all else that is read from M), the share of M that the rotary
    columns carry, every column's norm, and which columns are rotary. Destroyed are which two columns form a pair and
    at which frequency a column rotates. The permutations are those of `numpy.random.default_rng(seed)`, one after the
    other, as in the paper; layers of another rotary width have a generator of their own with the same seed.

    Args:
        model: a TransformerBridge or HookedTransformer in which some layer has rotary positions.
        draws: permutations.
        seed: of the permutations.

    Returns:
        DataFrame sorted by draw, layer and head. Columns: `draw, layer, head, name, rope_imag_frac, freq_centroid,
        hi_freq_dir`. A spectral layer's gain and phase stay with their columns.

    Raises:
        ValueError: no layer of the model has rotary positions, or no draw is asked for.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    What it does not establish: that a statistic which survives the placebo has no part in RoPE. Membership in the
    rotary block survives it as well, which is everything in a fully rotary head.
    """
    if draws < 1:
        raise ValueError(f"a placebo needs at least one draw, found draws={draws}")
    with measured(model, report_hooks=False) as view:
        if all(view.rotary(index) is None for index in view.layers):
            raise ValueError(
                f"{view.source['model']} has no layer with rotary positions, so there are no pairs to permute; "
                "pseudo_rope pretends some"
            )

        def permuted(layer: AttentionLayer) -> list[RotaryGeometry | None]:
            return [None] * draws if layer.rotary is None else [*permuted_geometries(layer.rotary, draws, seed)]

        return _placebo(view, permuted, placebo="permuted_pairing", draws=draws, seed=seed)


def pseudo_rope(model: Any) -> pd.DataFrame:
    """Phase metrics of a model without RoPE, as if its heads had rotary positions (FP section 7, placebo i).

    The assumed geometry is the paper's, rotate-half over all d columns of a head (less one where their number is odd):
    columns t and t + d / 2 form pair t, which rotates by `10000 ** (-2 t / d)` radians per token.

    Args:
        model: a TransformerBridge or HookedTransformer in which no layer has rotary positions.

    Returns:
        DataFrame as of `permuted_pairing`, with the one draw 0.

    Raises:
        ValueError: a layer of the model has rotary positions.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    What it does not establish: anything about positions. Such a model rotates none of these pairs; the numbers are what
    the method gives for columns in an arbitrary order.
    """
    with measured(model, report_hooks=False) as view:

        def pretended(layer: AttentionLayer) -> list[RotaryGeometry | None]:
            if layer.rotary is not None:
                raise ValueError(
                    f"layer {layer.layer} of {view.source['model']} has rotary positions, which a pretended geometry "
                    "would not replace; permuted_pairing is the placebo of such a model"
                )
            return [_rotate_half(layer.d_head)]

        return _placebo(view, pretended, placebo="pseudo_rope", base=_BASE)


def permuted_geometries(geometry: RotaryGeometry, draws: int, seed: int) -> list[RotaryGeometry]:
    """Permute the rotary columns of a geometry, once per draw; the frequencies keep their order."""
    columns = torch.cat([geometry.real_index, geometry.imag_index]).sort().values
    rng = np.random.default_rng(seed)
    geometries = []
    for _ in range(draws):
        source = torch.arange(geometry.d_head)
        source[columns] = columns[torch.from_numpy(rng.permutation(len(columns)))]
        geometries.append(
            replace(geometry, real_index=source[geometry.real_index], imag_index=source[geometry.imag_index])
        )
    return geometries


def _rotate_half(d_head: int) -> RotaryGeometry:
    width = d_head // 2 * 2
    theta = torch.tensor(_BASE, dtype=torch.float64) ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return RotaryGeometry(theta, *pair_columns(width, adjacent=False), d_head)


def _placebo(
    view: AttentionView, geometries_of: Callable[[AttentionLayer], list[RotaryGeometry | None]], **settings: Any
) -> pd.DataFrame:
    """Return the phase metrics of every head under each geometry of its layer, NaN where it is None."""
    tables = []
    with one_thread():
        for layer in map(view.layer, view.layers):
            geometries = geometries_of(layer)
            query, key = (torch.linalg.qr(w, mode="r").R for w in layer.operator_factors())
            unknown = dict.fromkeys(PHASE_COLUMNS, np.nan)
            drawn = [unknown if one is None else phase_columns(query, key, one) for one in geometries]
            tables.append(drawn_columns(layer.layer, layer.n_heads, drawn))
    table = pd.concat(tables).sort_values(["draw", "layer", "head"], ignore_index=True)
    return PERMUTED_PAIRING.frame(table, {**view.origin(), **settings})


@dataclass(frozen=True)
class PlaceboAttenuation:
    """An attenuation beside those of its placebos.

    Attributes:
        statistic: share of the association that the model's own phase features take away, 1 - after / before.
        draws: the same share for every draw of the placebo.
        pvalue: (1 + number of draws at or above `statistic`) / (n + 1).
        floor: the smallest pvalue that n draws allow, 1 / (n + 1).
        n: draws.
        seed: of the draws, None where none were random.
        method: the placebo.
        reason: why a number is NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    draws: Float64[np.ndarray, " n"]
    pvalue: float
    floor: float
    n: int
    seed: int | None
    method: str
    reason: str | None


def placebo_attenuation(
    heads: pd.DataFrame, placebo: pd.DataFrame, attenuation: Callable[[pd.DataFrame], Any] = stats.attenuation
) -> PlaceboAttenuation:
    """Compare the attenuation by RoPE-phase controls with that by placebo phase features (FP section 7, Table 3).

    Args:
        heads: table of `analyze_heads`.
        placebo: table of `permuted_pairing` or `pseudo_rope`, of the same model.
        attenuation: a function of a head table whose result has `.statistic`; give other options of
            `tlspectral.stats.attenuation` by `functools.partial(attenuation, method="rank")`.

    Returns:
        The attenuation, the placebos' and a one-sided p-value with its floor. Of a model without RoPE `statistic`,
        `pvalue` and `floor` are NaN, and the placebo's own attenuation is in `draws`.

    Raises:
        ValueError: a column that a table lacks, or the two are not of the same model or heads.

    What it does not establish: causal mediation. All columns are functions of the same weights. A large p-value says
    that pairing and frequency add nothing beyond membership in the rotary block, not that the phase is unused.
    """
    require(heads, ["layer", "head", "rope_imag_frac"], "analyze_heads", name="table of heads")
    statistic, reason = np.nan, "the model has no RoPE, so no phase features of its own"
    if heads["rope_imag_frac"].notna().any():
        statistic, reason = float(attenuation(heads).statistic), None
    drawn = np.array([float(attenuation(table).statistic) for table in tables_with_draws(heads, placebo)])
    if reason is None and not np.isfinite([statistic, *drawn]).all():
        reason = f"the attenuation is not finite in {int((~np.isfinite(drawn)).sum())} of {len(drawn)} draws, or itself"
    pvalue = (1 + int((drawn >= statistic).sum())) / (len(drawn) + 1) if reason is None else np.nan
    return PlaceboAttenuation(
        statistic=statistic,
        draws=drawn,
        pvalue=float(pvalue),
        floor=draws_floor(len(drawn)) if reason is None else np.nan,
        n=len(drawn),
        seed=placebo.attrs.get("seed"),
        method=str(placebo.attrs.get("placebo", "placebo")),
        reason=reason,
    )
