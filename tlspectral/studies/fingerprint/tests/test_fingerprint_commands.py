"""`replicate`, `compare` and the triage of `show`: what they print, what they write, and how they refuse."""

import numpy as np
import pandas as pd
import pytest
from described import assert_described
from matplotlib.figure import Figure
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.studies.fingerprint import replication
from tlspectral.studies.fingerprint.figures import replication as drawn
from tlspectral.studies.fingerprint.published import PUBLISHED_HEADS, published_heads, published_kernels
from tlspectral.studies.fingerprint.replication import scheme_contrast
from tlspectral.tables import read_table, write_table

ALL = [f"published:{name}" for name in PUBLISHED_HEADS]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def few_claims(monkeypatch):
    """Two sections and one sentence instead of all, and one figure: the rest is the same code and takes longer."""
    from tlspectral.studies.fingerprint.replication import matched_null, sentences, strong_heads, table

    few = (matched_null.null_levels, matched_null.self_checks, strong_heads.head_4_11)
    monkeypatch.setattr(table, "RECOMPUTED", few)
    monkeypatch.setattr(table, "DECIDED", (sentences.history.slow_over_the_next_hundredfold,))
    monkeypatch.setattr(drawn, "published_figures", lambda: {"figure_3": drawn.position_kernels(published_kernels())})


# --- replicate ---


def test_replicate_says_what_differs_and_why(few_claims):
    done = run("study", "replicate")
    assert done.exit_code == 0, done.output
    said = done.output
    assert "differs: 1\n  FP, section 6: GPT-2: percentile of D_head of head 4.11: printed 0.22, here 0.0833" in said
    assert "\n      0.22 is its D_head, not the percentile\n" in said
    assert "cannot be checked without weights: 1\n" in said
    assert "4 published numbers in" in said
    assert said.rstrip().endswith("2 reproduced, 1 differs, 1 cannot be checked without weights")
    assert "0.707" not in said
    assert "1 sentences: 0 holds, 1 holds only kindly, 0 does not hold, 0 not decidable from the tables" in said
    assert "\n      strictly no: in both models less than 0.9 of the fall" in said
    assert "\n      kindly yes: in both it is not complete" in said
    assert "printed 0.707, here 0.7066" in run("study", "replicate", "--all").output


