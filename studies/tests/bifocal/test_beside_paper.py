"""Tables of the page about BA: what the command prints is what the page has, and what it says follows the numbers."""

import shutil
from functools import partial
from pathlib import Path

import command_line
import numpy as np
import pytest
import scipy.stats
from tlspectral_studies.bifocal.beside_paper import (
    answers_in_setting,
    beside_paper,
    excess,
    nearest_settings,
    ratios,
    readings,
    standard_in_setting,
    table1_beside,
)

from tlspectral.tables import read_table

ROOT = Path(__file__).parents[3]
STORED = ROOT / "docs" / "results" / "spectral"

run = partial(command_line.run, "study")


def stored(name):
    return read_table(STORED / f"{name}.parquet")


@pytest.mark.slow
def test_the_pages_have_every_table_that_the_command_prints():
    done = run("beside-paper", STORED)
    assert done.exit_code == 0, done.output
    pages = [ROOT / "docs" / "results" / f"{name}.md" for name in ("spectral_rope", "bifocal_setting")]
    page = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    printed = [line for line in done.output.splitlines() if line.startswith("|")]
    assert len(printed) == (2 + 3) + (2 + 6) + (2 + 5) + (2 + 9) + (2 + 4) + (2 + 3) + (2 + 8) + (2 + 12)
    assert [line for line in printed if line not in page] == []
    assert (
        "Modulo: `standard` has 4.23 times the loss of BA's; no interval is below chance, so that there is no power"
        in done.output
    )
    assert done.output.count("no interval") == 1


def test_power_is_told_from_the_interval_below_chance():
    table = stored("table1")
    assert table1_beside(table).count("no interval") == 1
    one = (table["language"] == "modulo7") & (table["arm"] == "omega")
    table.loc[one, "loss_high"] = 1.94  # below ln 7 = 1.9459
    assert table1_beside(table).count("no interval") == 0
    table.loc[one, "loss_high"] = 1.95
    table.loc[table["language"] == "dyck3", "loss_high"] = 2.0
    assert table1_beside(table).count("no interval") == 2


def test_a_ratio_is_that_of_the_common_rate():
    table = stored("equivalence")
    table.loc[table["view"] == "best", "ratio"] = 9.0
    table.loc[(table["view"] == "equal") & (table["arm"] == "full"), "ratio"] = 8.0
    written = ratios(table)
    assert "9.0" not in written
    assert "| `full` | 0.104 | +0.022 (-0.002 to +0.047) | 8.000 (1.005 to 1.693) | 0.043 |" in written


def test_excess_is_not_gain_and_has_every_arm_that_moves():
    table = stored("resonance")
    table.loc[table["measure"] == "gain", "mean"] = 9.0
    written = excess(table)
    assert "+9000" not in written
    assert [line.split("`")[1] for line in written.splitlines() if "`" in line] == [
        "omega", "full", "bifocal", "full_noise", "full_noise_shared",
    ]  # fmt: skip
    turning = table[(table["measure"] == "excess") & (table["pairs"] == "turning") & (table["mean"] != 0)]
    away = turning[turning["high"] < 0]
    assert away["language"].tolist() == ["bio_rotation"] * 5
    assert not (turning["low"] > 0).any()


