"""Compare two models of one architecture, or their head tables: a base model and its fine-tuned copy."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.errors import warn_caller
from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.operator_changes import OperatorChanges, operator_changes
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.view import AttentionView
from tlspectral.tables.detector_columns import DETECTORS
from tlspectral.tables.head_columns import COLUMNS, HEAD
from tlspectral.tables.meanings import CHANGES, MEANINGS, followed, other_meanings
from tlspectral.tables.same_model import layers_apart
from tlspectral.tables.schema import Column, Schema, columns, require

# fmt: off
COMPARED_COLUMNS = (
    "outside_m", "rank", "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "self_match",
    "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "dir_frac_z", "D_head_z", "imag_mass_z",
    "henrici_z", "rope_imag_frac", "freq_centroid", "hi_freq_dir", *DETECTORS, "copying", "positivity", "D_head_pct",
)
"""Columns whose difference `compare_heads` gives."""

# fmt: on

RANKED_COLUMNS = {"behaviour": tuple(DETECTORS), "spectrum": ("dir_frac", "D_head", "henrici")}
"""Columns by which `compare_heads` ranks heads, by family. They have a noise band and run from 0 to 1."""

CHANGE_FLOOR = 0.02
"""The least difference, in units of the column, for which `compare_heads` ranks a head."""

_HEAD = ["layer", "head"]
_ARCHITECTURE = ("kv_head", "bilinear", "rotary_fraction")
_SETTINGS = ("seed", "null_draws", "null_blocks")
_DETECTOR_SETTINGS = ("max_se", "segment_length", "bos", "seed")
_ORIGIN = ("model", "revision", "sha256", "commit", "weights_sha256")
_WIDTH = 2.0  # standard deviations


def _change(family: str, unit: str) -> tuple[Column, ...]:
    """Return two `Column`s (name, unit and meaning of a column of `compare_heads`): `<family>_of` and
    `<family>_change`.

    `<family>_of` is the column that changed most, `<family>_change` its change. family: "behaviour" or "spectrum".
    unit: unit of the change, as text.
    """
    return columns(f"""
        {family}_of     | label  | Column of {family} with the largest difference beyond its band and the floor; missing
                        |        | where none is.
        {family}_change | {unit} | That difference; NaN where {family}_of is missing.
    """)


def _compared(name: str) -> tuple[Column, ...]:
    """Return the `Column`s (name, unit and meaning) that `compare_heads` makes from the head-table column `name`.

    These are `<name>_a`, `<name>_b` (values), `<name>_diff` (b less a) and, for columns with known noise, `<name>_band`
    (2 standard deviations) and `<name>_outside` (True beyond the band).
    """
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
            qk_change?     | ratio | sqrt(sum_t ||dM_t||^2 + ||dM_rest||^2) over the same of model a: M_t the complex
                           |       | operator of rotary pair t, M_rest what does not rotate, d model b less model a;
                           |       | without rotary positions ||dM|| / ||M||. Biases are in none. Of two models.
            ov_change?     | ratio | ||d(W_V W_O)|| / ||W_V W_O||, Frobenius norms, less means under LayerNorm. Of two
                           |       | models. Both are infinite where only that of model a is 0, NaN where both are.
            counterpart?   | label | Head of model b that is most alike by operators, wherever it stands. Of two models.
            counterpart_likeness? | ratio | Mean of qk and ov (`head_likeness`) with that head; ov alone where qk is
                           |       | NaN. Of two models.
        """),
        *(column for name in COMPARED_COLUMNS for column in _compared(name)),
    ),
    "`tls.compare_heads`",
)


