"""`tlspectral positional` and `canonical`: what they print and write, on a tiny model and a tiny schedule."""

import json

import pandas as pd
import pytest
from command_line import refusal, run, succeed
from matplotlib.figure import Figure
from tlspectral_studies.positional_symbolic.canonical import PRESETS, CanonicalSchedule
from zoo_words import reader

import tlspectral
from tlspectral.positional import BindingTask, PromptFile, draws, positional_symbolic
from tlspectral.tables import read_table, write_table
from tlspectral.tables.printed import short_number

SMALL = ["--task", "binding", "--pairs", "4", "--draws", "2"]


@pytest.fixture
def llama(monkeypatch):
    """The model of any name, and figures of few pixels, which else take longer than the tables."""
    monkeypatch.setattr(tlspectral, "load_model", lambda name, **_: reader("llama"), raising=False)
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **named: real(self, path, **{**named, "dpi": 20}))


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("mode", ["prompt", "key"])
def test_positional_writes_what_the_library_measures_once(tmp_path, monkeypatch, mode):
    options = [*SMALL, "--mode", mode, "--swaps", "all", "-o", tmp_path / "out"]
    done = succeed("positional", "any", *options, "--seed", 3)
    task = BindingTask("plain", 4, draws=2)
    settings = {"mode": mode, "seed": 3, "swaps": "all"}
    shown = {"heads": {}, "queries": {"by": "query"}, "draws": {"by": "draw"}, "frequencies": {"per_frequency": True}}
    scores = {name: positional_symbolic(reader("llama"), task, **settings, **by) for name, by in shown.items()}
    said = f"{task.name} on external, swaps all by {mode}, draws: 2\nanswer: mean probability "
    said += f"{short_number(scores['heads'].attrs['answers']['probability'])}, first"
    assert said in done.output
    # Both ends of the index are named, with errors over the lists; a task that is not done comes with a warning.
    for kind, head in (("positional", "idxmax"), ("symbolic", "idxmin")):
        row = scores["heads"].loc[getattr(scores["heads"]["exclusion_index"], head)()]
        lines = done.output.split(f"Most {kind} heads by the exclusion index\n")[1].splitlines()
        numbers = [row[name] for name in ("exclusion_index", "exclusion_index_se", "s_pos")]
        name, *shown = lines[1].split()[:4]
        assert name == row["name"]
        # Two decimals, and more where the smallest error of a column would read as 0.
        assert [float(one) for one in shown] == pytest.approx(numbers, abs=0.005)
        assert all(len(one.split(".")[1]) >= 2 for one in shown)
    assert scores["heads"].attrs["answers"]["first"] < 0.5
    assert "warning: the model does not answer this task" in done.output
    assert "p = " not in done.output
    for figure in ("plane", "exclusion_plane"):
        assert (tmp_path / "out" / f"{figure}_{mode}.png").read_bytes().startswith(b"\x89PNG")
    for name, one in scores.items():
        pd.testing.assert_frame_equal(read_table(tmp_path / "out" / f"{name}_{mode}.parquet"), one)
    # What was measured is kept: the same command measures nothing again, and refuses other settings.
    monkeypatch.setattr(draws, "BlockReading", lambda *_, **__: pytest.fail("measured again"))
    again = run("positional", "any", *options, "--seed", 3)
    assert again.stdout == done.stdout
    monkeypatch.setattr("tlspectral.cli.positional._ANSWERED", -1)
    assert "warning" not in run("positional", "any", *options, "--seed", 3).output
    assert "was made with other" in refusal("positional", "any", *options, "--seed", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
def test_further_figures_are_drawn_from_the_folder(tmp_path):
    heads = tlspectral.analyze_heads(reader("llama"), null_draws=2, detectors=False)
    heads["prev"] = heads.index / len(heads)
    write_table(heads, table := tmp_path / "heads.parquet")
    assert "holds no heads_prompt.parquet" in refusal("study", "positional-figures", tmp_path)
    for mode in ("prompt", "key"):
        run("positional", "any", *SMALL, "--mode", mode, "-o", tmp_path / "out")
    drawn = succeed("study", "positional-figures", tmp_path / "out", "--table", table)
    assert "Rank correlation with the table of heads, swaps by prompt" in drawn.output
    statistics = read_table(tmp_path / "out" / "agreement_key.parquet")
    assert set(statistics["column"]) == {"rope_imag_frac", "D_head", "prev"}
    for figure in ("heatmaps", "plane_by_query", "histograms", "exclusion_heatmap", "agreement", "frequencies"):
        for mode in ("prompt", "key"):
            assert (tmp_path / "out" / f"{figure}_{mode}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_without_rotary_positions_has_no_frequencies(monkeypatch, tmp_path):
    monkeypatch.setattr(tlspectral, "load_model", lambda name, **_: reader("gpt2"), raising=False)
    succeed("positional", "any", *SMALL, "-o", tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.parquet")) == [
        "draws_prompt",
        "heads_prompt",
        "queries_prompt",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
def test_prompts_come_from_a_file(tmp_path):
    draw = BindingTask("plain", 4).draw(1)
    line = {
        "prefix": draw.prefix,
        "blocks": draw.blocks,
        "questions": [[q.block, q.suffix, q.answer] for q in draw.questions],
    }
    (tmp_path / "mine.jsonl").write_text(json.dumps(line), encoding="utf-8")
    # All blocks of the file swap and are asked about.
    options = ["--prompts", tmp_path / "mine.jsonl"]
    done = succeed("positional", "any", *options, "--swaps", "per_query")
    assert "PromptFile" in done.output
    assert "swaps per_query by prompt" in done.output
    (tmp_path / "printed.jsonl").write_text(run("positional", "--example").stdout, encoding="utf-8")
    assert PromptFile(str(tmp_path / "printed.jsonl")).n_blocks == 3
    assert "--pairs works with --task" in refusal("positional", "any", *options, "--pairs", 4)


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--template", "gpt-5"], "'gpt-5' is not a ready task"),
        (["--task", "haystack"], "not a ready task: give 'binding', 'key-value', 'copying', 'needle', 'list-index'"),
        (["--swaps", "some"], "swaps='some' is not known: give 'kept', 'all'"),
        (["--pairs", "60"], "and the model's context is "),
    ],
)
def test_refusals_are_one_line(options, said):
    done = run("positional", "any", *SMALL[:2], *SMALL[4:], *options)
    assert done.exit_code == 2
    assert done.output.startswith("tlspectral: error: ")
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.slow
def test_canonical_trains_writes_and_resumes(monkeypatch, tmp_path):
    short = CanonicalSchedule(steps=3, batch_size=8, warmup_steps=1, validation_samples=64, log_every=1)
    monkeypatch.setitem(PRESETS, "quick", short)
    done = succeed("study", "canonical", "-o", tmp_path, "--seeds", 2)
    accuracy = read_table(tmp_path / "accuracy.parquet")
    assert len(accuracy) == 4 * 10 * 2
    row = next(line for line in done.stdout.splitlines() if line.startswith("retrieval"))
    values = accuracy.query("task == 'retrieval' and angle == 0")["accuracy"]
    assert f"{values.mean():.3f} ({values.std():.3f})" in row
    for figure in ("accuracy_against_angle", "accuracy_against_position", "accuracy_while_learning", "trajectories"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000
    monkeypatch.setattr(
        "tlspectral_studies.positional_symbolic.canonical.sweep.train_canonical", None
    )  # resumed: nothing is trained
    again = run("study", "canonical", "-o", tmp_path, "--seeds", 2)
    assert again.stdout == done.stdout
    assert len(list((tmp_path / "runs" / "weights").glob("*.safetensors"))) == 4 * 2
