"""Tables come back from a file exactly as they were written, or are refused with a reason."""

import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlspectral.tables import describe_columns, read_table, write_table
from tlspectral.tables.every_table import every_schema
from tlspectral.tables.head_columns import COLUMNS, EXTRA_COLUMNS, HEAD_COLUMNS
from tlspectral.tables.schema import require

pytestmark = pytest.mark.lowest

TABLES = every_schema()

NULL_OF = ("dir_frac", "D_head", "imag_mass", "henrici")


def heads(rows: int = 4) -> pd.DataFrame:
    """A table with every head column, some of it NaN."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({column.name: generator.random(rows) for column in HEAD_COLUMNS})
    frame["layer"], frame["head"], frame["kv_head"] = np.arange(rows) // 2, np.arange(rows) % 2, 0
    frame["rank"] = 8
    frame["name"] = [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame["status"], frame["bilinear"] = "ok", "exact"
    frame.loc[1, ["D_head", "prev"]] = np.nan
    frame["rope_imag_frac"] = np.nan
    frame.attrs = {
        "model": "tiny",
        "revision": None,
        "versions": {"torch": "2.13.0"},
        "score_check": {"worst_error": 1e-6, "layer": 0},
        "columns": {"D_head_null_mean": {"control_variate": True}},
    }
    return TABLES["analyze_heads"].frame(frame)


def assert_identical(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(
        found, expected, check_exact=True, check_index_type="exact", check_column_type="exact"
    )
    assert type(found.index) is type(expected.index)


# Documentation


def test_head_columns_are_the_documented_ones_in_order_and_described():
    first = "layer head name kv_head status bilinear outside_m rank dir_frac D_head lam_mass imag_mass henrici"
    second = "content_pos_frac self_match cond_eig spectral_radius prin_angle_mean prin_angle_max"
    null = " ".join(f"{m}_null_mean {m}_null_std {m}_z {m}_null_pct" for m in NULL_OF)
    rest = "rope_imag_frac freq_centroid hi_freq_dir rotary_fraction prev prev_se dup dup_se ind ind_se"
    expected = f"{first} {second} {null} {rest} copying positivity D_head_pct".split()
    assert [column.name for column in HEAD_COLUMNS] == expected
    assert [column.name for column in EXTRA_COLUMNS] == ["score_asym", "position_share", "content_scale"]
    described = describe_columns()
    assert list(described["name"]) == list(COLUMNS)
    assert described.loc[described["name"] == "freq_centroid", "unit"].item() == "rad/token"


# Round trips


@pytest.mark.parametrize("frame", [heads(), heads()[lambda table: table["head"] == 1]], ids=["whole", "filtered"])
def test_a_head_table_comes_back_as_it_was_written_and_plain_pandas_reads_it(tmp_path, frame):
    folder = tmp_path / "seed=3"  # it looks like a partition, and adds no column
    folder.mkdir()
    assert write_table(frame, str(folder / "heads.parquet")) is None
    found = read_table(folder / "heads.parquet")
    assert_identical(found, frame)
    assert found.attrs == frame.attrs
    plain = pd.read_parquet(folder / "heads.parquet", partitioning=None)
    assert_identical(plain, frame)
    assert plain.attrs == frame.attrs
    write_table(frame, folder / "heads.parquet", attrs_for_pandas=False)  # as in a file of a dataset
    assert pd.read_parquet(folder / "heads.parquet", partitioning=None).attrs == {}
    assert read_table(folder / "heads.parquet").attrs == frame.attrs


def test_lists_of_numbers_come_back_as_lists(tmp_path):
    frame = pd.DataFrame({"name": ["L0H0", "L0H1", "L1H0"], "draws": [[0.1, -2.0], None, []]})
    write_table(frame, tmp_path / "draws.parquet")
    assert read_table(tmp_path / "draws.parquet")["draws"].tolist() == [[0.1, -2.0], None, []]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
columns_of_any_kind = st.sampled_from(
    [
        np.array([1.5, np.nan, -np.inf]),
        np.array([1.5, np.nan, 0], dtype=np.float32),
        np.array([1, 2, 3], dtype=np.int32),
        np.array([True, False, True]),
        pd.array([1, None, 3], dtype="Int64"),
        pd.Series(["a", "b", ""]),
        pd.Categorical(["exact", "softcapped", "exact"]),
        pd.to_datetime(["2026-01-01", "2026-01-02", None]),
    ]
)


# One folder serves all examples: each writes over the file of the one before.
@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns=st.dictionaries(st.text(min_size=1, max_size=8), columns_of_any_kind, min_size=1, max_size=4),
    attrs=st.dictionaries(st.text(), json_values, max_size=4),
)
def test_any_table_and_any_json_provenance_come_back(tmp_path, columns, attrs):
    frame = pd.DataFrame(columns, index=pd.RangeIndex(3))
    frame.attrs = attrs
    write_table(frame, tmp_path / "any.parquet")
    found = read_table(tmp_path / "any.parquet")
    assert_identical(found, frame)
    assert found.attrs == attrs


def test_numpy_scalars_in_attrs_become_plain_numbers(tmp_path):
    frame = heads()
    frame.attrs = {"seed": np.int64(3), "check": {"error": np.float32(0.5), "passed": np.bool_(True)}, "t": (1, 2)}
    write_table(frame, tmp_path / "heads.parquet")
    plain = {"seed": 3, "check": {"error": 0.5, "passed": True}, "t": [1, 2]}
    assert read_table(tmp_path / "heads.parquet").attrs == plain
    assert type(frame.attrs["seed"]) is np.int64, "the caller's attrs were changed"


def test_docs_and_provenance_travel_in_the_schema(tmp_path):
    frame = heads().assign(mine=1.0)
    write_table(frame, tmp_path / "heads.parquet")
    schema = pq.read_schema(tmp_path / "heads.parquet")
    ours = json.loads(schema.metadata[b"tlspectral"])
    assert ours["format"] == 2
    assert ours["provenance"] == frame.attrs
    assert ours["columns"]["D_head"]["meaning"] == COLUMNS["D_head"].meaning
    assert schema.field("D_head").metadata[b"unit"] == b"share"
    assert "mine" in schema.names
    assert "mine" not in ours["columns"]
    assert b"meaning" not in (schema.field("mine").metadata or {})


def documented(path):
    """The meanings that a file carries, by column."""
    ours = json.loads(pq.read_schema(path).metadata[b"tlspectral"])
    return {name: entry["meaning"] for name, entry in ours["columns"].items()}


@pytest.mark.parametrize("name", ["nobody's", ["analyze_heads"], {"analyze_heads": 1}, 3, None])
def test_a_name_that_no_maker_gave_documents_nothing(tmp_path, name):
    """`loss` is a column of six tables, and none of them is this one."""
    frame = heads().assign(loss=2.0)
    frame.attrs["table"] = name
    write_table(frame, tmp_path / "heads.parquet")
    assert documented(tmp_path / "heads.parquet") == {}


def test_columns_that_the_user_renames_or_joins_go_without(tmp_path):
    """`rank` is a place among heads in `k_composition` and a matrix's rank in the head table."""
    ranked = pd.DataFrame({"layer": [0], "head": [1], "score": [0.5], "chance": [0.1], "rank": [1]})
    joined = ranked.rename(columns={"rank": "place"}).assign(D_head=0.5, dir_frac=0.7, own=1.0)
    for frame, kept in ((ranked, {*ranked}), (joined, {"layer", "head", "score", "chance"})):
        frame.attrs["table"] = "k_composition"
        write_table(frame, tmp_path / "table.parquet")
        found = documented(tmp_path / "table.parquet")
        assert set(found) == kept
        assert found == {
            column.name: column.meaning for column in TABLES["k_composition"].columns if column.name in kept
        }


