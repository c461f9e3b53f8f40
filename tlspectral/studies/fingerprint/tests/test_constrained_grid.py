"""The grid of constrained training: what it writes, how it goes on where it was stopped, its command."""

import pandas as pd
import pytest
from constrained_preset import TINY
from described import assert_described
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.studies.fingerprint.constrained import ARMS, PRESETS, Arm, constrained_grid, grid, train_cell
from tlspectral.tables import read_table

TABLES = ("evaluations", "heads", "kernels", "formation", "table4", "rerouting")


def same_tables(found, expected):
    for name in TABLES:
        pd.testing.assert_frame_equal(found[name], expected[name])
        assert found[name].attrs == expected[name].attrs


def test_a_grid_writes_what_it_returns(tiny_grid):
    folder, returned = tiny_grid
    assert tuple(returned) == TABLES
    same_tables({name: read_table(folder / f"{name}.parquet") for name in TABLES}, returned)
    for table in returned.values():
        assert_described(table)
    cells = returned["evaluations"][["arm", "seed"]].drop_duplicates()
    assert cells.to_numpy().tolist() == [[arm, seed] for arm in ARMS for seed in (0, 1)]
    cell = train_cell(TINY, ARMS["rope_sym"], 1)
    heads = returned["heads"]
    mine = heads[(heads["arm"] == "rope_sym") & (heads["seed"] == 1)].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, cell.heads, rtol=1e-5, atol=1e-7)  # here on more than one thread
    assert heads.loc[heads["arm"] == "ape_free", "rope_imag_frac"].isna().all()
    assert returned["formation"]["formed_both"].isna().all()
    assert (returned["table4"]["not_formed_slower"] == 2).all()
    assert heads.attrs["preset"]["loss_threshold"] == TINY.loss_threshold
    assert heads.attrs["arms"]["rope_imag"] == {
        "positional_embedding_type": "rotary",
        "penalty": "phase_penalty",
        "penalty_weight": 10.0,
    }
    assert heads.attrs["seeds"] == [0, 1]


def test_a_grid_that_was_stopped_goes_on_to_the_same_tables(tiny_grid, tmp_path, monkeypatch):
    left, trained = [5], grid.train_cell

    def some(*arguments, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return trained(*arguments, **options)

    monkeypatch.setattr(grid, "train_cell", some)
    with pytest.raises(KeyboardInterrupt):
        constrained_grid(tmp_path, TINY, seeds=2)
    assert len(list((tmp_path / "cells").glob("*.parquet"))) == 5
    assert not list(tmp_path.glob("*.parquet"))
    left[0] = 5  # those that are there are not trained again
    same_tables(constrained_grid(tmp_path, TINY, seeds=2), tiny_grid[1])
    assert left[0] == 0


def test_arms_and_seeds_are_added_to_a_grid_of_one_seed(tmp_path, tiny_grid):
    tables = constrained_grid(tmp_path, TINY, arms=["rope_free", "ape_free"], seeds=[1])
    expected = tiny_grid[1]["kernels"]
    one = expected[(expected["seed"] == 1) & expected["arm"].isin(["rope_free", "ape_free"])]
    # Arms stand in the order in which they were given.
    pd.testing.assert_frame_equal(
        tables["kernels"], one.sort_values("arm", ascending=False, kind="stable", ignore_index=True)
    )
    contrasts = tables["table4"]
    assert_described(contrasts)
    assert (contrasts["verdict"] == "one seed").all()
    assert (contrasts[["n_slower", "n_faster"]] == 1).all(axis=None)
    assert contrasts[["pvalue", "q", "pvalue_paper", "q_paper", "statistic", "sd_slower"]].isna().all(axis=None)
    assert tables["rerouting"][["kernel_distance", "free_spread", "distance_ratio"]].isna().all(axis=None)
    assert tables["heads"].attrs["seeds"] == [1]
    mine = Arm("rope_mine", "rotary", lambda built: built.layers[0].attn.W_V.square().sum(), 0.1)
    more = constrained_grid(tmp_path, TINY, arms=["rope_free", mine], seeds=2)
    assert more["formation"]["arm"].value_counts().to_dict() == {"rope_free": 2, "rope_mine": 2}
    assert more["table4"].empty
    assert more["heads"].attrs["arms"]["rope_mine"]["penalty"] == "<lambda>"
    assert more["rerouting"].set_index("arm").loc["rope_mine", "free_spread"].notna().all()
    pd.testing.assert_frame_equal(
        more["kernels"].query("arm == 'rope_free'").reset_index(drop=True),
        expected.query("arm == 'rope_free'").reset_index(drop=True),
    )


@pytest.mark.slow
def test_workers_give_the_same_tables(tiny_grid, tmp_path):
    found = constrained_grid(tmp_path, TINY, seeds=2, n_jobs=2)
    same_tables(found, tiny_grid[1])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", TINY)
    command = ["study", "constrained", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--arms", "ape_free, ape_sym", "--seeds", "2"])
    assert done.exit_code == 0, done.output
    assert "evaluations.parquet: 16 rows" in done.output.replace("\n", "")
    assert "falsified" in done.output
    written = read_table(tmp_path / "table4.parquet").attrs["command"]
    assert written == "tlspectral study constrained --preset quick --arms ape_free, ape_sym --seeds 2"
    one = CliRunner().invoke(app, [*command, "--arms", "ape_free", "--seeds", "1", "--until", "4"])
    assert one.exit_code == 0, one.output
    assert "One seed: contrasts and spreads are over seeds, and are NaN" in one.output
    assert read_table(tmp_path / "formation.parquet").attrs["command"].endswith("--seeds 1 --until 4")
    wrong = CliRunner().invoke(app, [*command, "--arms", "ape_fre"])
    assert wrong.exit_code == 2
    assert "is no arm" in wrong.output
