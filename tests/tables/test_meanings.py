"""Columns that changed their meaning under one name: tables say which they have, and older ones are named."""

import re

import numpy as np
import pandas as pd
import pytest
from command_line import heads as head_table
from page_code import ROOT

import tlspectral as tls
from tlspectral.heads import compare_heads
from tlspectral.hooks import summarize_sweep
from tlspectral.tables import join, read_table, write_table
from tlspectral.tables.every_table import every_schema
from tlspectral.tables.meanings import CHANGES, Change, other_meanings, with_values
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns

ORIGIN = {"model": "tiny", "backend": "bridge", "weights_by_layer": {"0": "a" * 64, "1": "b" * 64}, "n_layers": 2}
HEADS = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]}


NOW = len(CHANGES)


def heads(meanings: int | None = NOW, **columns):
    table = pd.DataFrame({**HEADS, "copying": [0.1, 0.2, 0.3, 0.4], "prev": 0.5, **columns})
    table.attrs = {**ORIGIN, "table": "analyze_heads"} | ({} if meanings is None else {"meanings": meanings})
    return table


def sweep(meanings=None, part="output", **attrs):
    table = pd.DataFrame({**HEADS, "part": part, "delta": [1.0, 2.0, 3.0, 4.0], "control_p": 0.5})
    table.attrs = {**ORIGIN, "task": "names", "table": "ablation_sweep", "higher_is_better": True, **attrs}
    if meanings is not None:
        table.attrs["meanings"] = meanings
    return table


def table_of(name, **columns):
    table = pd.DataFrame({**HEADS, **columns})
    table.attrs = {**ORIGIN, "table": name}
    return table


OLDER = {
    "heads": (lambda: heads(None), "copying may mean .* W_U was used as the model held it"),
    "heads that say so": (lambda: heads(0), "copying may mean something else than now. Before, W_U"),
    "copying alone": (lambda: table_of("copying_scores", positivity=0.5), "positivity may mean .* W_U"),
    "a history": (lambda: table_of("head_history.heads", copying=0.5), "copying may mean .* W_U"),
    "many models": (lambda: table_of("analyze_models.heads", copying=0.5), "copying may mean .* W_U"),
    "a comparison": (lambda: table_of("compare_heads", copying_a=0.5, copying_diff=0), "copying_a, copying_diff may"),
    "outputs of pairs": (sweep, 'part may mean .* "output" set the output to zero'),
    "a summary": (lambda: table_of("summarize_sweep", part="output"), 'part may mean .* "output" set'),
    "a control": (lambda: sweep(part="rotary_band"), "control_p may mean .* random scores of equal size"),
    "a circuit": (lambda: table_of("faithfulness", low=0.1, high=0.2), "low, high may mean .* percentile"),
    "positional": (lambda: table_of("positional_symbolic", s_pos=0.1, s_sym=0.2), "s_pos, s_sym may mean .* window"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "said"), OLDER.values(), ids=OLDER)
def test_a_file_that_is_older_is_read_and_its_columns_are_named(make, said, tmp_path):
    table, path = make(), tmp_path / "old.parquet"
    write_table(table, path)
    with pytest.warns(
        UserWarning, match=f"{re.escape(str(path))} was made before a change, or does not record its version: {said}"
    ) as caught:
        read = read_table(path)
    assert [warning.filename for warning in caught] == [__file__]
    pd.testing.assert_frame_equal(read, table)
    assert read.attrs == table.attrs


UNTOUCHED = {
    "new heads": heads,
    "numbers that were not computed": lambda: heads(None, copying=np.nan),
    "no such column": lambda: heads(None).drop(columns="copying"),
    "another part": lambda: sweep(part="rope_phase"),
    "a task without pairs": lambda: sweep(task="induction"),
    "a sweep that says what replaces outputs": lambda: sweep(replace="mean"),
    "another table": lambda: table_of("edge_effects", copying=0.5),
    "a table without a name": lambda: table_of(None, copying=0.5),
    "odd attrs": lambda: heads(True, copying=np.nan),
}


