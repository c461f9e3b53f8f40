"""Containers of any library as Python values: what is an array, what a frame, and what stands side by side."""

from collections import namedtuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from tlspectral.containers import are_columns, column_names, columns_of, is_array, named_fields, plain, values

RECORDS = np.array([(2, 1.5), (3, 0.5)], dtype=[("a", int), ("b", float)])


@pytest.mark.parametrize(
    "value",
    [7, np.int64(7), np.array(7), torch.tensor(7), pa.scalar(7), np.array(7, dtype=object), np.float32(7)],
    ids=lambda value: type(value).__module__,
)
def test_numbers_without_axes_are_those_of_python(value):
    assert plain(value) == 7
    assert type(plain(value)) in (int, float)


def test_what_has_axes_names_or_neither_stays():
    for value in ("text", [7], np.array([7]), RECORDS[0], None):
        assert plain(value) is value


@pytest.mark.parametrize(
    "given",
    [
        [1, 2], (1, 2), iter([1, 2]), {1: 0, 2: 0}.keys(), np.array([1, 2]), torch.tensor([1, 2]), pd.Series([1, 2]),
        pd.Index([1, 2]), pd.array([1, 2]), pa.array([1, 2]), pa.chunked_array([[1], [2]]), pl.Series([1, 2]),
        [np.int64(1), torch.tensor(2)], np.array([1, 2], dtype=object), memoryview(b"\x01\x02"),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_values_of_containers_of_every_library(given):
    found = values(given)
    assert found == [1, 2]
    assert {*map(type, found)} == {int}


def test_cells_become_lists_and_entries_of_lists_stay():
    rows = np.array([[1, 2], [3, 4]])
    assert values(rows) == values(pd.Series([*rows])) == values(pa.array(rows.tolist())) == [[1, 2], [3, 4]]
    assert values([*rows])[0] is not None
    assert all(isinstance(one, np.ndarray) for one in values([*rows]))


@pytest.mark.parametrize(
    "given",
    ["text", b"text", 7, None, np.array(7), torch.tensor(7), {"a": 1}, pd.DataFrame({"a": [1]}), RECORDS],
    ids=str,
)
def test_text_mappings_and_frames_hold_no_values(given):
    """A frame that is iterated gives the names of its columns, or the columns."""
    assert values(given) is None


def test_what_stands_side_by_side():
    columns = np.array([1, 0]), np.array([2, 1])
    for given in (columns, [*columns], tuple(map(torch.tensor, columns)), ([1, 0], [2, 1]), columns[:1],
                  (pd.Series([1]), pa.array([2])), torch.tensor([1.0, 2.0]).topk(2)):  # fmt: skip
        assert are_columns(given)
    for given in ([[1, 0], [2, 1]], ((1, 0), (2, 1)), ([1, 0], [2, 1], [3, 1]), (1, 0), [], "ab", np.eye(2),
                  [np.eye(2)], [*RECORDS], [row for _, row in pd.DataFrame({"a": [1, 2]}).iterrows()]):  # fmt: skip
        assert not are_columns(given)


@pytest.mark.parametrize(
    "row",
    [
        {"a": 2, "b": 1.5},
        {"a": np.int64(2), "b": torch.tensor(1.5)},
        RECORDS[0],
        RECORDS.view(np.recarray)[0],
        np.array(RECORDS[0]),
        pd.Series({"b": 1.5, "a": 2}),
        namedtuple("Row", "b a")(1.5, 2),
        plain(pa.scalar({"b": 1.5, "a": 2})),
    ],
    ids=lambda row: type(row).__name__,
)
def test_fields_of_rows_by_name(row):
    assert named_fields(row) == {"a": 2, "b": 1.5}


@pytest.mark.parametrize("given", [(1, 2), [1, 2], "text", np.eye(2), pd.DataFrame({"a": [1]}), 7, None], ids=str)
def test_what_is_no_row_has_no_fields(given):
    assert named_fields(given) is None


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [2, 3], "b": [1.5, 0.5]}), pl.DataFrame({"a": [2, 3], "b": [1.5, 0.5]}), RECORDS,
        pa.table({"a": [2, 3], "b": [1.5, 0.5]}), pa.RecordBatch.from_pydict({"a": [2, 3], "b": [1.5, 0.5]}),
        pa.table({"a": [2, 3], "b": [1.5, 0.5]}).to_reader(),
    ],
    ids=lambda frame: type(frame).__module__,
)  # fmt: skip
def test_columns_of_frames_of_every_library(frame):
    assert column_names(frame) == ["a", "b"]
    assert columns_of(frame, ("b", "a")) == [[1.5, 0.5], [2, 3]]


def test_a_frame_that_cannot_be_read_is_refused_by_its_type():
    lazy = pl.DataFrame({"a": [1]}).lazy()
    assert column_names(lazy) == ["a"]
    with pytest.raises(TypeError, match=r"the columns of a polars\..*LazyFrame cannot be read: give a pandas"):
        columns_of(lazy, ("a",))


def test_what_is_an_array():
    for given in (np.eye(2), torch.ones(1), pd.Series([1]), pa.array([1]), pl.Series([1]), np.array(["a"])):
        assert is_array(given)
    for given in ([1], (1,), "text", {"a": 1}, {1}, 7, np.int64(7), np.array(7), torch.tensor(7), None, range(2)):
        assert not is_array(given)
