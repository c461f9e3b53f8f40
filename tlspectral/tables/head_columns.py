"""The columns of the head table, as data in `head_columns.txt`, and of what is joined to it.

Makers, figures and reports on every floor read these; the texts of all other tables stand beside their makers. The file
is plain text: Python 3.10 reads no TOML, JSON breaks no lines, and INI takes twice the lines.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType

import numpy as np
import pandas as pd

from tlspectral.tables.detector_columns import DETECTORS, Detector
from tlspectral.tables.schema import Column, Schema, columns, columns_of

# fmt: off
_SHARE = "share"
_NARROW_NULL = {
    "dir_frac": " dir_frac's null is so narrow (sd about 1/(2n), n = d_model, one less under LayerNorm) that nearly "
    "every trained head has a large |z|: z alone misleads, read the difference.",
    "D_head": " z is not comparable across heads of unlike spectra: the null widens where s is concentrated.",
    "imag_mass": " The null scales with the head's own effective rank.",
    "henrici": " henrici's null is very narrow (|z| of 10 to 1000 is usual): read the ratio to the null mean.",
}
_NULL = "M with its own singular values and independent random (Haar) left and right frames"
_DRAWS = "Over the draws (see df.attrs for how many, and in which dtype)."
_NULL_SOURCE = "FP 3 (random-orientation null)"
_SHARED = (
    " With null_blocks='shared' the Monte-Carlo error is common to all heads: claims on a population of z need 'fresh'."
)


def _null_columns(metric: str) -> tuple[Column, ...]:
    unit = "ratio" if metric == "imag_mass" else _SHARE
    plain = {"dir_frac": "directional share", "D_head": "rotational share", "imag_mass": "imaginary mass"}
    name = plain.get(metric, metric)
    mean_range = "0 .. sqrt(d_head)" if metric == "imag_mass" else "0 .. 1"
    closed = metric == "dir_frac"
    how = "From closed moments, without draws." if closed else _DRAWS
    sampling = "" if closed else " With R draws z itself has sd of about sqrt((1 + z^2/2) / R)." + _SHARED
    return (
        Column(f"{metric}_null_mean", f"Mean of {metric} under the null: {_NULL}. {how}", unit, range=mean_range,
            source=_NULL_SOURCE, also_known_as="Ginibre baseline", label=f"{name}, null mean",
            does_not_establish="The null keeps the singular values and nothing else of training: leaving it shows "
            "orientation, not function." + ("" if closed else _SHARED)),
        Column(f"{metric}_null_std", f"Standard deviation (ddof 0) of {metric} under the null: {_NULL}. {how}", unit,
            range="0 .. inf", source=_NULL_SOURCE, label=f"{name}, null sd",
            does_not_establish="The spread of random operators, not a standard error of the head's own number."
            + _NARROW_NULL[metric]),
        Column(f"{metric}_z", f"({metric} - {metric}_null_mean) / {metric}_null_std.", "null standard deviations",
            range="-inf .. inf", source=_NULL_SOURCE, label=f"{name}, z against the null",
            does_not_establish="Not a p-value: the null need not be normal." + _NARROW_NULL[metric] + sampling),
        Column(f"{metric}_null_pct", f"Share of the null's raw draws that are at or below the head's {metric}.", _SHARE,
            range="0 .. 1", source=_NULL_SOURCE, also_known_as="empirical percentile against the null",
            label=f"{name}, share of the null at or below",
            does_not_establish="With R draws it is no finer than 1/(R+1): 0 and 1 mean beyond every draw, "
            "not a probability of 0." + _SHARED),
    )


def _detector_columns(one: Detector) -> tuple[Column, Column]:
    return (
        Column(one.name,
            f"Mean attention from each query of the second copy to {one.target}, on random sequences [BOS, r, r]. The "
            "chance level is in df.attrs.", "attention probability", range="0 .. 1", source="FP 3 (detectors)",
            also_known_as=one.also_known_as, label=f"{one.kind} score ({one.name})",
            does_not_establish="Behaviour on random repeated tokens: not on text, not in a circuit, and not that "
            "the output depends on it."),
        Column(f"{one.name}_se", f"Standard error of {one.name} over sequences.", "attention probability",
            range="0 .. inf", label=f"{one.kind} score, standard error",
            does_not_establish="Sampling of sequences only: neither another task nor another seed of the model."),
    )



def columns_under_headings(text: str) -> dict[str, tuple[Column, ...]]:
    """Return the columns of such a file by the heading, as in `[latent]`, under which they stand."""
    _, *sections = re.split(r"^\[(\w+)\]\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return {heading: tuple(_columns_in(body)) for heading, body in zip(sections[::2], sections[1::2], strict=True)}


def _columns_in(section: str) -> Iterator[Column]:
    """Yield the columns of a section in their order; the lines of nulls and of detectors stand for several."""
    null_of, known, limit = "null of ", "also known as: ", "does not establish: "
    for entry in re.split(r"\n(?=[^ ])", section):
        head, _, body = entry.partition("\n")
        if head == "detectors":
            yield from (column for one in DETECTORS.values() for column in _detector_columns(one))
            continue
        if head.startswith(null_of):
            yield from (column for name in head.removeprefix(null_of).split(", ") for column in _null_columns(name))
            continue
        name, unit, span, source, label = (cell.strip() for cell in f"{head} |".split("|")[:5])
        parts = re.split(f"({known}|{limit})", " ".join(body.split()))
        said = {mark: part.strip() for mark, part in zip(parts[1::2], parts[2::2], strict=True)}
        plain = f"{label} ({name})" if label else ""
        yield Column(name, parts[0].strip(), unit, range=span, source=source, label=plain,
            also_known_as=said.get(known, ""), does_not_establish=said.get(limit, ""))


_BY_HEADING = columns_under_headings(
    files("tlspectral.tables").joinpath("head_columns.txt").read_text(encoding="utf-8")
)
HEAD_COLUMNS: tuple[Column, ...] = _BY_HEADING["heads"]
"""The columns of `analyze_heads`, in their order."""

LATENT_COLUMNS: tuple[Column, ...] = tuple(replace(column, always=False) for column in _BY_HEADING["latent"])
"""What follows them for a model with latent attention."""

EXTRA_COLUMNS: tuple[Column, ...] = _BY_HEADING["extras"]
"""What `analyze_heads(extras=...)` adds."""

HEAD = tuple(column for column in HEAD_COLUMNS if column.name in ("layer", "head", "name"))
"""Layer, head and name: what a table about heads begins with."""

(PART,) = columns("part | label | What was removed, under the name or the symbol that was asked for.")
"""The column that names a part of a head. Its settings are in the table's `attrs`."""

