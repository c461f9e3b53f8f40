"""What a schema makes of data, and of the text that its columns are written as."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlspectral import read_table, write_table
from tlspectral.tables import describe_columns, schema
from tlspectral.tables.schema import Column, Schema, columns, known_schemas, spelled

TABLE = Schema(
    "test_schema",
    columns("""
        layer | index | Index of the block.
        head  | index | Index of the head.
        name  | label | The head in words.
        value | nat   | A number, which is NaN without data, |x| or not.
        good? | flag  | Whether it is good.
        note? | text  | Any text.
    """),
)
NAMES = [column.name for column in TABLE.columns]
schema._SCHEMAS.pop(TABLE.name)  # the other files of a process look at every table of the package


@pytest.mark.slow
@given(st.permutations(NAMES), st.sets(st.sampled_from(["good", "note"])), st.integers(0, 3))
def test_a_frame_has_the_order_of_the_schema_whatever_the_data_have(order, lacking, rows):
    data = pd.DataFrame({name: [0] * rows for name in order if name not in lacking})
    data.attrs = {"a": 1}
    frame = TABLE.frame(data, {"b": 2})
    assert list(frame) == [name for name in NAMES if name not in lacking]
    assert frame.attrs == {"a": 1, "b": 2, "table": "test_schema"}
    assert data.attrs == {"a": 1}
    assert list(data) == [name for name in order if name not in lacking]
    pd.testing.assert_frame_equal(TABLE.frame(frame), frame)


def test_names_of_heads_are_filled_in_and_data_come_as_frame_columns_or_rows():
    rows = [{"head": 3, "layer": 1, "value": 0.5}, {"head": 0, "layer": 16, "value": 1.5}]
    frame = TABLE.frame(rows)
    assert frame["name"].tolist() == ["L1H3", "L16H0"]
    for data in (pd.DataFrame(rows), {name: [row[name] for row in rows] for name in rows[0]}):
        pd.testing.assert_frame_equal(TABLE.frame(data), frame)
    assert TABLE.frame([{**rows[0], "name": "mine"}])["name"].tolist() == ["mine"]


@pytest.mark.parametrize("data", [[], {}, pd.DataFrame(), pd.DataFrame({"layer": [], "head": [], "value": []})])
def test_a_table_without_rows_has_the_types_of_its_columns(data):
    kinds = {"layer": "int64", "head": "int64", "name": "object", "value": "float64"}
    assert TABLE.frame(data).dtypes.astype(str).to_dict() == kinds
    assert TABLE.frame(data).attrs["table"] == "test_schema"


def test_columns_that_are_unknown_or_missing_are_refused():
    with pytest.raises(ValueError, match=r"table test_schema: columns \['other'\] .* columns \['value'\] are missing"):
        TABLE.frame({"layer": [0], "head": [0], "other": [1]})


def test_columns_are_read_from_text():
    assert TABLE.columns[3] == Column("value", "A number, which is NaN without data, |x| or not.", "nat")
    assert [column.always for column in TABLE.columns] == [True] * 4 + [False] * 2
    shared = (*columns("value | bit | Mine."), *TABLE.columns)
    taken = columns("head, layer?\n value\n new | 1 | New.", shared)
    assert [(column.name, column.unit, column.always) for column in taken] == [
        ("head", "index", True), ("layer", "index", False), ("value", "bit", True), ("new", "1", True)
    ]  # fmt: skip
    with pytest.raises(KeyError, match="other"):
        columns("layer, other", shared)


def test_a_schema_of_a_call_adds_columns_and_leaves_the_first(monkeypatch):
    monkeypatch.setitem(schema._SCHEMAS, TABLE.name, TABLE)
    more = Schema("test_schema", (*TABLE.columns, *columns("extra | 1 | Of one call.")))
    assert known_schemas()["test_schema"] is TABLE
    frame = more.frame({"layer": [0], "head": [0], "value": [0.0], "extra": [1.0]})
    assert describe_columns(frame)["meaning"].tolist()[-1] == "Of one call."


def test_texts_go_into_files_and_back(tmp_path, monkeypatch):
    frame = TABLE.frame({"layer": [0], "head": [0], "value": [0.5]})
    before = describe_columns(frame)
    write_table(frame, tmp_path / "table.parquet")
    monkeypatch.setattr(schema, "_DOCUMENTED", {})
    assert (describe_columns(frame)["meaning"] == "").all()
    pd.testing.assert_frame_equal(describe_columns(read_table(tmp_path / "table.parquet")), before)


def test_a_name_in_a_column_has_letters_digits_and_dashes():
    assert spelled("logit difference, part 2-b") == "logit_difference__part_2-b"
