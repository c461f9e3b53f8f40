"""A table that lacks what is needed is refused in the same words everywhere."""

import pandas as pd
import pytest

from tlspectral.tables.required import require


def test_what_is_missing_is_named_with_what_makes_it():
    table = pd.DataFrame({"layer": [0]})
    require(table, ["layer"], "analyze_heads")
    with pytest.raises(ValueError, match=r"the table has no column head, prev: give a table of analyze_heads$"):
        require(table, ["layer", "head", "prev"], "analyze_heads")
    with pytest.raises(ValueError, match=r"the table of runs has no rows: give a table of x with at least one$"):
        require(table.iloc[:0], ["layer"], "x", name="table of runs")