def compare_heads(a: Any, b: Any) -> pd.DataFrame:
    """Compare every head of model b with the same head of model a: operators, spectrum and behaviour.

    Use it to see what fine-tuning or quantising changed, the most changed heads first.

    >>> import tlspectral as tls
    >>> base, changed = tls.load_model("tiny-rope"), tls.load_model("tiny-rope")
    >>> _ = changed.blocks[1].attn.q.original_component.weight.data[16:32].neg_()  # W_Q of L1H1
    >>> tls.compare_heads(base, changed)[["name", "qk_change"]].round(1).values.tolist()[:2]
    [['L1H1', 2.0], ['L0H0', 0.0]]

    Args:
        a, b: a model and a changed copy, each a TransformerBridge, a HookedTransformer, a model of transformers, or a
            name or path; or two tables of `analyze_heads` with equal settings. For models the tables are made here,
            which takes as long as two calls of `analyze_heads`.

    Returns:
        DataFrame with a row per head that both have, the most changed first: by the larger of `qk_change` and
        `ov_change` for models, by `change_rank` for tables. Its columns:

        * `layer, head, name`, and `change_rank` (1: most changed, by the better of `behaviour_rank`, `spectrum_rank`).
        * `behaviour_of`: which of `prev`, `dup`, `ind` changed most. `behaviour_change`: b less a (attention). Both are
          missing if no change exceeds its noise and 0.02. `spectrum_of` and `spectrum_change`: the same for `dir_frac`,
          `D_head`, `henrici` (shares). `behaviour_rank` and `spectrum_rank` rank heads by these changes.
        * `qk_change`, `ov_change`, for models only: the norm of the change of the query-key operator, and of W_V W_O,
          over the norm in model a. `counterpart`, `counterpart_likeness`, also for models only: the head of b that is
          most alike.
        * for each compared column of the head table: `<column>_a`, `<column>_b`, `<column>_diff` and, with known noise,
          `<column>_band` (2 standard deviations) and `<column>_outside` (True beyond it).

        `attrs["weights"]`: layers whose weights differ. `attrs["moved"]`: heads of a that stand at another index in b,
        with a warning.

    Raises:
        ValueError: models without a common basis (two trainings from scratch; see `heads.side_by_side`), different
            architectures or settings, no common head, or tables without the needed columns or attrs.
        TypeError: a table and a model, or the name of a table's file.

    Not established: that the function of a head changed. By noise alone, one head in twenty lies outside its band.
    Biases and rotary frequencies are not in the operators: see `attrs["outside"]`. More: docs/two_models.md.
    """
    for side, model in (("a", a), ("b", b)):
        if isinstance(model, str | os.PathLike) and Path(model).suffix.lower() in (".parquet", ".csv"):
            raise TypeError(f"{side} is the file name of a table: give the table itself, read_table({str(model)!r})")
    are_tables = [isinstance(model, pd.DataFrame) for model in (a, b)]
    if all(are_tables):
        return _compared_tables(a, b, None)
    if any(are_tables):
        kinds = [f"{side} is a {type(model).__name__}" for side, model in (("a", a), ("b", b))]
        raise TypeError(
            f"compare_heads takes two models or two tables: {' and '.join(kinds)}. Give both models, or replace the "
            "model by analyze_heads(model), with the settings of the table"
        )
    with open_layers(a, load=True) as layers_of_a, open_layers(b, load=True) as layers_of_b:
        sources = layers_of_a, layers_of_b
        operators = operator_changes(*sources)
    first, second = (analyze_heads(source.model if isinstance(source, AttentionView) else source) for source in sources)
    return _compared_tables(first, second, operators)


def _compared_tables(a: pd.DataFrame, b: pd.DataFrame, operators: OperatorChanges | None) -> pd.DataFrame:
    """Return the table of `compare_heads`, a new DataFrame with a row per head, made from the head tables `a` and `b`.

    `operators` adds the columns `qk_change` and `ov_change`, by which the rows are then sorted; None: only tables are
    known. Raises ValueError for tables that cannot be compared.
    """
    first, second = _checked(a, "a"), _checked(b, "b")
    first, second, alone = _shared_heads(first, second, a, b)
    settings = _same_settings(a, b)
    left_out = _lacking(first, second) | _other_meanings(a, b)
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
        changed_columns, change = _largest([name for name in names if name in kinds], compared, len(first))
        changes |= {f"{family}_of": changed_columns, f"{family}_change": change}
        ranks[f"{family}_rank"] = pd.Series(np.abs(change)).rank(ascending=False, method="min")
    # The better of the ranks of a head, then the other one.
    last = len(first) + 1
    ordered = np.sort(pd.DataFrame(ranks).fillna(last).to_numpy(), axis=1)
    joint = pd.Series(ordered[:, 0] * (last + 1) + ordered[:, 1]).where(ordered[:, 0] < last).rank(method="min")
    summary = {
        "layer": first["layer"],
        "head": first["head"],
        "change_rank": joint.astype("Int64"),
        **changes,
        **{name: rank.astype("Int64") for name, rank in ranks.items()},
    }
    table = pd.DataFrame(summary | compared)
    if operators is not None:
        table = table.merge(operators.table, on=_HEAD, how="left", validate="one_to_one")
    table = table.sort_values("change_rank", kind="stable", ignore_index=True)
    if operators is not None:
        largest = table[["qk_change", "ov_change"]].max(axis=1)
        table = table.loc[(-largest).sort_values(kind="stable").index].reset_index(drop=True)
    weights = layers_apart(a.attrs, b.attrs)
    attrs = {
        **{
            side: {name: heads.attrs[name] for name in _ORIGIN if name in heads.attrs}
            for side, heads in (("a", a), ("b", b))
        },
        "settings": settings,
        "bands": kinds,
        "floor": CHANGE_FLOOR,
        "left_out": {"columns": left_out, "heads": alone},
        "weights": weights,
        MEANINGS: min(followed(heads.attrs) for heads in (a, b)),
    }
    if operators is None:
        _warn_of_unseen(table, weights)
    else:
        attrs |= {"likeness": operators.likeness, "outside": operators.outside, "moved": operators.moved}
        _warn_of_moved(operators.moved)
    return COMPARE_HEADS.frame(table, attrs)