def test_tables_that_are_not_there_are_left_out(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none of table1\.parquet, equivalence\.parquet"):
        beside_paper(tmp_path)
    shutil.copy(STORED / "table1.parquet", tmp_path)
    assert beside_paper(tmp_path) == table1_beside(stored("table1"))


def test_thirty_settings_are_eight_readings_and_the_nearest_of_each_is_shown():
    table = stored("setting_search")
    sizes = readings(table).value_counts().to_dict()
    assert sizes == {
        "answers, fresh": 10, "answers, few": 5, "tokens, short, fresh": 3, "tokens, as printed, fresh": 4,
        "tokens, as printed, few": 1, "padded, short, fresh": 1, "padded, as printed, fresh": 5,
        "padded, as printed, few": 1,
    }  # fmt: skip
    lines = nearest_settings(table).splitlines()
    assert len(lines) == 3 + 8
    worst = table.groupby("setting")["worst"].first()
    for line in lines[3:]:
        name, *_, shown, near = (cell.strip() for cell in line.strip("|").split(" | "))
        own = worst[readings(table) == name]
        assert (shown, near) == (f"{own.min():.2f}", f"{(own <= 1.5).sum()} of {sizes[name]}")
    page = (STORED.parent / "bifocal_setting.md").read_text(encoding="utf-8")
    assert nearest_settings(table) in page


def test_what_the_page_says_of_the_setting():
    table, compared = stored("setting_search"), stored("setting_comparison")
    near = table[table["worst"] < 1.5].drop_duplicates("setting")
    assert near["worst"].agg(["min", "max"]).round(2).tolist() == [1.22, 1.48]
    assert (len(near), set(near["scored"]), near["sequences"].isna().all()) == (5, {"padded"}, True)
    printed = table[table["setting"].isin(near["setting"]) & (table["language"] == "modulo7")]
    assert set(printed["lengths"]) == {"as printed"}
    assert set(compared["outcome"]) == {"", "not seen"}
    # At chance, .25 and .143: the standard errors of 5,120 and 10,240 answers are .006 and .0035.
    by_task = compared.groupby("language")["accuracy"]
    assert by_task.agg(["min", "max"]).loc["bio_rotation"].between(0.22, 0.28).all()
    assert by_task.agg(["min", "max"]).loc["modulo7"].between(0.135, 0.151).all()
    above = compared[compared["language"] == "dyck3"].set_index("arm")["mean"] - 0.482
    assert above[["standard", "omega"]].round(3).tolist() == [0.048, 0.059]


def test_the_arms_where_more_is_learned_are_what_the_stored_runs_give():
    """Ratios, paired t tests, Holm over nine by hand and the outcomes; every number that the page's text has."""
    runs, table = stored("setting_learned_runs"), stored("setting_learned").set_index(["language", "arm"]).sort_index()
    assert set(runs.groupby(["language", "arm"])["seed"].agg(tuple)) == {(20, 21, 22, 23, 24)}
    assert len(runs) == 60
    loss = runs.pivot(index=["language", "seed"], columns="arm", values="loss")
    accuracy = runs[runs["arm"] == "standard"].groupby("language")["accuracy"].mean().round(2).to_dict()
    assert accuracy == {"bio_rotation": 0.25, "dyck3": 0.90, "modulo7": 0.94}  # chance: .25, .29 and .14
    pvalues = {}
    for language, arm in table.index[table.index.get_level_values("arm") != "standard"]:
        logs = np.log(loss.loc[language])
        pvalues[language, arm] = scipy.stats.ttest_rel(logs[arm], logs["standard"]).pvalue
        row = table.loc[(language, arm)]
        assert row["ratio"] == pytest.approx(np.exp((logs[arm] - logs["standard"]).mean()))
        assert row["outcome"] == ("no power" if language == "bio_rotation" else "not seen")
    assert len(pvalues) == 9
    worst = 0.0
    for rank, (key, p) in enumerate(sorted(pvalues.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, (9 - rank) * p))
        assert table.loc[key, "pvalue_holm"] == pytest.approx(worst)
    least = min(pvalues, key=pvalues.get)
    assert (least, round(pvalues[least], 3)) == (("dyck3", "full"), 0.052)
    assert table.loc[least, "ratio"] > 1
    learned = table.drop("bio_rotation").dropna(subset=["ratio"])
    assert (round(learned["ratio_low"].min(), 3), round(learned["ratio_high"].max(), 3)) == (0.949, 1.126)
    bounds = learned["bound"].groupby("language").max()
    assert bounds["modulo7"] < 0.009
    assert bounds["dyck3"] < 0.057
    paper = {"dyck3": 0.4293, "bio_rotation": 1.0725, "modulo7": 0.4583}
    ratios = [table.loc[(language, "standard"), "mean"] / value for language, value in paper.items()]
    assert round(max(max(ratio, 1 / ratio) for ratio in ratios), 2) == 1.21


def test_four_settings_of_the_search_learn_all_three_tasks_far_from_ba():
    table = stored("setting_search")
    least = {"dyck3": 0.286 + 0.714 / 3, "bio_rotation": 0.25 + 0.75 / 3, "modulo7": 1 / 7 + 6 / 21}
    known = table[table["accuracy"] >= table["language"].map(least)].groupby("setting").size()
    worst = table[table["setting"].isin(known[known == 3].index)].groupby("setting")["worst"].first()
    assert (len(worst), round(worst.min(), 1), round(worst.max())) == (4, 2.5, 152)


def test_tables_of_learned_tasks_name_what_is_not_learned_and_no_answer_differs():
    written = standard_in_setting(stored("setting_learned"))
    assert [line.split(" | ")[-1].strip(" |") for line in written.splitlines()[2:5]] == ["yes", "no", "yes"]
    assert written.count("Bio-Rotation") == 1
    lines = answers_in_setting(stored("setting_learned_runs")).splitlines()[2:]
    assert len(lines) == 12
    intervals = [
        cell[cell.index("(") + 1 : -1].split(" to ") for line in lines for cell in line.split(" | ") if "(" in cell
    ]
    assert len(intervals) == 18
    assert all(float(low) < 0 < float(high.strip(" |)")) for low, high in intervals)
