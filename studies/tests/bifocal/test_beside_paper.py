"""Tables of the page about BA: what the command prints is what the page has, and what it says follows the numbers."""

import shutil
from functools import partial
from pathlib import Path

import command_line
import pytest
from tlspectral_studies.bifocal.beside_paper import (
    beside_paper,
    excess,
    nearest_settings,
    ratios,
    readings,
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
    assert len(printed) == (2 + 3) + (2 + 6) + (2 + 5) + (2 + 9) + (2 + 4)
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