@pytest.mark.parametrize("make", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_no_change_concerns_is_read_without_a_word(make, tmp_path):
    write_table(make(), tmp_path / "table.parquet")
    read_table(tmp_path / "table.parquet")


def test_a_table_of_a_newer_version_says_so(tmp_path):
    write_table(heads(len(CHANGES) + 1), tmp_path / "table.parquet")
    with pytest.warns(UserWarning, match="made by a newer version of tlspectral, whose columns may mean"):
        read_table(tmp_path / "table.parquet")


def test_every_table_that_is_named_exists_and_says_which_meaning_it_has():
    schemas = every_schema()
    for change in CHANGES:
        for name in change.tables:
            assert schemas[name].frame([]).attrs["meanings"] == len(CHANGES)
    assert "meanings" not in schemas["k_composition"].frame([]).attrs
    page = (ROOT / "docs/table.md").read_text(encoding="utf-8")
    for name in {change.tables[0] for change in CHANGES}:
        assert f"\n| `{name}`" in page


@pytest.mark.parametrize(
    ("heads", "changed"),
    [
        (["L0H2", "L0H3"], True),
        (["L0H1", "L0H2"], False),
        (["L0H3", "L0H4", "L0H5", "L1H0", "L1H1", "L1H2"], True),
        (["L0H0", "L0H1", "L1H5"], False),
    ],
)
def test_an_older_sweep_of_what_may_be_whole_groups_has_another_control(heads, changed):
    older = pd.DataFrame({"name": ["a"], "delta": [0.1], "control_p": [0.05], "control_delta": [np.nan]})
    older.attrs = {"table": "ablation_sweep", "meanings": len(CHANGES) - 1, "sets": {"a": heads}}
    assert [*other_meanings(older).values()] == ([["control_p"]] if changed else [])
    older.attrs["meanings"] = len(CHANGES)
    assert other_meanings(older) == {}


def test_a_change_of_any_schema_is_a_line(monkeypatch):
    """The mechanism knows no table: a change that is added is written, and older tables of that schema are named."""
    for registry in ("_SCHEMAS", "_DOCUMENTED"):
        monkeypatch.setattr(f"tlspectral.tables.schema.{registry}", {})
    schema = Schema("a_table", columns("value | nat | Loss."))
    before = schema.frame({"value": [1.0]})
    assert "meanings" not in before.attrs
    changes = (*CHANGES, Change(("a_table",), "in bits; now in nats", with_values("value")))
    monkeypatch.setattr("tlspectral.tables.meanings.CHANGES", changes)
    monkeypatch.setattr("tlspectral.tables.schema.CHANGES", changes)
    after = schema.frame({"value": [1.0]})
    assert after.attrs["meanings"] == len(changes)
    assert other_meanings(after) == {}
    assert other_meanings(before) == {len(CHANGES): ["value"]}
    assert schema.frame(before, {"meanings": 0}).attrs["meanings"] == 0  # made from an older table


def test_a_new_head_table_goes_through_a_file_without_a_word(tmp_path):
    table = tls.heads.copying_scores(tls.load_model("tiny-rope"))
    assert table.attrs["meanings"] == len(CHANGES)
    write_table(table, tmp_path / "table.parquet")
    assert read_table(tmp_path / "table.parquet").attrs == table.attrs


# --- several tables ---


def test_a_join_names_the_older_table_and_keeps_saying_so(tmp_path):
    with pytest.warns(UserWarning, match='the table ablation_sweep was .*: part may mean .* "output" set'):
        joined = join(heads(), sweep(), text=sweep(len(CHANGES)))
    assert joined.attrs["meanings"] == len(CHANGES)
    write_table(joined, tmp_path / "joined.parquet")
    with pytest.warns(UserWarning, match='joined.parquet .*: output_delta, output_control_p may mean .* "output"'):
        read_table(tmp_path / "joined.parquet")
    with pytest.warns(UserWarning, match="the table of heads .*: copying may"):
        joined = join(heads(None), sweep(len(CHANGES)))
    write_table(joined, tmp_path / "joined.parquet")
    with pytest.warns(UserWarning, match="joined.parquet .*: copying may mean"):
        read_table(tmp_path / "joined.parquet")
    new = table_of("copying_scores", copying=0.5)
    new.attrs["meanings"] = len(CHANGES)
    write_table(join(heads().drop(columns="copying"), new), tmp_path / "joined.parquet")
    read_table(tmp_path / "joined.parquet")


def test_a_joined_table_from_before_is_named_too(tmp_path):
    with pytest.warns(UserWarning, match="may mean something else"):
        joined = join(heads(None), text=sweep())
    del joined.attrs["meanings"]
    write_table(joined, tmp_path / "joined.parquet")
    with pytest.warns(UserWarning, match="may mean something else") as caught:
        read_table(tmp_path / "joined.parquet")
    assert [re.findall(r"version: ([\w, ]+) may", str(one.message))[0] for one in caught] == [
        "copying", "text_output_delta, text_output_control_p"
    ]  # fmt: skip


@pytest.mark.parametrize("older", ["a", "b"])
def test_compared_are_columns_of_one_meaning(older):
    tables = {"a": head_table(), "b": head_table()}
    for which, table in tables.items():
        table.attrs = {**table.attrs, "table": "analyze_heads"}
        if which != older:
            table.attrs["meanings"] = len(CHANGES)
    with pytest.warns(UserWarning, match=rf"copying, positivity cannot be compared.*another meaning in {older}, .*W_U"):
        compared = compare_heads(*tables.values())
    assert not {"copying_diff", "positivity_diff"} & set(compared)
    assert "another meaning in" in compared.attrs["left_out"]["columns"]["copying"]
    assert "D_head_diff" in compared
    alike = compare_heads(tables[older], tables[older])  # of one meaning: compared, and the table says which
    assert (alike["copying_diff"] == 0).all()
    assert alike.attrs["meanings"] == 0


def test_a_summary_of_an_older_sweep_says_so():
    table = heads(dir_frac=0.5, D_head=0.5, rope_imag_frac=0.5, dup=0.1, ind=0.1)
    both = [sweep().assign(delta_se=0.1, score_rms=np.nan) for _ in range(2)]
    for one, meanings in zip(both, (None, len(CHANGES)), strict=True):
        one.attrs = sweep(meanings).attrs
    with pytest.warns(UserWarning, match="the sweep was .*: part may mean") as caught:
        summary = summarize_sweep(both, table, small=0.1)
    assert len(caught) == 1
    assert summary.attrs["meanings"] == 0


def test_no_folder_mixes_two_meanings(tmp_path, monkeypatch):
    of_heads = Measurement(every_schema()["analyze_models.heads"], {}, folder=tmp_path / "heads")
    assert of_heads.kept is not None
    of_edges = Measurement(every_schema()["edge_effects"], {}, folder=tmp_path / "edges")
    assert of_edges.kept is not None
    later = (*CHANGES, Change(("analyze_models.heads",), "one; now another", with_values("D_head")))
    monkeypatch.setattr("tlspectral.tables.meanings.CHANGES", later)
    with pytest.raises(tls.errors.IncompatibleCheckpoint, match="made with other meanings"):
        _ = Measurement(of_heads.schema, {}, folder=tmp_path / "heads").kept
    assert Measurement(of_edges.schema, {}, folder=tmp_path / "edges").kept is not None
