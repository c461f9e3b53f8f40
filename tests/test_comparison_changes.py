"""Comparisons of hand-made head tables: bands, ranks, tables that overlap in part, the figure and the command."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from test_cli import heads, run

from tlspectral.heads import compare_heads
from tlspectral.plots import head_changes
from tlspectral.tables import read_table, write_table

DETECTED = [f"{name}{end}" for name in ("prev", "dup", "ind") for end in ("", "_se")]


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables that differ in D_head of L0H1 by 2 bands and in prev of L1H0 by 5."""
    base = heads()
    for name in ("dir_frac", "D_head", "imag_mass", "henrici"):
        base[f"{name}_null_std"] = 0.01
    for name in ("prev", "dup", "ind"):
        base[f"{name}_se"] = 0.002
    base.attrs["model"] = "base"
    tuned = base.copy()
    tuned.attrs = {**base.attrs, "model": "tuned"}
    tuned.loc[1, "D_head"] += 2 * 2 * np.hypot(0.01, 0.01)
    tuned.loc[3, "prev"] -= 5 * 2 * np.hypot(0.002, 0.002)
    return base, tuned


def streamed(table: pd.DataFrame) -> pd.DataFrame:
    """The table as files give it: no detectors, no output side."""
    other = table.copy()
    other[[*DETECTED, "copying", "positivity", "outside_m", "self_match"]] = np.nan
    other.attrs = {**table.attrs, "detectors": None}
    return other


def test_heads_are_ranked_by_their_largest_change_in_bands():
    base, tuned = tables()
    table = compare_heads(base, tuned)
    ranked = table.sort_values("change_rank", kind="stable")
    assert ranked["name"].tolist()[:2] == ["L1H0", "L0H1"]
    assert ranked["change_of"].tolist()[:2] == ["prev", "D_head"]
    # Doubles lose 1e-16 of values near 1 in the difference, 1e-14 of it; a band of 1 sd would give a factor of 2.
    np.testing.assert_allclose(ranked["change"].iloc[:2], [5, 2], rtol=1e-9)
    assert table["change_rank"].tolist() == [3, 2, 3, 1, 3, 3]
    pd.testing.assert_series_equal(table["D_head_a"], base["D_head"], check_names=False)
    pd.testing.assert_series_equal(table["D_head_b"], tuned["D_head"], check_names=False)
    assert table["D_head_outside"].tolist() == [False, True, False, False, False, False]
    assert table.attrs["bands"]["D_head"] == "null"
    assert table.attrs["bands"]["prev"] == "standard error over sequences"
    assert "self_match_band" not in table


def test_a_change_where_the_band_is_zero_is_beyond_it_and_no_change_is_none():
    base, tuned = tables()
    for table in (base, tuned):
        table["D_head_null_std"] = 0.0
    table = compare_heads(base, tuned)
    assert table["change"].tolist()[1] == np.inf
    assert table["change"].tolist()[0] == 0
    assert table["change_of"].tolist()[1] == "D_head"


def test_without_a_band_nothing_is_ranked():
    base, tuned = tables()
    none = [column for column in base if column.endswith(("_null_std", "_se"))]
    table = compare_heads(base.assign(**dict.fromkeys(none, np.nan)), tuned)
    assert table["change"].isna().all()
    assert table["change_rank"].isna().all()
    assert not table.filter(like="_band").columns.any()


@pytest.mark.parametrize("turned", [False, True])
def test_a_streamed_table_is_compared_in_the_columns_that_it_has(turned):
    base, tuned = tables()
    pair = [streamed(base), tuned]
    table = compare_heads(*(reversed(pair) if turned else pair))
    without = "b" if turned else "a"
    columns = ["outside_m", "self_match", "prev", "dup", "ind", "copying", "positivity"]
    assert table.attrs["left_out"]["columns"] == dict.fromkeys(columns, f"no value in {without}")
    assert not [name for name in table if name.startswith("prev_")]
    assert table.attrs["settings"]["detectors"] is None
    assert table.sort_values("change_rank")["name"].iloc[0] == "L0H1"


def test_heads_of_one_table_alone_are_left_out_and_counted():
    base, tuned = tables()
    table = compare_heads(base.iloc[1:], tuned.iloc[:-2])
    assert table["name"].tolist() == ["L0H1", "L0H2", "L1H0"]
    assert table.attrs["left_out"]["heads"] == {"a": 2, "b": 1}
    # A percentile among other heads is another number.
    assert table.attrs["left_out"]["columns"] == {"D_head_pct": "a percentile among other heads"}
    assert "D_head_pct_diff" not in table
    assert table["D_head_a"].tolist() == base["D_head"].tolist()[1:4]
    assert table["D_head_b"].tolist() == tuned["D_head"].tolist()[1:4]
    with pytest.raises(ValueError, match=r"base \(a\) and tuned \(b\) have no head in common"):
        compare_heads(base.iloc[:3], tuned.iloc[3:])


def test_the_figure_draws_every_head_against_the_band_and_names_the_largest():
    base, tuned = tables()
    table = compare_heads(base, tuned)
    figure = head_changes(table)  # of the five largest, three did not change
    np.testing.assert_array_equal(offsets(figure, "heads")[:, 1], table["change"])
    assert [label.get_text() for label in part(figure, "changed head")] == ["L1H0 prev", "L0H1 D_head"]
    assert part(figure, "band")[0].get_height() == 1
    assert figure.axes[0].get_title(loc="left") == "tuned against base"
    table.loc[0, "change"] = np.inf
    assert "not drawn, no finite change: 1" in said(head_changes(table))
    with pytest.raises(ValueError, match="no column change, change_of: give a table of compare_heads"):
        head_changes(table.drop(columns=["change", "change_of"]))
    with pytest.raises(ValueError, match="highlight is -1"):
        head_changes(table, highlight=-1)


def test_the_command_prints_the_top_changes_and_writes_the_table(tmp_path):
    base, tuned = tables()
    write_table(streamed(base), tmp_path / "base.parquet")
    write_table(tuned.iloc[:-1].set_axis(range(5)), tmp_path / "tuned.parquet")
    done = run(
        "compare", tmp_path / "base.parquet", tmp_path / "tuned.parquet", "--top", 1, "-o", tmp_path / "c.parquet"
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "tuned (b) against base (a): 5 heads compared"
    assert "left out, in one table only: 1 heads of a, 0 of b" in lines
    assert "left out, prev: no value in a" in lines
    assert "D_head: null" in lines
    assert lines[-2].split()[:3] == ["L0H1", "D_head", "2"]
    assert len(read_table(tmp_path / "c.parquet")) == 5
    done = run("compare", tmp_path / "base.parquet", tmp_path / "c.parquet")
    assert done.exit_code == 2
