"""The published tables, the commands `replicate`, `beside-published` and `schemes`, and the figures of the paper.

What the tables hold is asked of every number and sentence made from them, in test_replication.py.
"""

from functools import partial

import command_line
import numpy as np
import pandas as pd
import pytest
from constrained_preset import TINY
from figure_parts import offsets, part
from tlspectral_studies.fingerprint import replication
from tlspectral_studies.fingerprint.constrained import ARMS, PRESETS
from tlspectral_studies.fingerprint.figures import replication as drawn
from tlspectral_studies.fingerprint.figures.formation import formation as formation_figure
from tlspectral_studies.fingerprint.figures.formation import places_around
from tlspectral_studies.fingerprint.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    published_checkpoints,
    published_constrained,
    published_heads,
    published_kernels,
)
from tlspectral_studies.fingerprint.replication import (
    beside_markdown,
    beside_published,
    matched_null,
    scheme_contrast,
    sentences,
    strong_heads,
    table,
)

from tlspectral.tables import read_table, write_table

pytestmark = pytest.mark.lowest


def test_tables_say_whose_they_are():
    tracks = [published_checkpoints(name) for name in PUBLISHED_CHECKPOINTS]
    others = [published_kernels(), *vars(published_constrained()).values()]
    for one in (*map(published_heads, PUBLISHED_HEADS), *tracks, *others):
        assert one.attrs["licence"] == "CC-BY-4.0"
        assert "qk-spectral-fingerprint" in one.attrs["source"]
    assert published_heads("gpt2").attrs["baseline_ce"] == pytest.approx(3.657209)
    assert [track["tokens"].iloc[-1] for track in tracks] == [143_000 * 1024 * 2048] * 2


def test_heads_of_constrained_runs_are_those_of_their_evaluations():
    tables = published_constrained()
    keys = ["arm", "seed", "step"]
    largest = tables.heads.groupby(keys)[["prev", "ind"]].max()
    assert (len(largest), len(tables.heads), len(tables.kernels)) == (25 * 61, 25 * 61 * 8, 25 * 8 * 9)
    expected = tables.evaluations.set_index(keys).loc[largest.index, ["prev_best", "ind_best"]]
    np.testing.assert_allclose(largest, expected, atol=1e-6)  # single precision; neighbours differ by 1e-3 and more


# --- replicate ---


run = partial(command_line.run, "study")


@pytest.fixture
def few_claims(monkeypatch):
    """Two sections and one sentence instead of all, and one figure: the rest is the same code and takes longer."""
    few = (matched_null.null_levels, matched_null.self_checks, strong_heads.head_4_11)
    monkeypatch.setattr(table, "RECOMPUTED", few)
    monkeypatch.setattr(table, "DECIDED", (sentences.history.slow_over_the_next_hundredfold,))
    monkeypatch.setattr(drawn, "published_figures", lambda: {"figure_3": drawn.position_kernels(published_kernels())})


