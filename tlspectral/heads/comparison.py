"""Two head tables of one architecture, such as a base model and its fine-tuned copy, side by side."""

from typing import Any

import numpy as np
import pandas as pd

from tlspectral.heads.columns import COMPARE_HEADS
from tlspectral.tables import named
from tlspectral.tables.required import require
from tlspectral.tables.same_model import require_same_model

COMPARED_COLUMNS = (
    "outside_m",
    "rank",
    "dir_frac",
    "D_head",
    "lam_mass",
    "imag_mass",
    "henrici",
    "content_pos_frac",
    "self_match",
    "cond_eig",
    "spectral_radius",
    "prin_angle_mean",
    "prin_angle_max",
    "dir_frac_z",
    "D_head_z",
    "imag_mass_z",
    "henrici_z",
    "rope_imag_frac",
    "freq_centroid",
    "hi_freq_dir",
    "prev",
    "dup",
    "ind",
    "copying",
    "positivity",
    "D_head_pct",
)
"""The columns of which `compare_heads` gives the difference."""

_HEAD = ["layer", "head"]
_ARCHITECTURE = ("kv_head", "bilinear", "rotary_fraction")
_SETTINGS = ("seed", "null_draws", "null_blocks")
_DETECTOR_SETTINGS = ("n_sequences", "segment_length", "bos", "seed", "exclude_special")
_ORIGIN = ("model", "revision", "sha256", "commit", "weights_sha256")
_WIDTH = 2.0  # standard deviations


