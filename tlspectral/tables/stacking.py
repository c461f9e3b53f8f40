"""Concatenate tables of the same columns, and bundle different tables into one that fits in a file."""

from collections.abc import Iterable, Mapping

import pandas as pd


def stacked(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the rows of tables, with a fresh index.

    The result has no `attrs`: each table's belong to it alone, and `pandas.concat` would compare them.
    """
    bare = [table.copy(deep=False) for table in tables]
    for table in bare:
        table.attrs = {}
    return pd.concat(bare, ignore_index=True)


def bundled(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put several tables into one, which `unbundled` takes apart. At least one of them has rows.

    The column `table` holds the names, `attrs["tables"]` the columns and dtypes. Index and `attrs` are lost.
    """
    columns = {
        name: {str(column): str(kind) for column, kind in table.dtypes.items()} for name, table in tables.items()
    }
    bundle = stacked(table.assign(table=name) for name, table in tables.items() if len(table))
    bundle.attrs = {"tables": columns}
    return bundle


def unbundled(bundle: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables that `bundled` was given, with a fresh index and without `attrs`."""
    bare = bundle.copy(deep=False)
    bare.attrs = {}
    # A column that only empty tables have is not in the bundle, so reindex in place of a selection.
    return {
        name: bare.loc[bare["table"] == name]
        .reindex(list(columns), axis="columns")
        .astype(columns)
        .reset_index(drop=True)
        for name, columns in bundle.attrs["tables"].items()
    }