def _warn_of_unseen(table: pd.DataFrame, weights: dict[str, Any]) -> None:
    """Warn (UserWarning) of layers whose weights differ although none of their heads has a `change_rank` in `table`.

    `weights["differ"]` lists the layers whose hashes differ between models a and b. Nothing is returned.
    """
    ranked = {*table.loc[table["change_rank"].notna(), "layer"]}
    unseen = [layer for layer in weights.get("differ", []) if layer in {*table["layer"]} - ranked]
    if unseen:
        warn_caller(
            f"the weights of {layers_named(unseen)} differ between a and b, and no head of "
            f"{'it' if len(unseen) == 1 else 'them'} changed by {CHANGE_FLOOR:g} or more beyond its band. Spectra, and "
            "attention on random tokens, hardly see new directions: compare_heads of the two models in place of their "
            "tables adds qk_change and ov_change, which see every change of the operators"
        )


def _warn_of_moved(moved: dict[str, str]) -> None:
    """Warn (UserWarning) of heads that stand at another index in model b.

    `moved` has their names in b by their names in a.
    """
    if moved:
        some = ", ".join(f"{name} is {now}" for name, now in [*moved.items()][:4])
        warn_caller(
            f"{len(moved)} heads of a stand at another index in b ({some}{', ...' if len(moved) > 4 else ''}): their "
            "rows compare different heads. Column counterpart names the right ones"
        )