@pytest.mark.slow
def test_a_file_read_and_written_again_keeps_its_docs_without_the_maker(tmp_path):
    write_table(heads().assign(mine=1.0), tmp_path / "heads.parquet")
    code = (
        "import sys; from tlspectral.tables import read_table, write_table; "
        "write_table(read_table(sys.argv[1]), sys.argv[2]); "
        "print([m for m in sys.modules if m in ('torch', 'tlspectral.heads')])"
    )
    paths = tmp_path / "heads.parquet", tmp_path / "again.parquet"
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert documented(paths[0]) == documented(paths[1])
    assert pq.read_schema(paths[0]).equals(pq.read_schema(paths[1]), check_metadata=True)


def test_docs_of_a_file_do_not_replace_those_of_the_maker(tmp_path):
    schema = pa.schema([("D_head", pa.float64()), ("odd", pa.float64())])
    ours = {
        "format": 1,
        "provenance": {"table": "analyze_heads"},
        "columns": {"D_head": {"meaning": "Another."}, "odd": {"meaning": "Odd.", "of_a_later_version": 1}, "no": 3},
    }
    table = pa.table({"D_head": [0.5], "odd": [1.0]}, schema=schema)
    pq.write_table(table.replace_schema_metadata({b"tlspectral": json.dumps(ours)}), tmp_path / "file.parquet")
    heads()
    write_table(read_table(tmp_path / "file.parquet"), tmp_path / "again.parquet")
    assert documented(tmp_path / "again.parquet") == {"D_head": COLUMNS["D_head"].meaning, "odd": "Odd."}


# Refusals


LISTS = pd.ArrowDtype(pa.list_(pa.float64()))  # written by pyarrow, and not read by pandas


def with_attrs(attrs):
    frame = heads()
    frame.attrs = attrs
    return frame


