"""Comparisons of hand-made head tables: bands, ranks, tables that overlap in part, the command."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from command_line import heads, refusal, run

from tlspectral.heads import compare_heads
from tlspectral.tables import read_table, write_table

DETECTED = [f"{name}{end}" for name in ("prev", "dup", "ind") for end in ("", "_se")]


FIRST = ["layer", "head", "name", "change_rank", "behaviour_of", "behaviour_change", "spectrum_of", "spectrum_change"]


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables that differ in D_head of L0H1 by 2 bands and in prev of L1H0 by 5, .057 and .028."""
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


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """The comparison in the order of the head tables."""
    return table.sort_values(["layer", "head"], ignore_index=True)


def test_heads_are_ranked_in_each_family_by_the_size_of_their_change():
    base, tuned = tables()
    tuned.loc[5, "ind"] += 0.3
    tuned.loc[5, "dir_frac"] -= 0.1
    table = compare_heads(base, tuned)
    assert list(table)[:8] == FIRST
    assert table["name"].tolist() == ["L1H2", "L0H1", "L1H0", "L0H0", "L0H2", "L1H1"]
    assert table["change_rank"].tolist()[:3] == [1, 2, 2]
    assert table["change_rank"].isna().tolist() == [False] * 3 + [True] * 3
    assert table["behaviour_rank"].fillna(0).tolist() == [1, 0, 2, 0, 0, 0]
    assert table["spectrum_rank"].fillna(0).tolist() == [1, 2, 0, 0, 0, 0]
    named = table.set_index("name")
    assert named["behaviour_of"].dropna().to_dict() == {"L1H2": "ind", "L1H0": "prev"}
    assert named["spectrum_of"].dropna().to_dict() == {"L1H2": "dir_frac", "L0H1": "D_head"}
    # With their sign, to rounding of a difference of values near 1; changes are 0.03 and more.
    np.testing.assert_allclose(table["behaviour_change"][[0, 2]], [0.3, -0.02 * np.sqrt(2)], rtol=1e-9)
    np.testing.assert_allclose(table["spectrum_change"][:2], [-0.1, 0.04 * np.sqrt(2)], rtol=1e-9)
    assert table["behaviour_change"].isna().tolist() == [False, True, False, True, True, True]
    table = in_order(table)
    pd.testing.assert_series_equal(table["D_head_a"], base["D_head"], check_names=False)
    pd.testing.assert_series_equal(table["D_head_b"], tuned["D_head"], check_names=False)
    assert table["D_head_outside"].tolist() == [False, True, False, False, False, False]
    assert table.attrs["bands"]["D_head"] == "null"
    assert table.attrs["bands"]["prev"] == "standard error over sequences"
    assert "self_match_band" not in table


def test_of_two_heads_that_lead_a_family_the_other_rank_decides():
    base, tuned = tables()
    tuned.loc[[0, 1, 3, 4], "prev"] = base.loc[[0, 1, 3, 4], "prev"] + [0.1, 0.3, 0.5, 0.4]
    tuned.loc[[0, 1, 3], "D_head"] = base.loc[[0, 1, 3], "D_head"] + [0.3, 0.2, 0.1]
    table = compare_heads(base, tuned)
    # L0H0: 4 and 1, L0H1: 3 and 2, L1H0: 1 and 3, L1H1: 2 and none.
    assert table["name"].tolist()[:4] == ["L1H0", "L0H0", "L0H1", "L1H1"]
    assert table["change_rank"].tolist()[:4] == [1, 2, 3, 4]


def test_noise_of_a_detector_does_not_hide_a_change_of_the_spectrum():
    """Sequences say `dup` to 1e-5, so that a change at the level of chance is many standard errors."""
    base, _ = tables()
    for name in ("prev", "dup", "ind"):
        base[f"{name}_se"] = 1e-5
    base["dup"], base["D_head_null_std"] = 0.01061, 0.06
    base.loc[2, "D_head"] = 0.574
    tuned = base.copy()
    tuned.attrs = dict(base.attrs)
    tuned["dup"] = 0.01108
    tuned.loc[2, "D_head"] = 0.321
    table = compare_heads(base, tuned)
    assert table["dup_outside"].all()
    assert table["behaviour_rank"].isna().all()
    assert table["behaviour_of"].isna().all()
    assert table["name"].iloc[0] == "L0H2"
    assert table.set_index("name")["spectrum_of"].dropna().to_dict() == {"L0H2": "D_head"}
    # Attention on the same token grows beyond the floor of 0.02 in one head.
    tuned.loc[4, "dup"] = 0.0307
    table = compare_heads(base, tuned)
    assert table.set_index("name")["behaviour_of"].dropna().to_dict() == {"L1H1": "dup"}


def test_a_change_has_to_exceed_its_band_and_the_floor():
    base, tuned = tables()
    tuned.loc[:, ["dir_frac", "D_head", "prev"]] = base[["dir_frac", "D_head", "prev"]]
    tuned.loc[0, "D_head"] += 0.027  # inside the band, 2 sqrt(2) 0.01
    tuned.loc[1, "D_head"] += 0.029
    for table in (base, tuned):
        table["dir_frac_null_std"] = 0.0
    tuned.loc[2, "dir_frac"] += 0.019  # beyond a band of 0, below the floor
    tuned.loc[3, "dir_frac"] += 0.021
    tuned.loc[4, "imag_mass"] += 3.0  # in no unit that shares have: compared, not ranked
    table = compare_heads(base, tuned)
    assert table.set_index("name")["spectrum_of"].dropna().to_dict() == {"L0H1": "D_head", "L1H0": "dir_frac"}
    assert in_order(table)["dir_frac_outside"].tolist() == [False, False, True, True, False, False]
    assert in_order(table)["imag_mass_outside"].tolist() == [False] * 4 + [True, False]
    none = [column for column in base if column.endswith(("_null_std", "_se"))]
    bandless = compare_heads(base.assign(**dict.fromkeys(none, np.nan)), tuned)
    assert bandless[["change_rank", "behaviour_rank", "spectrum_rank", "behaviour_of"]].isna().all(axis=None)
    assert not bandless.filter(like="_band").columns.any()


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
    assert table["name"].iloc[0] == "L0H1"


