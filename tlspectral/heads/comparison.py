"""Two head tables of one architecture, such as a base model and its fine-tuned copy, side by side."""

from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.tables.head_columns import COLUMNS, HEAD
from tlspectral.tables.schema import Column, Schema, columns, require

# fmt: off
COMPARED_COLUMNS = (
    "outside_m", "rank", "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "self_match",
    "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "dir_frac_z", "D_head_z", "imag_mass_z",
    "henrici_z", "rope_imag_frac", "freq_centroid", "hi_freq_dir", "prev", "dup", "ind", "copying", "positivity",
    "D_head_pct",
)
"""The columns of which `compare_heads` gives the difference."""

# fmt: on

RANKED_COLUMNS = {"behaviour": ("prev", "dup", "ind"), "spectrum": ("dir_frac", "D_head", "henrici")}
"""The columns by which `compare_heads` ranks heads, by family: those with a band, all of which run from 0 to 1."""

CHANGE_FLOOR = 0.02
"""The least difference by which `compare_heads` ranks a head, in attention or in the share that a column is."""

_HEAD = ["layer", "head"]
_ARCHITECTURE = ("kv_head", "bilinear", "rotary_fraction")
_SETTINGS = ("seed", "null_draws", "null_blocks")
_DETECTOR_SETTINGS = ("max_se", "segment_length", "bos", "seed")
_DETECTORS = ["prev", "dup", "ind"]
_ORIGIN = ("model", "revision", "sha256", "commit", "weights_sha256")
_WIDTH = 2.0  # standard deviations


def _change(family: str, unit: str) -> tuple[Column, ...]:
    return columns(f"""
        {family}_of     | label  | Column of {family} with the largest difference beyond its band and the floor; missing
                        |        | where none is.
        {family}_change | {unit} | That difference; NaN where {family}_of is missing.
    """)


def _compared(name: str) -> tuple[Column, ...]:
    unit = COLUMNS[name].unit
    values = columns(f"""
        {name}_a?    | {unit} | {name} of the head in table a.
        {name}_b?    | {unit} | {name} of the head in table b.
        {name}_diff? | {unit} | {name} of the head in table b less that in table a. NaN where one has no value.
    """)
    if name not in (*chain(*RANKED_COLUMNS.values()), "imag_mass"):
        return values
    return values + columns(f"""
        {name}_band?    | {unit} | Twice the standard deviation that noise gives {name}_diff, the models independent.
        {name}_outside? | flag   | Whether |{name}_diff| exceeds {name}_band; missing where either is NaN.
    """)


COMPARE_HEADS = Schema(
    "compare_heads",
    (
        *HEAD,
        *columns("""
            change_rank | count | Rank by the better of behaviour_rank and spectrum_rank, then by the other; missing
                        |       | where both are.
        """),
        *_change("behaviour", "attention probability"),
        *_change("spectrum", "share"),
        *columns("""
            behaviour_rank | count | Rank of the head by |behaviour_change|, 1 for the largest; missing where it is NaN.
            spectrum_rank  | count | Rank of the head by |spectrum_change|, 1 for the largest; missing where it is NaN.
        """),
        *(column for name in COMPARED_COLUMNS for column in _compared(name)),
    ),
    "`tls.compare_heads`",
)