COLUMNS: Mapping[str, Column] = MappingProxyType(
    {column.name: column for column in (*HEAD_COLUMNS, *LATENT_COLUMNS, *EXTRA_COLUMNS)}
)
"""The columns of the head table, of latent attention and the extras by their names."""


def column_title(name: str) -> str:
    """Return what people read for a column: its plain name, such as "rotational share (D_head)", else the name."""
    return COLUMNS[name].title if name in COLUMNS else name


def null_band(heads: pd.DataFrame, metric: str) -> tuple[float, float] | None:
    """Return medians over heads of the mean and standard deviation of a metric's null; None where there is none.

    What it does not establish: the null of one head, which depends on its own singular values.
    """
    columns = [f"{metric}_null_{part}" for part in ("mean", "std")]
    if not set(columns) <= set(heads):
        return None
    # Without dropna, pandas 2 warns of a column that is empty.
    mean, deviation = (float(heads[column].dropna().median()) for column in columns)
    return (mean, deviation) if np.isfinite([mean, deviation]).all() else None


ANALYZE_HEADS = Schema("analyze_heads",
    (*HEAD_COLUMNS, *LATENT_COLUMNS, *(replace(column, always=False) for column in EXTRA_COLUMNS)),
    "`tls.analyze_heads`, the last three with `extras`; `tlspectral analyze -o FILE` writes it")


def describe_columns(table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the documentation of columns as a table, one row per column.

    Args:
        table: a frame made or read by this package, such as one of `join`; None is the head table.

    Returns:
        DataFrame with string columns `name, meaning, unit, range, source, also_known_as, does_not_establish`: the
        columns of the table in their order, empty for a column that is not documented; without a table the head
        table's columns in their order, then its extras.
    """
    if table is None:
        return pd.DataFrame([column.texts() for column in COLUMNS.values()])
    known = columns_of(table.attrs)
    return pd.DataFrame([known.get(name, Column(str(name), "", source="")).texts() for name in table])