def beside(**columns):
    return pd.DataFrame({"layer": [0, 1], "head": [2, 3]}).assign(**columns)


@pytest.mark.parametrize(
    ("frame", "at", "error", "words"),
    [
        (with_attrs({"check": {"values": np.zeros(2)}}), "a", ValueError, r"df\.attrs\['check'\]\['values'\] is a nd"),
        (with_attrs({"layers": [1, {2}]}), "a", ValueError, r"df\.attrs\['layers'\]\[1\] is a set"),
        (with_attrs({"per_layer": {0: 1.0}}), "a", ValueError, r"attrs\['per_layer'\] has the key 0, but JSON"),
        (heads(), "nowhere/a", FileNotFoundError, "the folder .*nowhere does not exist"),
        (heads(), ".", IsADirectoryError, "is a folder"),
        (3, "a", TypeError, "write_table needs a DataFrame; found int"),
        (
            beside(mixed=[1, "a"]),
            "a",
            ValueError,
            "^column mixed holds int, str, which parquet cannot .*one type",
        ),
        (beside(kinds=pd.Categorical([1, "a"])), "a", ValueError, "^column kinds holds int, str"),
        (beside(rows=[[1], ["a"]]), "a", ValueError, r"^column rows holds list, .*\(Could not convert 'a'"),
        (beside(paths=[Path("a")] * 2), "a", ValueError, "^column paths holds .*Path, which parquet cannot store"),
        (beside(turns=[1j, 2j]), "a", ValueError, "^column turns holds complex"),
        (beside(large=[2**80, 1]), "a", ValueError, "^column large holds int, .*too large"),
        (beside(nothing=[{}, {}]), "a", ValueError, "^column nothing holds dict"),
        (beside().set_axis([1, "a"]), "a", ValueError, "^the index holds int, str, which parquet cannot store"),
        (beside(third=pd.cut([0, 1], 3)), "a", ValueError, "^column third holds Interval, .*or leave it out"),
        (beside().groupby(pd.cut([0, 1], 3), observed=True).mean(), "a", ValueError, "^the index holds Interval, "),
        (beside(draws=pd.Series([[1.0], [2.0]], dtype=LISTS)), "a", ValueError, "^column draws holds list, "),
        (beside(**{"0": 1}).rename(columns={"head": 0}), "a", ValueError, "^several columns are called 0: rename"),
        (pd.concat([beside(), beside()], axis=1), "a", ValueError, "^several columns are called head, layer: rename"),
        (
            pd.concat([beside(), beside()], axis=1),
            "a.csv",
            ValueError,
            "^several columns are called head, layer: rename",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, frame, at, error, words):
    with pytest.raises(error, match=words):
        inspect.unwrap(write_table)(frame, tmp_path / at)  # while tests run, annotations refuse what is no frame first
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_table(beside(), "~/a.parquet")
    write_table(beside(), "~/a.csv")
    assert read_table("~/a.parquet").equals(read_table(tmp_path / "a.parquet"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.columns.csv", "a.csv", "a.parquet"]


def test_a_table_that_cannot_be_read_again_replaces_no_file(tmp_path):
    file = tmp_path / "a.parquet"
    write_table(beside(), file)
    with pytest.raises(ValueError, match="column draws"):
        write_table(beside(draws=pd.Series([[1.0], [2.0]], dtype=LISTS)), file)
    assert read_table(file).equals(beside())


def of_format(ours):
    """A parquet file with metadata of ours, or of pandas alone, as bytes."""
    buffer = io.BytesIO()
    table = pa.Table.from_pandas(heads())
    pq.write_table(table if ours is None else table.replace_schema_metadata({b"tlspectral": ours}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"layer,head\n0,0\n", r"is not a parquet file \(it starts with b'laye'\)"),
        (b"", r"is not a parquet file \(it is empty\)"),
        (b"PAR1 and then nothing more of it", "is a damaged or cut-off parquet file"),
        (of_format(None)[:-20], "damaged or cut-off"),
        (of_format(None), r"tlspectral did not write .*pandas.*: read it with pandas\.read_parquet"),
        (of_format(b'{"format": 3, "provenance": {}, "columns": {}}'), "format 3; .* reads up to 2: upgrade"),
        (of_format(b'{"format": "x", "provenance": {}}'), "unknown format"),
        (of_format(b'{"format": 0, "provenance": {}}'), "unknown format"),
        (of_format(b'{"format": 1, "provenance": []}'), "unknown format"),
        (of_format(b'{"provenance": {}}'), "cannot be read"),
        (of_format(b"not json"), "cannot be read"),
        (of_format(b"[]"), "cannot be read"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "heads.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="is a folder, not a table"):
        read_table(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.parquet does not exist"):
        read_table(tmp_path / "none.parquet")
    for address in ("https://host/heads.parquet", "hf://datasets/me/heads.parquet", f"file://{path}"):
        with pytest.raises(FileNotFoundError, match=r"is an address, .*: fetch it"):
            read_table(address)


def test_what_is_missing_in_a_table_is_named_with_what_makes_it():
    table = pd.DataFrame({"layer": [0]})
    require(table, ["layer"], "analyze_heads")
    with pytest.raises(ValueError, match=r"the table has no column head, prev: give a table of analyze_heads$"):
        require(table, ["layer", "head", "prev"], "analyze_heads")
    with pytest.raises(ValueError, match=r"the table of runs has no rows: give a table of x with at least one$"):
        require(table.iloc[:0], ["layer"], "x", name="table of runs")


def test_a_flipped_bit_is_never_read_as_another_number(tmp_path):
    file = tmp_path / "heads.parquet"
    write_table(heads(), file)
    whole, drawn = file.read_bytes(), np.random.default_rng(0)
    for place in (4, *drawn.integers(len(whole), size=100)):  # byte 4 begins the first data page
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(drawn.integers(8))
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=re.escape(str(file))):
            read_table(file)
    file.write_bytes(whole)
    pd.testing.assert_frame_equal(read_table(file), heads())


def test_pages_carry_checksums_that_other_readers_can_verify(tmp_path):
    file = tmp_path / "heads.parquet"
    write_table(heads(), file)
    flipped = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    flipped[start + column.total_compressed_size - 1] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(OSError, match="CRC checksum"):
        pq.ParquetFile(file, page_checksum_verification=True).read()


# No half file


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, interruption):
    path = tmp_path / "heads.parquet"
    write_table(heads(), path)
    before = path.read_bytes()

    def cut_short(where, data):
        where.write_text(data[: len(data) // 2].decode("latin-1"))
        raise interruption

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(interruption):
        write_table(heads(2), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_through_a_link_keeps_the_link(tmp_path):
    target, link = tmp_path / "target.parquet", tmp_path / "link.parquet"
    link.symlink_to(target)
    write_table(heads(), link)
    assert link.is_symlink()
    assert_identical(read_table(target), heads())


@pytest.mark.parametrize("name", ["heads.xlsx", "heads.json", "heads.TXT", "heads.parquet.gz", "heads.feather"])
def test_a_name_of_another_format_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(
        ValueError, match=rf"{name}: write_table writes \.parquet and \.csv, not {Path(name).suffix.lower()}"
    ):
        write_table(heads(), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["heads", "qwen2.5", "heads.pq", "HEADS.PARQUET", ".heads", "heads.2026-11"])
def test_other_names_are_those_of_parquet_files(tmp_path, name):
    write_table(heads(), tmp_path / name)
    pd.testing.assert_frame_equal(read_table(tmp_path / name), pd.DataFrame(heads()))


def test_csv_has_the_numbers_and_beside_it_the_meaning_of_its_columns(tmp_path):
    frame = heads().assign(mine=1.0)
    frame.attrs["table"] = "analyze_heads"
    write_table(frame, tmp_path / "heads.csv")
    # pandas' shortest text of a number reads back as the same number.
    found = pd.read_csv(tmp_path / "heads.csv", float_precision="round_trip")
    pd.testing.assert_frame_equal(found, frame, check_exact=True)
    docs = pd.read_csv(tmp_path / "heads.columns.csv", index_col="name")
    assert docs.index.tolist() == frame.columns.tolist()
    assert docs["meaning"].drop("mine").notna().all()
    assert pd.isna(docs.loc["mine", "meaning"])
    write_table(frame[["layer", "D_head"]].set_index("layer"), tmp_path / "labelled.csv")
    assert pd.read_csv(tmp_path / "labelled.csv").columns.tolist() == ["layer", "D_head"]
    with pytest.raises(ValueError, match=r"heads\.csv is CSV, .*pandas\.read_csv"):
        read_table(tmp_path / "heads.csv")


def test_columns_of_an_earlier_release_get_their_names_of_now(tmp_path):
    earlier = pd.DataFrame({"name": ["L0H0"], "random_delta": [0.5], "random_overlap": [0.25], "random_draws": [2]})
    earlier.attrs = {"table": "band_effects"}
    other = earlier.copy()
    other.attrs = {"table": "of my own"}
    for table, file in ((earlier, "bands.parquet"), (other, "other.parquet")):
        write_table(table, tmp_path / file)
    with pytest.warns(UserWarning, match=r"bands\.parquet .* random_delta is now control_delta, random_overlap is now"):
        table = read_table(tmp_path / "bands.parquet")
    # Draws were a count, which no column is now.
    assert list(table) == ["name", "control_delta", "control_overlap", "random_draws"]
    assert table["control_delta"].tolist() == [0.5]
    assert list(read_table(tmp_path / "other.parquet")) == list(other)
