"""Tables of the page about BA: what the command prints is what the page has, and what it says follows the numbers."""

import shutil
from functools import partial
from pathlib import Path

import command_line
import pytest
from tlspectral_studies.bifocal.beside_paper import beside_paper, excess, ratios, table1_beside

from tlspectral.tables import read_table

ROOT = Path(__file__).parents[3]
STORED = ROOT / "docs" / "results" / "spectral"

run = partial(command_line.run, "study")


def stored(name):
    return read_table(STORED / f"{name}.parquet")


def test_the_page_has_every_table_that_the_command_prints():
    done = run("beside-paper", STORED)
    assert done.exit_code == 0, done.output
    page = (ROOT / "docs" / "results" / "spectral_rope.md").read_text(encoding="utf-8").splitlines()
    printed = [line for line in done.output.splitlines() if line.startswith("|")]
    assert len(printed) == (2 + 3) + (2 + 6) + (2 + 5)
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
