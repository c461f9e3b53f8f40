"""`join`: everything that was measured on the heads of one model as one table, and one sweep on several tasks."""

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
"""Columns that tell several rows of one head apart, in the order in which they stand in the new names."""

_HEAD = ["layer", "head"]

_ROW = ("name", "part", "band", "position")
"""Columns that tell the rows of a sweep apart, beside layer and head: a set of heads has its name alone."""

_OF_TASK = {
    *("task", "n_sequences", "batch", "higher_is_better", "tokens_sha256", "reference_sha256", "prompt_notes"),
    *("positions", "intact_value", "intact_value_se", "sums_per_sequence", "screen"),
}
"""`attrs` of a sweep that may differ between two tasks. All others say what was removed, and beside which control."""


@earlier_calls(heads="table")
def join(table: pd.DataFrame, /, *tables: pd.DataFrame, **more: pd.DataFrame) -> pd.DataFrame:
    """Join tables about the heads of one model into one frame with a row per head.

        heads = tls.analyze_heads(model)
        phase, output = (tls.ablation_sweep(model, part) for part in ("rope_phase", "output"))
        text = tls.ablation_sweep(model, "output", task="language")
        joined = tls.tables.join(heads, phase, output, text=text)
        joined[["name", "prev", "rope_phase_delta", "output_delta", "text_output_delta"]]
        tls.tables.describe_columns(joined)

    A table with one row per head adds its columns under their own names. Where a table has one of the columns part,
    mode, kind, band, frequency or offset, its value stands before the name: `rope_phase_delta` is `delta` where
    `part` is rope_phase, and `frequency_3_im_norm` is `im_norm` where `frequency` is 3. Other characters than letters,
    digits, `_` and `-` become `_`. A table given by keyword has that name before all its columns. A head that a table
    lacks has missing values there; whole numbers and flags then become pandas' nullable types.

    Two sweeps of one part on two tasks stand side by side: rows are matched by head or set, part and position, and
    the second table's columns have its keyword in front.

        on_names, on_text = (tls.ablation_sweep(model, "M_S", task=task, **settings) for task in (names, "language"))
        tls.tables.join(on_names, text=on_text)[["name", "excess_z", "text_excess_z"]]

    Args:
        table: table of `analyze_heads`, whose rows and order are kept; or a sweep (`band_effects` too), to set the same
            on other tasks beside it.
        tables: other tables with `layer` and `head`, such as `positional_symbolic`, `ablation_sweep`,
            `band_effects`, `frequency_table` or `heads.kernel_prediction` return.
        more: the same with a name, for tables that share columns with others.

    Returns:
        The columns of `heads`, then the columns of each table in its order. Each keeps its documentation, which
        `describe_columns` gives back and `write_table` keeps. `attrs` are as in `heads`, and `joined` holds what
        each other table says of itself.

    Raises:
        ValueError: a table of other weights, or of weights that cannot be compared; heads that `heads` lacks; several
            rows of one head that no key column tells apart; a column that stands there already; a table whose
            `layer` and `head` name a sender; or a sweep beside one of another part, replacement, control, number of
            draws, seed, position or set, which is not the same cut.

    Every function that measures heads writes hashes of the weights into `attrs`, one per layer: the hashes of the
    layers that both tables have must agree. Tables of one model that was loaded for one and read from files for the
    other, or of two backends, are compared by the name of the model, its revision and its number of layers.

    Columns of a table that was made before they changed their meaning are joined with a warning that names them.

    What it does not establish: that the numbers belong together. The hashes are of attention, embedding and
    unembedding, not of MLPs. Prompts and seeds may differ from table to table: see `attrs["joined"]`.
    """
    require(table, _HEAD, "analyze_heads", name="table of heads")
    joined = table.reset_index(drop=True)
    first = first_table(table.attrs) if _is_sweep(table) else None
    warn_of_older(table, "the table of heads")
    documents = dict(columns_of(table.attrs))
    origins: dict[str, Any] = dict(table.attrs.get("joined", {}))
    given = [(None, added) for added in tables] + list(more.items())
    for place, (label, added) in enumerate(given, 1):
        made_by = added.attrs.get("table")
        said = f"table {label or made_by or place}"
        require(added, _HEAD, "heads", name=said)
        unknown_origin = require_same_model(table, added.attrs, f"the rows of the {said}")
        if unknown_origin:
            raise ValueError(
                f"cannot check that the {said} and the table of heads are of one model: {unknown_origin}. Make both "
                "with this version on one model; to a table that lost its attrs in pandas (concat, merge) give them "
                "back: table.attrs = original.attrs"
            )
        if "receiver" in added:
            raise ValueError(f"layer and head of the {said} are those of a sender: it has no row per head to join")
        warn_of_older(added, f"the {said}")
        rows, on = _HEAD, ""
        if first is not None and first == made_by and _is_sweep(added):
            _require_same_cut(table.attrs, added.attrs, said)
            rows = [*_HEAD, *(key for key in _ROW if key in table and key in added)]
            on = f" On the task {added.attrs.get('task')}."
        require_one_row(table, rows, "choose its rows first", name="table of heads")
        index = joined.set_index(rows).index
        wide, meanings = _wide(added, said, rows, on)
        unknown = wide.index.difference(index)
        if len(unknown):
            raise ValueError(f"the {said} holds {_row_said(rows, unknown[0])}, which the table of heads lacks")
        if label is not None:
            wide.columns = [f"{label}_{name}" for name in wide]
            meanings = {f"{label}_{name}": replace(one, name=f"{label}_{name}") for name, one in meanings.items()}
        repeated = [name for name in wide if name in joined]
        if repeated:
            raise ValueError(
                f"the {said} has the column {repeated[0]}, which stands there already: give the table a name of its "
                "own, join(heads, other=table)"
            )
        joined = pd.concat([joined, _filled(wide, index).reset_index(drop=True)], axis=1)
        documents |= meanings
        name = str(label or made_by or place)
        name = f"{name}_{len(origins) + 1}" if name in origins else name
        left_out = {*origin_of(added.attrs), "versions", "columns"}
        origins[name] = {str(key): value for key, value in added.attrs.items() if key not in left_out}
    texts = {name: documents[name].meaning for name in joined if name in documents}
    made = ", ".join([f"{label}=" * bool(label) + str(added.attrs.get("table")) for label, added in given])
    schema = Schema(f"join({first or 'heads'}, {made})", tuple(documents[name] for name in texts), "`tls.tables.join`")
    joined.attrs = {**table.attrs, "columns": texts, "joined": origins, "table": schema.name, **carried(table)}
    return joined


