"""Part files: each is read under its own name alone, with the attrs that its table was given."""

import shutil

import pandas as pd
import pytest

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import open_parts, read_table, write_table

# A model from a GGUF file has its name under `file`; a part that is read and written again has none of the folder's.
ATTRS = {"seed": 3, "file": "tiny.gguf", "given": {"made_with": 1}, "nested": {"tokens": [1, 2]}}


def table_of(number, attrs):
    table = pd.DataFrame({"number": [number]})
    table.attrs = dict(attrs)
    return table


@pytest.fixture
def folder(tmp_path):
    """A folder with two finished parts."""
    folder = open_parts(tmp_path / "parts", {"a": 1})
    for number in range(2):
        folder.write(f"part{number}", table_of(number, ATTRS))
    return folder


@pytest.mark.parametrize("attrs", [{}, ATTRS])
def test_a_part_is_read_under_its_own_name_with_the_attrs_it_was_given(folder, attrs):
    table = table_of(2, attrs)
    folder.write("part2", table)
    pd.testing.assert_frame_equal(folder.read("part2"), table)
    assert folder.read("part2").attrs == table.attrs == attrs
    assert folder.read("part3") is None


def test_a_part_copied_over_another_is_refused_by_name(folder):
    shutil.copy(folder.path / "part0.parquet", folder.path / "part1.parquet")
    with pytest.raises(IncompatibleCheckpoint, match=r"part1\.parquet holds part0: another part was copied there"):
        folder.read("part1")
    assert folder.read("part0")["number"].item() == 0


def test_a_part_without_a_name_is_refused(folder):
    """An earlier version wrote such parts."""
    file = folder.path / "part0.parquet"
    table = read_table(file)
    assert table.attrs.pop("file") == "part0"
    write_table(table, file)
    with pytest.raises(IncompatibleCheckpoint, match=r"part0\.parquet holds a part without a name.*; remove it"):
        folder.read("part0")


def test_a_part_of_other_settings_is_refused(folder, tmp_path):
    other = open_parts(tmp_path / "other", {"a": 2})
    shutil.copy(folder.path / "part0.parquet", other.path)
    with pytest.raises(IncompatibleCheckpoint, match=r"part0\.parquet was made with other settings than .*settings"):
        other.read("part0")
