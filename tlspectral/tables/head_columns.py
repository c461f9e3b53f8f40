"""The columns of the head table and of its extras, read from `head_columns.txt`.

Rooms of all floors use them. Columns of all other tables are written beside the functions that make these tables. The
file is plain text because Python 3.10 cannot read TOML, JSON breaks no lines, and INI would be twice as long.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType

import numpy as np
import pandas as pd

from tlspectral.tables.detector_columns import DETECTORS, Detector
from tlspectral.tables.schema import Column, Schema, columns, columns_of, require_table

# fmt: off
_SHARE = "share"
_NARROW_NULL = {
    "dir_frac": " The null of dir_frac is narrow (sd about 1/(2n), n = d_model, or d_model - 1 under LayerNorm), so "
    "nearly every trained head has a large |z|. Read the difference from the null mean too.",
    "D_head": " Do not compare z between heads with different spectra: the null is wider where few singular values "
    "dominate.",
    "imag_mass": " The null scales with the head's own effective rank.",
    "henrici": " The null of henrici is very narrow (|z| of 10 to 1000 is usual). Read the ratio to the null mean.",
}
_NULL = "M with its own singular values and independent random (Haar) left and right frames"
_DRAWS = "Computed from random draws (df.attrs has their number and dtype)."
_NULL_SOURCE = "FP 3 (random-orientation null)"
_SHARED = (
    " With null_blocks='shared' all heads share their Monte-Carlo error. Statements about many z need 'fresh'."
)


def _null_columns(metric: str) -> tuple[Column, ...]:
    """Return the documentation of four columns of the head table as `Column`s: mean and standard deviation of the
    random null of `metric`, such as "D_head", then z and percentile of the head.
    """
    unit = "ratio" if metric == "imag_mass" else _SHARE
    plain = {"dir_frac": "directional share", "D_head": "rotational share", "imag_mass": "imaginary mass"}
    name = plain.get(metric, metric)
    mean_range = "0 .. sqrt(d_head)" if metric == "imag_mass" else "0 .. 1"
    closed = metric == "dir_frac"
    how = "Computed from exact moments, without draws." if closed else _DRAWS
    sampling = "" if closed else " With R draws z itself has sd of about sqrt((1 + z^2/2) / R)." + _SHARED
    return (
        Column(f"{metric}_null_mean", f"Mean of {metric} under the null: {_NULL}. {how}", unit, range=mean_range,
            source=_NULL_SOURCE, also_known_as="Ginibre baseline", label=f"{name}, null mean",
            does_not_establish="The null keeps the head's singular values and randomises its directions. A head "
            "outside of the null has unusual directions; this does not show its function."
            + ("" if closed else _SHARED)),
        Column(f"{metric}_null_std", f"Standard deviation (ddof 0) of {metric} under the null: {_NULL}. {how}", unit,
            range="0 .. inf", source=_NULL_SOURCE, label=f"{name}, null sd",
            does_not_establish="This is the spread of random operators. It is not a standard error of the head's "
            "own number."
            + _NARROW_NULL[metric]),
        Column(f"{metric}_z", f"({metric} - {metric}_null_mean) / {metric}_null_std.", "null standard deviations",
            range="-inf .. inf", source=_NULL_SOURCE, label=f"{name}, z against the null",
            does_not_establish="Not a p-value: the null need not be normal." + _NARROW_NULL[metric] + sampling),
        Column(f"{metric}_null_pct", f"Share of the null's raw draws that are at or below the head's {metric}.", _SHARE,
            range="0 .. 1", source=_NULL_SOURCE, also_known_as="empirical percentile against the null",
            label=f"{name}, share of the null at or below",
            does_not_establish="With R draws its resolution is 1/(R+1). 0 and 1 mean that the head lies beyond every "
            "draw, not that the probability is 0." + _SHARED),
    )


def _detector_columns(detector: Detector) -> tuple[Column, Column]:
    """Return the documentation of a detector's two columns in the head table as `Column`s: its score, and the score's
    standard error.
    """
    return (
        Column(detector.name,
            f"Mean attention from each query of the second copy to {detector.target}, on random sequences [BOS, r, r]. "
            "The chance level is in df.attrs.", "attention probability", range="0 .. 1", source="FP 3 (detectors)",
            also_known_as=detector.also_known_as, label=f"{detector.kind} score ({detector.name})",
            does_not_establish="The score is for random repeated tokens. It does not show how the head behaves on text "
            "or in a circuit, or that the model's output depends on the head."),
        Column(f"{detector.name}_se", f"Standard error of {detector.name} over sequences.", "attention probability",
            range="0 .. inf", label=f"{detector.kind} score, standard error",
            does_not_establish="Only the sampling of sequences. Another task or another seed of the model may differ "
            "by more."),
    )



def columns_under_headings(text: str) -> dict[str, tuple[Column, ...]]:
    """Read the documentation of columns from `text`, in the format of `head_columns.txt`; return a dict from each
    heading, such as "latent", to its `Column`s.
    """
    _, *sections = re.split(r"^\[(\w+)\]\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return {heading: tuple(_columns_in(body)) for heading, body in zip(sections[::2], sections[1::2], strict=True)}


def _columns_in(section: str) -> Iterator[Column]:
    """Yield the `Column`s that are described below one heading of `head_columns.txt`, in their order. `section` is this
    text.

    The line "null of ..." yields four columns for each metric, the line "detectors" two columns for each detector.
    """
    null_of, known, limit = "null of ", "also known as: ", "does not establish: "
    for entry in re.split(r"\n(?=[^ ])", section):
        head, _, body = entry.partition("\n")
        if head == "detectors":
            yield from (column for detector in DETECTORS.values() for column in _detector_columns(detector))
            continue
        if head.startswith(null_of):
            yield from (column for name in head.removeprefix(null_of).split(", ") for column in _null_columns(name))
            continue
        name, unit, span, source, label = (cell.strip() for cell in f"{head} |".split("|")[:5])
        parts = re.split(f"({known}|{limit})", " ".join(body.split()))
        texts = {mark: part.strip() for mark, part in zip(parts[1::2], parts[2::2], strict=True)}
        plain = f"{label} ({name})" if label else ""
        yield Column(name, parts[0].strip(), unit, range=span, source=source, label=plain,
            also_known_as=texts.get(known, ""), does_not_establish=texts.get(limit, ""))


_BY_HEADING = columns_under_headings(
    files("tlspectral.tables").joinpath("head_columns.txt").read_text(encoding="utf-8")
)
HEAD_COLUMNS: tuple[Column, ...] = _BY_HEADING["heads"]
"""The columns of `analyze_heads`, in their order."""

LATENT_COLUMNS: tuple[Column, ...] = tuple(replace(column, always=False) for column in _BY_HEADING["latent"])
"""Further columns of `analyze_heads` for a model with latent attention."""

EXTRA_COLUMNS: tuple[Column, ...] = _BY_HEADING["extras"]
"""Columns that `analyze_heads(extras=...)` adds."""

HEAD = tuple(column for column in HEAD_COLUMNS if column.name in ("layer", "head", "name"))
"""The first columns of a table about heads: layer, head and name."""

(PART,) = columns("part | label | The part that was removed, under the name or symbol that the caller gave.")
"""The column that names the removed part of a head. The part's settings are in the table's `attrs`."""

COLUMNS: Mapping[str, Column] = MappingProxyType(
    {column.name: column for column in (*HEAD_COLUMNS, *LATENT_COLUMNS, *EXTRA_COLUMNS)}
)
"""All columns of the head table by name, with the columns of latent attention and the extras."""


def column_title(name: str) -> str:
    """Return the title of the column `name` of the head table for readers, such as "rotational share (D_head)"; `name`
    itself if it has no title.
    """
    return COLUMNS[name].title if name in COLUMNS else name


def null_band(heads: pd.DataFrame, metric: str) -> tuple[float, float] | None:
    """Return (mean, standard deviation) of the typical random null of `metric`, such as "D_head": medians over the
    heads of the table, in the metric's unit.

    Return None if the table has no null for this metric.

    Not established: the null of a single head, which depends on the head's own singular values.
    """
    columns = [f"{metric}_null_{part}" for part in ("mean", "std")]
    if not set(columns) <= set(heads):
        return None
    # dropna comes first because pandas 2 warns about the median of an empty column.
    mean, deviation = (float(heads[column].dropna().median()) for column in columns)
    return (mean, deviation) if np.isfinite([mean, deviation]).all() else None


ANALYZE_HEADS = Schema("analyze_heads",
    (*HEAD_COLUMNS, *LATENT_COLUMNS, *(replace(column, always=False) for column in EXTRA_COLUMNS)),
    "`tls.analyze_heads`, the last three with `extras`; `tlspectral analyze -o FILE` writes it")


def describe_columns(table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the meaning of a table's columns as a table, one row per column. Use it to read a table that you did not
    make.

    >>> import tlspectral as tls
    >>> tls.tables.describe_columns().set_index("name").loc["dir_frac", "range"]
    '0 .. 1'

    Args:
        table: a DataFrame that this package made or read, such as the result of `tls.read_table`. Default: the head
            table of `tls.analyze_heads`.

    Returns:
        DataFrame with string columns `name, meaning, unit, label, range, source, also_known_as, does_not_establish`.
        Rows follow the table's columns. Without a table, rows are the head table's columns and then its extras.

    It does not show how the numbers were made; model and settings are in `table.attrs`. The texts of a column are empty
    if you added it, or if pandas (concat, merge) dropped the table's `attrs`. It fails (AttributeError) for anything
    but a DataFrame.
    """
    if table is None:
        return pd.DataFrame([column.texts() for column in COLUMNS.values()])
    require_table(table, "give a table of this package, or None")
    known = columns_of(table.attrs)
    return pd.DataFrame([known.get(name, Column(str(name), "", source="")).texts() for name in table])