def compare_heads(
    a: pd.DataFrame,
    b: pd.DataFrame,
    *,
    noise_a: pd.DataFrame | None = None,
    noise_b: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Compare every head of model b with the same head of model a, and with the noise of rounding.

    Args:
        a, b: tables of `analyze_heads` with the same settings, of two models of the same shape (a base model and its
            fine-tuned or quantised copy).
        noise_a, noise_b: tables of `weight_noise_band` of the same models, where their rounding matters.

    Returns:
        DataFrame sorted by `layer, head`, with `<column>_diff` (b less a, in the column's unit) for every column of
        `COMPARED_COLUMNS`, NaN where one of the tables has no value. Where a noise table is given, also
        `<column>_band` for the columns that it has, twice the standard deviation that rounding gives the difference
        (of both models, taken as independent), and `<column>_outside`, whether the difference exceeds it (missing
        where either is NaN). `attrs["a"]` and `attrs["b"]` name the models, `attrs["settings"]` how they were
        measured.

    Raises:
        ValueError: columns, rows or provenance are missing, the tables are of other layers and heads, architectures or
            settings, or a noise table is of another model.

    What it does not establish: that a difference is one of function, or what training did to it: two runs of the same
    fine-tuning may move different heads. One head in twenty lies outside of its band where rounding is all there is.
    """
    first, second = _checked(a, "a"), _checked(b, "b")
    _require_same_heads(first, second, a, b)
    settings = _same_settings(a, b)
    table = first[_HEAD].copy()
    bands = _bands(first, noise_a, a, "a"), _bands(second, noise_b, b, "b")
    for name in COMPARED_COLUMNS:
        difference = second[name].astype(float) - first[name].astype(float)
        table[f"{name}_diff"] = difference
        spreads = [band[f"{name}_sd"].to_numpy() for band in bands if band is not None and f"{name}_sd" in band]
        if spreads:
            width = _WIDTH * np.sqrt(np.square(spreads).sum(axis=0))
            outside = pd.Series(difference.abs() > width, dtype="boolean")
            table[f"{name}_band"] = width
            table[f"{name}_outside"] = outside.mask(difference.isna() | np.isnan(width))
    table.attrs = {
        "a": _origin(a),
        "b": _origin(b),
        "settings": settings,
        "noise": {key: _noise_origin(noise) for key, noise in (("a", noise_a), ("b", noise_b)) if noise is not None},
    }
    return named(table, COMPARE_HEADS)


def _checked(heads: pd.DataFrame, which: str) -> pd.DataFrame:
    require(heads, (*_HEAD, *_ARCHITECTURE, *COMPARED_COLUMNS), "analyze_heads", name=f"table {which}")
    if heads.duplicated(_HEAD).any():
        raise ValueError(f"table {which} has some head twice; give one table of analyze_heads, not several joined")
    missing = [name for name in ("model", *_SETTINGS, "detectors") if name not in heads.attrs]
    if missing:
        raise ValueError(
            f"table {which} does not say its {', '.join(missing)} in its attrs; give the table as analyze_heads or "
            "read_table returns it, since joins and many edits drop them"
        )
    return heads.sort_values(_HEAD, ignore_index=True)


def _require_same_heads(first: pd.DataFrame, second: pd.DataFrame, a: pd.DataFrame, b: pd.DataFrame) -> None:
    names = f"{a.attrs['model']} (a) and {b.attrs['model']} (b)"
    if not first[_HEAD].equals(second[_HEAD]):
        shapes = [f"{len(table)} heads in {table['layer'].nunique()} layers" for table in (first, second)]
        raise ValueError(f"{names} differ in shape: {shapes[0]} and {shapes[1]}, not the same layers and heads")
    for column in _ARCHITECTURE:
        alike = (first[column] == second[column]) | (first[column].isna() & second[column].isna())
        if not alike.all():
            row = int(np.argmin(alike.to_numpy()))
            layer, head = first.loc[row, _HEAD]
            raise ValueError(
                f"{names} differ in architecture: {column} of L{layer}H{head} is {first.loc[row, column]} and "
                f"{second.loc[row, column]}"
            )


def _same_settings(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    settings = {}
    for key in _SETTINGS:
        settings[key] = _same_value(key, a.attrs[key], b.attrs[key])
    detectors = a.attrs["detectors"], b.attrs["detectors"]
    if None in detectors:
        settings["detectors"] = _same_value("detectors", *detectors)
        return settings
    settings["detectors"] = {
        key: _same_value(f"detectors' {key}", *(attrs.get(key) for attrs in detectors))
        for key in _DETECTOR_SETTINGS
        if any(key in attrs for attrs in detectors)
    }
    return settings


def _same_value(key: str, of_a: Any, of_b: Any) -> Any:
    if of_a != of_b:
        raise ValueError(f"the tables were made with other settings: {key} is {of_a} in a and {of_b} in b")
    return of_a


def _bands(heads: pd.DataFrame, noise: pd.DataFrame | None, table: pd.DataFrame, which: str) -> pd.DataFrame | None:
    """Return a noise table's rows in the order of the heads."""
    if noise is None:
        return None
    require(noise, (*_HEAD, "dir_frac_sd"), "weight_noise_band", name=f"table noise_{which}")
    for key in ("model", "revision", "sha256"):
        noise_value, table_value = noise.attrs.get(key), table.attrs.get(key)
        if noise_value != table_value:
            raise ValueError(f"noise_{which} is of {key} {noise_value}, but table {which} of {key} {table_value}")
    require_same_model(table, noise.attrs, f"the rows of noise_{which}")
    joined = heads[_HEAD].merge(noise, on=_HEAD, how="left", validate="one_to_one", indicator=True)
    missing = joined[joined["_merge"] != "both"]
    if len(missing):
        layer, head = missing.iloc[0][_HEAD]
        raise ValueError(f"noise_{which} lacks {len(missing)} of {len(heads)} heads, such as L{layer}H{head}")
    return joined


def _origin(heads: pd.DataFrame) -> dict[str, Any]:
    return {key: heads.attrs[key] for key in _ORIGIN if key in heads.attrs}


def _noise_origin(noise: pd.DataFrame) -> dict[str, Any]:
    return {key: noise.attrs[key] for key in ("storage", "draws", "seed") if key in noise.attrs}
