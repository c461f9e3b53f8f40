"""`join`: everything that was measured on the heads of one model, as one table with a row per head."""

from dataclasses import replace
from typing import Any

import pandas as pd

from tlspectral.tables.meanings import carried, warn_of_older
from tlspectral.tables.same_model import origin_of, require_same_model
from tlspectral.tables.schema import Column, Schema, columns_of, require, require_one_row, spelled

KEYS = ("part", "mode", "kind", "band", "frequency", "offset")
"""Columns that tell several rows of one head apart, in the order in which they stand in the new names."""

_HEAD = ["layer", "head"]


def join(heads: pd.DataFrame, *tables: pd.DataFrame, **more: pd.DataFrame) -> pd.DataFrame:
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

    Args:
        heads: table of `analyze_heads`, whose rows and order are kept.
        tables: other tables with `layer` and `head`, such as `positional_symbolic`, `ablation_sweep`,
            `band_effects`, `frequency_table` or `heads.kernel_prediction` return.
        more: the same with a name, for tables that share columns with others.

    Returns:
        The columns of `heads`, then the columns of each table in its order. Each keeps its documentation, which
        `describe_columns` gives back and `write_table` keeps. `attrs` are as in `heads`, and `joined` holds what
        each other table says of itself.

    Raises:
        ValueError: a table of other weights, or of weights that cannot be compared; heads that `heads` lacks; several
            rows of one head that no key column tells apart; a column that stands there already; or a table whose
            `layer` and `head` name a sender.

    Every function that measures heads writes hashes of the weights into `attrs`, one per layer: the hashes of the
    layers that both tables have must agree. Tables of one model that was loaded for one and read from files for the
    other, or of two backends, are compared by the name of the model, its revision and its number of layers.

    Columns of a table that was made before they changed their meaning are joined with a warning that names them.

    What it does not establish: that the numbers belong together. The hashes are of attention, embedding and
    unembedding, not of MLPs. Prompts and seeds may differ from table to table: see `attrs["joined"]`.
    """
    require(heads, _HEAD, "analyze_heads", name="table of heads")
    require_one_row(heads, _HEAD, "choose its rows first", name="table of heads")
    joined = heads.reset_index(drop=True)
    index = joined.set_index(_HEAD).index
    warn_of_older(heads, "the table of heads")
    documents = dict(columns_of(heads.attrs))
    origins: dict[str, Any] = dict(heads.attrs.get("joined", {}))
    given = [(None, table) for table in tables] + list(more.items())
    for place, (label, table) in enumerate(given, 1):
        made_by = table.attrs.get("table")
        said = f"table {label or made_by or place}"
        require(table, _HEAD, "heads", name=said)
        unknown_origin = require_same_model(heads, table.attrs, f"the rows of the {said}")
        if unknown_origin:
            raise ValueError(
                f"cannot check that the {said} and the table of heads are of one model: {unknown_origin}. Make both "
                "with this version on one model; to a table that lost its attrs in pandas (concat, merge) give them "
                "back: table.attrs = original.attrs"
            )
        if "receiver" in table:
            raise ValueError(f"layer and head of the {said} are those of a sender: it has no row per head to join")
        warn_of_older(table, f"the {said}")
        wide, meanings = _wide(table, said)
        unknown = wide.index.difference(index)
        if len(unknown):
            raise ValueError(f"the {said} holds L{unknown[0][0]}H{unknown[0][1]}, which the table of heads lacks")
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
        left_out = {*origin_of(table.attrs), "versions", "columns"}
        origins[name] = {str(key): value for key, value in table.attrs.items() if key not in left_out}
    texts = {name: documents[name].meaning for name in joined if name in documents}
    made = ", ".join([f"{label}=" * bool(label) + str(table.attrs.get("table")) for label, table in given])
    schema = Schema(f"join(heads, {made})", tuple(documents[name] for name in texts), "`tls.tables.join`")
    joined.attrs = {**heads.attrs, "columns": texts, "joined": origins, "table": schema.name, **carried(heads)}
    return joined


def _wide(table: pd.DataFrame, said: str) -> tuple[pd.DataFrame, dict[str, Column]]:
    """Return the table with a row per head, and the documentation of its new columns."""
    bare = table.reset_index(drop=True)
    bare.attrs = {}
    known = columns_of(table.attrs)
    keys = [key for key in KEYS if key in table]
    values = [str(name) for name in table if name not in (*_HEAD, *keys, "name", "kv_head")]
    if not keys:
        require_one_row(bare, _HEAD, f"choose its rows first, as none of {', '.join(KEYS)} tells them apart", name=said)
        return bare.set_index(_HEAD).loc[:, values], {name: known[name] for name in values if name in known}
    if bare[keys].isna().to_numpy().any():
        raise ValueError(f"the {said} has a row without {' or '.join(keys)}: choose its rows first")
    require_one_row(bare, [*_HEAD, *keys], "choose its rows first", name=said)
    blocks, meanings = [], {}
    for chosen, rows in bare.groupby(keys, sort=False):
        by_key = dict(zip(keys, tuple[Any, ...](chosen), strict=True))  # type: ignore[arg-type]
        prefix = "".join(f"{_spelled(key, value)}_" for key, value in by_key.items())
        blocks.append(rows.set_index(_HEAD)[values].add_prefix(prefix))
        where = ", ".join(f"{key} {value}" for key, value in by_key.items())
        meanings |= {
            prefix + name: replace(known[name], name=prefix + name, meaning=f"{known[name].meaning} Where {where}.")
            for name in values
            if name in known
        }
    names = [name for block in blocks for name in block]
    if len(set(names)) < len(names):
        raise ValueError(f"the {said} has values of {' and '.join(keys)} that are spelled alike: rename them first")
    heads = bare.set_index(_HEAD).index.unique()
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
