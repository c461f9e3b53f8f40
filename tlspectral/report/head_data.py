"""Data for the page's script: the table's columns as JSON, each with its meaning and colour scale."""

import json
from math import isfinite, isnan
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.report.head_pages import page_address
from tlspectral.tables.detector_columns import DETECTORS, detector_chance
from tlspectral.tables.head_columns import COLUMNS, null_band
from tlspectral.tables.schema import columns_of

NULL_METRICS = ("dir_frac", "D_head", "imag_mass", "henrici")
"""Columns that `analyze_heads` compares with the random null."""

BAND_DEVIATIONS = 2.0
"""Half the width of a drawn null band, in null standard deviations."""

_DIGITS = 6  # significant digits: rounding far below any standard error, and the page is half as large
_IDENTITY = ("layer", "head", "name", "kv_head", "status", "bilinear")


def head_data(heads: pd.DataFrame) -> str:
    """Return a head table as JSON text for the page's script, with the keys identity, columns (meaning and colour
    scale), nullMetrics, detectors, values and page (address of the public page).

    The text may stand inside a script element. Numbers have 6 significant digits. NaN becomes null, infinities the
    texts "Infinity" and "-Infinity", because JSON has no such numbers.
    """
    numbers = [name for name in heads if name not in _IDENTITY and pd.api.types.is_numeric_dtype(heads[name])]
    data = {
        "identity": {name: _identity(heads[name]) for name in _IDENTITY if name in heads},
        "columns": [_described(heads, name) for name in shown_columns(heads)],
        "nullMetrics": [name for name in NULL_METRICS if name in heads],
        "detectors": [name for name in DETECTORS if name in heads],
        "values": {name: _cells(heads[name]) for name in numbers},
        "page": page_address(heads.attrs),
    }
    return script_json(data)


def script_json(data: Any) -> str:
    """Return data as JSON text in which "<" is escaped, because "<" could end the script element around it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def shown_columns(heads: pd.DataFrame) -> list[str]:
    """Return the names of the numeric columns that a reader can choose: without names of heads, null means, null
    standard deviations and standard errors.
    """
    serving = {f"{metric}_null_{part}" for metric in NULL_METRICS for part in ("mean", "std")}
    serving |= {f"{name}_se" for name in DETECTORS}
    numeric = [name for name in heads if pd.api.types.is_numeric_dtype(heads[name])]
    return [name for name in numeric if name not in serving.union(_IDENTITY)]


def _described(heads: pd.DataFrame, name: str) -> dict[str, Any]:
    """Return a dict about the column `name` of the head table `heads` for the page's script: title, meaning, unit,
    whether it has values, bounds and signs, and the mark on its colour scale.
    """
    known = columns_of(heads.attrs).get(name, COLUMNS.get(name))
    return {
        "name": name,
        "title": known.title if known else name,
        "meaning": known.meaning if known else "",
        "unit": known.unit if known else "",
        "computed": bool(heads[name].notna().any()),
        # A column without bounds has tails: a few heads would use up the whole colour scale.
        "unbounded": "inf" in known.range if known else True,
        "signed": known.signed if known else bool((heads[name] < 0).any()),
        "mark": _mark(heads, name),
    }


def _mark(heads: pd.DataFrame, name: str) -> dict[str, Any] | None:
    """Return the mark on the colour scale of the column `name` of the head table `heads`: a dict with `value` (level of
    the null or of chance), `reach` (half the width of its band) and `label`. None if it has no such level.
    """
    if name.removesuffix("_z") in NULL_METRICS and name.endswith("_z"):
        return {"value": 0.0, "reach": BAND_DEVIATIONS, "label": "null"}
    if name in NULL_METRICS and (band := null_band(heads, name)):
        return {"value": _rounded(band[0]), "reach": _rounded(BAND_DEVIATIONS * band[1]), "label": "null"}
    if name in DETECTORS and isinstance(chance := detector_chance(heads, name), float):
        return {"value": chance, "reach": 0.0, "label": "chance"}
    return None  # a chance level that depends on the layer has no single place on the scale


def _identity(column: pd.Series) -> list[Any]:
    """Return a column such as layer or name as a list for JSON: int for whole numbers, otherwise text, None for missing
    values.
    """
    if pd.api.types.is_integer_dtype(column):
        return [int(value) for value in column]
    return [None if pd.isna(value) else str(value) for value in column]


def _cells(column: pd.Series) -> list[float | str | None]:
    """Return a numeric column as a list for JSON: numbers with 6 significant digits, None for NaN, "Infinity" or
    "-Infinity".
    """
    numbers: Float64[np.ndarray, " heads"] = column.to_numpy(np.float64, na_value=np.nan)
    cells: list[float | str | None] = []
    for number in numbers.tolist():
        if isfinite(number):
            cells.append(float(f"{number:.{_DIGITS}g}"))
        else:
            cells.append(None if isnan(number) else "Infinity" if number > 0 else "-Infinity")
    return cells


def _rounded(value: float) -> float:
    """Return a number rounded to 6 significant digits."""
    return float(f"{value:.{_DIGITS}g}")
