"""Names of the schema as tables that are described in `columns.py` use them."""

import pandas as pd

from tlspectral.tables.schema import Column as Column
from tlspectral.tables.schema import Schema
from tlspectral.tables.schema import columns_of as columns_of
from tlspectral.tables.schema import remember as remember


class Table(Schema):
    """A schema whose columns come last."""

    def __init__(self, name: str, made_by: str, columns: tuple[Column, ...]) -> None:
        super().__init__(name, columns, made_by)


def named(frame: pd.DataFrame, table: Schema) -> pd.DataFrame:
    """Write the table's name into the frame's `attrs`, in place, and fill in the names of heads."""
    documented = {column.name: column for column in table.columns}
    if "name" in documented and "name" not in frame and {"layer", "head"} <= set(frame):
        names = "L" + frame["layer"].astype(str) + "H" + frame["head"].astype(str)
        frame.insert(list(frame).index("head") + 1, "name", names)
    frame.attrs["table"] = table.name
    return frame