def compare_heads(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Compare every head of model b with the same head of model a, and with noise.

    >>> import tlspectral as tls
    >>> a, b = (tls.analyze_heads(tls.load_model(name), null_draws=9) for name in ("tiny-rope", "tiny-rope-sym"))
    >>> tls.compare_heads(a, b)[["name", "behaviour_of", "spectrum_of"]].iloc[0].tolist()
    ['L1H2', 'ind', 'henrici']

    Args:
        a, b: tables of `analyze_heads` with the same settings, of two models of the same shape (a base model and its
            fine-tuned or quantised copy). Heads that only one of them has are left out, and so are columns that only
            one has values for, such as the detectors beside a table read from files.

    Returns:
        DataFrame, one row per head, the most changed first. It begins with `layer, head, name, change_rank,
        behaviour_of, behaviour_change, spectrum_of, spectrum_change, behaviour_rank, spectrum_rank`; for every column
        of `COMPARED_COLUMNS` follow `<column>_a, <column>_b, <column>_diff` and, where a noise is known,
        `<column>_band, <column>_outside`. For the two families (`RANKED_COLUMNS`: behaviour in attention, spectrum in
        shares) a difference counts if it exceeds its band, of the null or of the standard error over sequences, and is
        at least `CHANGE_FLOOR`, 0.02. `attrs["bands"]` says which noise a band is of, `attrs["a"]`
        and `attrs["b"]` name the models, `attrs["settings"]` how they were measured, `attrs["left_out"]` the columns,
        each with the reason, and the number of heads of each table.

    The floor is there because a band says only what noise explains. Attention of most heads on random sequences is
    known to .001, so that many a difference exceeds its band; the null of `dir_frac` is as narrow. Tables of equal
    `max_se` are compared, whatever number of sequences each needed. A spectrum may move by 0.02 from rounding:
    between the stored 4-bit weights of SmolLM2-135M and a copy moved within the steps, 99 % of the heads move by at
    most 0.019 in `D_head` and 0.010 in every other ranked column.

    Raises:
        ValueError: columns, rows or provenance are missing, or the tables have no head in common or are of other
            architectures or settings.

    What it does not establish: that a difference is one of function, or what training did to it: two runs of the same
    fine-tuning may move different heads. One head in twenty lies outside of its band where noise is all there is.
    The band of a null is how far two heads of random directions and the same singular values lie apart, which is no
    error of either number. A table does not say how large its model is, so heads of two models of different size are
    compared if their architecture agrees in the heads they share.
    """
    first, second = _checked(a, "a"), _checked(b, "b")
    first, second, alone = _shared_heads(first, second, a, b)
    settings = _same_settings(a, b)
    left_out = _lacking(first, second)
    if any(alone.values()):
        left_out["D_head_pct"] = "a percentile among other heads"
    compared: dict[str, Any] = {}
    kinds = {}
    for name in COMPARED_COLUMNS:
        if name in left_out:
            continue
        of_a, of_b = first[name].astype(float), second[name].astype(float)
        difference = of_b - of_a
        compared |= {f"{name}_a": of_a, f"{name}_b": of_b, f"{name}_diff": difference}
        kind, spreads = _noise(name, first, second)
        if kind is not None:
            width = _WIDTH * np.sqrt(np.square(spreads).sum(axis=0))
            outside = pd.Series(difference.abs() > width, dtype="boolean")
            compared[f"{name}_band"] = width
            compared[f"{name}_outside"] = outside.mask(difference.isna() | np.isnan(width))
            kinds[name] = kind
    changes: dict[str, Any] = {}
    ranks: dict[str, pd.Series] = {}
    for family, names in RANKED_COLUMNS.items():
        of, change = _largest([name for name in names if name in kinds], compared, len(first))
        changes |= {f"{family}_of": of, f"{family}_change": change}
        ranks[f"{family}_rank"] = pd.Series(np.abs(change)).rank(ascending=False, method="min")
    summary = {
        "layer": first["layer"],
        "head": first["head"],
        "change_rank": _joint_rank(pd.DataFrame(ranks)).astype("Int64"),
        **changes,
        **{name: rank.astype("Int64") for name, rank in ranks.items()},
    }
    table = pd.DataFrame(summary | compared).sort_values("change_rank", kind="stable", ignore_index=True)
    attrs = {
        **{key: {name: one.attrs[name] for name in _ORIGIN if name in one.attrs} for key, one in (("a", a), ("b", b))},
        "settings": settings,
        "bands": kinds,
        "floor": CHANGE_FLOOR,
        "left_out": {"columns": left_out, "heads": alone},
    }
    return COMPARE_HEADS.frame(table, attrs)


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


def _shared_heads(
    first: pd.DataFrame, second: pd.DataFrame, a: pd.DataFrame, b: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, int]]:
    """Return the rows of the heads that both tables have, and how many heads only one has."""
    names = f"{a.attrs['model']} (a) and {b.attrs['model']} (b)"
    index_a, index_b = (pd.MultiIndex.from_arrays([table["layer"], table["head"]]) for table in (first, second))
    alone = {"a": int((~index_a.isin(index_b)).sum()), "b": int((~index_b.isin(index_a)).sum())}
    if alone["a"] == len(first):
        shapes = [f"{len(table)} heads of layers {sorted(set(table['layer']))}" for table in (first, second)]
        raise ValueError(f"{names} have no head in common: {shapes[0]} and {shapes[1]}; give tables of the same heads")
    first = first.loc[index_a.isin(index_b)].reset_index(drop=True)
    second = second.loc[index_b.isin(index_a)].reset_index(drop=True)
    for column in _ARCHITECTURE:
        alike = (first[column] == second[column]) | (first[column].isna() & second[column].isna())
        if not alike.all():
            row = int(np.argmin(alike.to_numpy()))
            layer, head = first.loc[row, _HEAD]
            raise ValueError(
                f"{names} differ in architecture: {column} of L{layer}H{head} is {first.loc[row, column]} and "
                f"{second.loc[row, column]}"
            )
    return first, second, alone


def _lacking(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, str]:
    """Return the columns that only one of the tables has values for, with the reason."""
    reasons = {}
    for name in COMPARED_COLUMNS:
        without = [which for which, table in (("a", first), ("b", second)) if table[name].isna().all()]
        if len(without) == 1:
            reasons[name] = f"no value in {without[0]}"
    return reasons


def _noise(name: str, first: pd.DataFrame, second: pd.DataFrame) -> tuple[str | None, list[np.ndarray]]:
    """Return what the band of a column comes from, None without a band, and the standard deviations of it."""
    for kind, column in (("null", f"{name}_null_std"), ("standard error over sequences", f"{name}_se")):
        if all(column in table and table[column].notna().any() for table in (first, second)):
            return kind, [table[column].to_numpy(float) for table in (first, second)]
    return None, []


def _largest(
    names: list[str], compared: dict[str, Any], count: int
) -> tuple[list[str | None], Float64[np.ndarray, " heads"]]:
    """Return for each head which column changed most, beyond its band and the floor, and by how much."""
    differences, sizes = [np.full(count, np.nan)], [np.zeros(count)]  # of no column: the largest where nothing counts
    for name in names:
        difference = compared[f"{name}_diff"].to_numpy()
        counts = compared[f"{name}_outside"].fillna(False).to_numpy(bool) & (np.abs(difference) >= CHANGE_FLOOR)
        differences.append(difference)
        sizes.append(np.where(counts, np.abs(difference), 0.0))
    best = np.argmax(sizes, axis=0)
    return [[None, *names][column] for column in best], np.stack(differences)[best, np.arange(count)]


def _joint_rank(ranks: pd.DataFrame) -> pd.Series:
    """Return the rank of each head by the better of its ranks, then by the other; NaN without any."""
    last = len(ranks) + 1
    ordered = np.sort(ranks.fillna(last).to_numpy(), axis=1)
    return pd.Series(ordered[:, 0] * (last + 1) + ordered[:, 1]).where(ordered[:, 0] < last).rank(method="min")


def _same_settings(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    settings = {key: _same_value(key, a.attrs[key], b.attrs[key]) for key in _SETTINGS}
    _same_value("extra content_scale, which changes M,", *("content_scale" in table for table in (a, b)))
    detectors = a.attrs["detectors"], b.attrs["detectors"]
    if any(table.attrs["detectors"] is None and bool(table[_DETECTORS].isna().to_numpy().all()) for table in (a, b)):
        return {**settings, "detectors": None}
    if None in detectors:
        return {**settings, "detectors": _same_value("detectors", *detectors)}
    same = {
        key: _same_value(f"detectors' {key}", *(attrs.get(key) for attrs in detectors))
        for key in _DETECTOR_SETTINGS
        if any(key in attrs for attrs in detectors)
    }
    return {**settings, "detectors": same}


def _same_value(key: str, of_a: Any, of_b: Any) -> Any:
    if of_a != of_b:
        raise ValueError(f"the tables were made with other settings: {key} is {of_a} in a and {of_b} in b")
    return of_a