@pytest.mark.slow
def test_replicate_says_what_differs_and_why_and_writes_it(few_claims, tmp_path):
    done = run("replicate", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for said in (
        "differs: 1\n  FP, section 6: GPT-2: percentile of D_head of head 4.11: printed 0.22, here 0.0833",
        "2 reproduced, 1 differs, 1 cannot be checked without weights",
        "1 sentences: 0 holds, 0 holds to rounding, 0 holds weakened, 0 depends on a choice, 0 open, 0 no power, "
        "0 asked of another population, 1 contradicted, 0 not decidable",
    ):
        assert said in done.output
    assert "0.707" not in done.output
    assert "printed 0.707, here 0.7066" in run("replicate", "--all").output
    rows = read_table(tmp_path / "out" / "replication.parquet")
    assert list(rows) == list(table.COLUMNS)
    assert rows["kind"].tolist() == ["number"] * 4 + ["sentence"]
    assert rows.attrs["licence"] == "CC-BY-4.0"
    readable = pd.read_csv(tmp_path / "out" / "replication.csv", keep_default_na=False)
    assert readable["verdict"].tolist() == ["contradicted", "differs", replication.VERDICTS[2], *["reproduced"] * 2]
    assert readable["here"].tolist()[:2] == ["", "0.08333"]
    assert (tmp_path / "out" / "figure_3.png").exists()


@pytest.mark.slow
def test_a_grid_is_put_beside_the_published_one(few_claims, tmp_path):
    steps = pd.DataFrame({"arm": np.repeat(["rope_free", "rope_imag", "own"], 2), "seed": [0, 1] * 3})
    steps["formed_loss"] = [100.0, 200.0, 300.0, 300.0, 50.0, np.nan]
    steps["formed_both"] = [200.0, 200.0, 400.0, np.nan, 50.0, np.nan]
    own = replication.arms_beside_published(steps)
    own = own.set_index("arm")
    assert own.loc["rope_imag", "published_ratio"] == pytest.approx(1280 / 940)
    assert own.loc["rope_imag", "loss_ratio"] == pytest.approx(2)
    assert own.loc["rope_imag", ["both_mean", "both_ratio"]].tolist() == [400, 2]
    assert own["unformed"].tolist() == [0, 1, 1]
    assert own.loc["rope_free", "loss_sd"] == pytest.approx(50 * 2**0.5)
    assert np.isnan(own.loc["own", "published_mean"])
    write_table(steps, tmp_path / "formation.parquet")
    done = run("replicate", "--grid", tmp_path / "formation.parquet")
    assert done.exit_code == 0, done.output
    assert "rope_imag" in done.output


# --- a grid of the paper preset beside the published runs ---

GRID = ("rope_imag", "ape_free")


@pytest.fixture
def grid():
    """Published runs of two arms, seed 1, until step 1000, in place of a grid that got so far."""
    published = published_constrained()
    tables = {}
    for name in ("evaluations", "heads"):
        table = getattr(published, name)
        # In another order of the arms than the published one.
        table = pd.concat([table[(table["arm"] == arm) & (table["seed"] == 1)] for arm in GRID])
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
    assert found.runs["arm"].tolist() == list(GRID)
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


@pytest.mark.slow
def test_where_runs_part_and_the_command(grid, tmp_path):
    moved(grid, "rope_imag", 300, 5e-6)
    moved(grid, "rope_imag", 500, -0.25)
    moved(grid, "ape_free", 600, 2.0)
    found = beside_published(grid)
    runs = found.runs.set_index("arm")
    assert runs.loc["rope_imag", ["same_until", "largest_at"]].tolist() == [400, 500]
    assert runs["largest_difference"].to_dict() == pytest.approx({"rope_imag": 0.25, "ape_free": 2.0})
    assert runs.loc["ape_free", "formed_loss"] == 700
    for name, rows in grid.items():
        write_table(rows, tmp_path / f"{name}.parquet")
    done = run("beside-published", tmp_path, "-o", tmp_path / "out")
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


# --- schemes ---


@pytest.mark.slow
def test_schemes_repeats_the_published_contrast(tmp_path):
    done = run("schemes", *(f"published:{name}" for name in PUBLISHED_HEADS), "-o", tmp_path / "compare.png")
    assert done.exit_code == 0, done.output
    tested = "7 models: separated by 0.527; exact permutation p = 0.029, one-sided, smallest possible 0.029"
    assert tested in done.output
    listed = [line.split()[0] for line in done.output.splitlines() if line.strip().startswith("published:")]
    assert (listed[0], listed[-1]) == ("published:pythia-410m", "published:gpt-neo-1.3b")
    assert (tmp_path / "compare.png").exists()


@pytest.mark.slow
def test_schemes_takes_tables_of_ones_own(tmp_path):
    mine, copy = tmp_path / "mine.parquet", tmp_path / "copy.parquet"
    for file in (mine, copy):
        write_table(published_heads("pythia-410m"), file)
    assert f"pythia-410m ({copy})" in run("schemes", mine, copy).output
    done = run("schemes", mine, "published:pythia-1.4b", "--top", 3)
    assert done.exit_code == 0, done.output
    assert "median of the top 3" in done.output
    assert "All models are RoPE: no test" in done.output
    for arguments, said in (
        ([mine, mine], "mine.parquet is named twice"),
        (["published:gpt3"], "no table of heads was published for 'gpt3'"),
        (["none.parquet"], "does not exist"),
    ):
        refused = run("schemes", *arguments)
        assert (refused.exit_code, said in refused.stderr) == (2, True)


# --- the contrast and the figures ---


def model(low: float, high: float, *, rotary: bool) -> pd.DataFrame:
    """Ten heads; the five that attend to the previous token have D_head from low to high."""
    spread = np.concatenate([np.linspace(low, high, 5), np.linspace(0.4, 0.5, 5)])
    heads = pd.DataFrame({"layer": 0, "head": range(10), "D_head": spread, "prev": np.linspace(0.9, 0.0, 10)})
    return heads.assign(rope_imag_frac=0.5 if rotary else np.nan)


def test_the_contrast_groups_by_phase_tests_in_one_direction_and_is_drawn():
    bounds = {"a": (0.6, 0.9), "b": (0.7, 0.8), "c": (0.1, 0.3)}
    tables = {name: model(*ends, rotary=name != "c") for name, ends in bounds.items()}
    found = scheme_contrast(tables)
    assert found.models["scheme"].tolist() == ["RoPE", "RoPE", "not RoPE"]
    assert found.models["percentile"].tolist() == [0.8, 0.8, 0.3]
    assert found.models["midrank"].tolist() == pytest.approx([0.75, 0.75, 0.25])
    assert found.test.separated
    assert found.test.pvalue == pytest.approx(1 / 3)
    turned = scheme_contrast({"a": model(0.1, 0.3, rotary=True), "c": model(0.6, 0.9, rotary=False)})
    assert turned.test.pvalue == 1.0
    figure = drawn.scheme_percentiles(found)
    assert part(figure, "heads of a")[0].get_ydata().tolist() == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert part(figure, "median of c")[0].get_ydata().tolist() == [0.3, 0.3]


@pytest.mark.slow
def test_all_figures_of_the_paper_are_drawn():
    figures = drawn.published_figures()
    assert list(figures) == ["figure_1", "figure_2a", "figure_2b", "figure_3", "figure_4", "figure_5"]
    assert [len(figures[f"figure_{name}"].axes) for name in ("4", "5")] == [3, 4]
    points = offsets(figures["figure_1"], "heads")
    np.testing.assert_array_equal(points, published_heads("gpt2")[["dir_frac", "D_head"]])
    # The bars are Table 3's: Pythia-410m, Pythia-1.4b, Llama-3-8B.
    heights = [[bar.get_height() for bar in bars] for bars in figures["figure_2b"].axes[0].containers]
    assert [heights[0][0], heights[0][2]] == pytest.approx([60.7, 98.2], abs=0.05)
    assert [heights[1][0], heights[1][2]] == pytest.approx([46.6, 70.4], abs=0.05)
    intact, ablated = figures["figure_3"].axes[1].get_lines()[:2]
    assert (intact.get_ydata().argmax(), ablated.get_ydata().argmax()) == (19, 20)  # offset -1 is the 19th
    assert len(drawn.position_kernels(published_kernels().query("not ablated")).axes) == 1


@pytest.mark.slow
def test_the_figure_stands_where_the_tables_say(tiny_grid):
    tables = tiny_grid[1]
    times = tables["formation"].assign(formed_both=[4.0, np.nan] * 5, formed_loss=[2.0, np.nan] * 5)
    figure = formation_figure(tables["evaluations"], times, tables["rerouting"], tables["kernels"])
    curves, formed_at, plane, shapes = figure.axes
    level, *lines = curves.lines
    assert level.get_ydata()[0] == TINY.loss_threshold  # from the table's attrs
    wide = tables["evaluations"].pivot_table(index="step", columns=["arm", "seed"], values="ce_pred")
    drawn = {tuple(np.round(line.get_ydata(), 9)) for line in lines if len(line.get_ydata())}
    for arm in ARMS:
        for curve in (*wide[arm].to_numpy().T, wide[arm].mean(axis=1).to_numpy()):
            assert tuple(np.round(curve, 9)) in drawn
    assert [places_around(3, n, 0.2).tolist() for n in (1, 3)] == [[3], [2.8, 3.0, 3.2]]  # points that share a place
    hollow, filled, arrows = formed_at.lines[:3]
    np.testing.assert_array_equal(hollow.get_ydata(), [2, np.nan])
    np.testing.assert_array_equal(filled.get_ydata(), [4, np.nan])
    assert arrows.get_ydata().tolist() == [6]
    heads = tables["rerouting"]
    for arm, line in zip(ARMS, plane.lines, strict=True):
        mine = heads[heads["arm"] == arm]
        assert line.get_xdata().tolist() == mine["dir_frac"].tolist()
        if arm.startswith("rope"):
            assert line.get_ydata().tolist() == mine["rope_imag_frac"].tolist()
        else:
            assert (line.get_ydata() < 0).all()
    run_and_head = ["arm", "seed", "step", "layer", "head"]
    own = tables["kernels"].merge(heads.iloc[:1][run_and_head])
    np.testing.assert_allclose(shapes.lines[0].get_ydata(), own["score"] - own["score"].mean())
    assert shapes.lines[0].get_xdata().tolist() == list(range(-8, 1))
    # The published tables have raw weights alone, and no threshold.
    raw = heads.drop(columns=["dir_frac", "D_head", "rope_imag_frac"])
    bare = tables["evaluations"].copy()
    bare.attrs = {}
    figure = formation_figure(bare, times, raw, tables["kernels"])
    assert figure.axes[2].get_xlabel().endswith("raw weights")
    assert figure.axes[2].lines[0].get_xdata().tolist() == raw.loc[raw["arm"] == "ape_free", "dir_frac_raw"].tolist()
    assert figure.axes[0].lines[0].get_ydata().tolist() == wide["ape_free"][0].tolist()