def test_replicate_writes_table_and_figures(few_claims, tmp_path):
    done = run("study", "replicate", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    table = read_table(tmp_path / "out" / "replication.parquet")
    assert list(table) == list(replication.table.COLUMNS)
    assert table["kind"].tolist() == ["number"] * 4 + ["sentence"]
    written = (tmp_path / "out" / "replication.md").read_text(encoding="utf-8")
    assert "### Sentences" in written
    assert "| FP, section 6 | 0 | 1 | 0 |" in written
    assert table.attrs["licence"] == "CC-BY-4.0"
    assert (tmp_path / "out" / "figure_3.png").stat().st_size > 10_000


def test_a_grid_is_put_beside_the_published_one(few_claims, tmp_path):
    steps = pd.DataFrame(
        {
            "arm": np.repeat(["rope_free", "rope_imag", "own"], 2),
            "seed": [0, 1] * 3,
            "formed_loss": [100.0, 200.0, 300.0, 300.0, 50.0, np.nan],
            "formed_both": [200.0, 200.0, 400.0, np.nan, 50.0, np.nan],
        }
    )
    write_table(steps, tmp_path / "formation.parquet")
    own = replication.side_by_side(steps)
    assert_described(own)
    own = own.set_index("arm")
    assert own.loc["rope_imag", "published_ratio"] == pytest.approx(1280 / 940)
    assert own.loc["rope_imag", "loss_ratio"] == pytest.approx(2)
    assert own.loc["rope_imag", ["both_mean", "both_ratio"]].tolist() == [400, 2]
    assert own["unformed"].tolist() == [0, 1, 1]
    assert own.loc["rope_free", "loss_sd"] == pytest.approx(50 * 2**0.5)
    assert np.isnan(own.loc["own", "published_mean"])
    done = run("study", "replicate", "--grid", tmp_path / "formation.parquet")
    assert done.exit_code == 0, done.output
    assert "rope_imag" in done.output
    write_table(steps.drop(columns="formed_both"), tmp_path / "less.parquet")
    refused = run("study", "replicate", "--grid", tmp_path / "less.parquet")
    assert refused.exit_code == 2
    assert "no column formed_both" in refused.stderr


# --- compare ---


def test_compare_repeats_the_published_contrast(tmp_path):
    done = run("study", "schemes", *ALL, "-o", tmp_path / "compare.png")
    assert done.exit_code == 0, done.output
    assert (
        "7 models: separated by 0.527; exact permutation p = 0.029, one-sided, smallest possible 0.029" in done.output
    )
    listed = [line.split()[0] for line in done.output.splitlines() if line.strip().startswith("published:")]
    assert listed[0] == "published:pythia-410m"
    assert listed[-1] == "published:gpt-neo-1.3b"
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_compare_takes_tables_of_ones_own(tmp_path):
    heads = published_heads("pythia-410m")
    write_table(heads, tmp_path / "mine.parquet")
    again = run("study", "schemes", tmp_path / "mine.parquet", tmp_path / "mine.parquet")
    assert again.exit_code == 2
    assert "mine.parquet is named twice" in again.stderr
    write_table(heads, tmp_path / "copy.parquet")
    assert (
        f"pythia-410m ({tmp_path / 'copy.parquet'})"
        in run("study", "schemes", tmp_path / "mine.parquet", tmp_path / "copy.parquet").output
    )
    done = run("study", "schemes", tmp_path / "mine.parquet", "published:pythia-1.4b", "--top", 3)
    assert done.exit_code == 0, done.output
    assert "median of the top 3" in done.output
    assert "All models are RoPE: no test" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["published:gpt3"], "no table of heads was published for 'gpt3'"),
        (["published:gpt2", "--top", "200"], "published:gpt2: k=200"),
        (["none.parquet"], "does not exist"),
    ],
)
def test_compare_refuses_in_one_line(arguments, said):
    done = run("study", "schemes", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# --- the contrast and its figures ---


def model(low: float, high: float, *, rotary: bool) -> pd.DataFrame:
    """Ten heads; the five that attend to the previous token have D_head from low to high."""
    spread = np.concatenate([np.linspace(low, high, 5), np.linspace(0.4, 0.5, 5)])
    table = pd.DataFrame({"layer": 0, "head": range(10), "D_head": spread, "prev": np.linspace(0.9, 0.0, 10)})
    return table.assign(rope_imag_frac=0.5 if rotary else np.nan)


def test_the_contrast_groups_by_phase_and_tests_in_one_direction():
    tables = {
        "a": model(0.6, 0.9, rotary=True),
        "b": model(0.7, 0.8, rotary=True),
        "c": model(0.1, 0.3, rotary=False),
    }
    found = scheme_contrast(tables)
    assert_described(found.models)
    assert_described(found.heads)
    assert found.models["scheme"].tolist() == ["RoPE", "RoPE", "not RoPE"]
    assert found.models["percentile"].tolist() == [0.8, 0.8, 0.3]
    assert found.models["midrank"].tolist() == pytest.approx([0.75, 0.75, 0.25])
    assert found.test is not None
    assert found.test.separated
    assert found.test.pvalue == pytest.approx(1 / 3)
    assert len(found.heads) == 15
    turned = scheme_contrast({"a": model(0.1, 0.3, rotary=True), "c": model(0.6, 0.9, rotary=False)})
    assert turned.test is not None
    assert turned.test.pvalue == 1.0
    with pytest.raises(ValueError, match="at least one"):
        scheme_contrast({})
    with pytest.raises(ValueError, match=r"^d: "):
        scheme_contrast({"d": model(0, 1, rotary=True).drop(columns="prev")})


def part(figure: Figure, gid: str):
    (found,) = figure.findobj(lambda artist: artist.get_gid() == gid)
    return found


def test_percentiles_are_drawn_where_they_are():
    tables = {"a": model(0.6, 0.9, rotary=True), "c": model(0.1, 0.3, rotary=False)}
    figure = drawn.scheme_percentiles(scheme_contrast(tables))
    assert part(figure, "heads of a").get_ydata().tolist() == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert part(figure, "median of c").get_ydata().tolist() == [0.3, 0.3]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["c", "a"]
    assert "permutation p = 0.500" in figure.legends[0].get_title().get_text()


def test_attenuation_bars_are_those_of_table_3():
    names = ("pythia-410m", "llama-3-8b")
    (axes,) = drawn.attenuation_bars({name: published_heads(name) for name in names}).axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights[0] == pytest.approx([60.7, 98.2], abs=0.05)
    assert heights[1] == pytest.approx([46.6, 70.4], abs=0.05)


def test_kernels_are_drawn_intact_and_ablated():
    curves = published_kernels()
    left, right = drawn.position_kernels(curves).axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["5.2", "9.5", "3.1", "4.9"]
    intact, ablated = right.get_lines()[:2]
    assert intact.get_ydata().argmax() == 19  # offset -1
    assert ablated.get_ydata().argmax() == 20
    assert len(drawn.position_kernels(curves[~curves["ablated"]]).axes) == 1
    with pytest.raises(ValueError, match="found 0"):
        drawn.position_kernels(curves[curves["ablated"]])


def test_all_figures_of_the_paper_are_drawn():
    figures = drawn.published_figures()
    assert list(figures) == ["figure_1", "figure_2a", "figure_2b", "figure_3", "figure_4", "figure_5"]
    assert [len(figures[f"figure_{name}"].axes) for name in ("4", "5")] == [3, 4]
    points = part(figures["figure_1"], "heads").get_offsets()
    np.testing.assert_array_equal(points, published_heads("gpt2")[["dir_frac", "D_head"]])