def test_heads_of_one_table_alone_are_left_out_and_counted():
    base, tuned = tables()
    table = in_order(compare_heads(base.iloc[1:], tuned.iloc[:-2]))
    assert table["name"].tolist() == ["L0H1", "L0H2", "L1H0"]
    assert table.attrs["left_out"]["heads"] == {"a": 2, "b": 1}
    # A percentile among other heads is another number.
    assert table.attrs["left_out"]["columns"] == {"D_head_pct": "a percentile among other heads"}
    assert "D_head_pct_diff" not in table
    assert table["D_head_a"].tolist() == base["D_head"].tolist()[1:4]
    assert table["D_head_b"].tolist() == tuned["D_head"].tolist()[1:4]
    with pytest.raises(ValueError, match=r"base \(a\) and tuned \(b\) have no head in common"):
        compare_heads(base.iloc[:3], tuned.iloc[3:])


def test_the_command_prints_the_top_changes_and_writes_the_table(tmp_path):
    base, tuned = tables()
    write_table(streamed(base), tmp_path / "base.parquet")
    write_table(tuned.iloc[:-1].set_axis(range(5)), tmp_path / "tuned.parquet")
    done = run(
        "compare", tmp_path / "base.parquet", tmp_path / "tuned.parquet", "--top", 1, "-o", tmp_path / "c.parquet"
    )
    assert done.exit_code == 0, done.output
    assert "tuned (b) against base (a): 5 heads compared" in done.stdout
    assert "left out, prev: no value in a" in done.stdout
    assert "weights of attention unknown: the tables hold no hash of a layer that both have" in done.stdout
    assert "behaviour: no difference of 0.02 or more and beyond its band" in done.stdout
    assert re.search(r"spectrum: 1 of 5 heads differ(.*\n){3}L0H1 +rotational share \(D_head\) ", done.stdout)
    assert len(read_table(tmp_path / "c.parquet")) == 5
    assert run("compare", tmp_path / "base.parquet", tmp_path / "c.parquet").exit_code == 2


def hashed(table, *hashes):
    """The table with hashes of its layers."""
    other = table.copy()
    other.attrs = {**table.attrs, "backend": "bridge", "weights_by_layer": dict(zip("01", hashes, strict=True))}
    return other


def test_a_layer_whose_weights_differ_is_named_where_no_head_of_it_is_ranked(tmp_path):
    base, tuned = tables()
    one, other = hashed(base, "a", "b"), hashed(base, "c", "d")
    with pytest.warns(
        UserWarning, match=r"the weights of layers 0, 1 differ .* no head of them changed by 0.02"
    ) as said:
        table = compare_heads(one, other)
    assert [warning.filename for warning in said] == [__file__]
    assert table.attrs["weights"] == {"differ": [0, 1], "equal": []}
    tuned.loc[3, "prev"] = base.loc[3, "prev"]  # a head of layer 0 is ranked, none of layer 1
    with pytest.warns(UserWarning, match="the weights of layer 1 differ"):
        compare_heads(one, hashed(tuned, "c", "d"))
    compare_heads(one, hashed(tuned, "c", "b"))
    compare_heads(one, hashed(base, "a", "b"))
    for file, each in (("a", one), ("b", hashed(base, "a", "d")), ("c", other)):
        write_table(each, tmp_path / f"{file}.parquet")
    with pytest.warns(UserWarning, match="the weights of layer 1 differ"):
        done = run("compare", tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert "weights of attention differ in layer 1 and are equal in layer 0\n" in done.stdout
    assert "0 of 6 heads" not in done.stdout
    with pytest.warns(UserWarning, match="the weights of layers 0, 1 differ"):
        done = run("compare", tmp_path / "a.parquet", tmp_path / "c.parquet")
    assert "No layer is equal. If these are two trainings, heads" in done.stdout
    done = run("compare", tmp_path / "a.parquet", tmp_path / "a.parquet")
    assert "weights of attention are equal in layers 0, 1\n" in done.stdout


@pytest.mark.slow
def test_the_command_takes_two_models_and_refuses_a_table_beside_one(tmp_path):
    base, tuned = zoo.save_folder("llama", tmp_path / "base"), tmp_path / "tuned"
    model = zoo.hf_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :12] *= 3
    model.save_pretrained(tuned)
    done = run("compare", base, tuned, "--top", 3, "-o", tmp_path / "c.parquet")
    assert done.exit_code == 0, done.output
    assert re.search(
        r"operators: 1 of 8 heads differ, relative to a\n *name +qk_change +ov_change\nL1H0 .* 2.0000\n", done.stdout
    )
    assert read_table(tmp_path / "c.parquet")["ov_change"].max() == pytest.approx(2)
    write_table(tables()[0], tmp_path / "a.parquet")
    for given in ((tmp_path / "a.parquet", tuned), (tuned, tmp_path / "a.parquet")):
        said = refusal("compare", *given)
        assert "a.parquet is a table and " in said
        assert "give two tables (tlspectral analyze" in said
    assert "no config.json" in refusal("compare", tmp_path, tuned)
    assert "share no common basis" in refusal("compare", "tiny-rope", "tiny-rope-sym")
