"""The published tables in the package, and a grid of the paper preset beside them.

What they hold is asked of every number and sentence made from them, in test_replication.py and test_sentences.py.
"""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.studies.fingerprint.constrained import PRESETS
from tlspectral.studies.fingerprint.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    published_checkpoints,
    published_constrained,
    published_heads,
    published_kernels,
)
from tlspectral.studies.fingerprint.replication import beside_markdown, beside_published
from tlspectral.tables import read_table, write_table


def test_tables_say_whose_they_are():
    tracks = [published_checkpoints(name) for name in PUBLISHED_CHECKPOINTS]
    for table in (
        *map(published_heads, PUBLISHED_HEADS),
        *tracks,
        published_kernels(),
        *vars(published_constrained()).values(),
    ):
        assert table.attrs["licence"] == "CC-BY-4.0"
        assert "qk-spectral-fingerprint" in table.attrs["source"]
    assert published_heads("gpt2").attrs["baseline_ce"] == pytest.approx(3.657209)
    assert [track["tokens"].iloc[-1] for track in tracks] == [143_000 * 1024 * 2048] * 2


def test_heads_of_constrained_runs_are_those_of_their_evaluations():
    tables = published_constrained()
    keys = ["arm", "seed", "step"]
    largest = tables.heads.groupby(keys)[["prev", "ind"]].max()
    assert (len(largest), len(tables.heads), len(tables.kernels)) == (25 * 61, 25 * 61 * 8, 25 * 8 * 9)
    expected = tables.evaluations.set_index(keys).loc[largest.index, ["prev_best", "ind_best"]]
    np.testing.assert_allclose(largest, expected, atol=1e-6)  # single precision; neighbours differ by 1e-3 and more


# --- a grid of the paper preset beside the published runs ---

ARMS = ("rope_imag", "ape_free")


@pytest.fixture
def grid():
    """Published runs of two arms, seed 1, until step 1000, in place of a grid that got so far."""
    published = published_constrained()
    tables = {}
    for name in ("evaluations", "heads"):
        table = getattr(published, name)
        # In another order of the arms than the published one.
        table = pd.concat([table[(table["arm"] == arm) & (table["seed"] == 1)] for arm in ARMS])
        table = table[table["step"] <= 1000].drop(columns="strength").reset_index(drop=True)
        table.attrs = {"preset": PRESETS["paper"].settings()}
        tables[name] = table
    return tables


def moved(tables, arm, step, by):
    rows = (tables["evaluations"]["arm"] == arm) & (tables["evaluations"]["step"] == step)
    tables["evaluations"].loc[rows, "ce_pred"] += by


def test_runs_that_are_the_published_ones(grid):
    found = beside_published(grid)
    assert (found.steps["difference"] == 0).all()
    assert found.steps.groupby("arm").size().to_dict() == {"ape_free": 11 * 4, "rope_imag": 11 * 5}
    assert found.runs["arm"].tolist() == list(ARMS)
    runs = found.runs.set_index("arm")
    assert (runs[["last_step", "same_until"]] == 1000).all(axis=None)
    # FP: seed 1 of rope_imag forms at 1400, of ape_free at 600.
    assert runs["formed_loss_published"].to_dict() == {"rope_imag": 1400, "ape_free": 600}
    assert np.isnan(runs.loc["rope_imag", "formed_loss"])
    assert runs.loc["ape_free", ["formed_loss", "formed_both"]].tolist() == [600, 600]
    heads = found.heads
    assert (heads["step"] == 1000).all()
    for name in ("layer", "head", "prev", "dir_frac_raw", "D_head_raw"):
        assert (heads[name] == heads[f"{name}_published"]).all()
    spread = found.steps[(found.steps["arm"] == "rope_imag") & (found.steps["measure"] == "ce_pred")]
    evaluations = published_constrained().evaluations
    expected = evaluations[evaluations["arm"] == "rope_imag"].groupby("step")["ce_pred"].std(ddof=1)
    assert spread["published_sd"].to_numpy() == pytest.approx(expected.loc[:1000].to_numpy())


def test_where_runs_part_and_the_command(grid, tmp_path):
    moved(grid, "rope_imag", 300, 5e-6)
    moved(grid, "rope_imag", 500, -0.25)
    moved(grid, "ape_free", 600, 2.0)
    found = beside_published(grid)
    runs = found.runs.set_index("arm")
    assert runs.loc["rope_imag", ["same_until", "largest_at"]].tolist() == [400, 500]
    assert runs["largest_difference"].to_dict() == pytest.approx({"rope_imag": 0.25, "ape_free": 2.0})
    assert runs.loc["ape_free", "formed_loss"] == 700
    for name, table in grid.items():
        write_table(table, tmp_path / f"{name}.parquet")
    done = CliRunner().invoke(app, ["study", "beside-published", str(tmp_path), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "| `rope_imag` | 1 | 1000 | 400 | 0.25 at 500 | none (1400) | none (1400) |" in done.output
    assert "| -2.5e-01 |" in done.output
    assert beside_markdown(found) in done.output
    for name in ("steps", "runs", "heads"):
        pd.testing.assert_frame_equal(read_table(tmp_path / "out" / f"{name}.parquet"), getattr(found, name))
    moved(grid, "ape_free", 0, 0.5)
    assert np.isnan(beside_published(grid).runs.set_index("arm").loc["ape_free", "same_until"])


def test_other_grids_are_refused(grid):
    with pytest.raises(ValueError, match="has none of the published arms and seeds"):
        beside_published({name: table.assign(seed=7) for name, table in grid.items()})
    for preset, said in (
        (PRESETS["quick"].settings(), "preset quick has another config, task, training than"),
        (None, "preset that is not recorded has another"),
    ):
        grid["evaluations"].attrs["preset"] = preset
        with pytest.raises(ValueError, match=said):
            beside_published(grid)