def _is_sweep(table: pd.DataFrame) -> bool:
    return "part" in table or "band" in table


def _require_same_cut(here: Mapping[Any, Any], there: Mapping[Any, Any], said: str) -> None:
    """Refuse two sweeps that differ in more than their task, by their `attrs`. Raises ValueError."""
    apart = {*_OF_TASK, *origin_of(here), *origin_of(there), "table", "columns", "joined", "versions", MEANINGS}
    found = {
        str(name): (there.get(name), here.get(name))
        for name in {**here, **there}
        if name not in apart and _as_json(here.get(name)) != _as_json(there.get(name))
    }
    if found:
        differ = ", ".join(f"{name} is {a!r:.60} there and {b!r:.60} here" for name, (a, b) in found.items())
        raise ValueError(
            f"the {said} is not the same cut as the table of heads on another task: {differ}. Measure both with the "
            "same settings"
        )


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # a file has lists in the place of tuples


def _row_said(rows: list[str], values: Sequence[Any]) -> str:
    """Return a row as a message calls it: L0H3, or the name of its set, and what else tells it apart."""
    by_key = dict(zip(rows, values, strict=True))
    name = by_key.get("name", f"L{by_key['layer']}H{by_key['head']}")
    return ", ".join([str(name), *(f"{key} {by_key[key]}" for key in rows if key not in (*_HEAD, "name"))])


def _wide(table: pd.DataFrame, said: str, rows: list[str], on: str) -> tuple[pd.DataFrame, dict[str, Column]]:
    """Return the table with a row for each value of the columns `rows`, and the documentation of its new columns.

    `on` stands behind the meaning of each column.
    """
    bare = table.reset_index(drop=True)
    bare.attrs = {}
    known = {name: replace(one, meaning=one.meaning + on) for name, one in columns_of(table.attrs).items()}
    keys = [key for key in KEYS if key in table and key not in rows]
    values = [str(name) for name in table if name not in (*rows, *keys, "name", "kv_head")]
    if not keys:
        require_one_row(bare, rows, f"choose its rows first, as none of {', '.join(KEYS)} tells them apart", name=said)
        return bare.set_index(rows).loc[:, values], {name: known[name] for name in values if name in known}
    if bare[keys].isna().to_numpy().any():
        raise ValueError(f"the {said} has a row without {' or '.join(keys)}: choose its rows first")
    require_one_row(bare, [*rows, *keys], "choose its rows first", name=said)
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
        raise ValueError(f"the {said} has values of {' and '.join(keys)} that are spelled alike: rename them first")
    heads = bare.set_index(rows).index.unique()
    return pd.concat([_filled(block, heads) for block in blocks], axis=1), meanings


def _spelled(key: str, value: Any) -> str:
    text = spelled(str(value))
    return text if isinstance(value, str) else f"{key}_{text}"


def _filled(wide: pd.DataFrame, index: pd.Index) -> pd.DataFrame:
    """Return the rows of the index, those that the table lacks with missing values."""
    if len(index.difference(wide.index)):
        kinds = {"b": "boolean", "i": "Int64", "u": "Int64"}
        wide = wide.astype({name: kinds[kind.kind] for name, kind in wide.dtypes.items() if kind.kind in kinds})
    return wide.reindex(index)
