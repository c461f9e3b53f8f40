"""Frames checked against what the documentation says of their table."""

import pandas as pd

from tlspectral.tables.every_table import every_schema

TABLES = every_schema()


def assert_described(*frames: pd.DataFrame, released: bool = False) -> None:
    """The frames name one documented table, have its columns in its order, and together have all of them.

    `released` is for published tables, whose columns stand in the order of whoever released them.
    """
    names = {frame.attrs.get("table") for frame in frames}
    assert len(names) == 1, names
    (name,) = names
    assert name in TABLES, f"{name} is no documented table"
    columns = [column.name for column in TABLES[name].columns]
    assert {column for frame in frames for column in frame} == set(columns), name
    flags = [column.name for column in TABLES[name].columns if column.unit == "flag"]
    for frame in frames:
        assert released or list(frame) == [column for column in columns if column in frame], name
        assert all(frame[column].dtype in ("bool", "boolean") for column in flags if column in frame), name