def layers_named(layers: list[int]) -> str:
    """Return the layers as text: "layer 1", "layers 0, 2"; for more than eight, their number and the first eight."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(map(str, layers[:8]))
    return f"layers {shown}" if len(layers) <= 8 else f"{len(layers)} layers ({shown}, ...)"


def _other_meanings(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, str]:
    """Return a dict from column to reason, as text: columns whose meaning a later release changed after only one of the
    head tables `a` and `b` was made.

    Such columns are not compared; a warning says so for each.
    """
    older = {side: other_meanings(table) for side, table in (("a", a), ("b", b))}
    reasons = {}
    for side, opposite in (("a", "b"), ("b", "a")):
        for place in older[side].keys() - older[opposite].keys():
            why = f"another meaning in {side}, made before a change: {CHANGES[place].text}"
            if names := [name for name in older[side][place] if name in COMPARED_COLUMNS]:
                reasons |= dict.fromkeys(names, why)
                warn_caller(f"{', '.join(names)} cannot be compared, and are left out: {why}")
    return reasons


def _checked(heads: pd.DataFrame, side: str) -> pd.DataFrame:
    """Return a copy of the head table `heads`, sorted by layer and head. `side` ("a" or "b") names the table in
    messages.

    Raises ValueError unless it has the columns and attrs that `compare_heads` needs, and each head once.
    """
    require(heads, (*_HEAD, *_ARCHITECTURE, *COMPARED_COLUMNS), "analyze_heads", name=f"table {side}")
    if heads.duplicated(_HEAD).any():
        raise ValueError(f"table {side} has a head twice: give one table of analyze_heads, not several tables joined")
    missing = [name for name in ("model", *_SETTINGS, "detectors") if name not in heads.attrs]
    if missing:
        raise ValueError(
            f"table {side} has no {', '.join(missing)} in its attrs, because joins and many edits drop them: give the "
            "table as analyze_heads or read_table returns it"
        )
    return heads.sort_values(_HEAD, ignore_index=True)


def _shared_heads(
    first: pd.DataFrame, second: pd.DataFrame, a: pd.DataFrame, b: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, int]]:
    """Return the rows of the heads that both tables have, of the first and of the second table, and the number of other
    heads.

    `first` and `second` are sorted copies of tables `a` and `b`, whose attrs name the models. The last result is `{"a":
    heads only in a, "b": heads only in b}`. Raises ValueError for no common head or for another architecture.
    """
    names = f"{a.attrs['model']} (a) and {b.attrs['model']} (b)"
    index_a, index_b = (pd.MultiIndex.from_arrays([table["layer"], table["head"]]) for table in (first, second))
    alone = {"a": int((~index_a.isin(index_b)).sum()), "b": int((~index_b.isin(index_a)).sum())}
    if alone["a"] == len(first):
        shapes = [f"{len(table)} heads of layers {sorted(set(table['layer']))}" for table in (first, second)]
        raise ValueError(f"{names} have no head in common: {shapes[0]} and {shapes[1]}: give tables of the same heads")
    first = first.loc[index_a.isin(index_b)].reset_index(drop=True)
    second = second.loc[index_b.isin(index_a)].reset_index(drop=True)
    for column in _ARCHITECTURE:
        alike = (first[column] == second[column]) | (first[column].isna() & second[column].isna())
        if not alike.all():
            row = int(np.argmin(alike.to_numpy()))
            layer, head = first.loc[row, _HEAD]
            raise ValueError(
                f"{names} differ in architecture: {column} of L{layer}H{head} is {first.loc[row, column]} and "
                f"{second.loc[row, column]}; give a model and a changed copy of it"
            )
    return first, second, alone


def _lacking(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, str]:
    """Return a dict from column to reason, such as "no value in a": compared columns that are all NaN in only one of
    the head tables `first` (a) and `second` (b).
    """
    reasons = {}
    for name in COMPARED_COLUMNS:
        without = [side for side, table in (("a", first), ("b", second)) if table[name].isna().all()]
        if len(without) == 1:
            reasons[name] = f"no value in {without[0]}"
    return reasons


def _noise(name: str, first: pd.DataFrame, second: pd.DataFrame) -> tuple[str | None, list[np.ndarray]]:
    """Return the source of a column's noise, and a list of its standard deviations per head in the first and second
    table.

    The source is "null" or "standard error over sequences". (None, []) if the column `name` has neither in both tables.
    """
    for kind, column in (("null", f"{name}_null_std"), ("standard error over sequences", f"{name}_se")):
        if all(column in table and table[column].notna().any() for table in (first, second)):
            return kind, [table[column].to_numpy(float) for table in (first, second)]
    return None, []


def _largest(
    names: list[str], compared: dict[str, Any], count: int
) -> tuple[list[str | None], Float64[np.ndarray, " heads"]]:
    """Return, for each of `count` heads, the column that changed most and its change: a list of names and an array of
    differences (b less a).

    `names` are the columns to choose from; `compared` has `<name>_diff` and `<name>_outside` for each. Only differences
    beyond the noise band and of at least 0.02 count; without any, the name is None and the difference NaN.
    """
    differences, sizes = [np.full(count, np.nan)], [np.zeros(count)]  # zeros: the largest where nothing counts
    for name in names:
        difference = compared[f"{name}_diff"].to_numpy()
        counts = compared[f"{name}_outside"].fillna(False).to_numpy(bool) & (np.abs(difference) >= CHANGE_FLOOR)
        differences.append(difference)
        sizes.append(np.where(counts, np.abs(difference), 0.0))
    best = np.argmax(sizes, axis=0)
    return [[None, *names][column] for column in best], np.stack(differences)[best, np.arange(count)]


def _same_settings(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    """Return the settings with which head tables a and b were both made: a dict `seed`, `null_draws`, `null_blocks`,
    `detectors`.

    `detectors` has the settings of the detectors, None if a table has no detectors. Raises ValueError for settings that
    differ.
    """
    settings = {key: _same_value(key, a.attrs[key], b.attrs[key]) for key in _SETTINGS}
    _same_value("extra content_scale, which changes M,", *("content_scale" in table for table in (a, b)))
    detectors = a.attrs["detectors"], b.attrs["detectors"]
    if any(table.attrs["detectors"] is None and bool(table[[*DETECTORS]].isna().to_numpy().all()) for table in (a, b)):
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
    """Return the value of the setting `key`, which must be equal in tables a and b. Raise ValueError if `of_a` differs
    from `of_b`.
    """
    if of_a != of_b:
        raise ValueError(
            f"the tables were made with different settings: {key} is {of_a} in a and {of_b} in b; make both by "
            "analyze_heads with equal arguments"
        )
    return of_a
