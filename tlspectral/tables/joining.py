"""`join`: put all tables about the heads of a model into a single table, or put a sweep beside the same sweep on other
tasks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from tlspectral.errors import earlier_calls
from tlspectral.tables.meanings import MEANINGS, carried, first_table, warn_of_older
from tlspectral.tables.same_model import origin_of, require_same_model
from tlspectral.tables.schema import Column, Schema, columns_of, require, require_one_row, spelled

KEYS = ("part", "mode", "kind", "band", "frequency", "offset")
"""Columns that distinguish several rows of one head. Their values precede the new column names in this order."""

_HEAD = ["layer", "head"]

_ROW = ("name", "part", "band", "position")
"""Columns that distinguish the rows of a sweep, in addition to layer and head. A set of heads has only a name."""

_OF_TASK = {
    *("task", "n_sequences", "batch", "higher_is_better", "tokens_sha256", "reference_sha256", "prompt_notes"),
    *("positions", "intact_value", "intact_value_se", "sums_per_sequence", "screen"),
}
"""`attrs` of a sweep that may differ between two tasks. All other `attrs` describe the removed part and its control."""


@earlier_calls(heads="table")
def join(table: pd.DataFrame, /, *tables: pd.DataFrame, **more: pd.DataFrame) -> pd.DataFrame:
    """Join tables about the heads of one model into a table with a row per head.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> heads = tls.analyze_heads(model, null_draws=10)
    >>> phase = tls.ablation_sweep(model, "rope_phase", heads=["L0H3", "L1H0"])
    >>> joined = tls.tables.join(heads, phase)
    >>> columns = ["name", "prev", "rope_phase_delta"]
    >>> joined[columns].dropna().round(1).to_string(index=False, header=False).split()
    ['L0H3', '0.9', '1.3', 'L1H0', '0.0', '0.0']

    Use it to compare numbers of different functions head by head. A sweep (table of removed parts) can also be joined
    with the same sweep on other tasks: `tls.tables.join(on_names, text=on_text)` adds `text_delta`, `text_excess_z` and
    so on.

    Args:
        table: table of `analyze_heads`, whose rows and order are kept, or a sweep of `ablation_sweep` or
            `band_effects`.
        tables: other tables with `layer` and `head`, such as the tables of `positional_symbolic`, `ablation_sweep`,
            `band_effects`, `frequency_table` or `heads.kernel_prediction`.
        more: tables given by a name, which is put before all their column names. Use it for tables that share columns
            with others.

    Returns:
        DataFrame: the columns of `table`, then the columns of each other table, in their units. If a table has several
        rows per head, the value of part, mode, kind, band, frequency or offset precedes the name: `rope_phase_delta`. A
        head that a table lacks has missing values in this table's columns. `attrs["joined"]` has the `attrs` of each
        other table.

    Raises:
        ValueError: a table has other weights, or weights that cannot be compared; it has a head that `table` lacks;
            several of its rows belong to one head; a column exists already; or a second sweep removed another part than
            the first.

    A warning names columns whose meaning changed since a table was made.

    Not established: that the numbers belong together. Prompts and seeds may differ: see `attrs["joined"]`. Hashes cover
    attention, embedding and unembedding, not MLPs. More: docs/table.md
    """
    require(table, _HEAD, "analyze_heads", name="table of heads")
    joined = table.reset_index(drop=True)
    first = first_table(table.attrs) if _is_sweep(table) else None
    warn_of_older(table, "the table of heads")
    documents = dict(columns_of(table.attrs))
    origins: dict[str, Any] = dict(table.attrs.get("joined", {}))
    labelled = [(None, added) for added in tables] + list(more.items())
    for place, (label, added) in enumerate(labelled, 1):
        made_by = added.attrs.get("table")
        title = f"table {label or made_by or place}"
        require(added, _HEAD, "heads", name=title)
        unknown_origin = require_same_model(table, added.attrs, f"the rows of the {title}")
        if unknown_origin:
            raise ValueError(
                f"cannot check that the {title} and the table of heads are of one model: {unknown_origin}. Make both "
                "tables with this version on one model. If pandas (concat, merge) dropped the attrs of a table, "
                "restore them: table.attrs = original.attrs"
            )
        if "receiver" in added:
            raise ValueError(
                f"the {title} has a row per edge: its layer and head name the sender. join needs a row per head: leave "
                "this table out"
            )
        warn_of_older(added, f"the {title}")
        rows, on = _HEAD, ""
        if first is not None and first == made_by and _is_sweep(added):
            _require_same_cut(table.attrs, added.attrs, title)
            rows = [*_HEAD, *(key for key in _ROW if key in table and key in added)]
            on = f" Measured on the task {added.attrs.get('task')}."
        require_one_row(table, rows, "choose its rows first", name="table of heads")
        index = joined.set_index(rows).index
        wide, meanings = _wide(added, title, rows, on)
        unknown = wide.index.difference(index)
        if len(unknown):
            raise ValueError(
                f"the {title} has a row for {_row_said(rows, unknown[0])}, which the table of heads lacks: choose the "
                "rows of its heads first"
            )
        if label is not None:
            wide.columns = [f"{label}_{name}" for name in wide]
            meanings = {f"{label}_{name}": replace(column, name=f"{label}_{name}") for name, column in meanings.items()}
        repeated = [name for name in wide if name in joined]
        if repeated:
            raise ValueError(
                f"the {title} has the column {repeated[0]}, which the joined table has already: give the table a name, "
                "join(heads, other=table)"
            )
        joined = pd.concat([joined, _filled(wide, index).reset_index(drop=True)], axis=1)
        documents |= meanings
        name = str(label or made_by or place)
        name = f"{name}_{len(origins) + 1}" if name in origins else name
        left_out = {*origin_of(added.attrs), "versions", "columns"}
        origins[name] = {str(key): value for key, value in added.attrs.items() if key not in left_out}
    texts = {name: documents[name].meaning for name in joined if name in documents}
    made = ", ".join([f"{label}=" * bool(label) + str(added.attrs.get("table")) for label, added in labelled])
    schema = Schema(f"join({first or 'heads'}, {made})", tuple(documents[name] for name in texts), "`tls.tables.join`")
    joined.attrs = {**table.attrs, "columns": texts, "joined": origins, "table": schema.name, **carried(table)}
    return joined


def _is_sweep(table: pd.DataFrame) -> bool:
    """Return whether a table is a sweep (effects of removed parts), which has a column part or band."""
    return "part" in table or "band" in table


def _require_same_cut(here: Mapping[Any, Any], there: Mapping[Any, Any], title: str) -> None:
    """Raise ValueError if two sweeps differ in more than their task, such as in the removed part or its control.

    `here` are the `attrs` of the first sweep, `there` of the second, which messages call `title`.
    """
    ignored = {*_OF_TASK, *origin_of(here), *origin_of(there), "table", "columns", "joined", "versions", MEANINGS}
    different = {
        str(name): (there.get(name), here.get(name))
        for name in {**here, **there}
        if name not in ignored and _as_json(here.get(name)) != _as_json(there.get(name))
    }
    if different:
        differ = ", ".join(
            f"{name} is {added!r:.60} in the {title} and {first!r:.60} in the table of heads"
            for name, (added, first) in different.items()
        )
        raise ValueError(
            f"the {title} and the table of heads do not remove the same on two tasks: {differ}. Measure both with the "
            "same settings"
        )


def _as_json(value: Any) -> str:
    """Return a value as JSON text, so that equal lists and tuples give equal texts."""
    return json.dumps(value, sort_keys=True, default=str)  # tables read from a file have lists instead of tuples


def _row_said(rows: list[str], values: Sequence[Any]) -> str:
    """Return text that names a row of a table in messages: "L0H3" or the name of its set, then other key columns, such
    as "band slow".

    `rows` are the names of the key columns, `values` the row's values in them.
    """
    by_key = dict(zip(rows, values, strict=True))
    name = by_key.get("name", f"L{by_key['layer']}H{by_key['head']}")
    return ", ".join([str(name), *(f"{key} {by_key[key]}" for key in rows if key not in (*_HEAD, "name"))])


def _wide(table: pd.DataFrame, title: str, rows: list[str], on: str) -> tuple[pd.DataFrame, dict[str, Column]]:
    """Return (wide table, dict from each new column to its `Column`): the wide table has one row per value of the
    columns `rows`.

    Values of further key columns such as part become prefixes of the column names. `on` is a sentence added to the
    meaning of each column, and `title` names the table in messages. Raises ValueError for two rows that would fall
    together.
    """
    bare = table.reset_index(drop=True)
    bare.attrs = {}
    known = {name: replace(column, meaning=column.meaning + on) for name, column in columns_of(table.attrs).items()}
    keys = [key for key in KEYS if key in table and key not in rows]
    values = [str(name) for name in table if name not in (*rows, *keys, "name", "kv_head")]
    if not keys:
        require_one_row(bare, rows, f"choose its rows first, as none of {', '.join(KEYS)} tells them apart", name=title)
        return bare.set_index(rows).loc[:, values], {name: known[name] for name in values if name in known}
    if bare[keys].isna().to_numpy().any():
        raise ValueError(f"the {title} has a row without {' or '.join(keys)}: choose its rows first")
    require_one_row(bare, [*rows, *keys], "choose its rows first", name=title)
    blocks, meanings = [], {}
    for chosen, block in bare.groupby(keys, sort=False):
        by_key = dict(zip(keys, tuple[Any, ...](chosen), strict=True))  # type: ignore[arg-type]
        prefix = "".join(f"{_spelled(key, value)}_" for key, value in by_key.items())
        blocks.append(block.set_index(rows)[values].add_prefix(prefix))
        where = ", ".join(f"{key} {value}" for key, value in by_key.items())
        meanings |= {
            prefix + name: replace(known[name], name=prefix + name, meaning=f"{known[name].meaning} Where {where}.")
            for name in values
            if name in known
        }
    names = [name for block in blocks for name in block]
    if len(set(names)) < len(names):
        raise ValueError(f"the {title} has values of {' and '.join(keys)} that are spelled alike: rename them first")
    heads = bare.set_index(rows).index.unique()
    return pd.concat([_filled(block, heads) for block in blocks], axis=1), meanings


def _spelled(key: str, value: Any) -> str:
    """Return a value of the key column `key` as a prefix of column names: "rope_phase" for a text, "frequency_3" for a
    number.
    """
    text = spelled(str(value))
    return text if isinstance(value, str) else f"{key}_{text}"


def _filled(wide: pd.DataFrame, index: pd.Index) -> pd.DataFrame:
    """Return a copy of the table `wide` with exactly the rows of `index`, in its order; a row that the table lacks gets
    missing values (pandas' nullable types for whole numbers and booleans).
    """
    # Whole numbers and flags cannot be missing in numpy's types, so they become pandas' nullable types.
    if len(index.difference(wide.index)):
        kinds = {"b": "boolean", "i": "Int64", "u": "Int64"}
        wide = wide.astype({name: kinds[kind.kind] for name, kind in wide.dtypes.items() if kind.kind in kinds})
    return wide.reindex(index)
