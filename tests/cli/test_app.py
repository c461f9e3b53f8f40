"""The command line: what it prints, what it passes on, and how it refuses."""

import io
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from command_line import heads, refusal, run, succeed

import tlspectral as tls
from tlspectral.cli import app, demo, terminal_summary
from tlspectral.errors import ScoreMismatch
from tlspectral.tables import progress, read_table, write_table

pytestmark = pytest.mark.lowest


@pytest.fixture
def table(tmp_path):
    write_table(heads(), tmp_path / "heads.parquet")
    return tmp_path / "heads.parquet"


@pytest.fixture
def library(monkeypatch):
    """The two long calls, replaced; what they were given is kept."""
    calls = SimpleNamespace(load=[], analyze=[])

    def load_model(name, **options):
        calls.load.append((name, options))
        return SimpleNamespace(loaded=name)

    def analyze_heads(model, **options):
        calls.analyze.append((model, options))
        return heads()

    monkeypatch.setattr(tls, "load_model", load_model, raising=False)
    monkeypatch.setattr(tls, "analyze_heads", analyze_heads, raising=False)
    monkeypatch.setattr(tls, "write_table", write_table, raising=False)
    return calls


def section(output: str, title: str) -> list[str]:
    """The head names listed under a title."""
    (part,) = [part for part in output.split("\n\n") if part.startswith(title)]
    return [line.split()[0] for line in part.splitlines() if re.match(r" *L\d+H\d", line)]


@pytest.mark.slow
def test_show_lists_the_top_heads_and_where_the_table_comes_from(table):
    done = succeed("show", table, "--all", "--top", 2)
    assert section(done.output, "Previous-token heads") == ["L1H2", "L1H1"]
    assert section(done.output, "rotational share (D_head) furthest above its null") == ["L1H2", "L1H1"]
    assert section(done.output, "rotational share (D_head) furthest below its null") == ["L0H1", "L0H0"]
    for said in (
        "tiny-model (abc123): 6 heads in 2 layers",
        "weights_sha256: 0123456789ab",
        "null_draws: 300\nnull_blocks: shared\n",
        "detectors: n_sequences 200, segment_length 64, bos 0\n",
        "self-check: worst_error 2.5e-06, tolerance 1.3e-05, layer 1, compared scores",
        "status: ok for all 6 heads",
    ):
        assert said in done.output
    # Medians over the heads' own nulls, beside which the lists are read.
    median = heads()[["D_head_null_mean", "dir_frac_null_mean"]].median()
    shares = f"rotational share (D_head) {median.iloc[0]:.3f}, directional share (dir_frac) {median.iloc[1]:.3f} "
    assert f"Random heads: {shares}" in done.output.split("Previous-token heads")[0]
    row = next(line for line in done.output.splitlines() if line.split()[:1] == ["L1H2"])
    assert row.split()[4] == f"{heads()['D_head_null_mean'].iloc[-1]:.3f}"
    assert row.split()[1:3] == ["0.876", "0.0012"]
    assert row.split()[-1] == "-", "rope_imag_frac is NaN: a dash"
    assert "-7.5" in done.output
    assert "nan" not in done.output


def test_show_says_what_is_missing_and_counts_the_heads_that_are_not_ok(tmp_path):
    frame = heads()
    frame["status"] = ["zero", "zero", "defective", "ok", "ok", "ok"]
    frame[["prev", "dup", "ind", "D_head_z"]] = np.nan
    frame.attrs = {}
    write_table(frame.drop(columns="name"), tmp_path / "heads.parquet")
    known = ["No detector scores in this table.", "No null in this table.", "status: 2 zero, 1 defective, 3 ok"]
    known.append("unnamed model: 6 heads")
    done = succeed("show", tmp_path / "heads.parquet", "--all")
    assert [said for said in [*known, "self-check: not made"] if said not in done.output] == []
    done = succeed("show", tmp_path / "heads.parquet")
    assert [said for said in known if said not in done.output] == []


def with_chance(chance, **scores):
    """The table of `heads` with a chance level, and other scores."""
    frame = heads().assign(**scores)
    frame.attrs["detectors"] = {**frame.attrs["detectors"], "chance": chance}
    return frame


def test_the_first_screen_has_23_lines_of_80_characters_results_first(tmp_path):
    frame = pd.concat([heads().assign(layer=layer) for layer in range(98, 100)], ignore_index=True)
    frame["head"] += 100
    frame["name"] = [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame["D_head_z"] = np.linspace(-1234.5, 1234.5, len(frame))
    frame[["prev_se", "dup_se", "ind_se", "rope_imag_frac"]] = 0.0123
    frame.attrs = {**heads().attrs, "model": "folder/" * 30}
    write_table(frame, tmp_path / "heads.parquet")
    lines = succeed("show", tmp_path / "heads.parquet").stdout.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("folder/")
    assert lines[0].endswith(": 12 heads in 2 layers")
    assert lines[5].startswith("L98H102 0.876 ± 0.0123")
    assert lines[-2:] == [
        "status: ok for all 12 heads",
        "weights 0123456789ab, tlspectral 0.1.0; more: tlspectral show TABLE --all",
    ]


def test_heads_at_chance_are_not_listed(tmp_path):
    # prev: one head of six is above chance. dup: the largest is 2 standard errors above, which the largest of six
    # scores reaches by chance. ind: the second layer has another chance level.
    dup, ind = [0.02, 0.01, 0.022, 0.0, 0.0, 0.026], [0.3, 0.01, 0.01, 0.3, 0.31, 0.9]
    chance = {"prev": 0.05, "dup": 0.022, "ind": {"L0": 0.05, "L1": 0.305}}
    write_table(with_chance(chance, dup=dup, dup_se=0.002, ind=ind, ind_se=0.001), tmp_path / "heads.parquet")
    lines = succeed("show", tmp_path / "heads.parquet").stdout.splitlines()
    assert lines[4].split("  ")[0] == "chance 0.050"
    assert lines[4].endswith("chance 0.050 to 0.305")
    assert [line.split()[0] for line in lines[5:8]] == ["L1H2", "L1H1", "L0H0"]
    assert lines[5].split("±")[0] == "L1H2 0.876 "
    assert "none above chance" in lines[5]
    assert lines[5].endswith("L1H2 0.900 ± 0.0010")
    everything = succeed("show", tmp_path / "heads.parquet", "--all").stdout
    assert "Duplicate-token heads, by dup\nnone above chance\n" in everything
    assert section(everything, "Previous-token heads") == ["L1H2"]
    # Without a level, or without errors, nothing else can be said.
    write_table(heads().assign(dup=dup, dup_se=0.002), tmp_path / "heads.parquet")
    assert "chance not recorded" in succeed("show", tmp_path / "heads.parquet").stdout
    assert "none above" not in succeed("show", tmp_path / "heads.parquet").stdout
    write_table(with_chance(chance, dup=dup).drop(columns="dup_se"), tmp_path / "heads.parquet")
    assert "L1H2 0.026\n" in succeed("show", tmp_path / "heads.parquet").stdout.replace("   ", "\n")


def test_names_are_bold_on_a_terminal_alone(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = terminal_summary.first_screen(heads(), 2)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    styled = terminal_summary.first_screen(heads(), 2)
    assert "\x1b[1mL1H2\x1b[0m 0.876" in styled
    assert "\x1b[2mchance not recorded\x1b[0m" in styled
    assert re.sub(r"\x1b\[\d+m", "", styled) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal_summary.first_screen(heads(), 2) == plain


def test_analyze_loads_analyses_writes_and_shows(tmp_path, library):
    output = tmp_path / "out" / "heads.parquet"
    options = ("--null-draws", 20, "--jobs", 2, "--seed", 7, "--folder", "parts")
    options += ("--revision", "v2", "--device", "cuda:1", "--dtype", "float64", "--heads", "L0,L-1")
    done = succeed("analyze", "tiny", "-o", output, *options)
    assert library.load == [("tiny", {"revision": "v2", "device": "cuda:1", "dtype": "float64"})]
    model, passed = library.analyze[0]
    assert model.loaded == "tiny"
    assert passed == {
        "null_draws": 20,
        "detectors": True,
        "n_jobs": 2,
        "seed": 7,
        "heads": ["L0", "L-1"],
        "folder": Path("parts"),
    }
    assert len(read_table(output)) == 6
    assert f"{output}: 6 heads in " in done.output
    assert "worst_error 2.5e-06" in done.output.splitlines()[0]
    assert "\nL1H2 0.876 ± 0.0012 " in done.output
    quiet = run("analyze", "tiny", "--quiet", "-o", tmp_path / "heads.csv")
    assert (quiet.exit_code, quiet.output) == (0, "")
    columns = pd.read_csv(tmp_path / "heads.columns.csv")
    assert columns["name"].tolist() == pd.read_csv(tmp_path / "heads.csv").columns.tolist()


@pytest.mark.slow
def test_analyze_without_detectors_hands_over_the_files_unloaded(tmp_path, library):
    options = ("-o", tmp_path / "h.parquet", "--no-detectors")
    succeed("analyze", "maker/model", *options, "--revision", "v2", "--folder", "parts")
    assert library.load == []
    model, passed = library.analyze[0]
    assert (model.location, model.revision, passed["detectors"]) == ("maker/model", "v2", False)
    assert str(passed["folder"]) == "parts"
    # A device or type that was asked for is used.
    for option, value in (("device", "cpu"), ("dtype", "float64")):
        run("analyze", "tiny", *options, f"--{option}", value)
        unset = {"revision": None, "device": None, "dtype": None}
        assert library.load.pop()[1] == unset | {option: value}


@pytest.fixture
def many(monkeypatch):
    """What `analyze_models` is given; of the models, `many.failing` fail."""
    calls = SimpleNamespace(given=[], failing=[])

    def analyze_models(models, folder, **options):
        calls.given.append((models, folder, options))
        failures = pd.DataFrame(
            [(model, "BadWeights", "no\nweights", "") for model in calls.failing],
            columns=["model", "error", "message", "raised_in"],
        )
        failures.attrs["models"] = models
        return failures

    monkeypatch.setattr(tls.heads, "analyze_models", analyze_models, raising=False)
    return calls


def test_analyze_of_several_models_says_how_many_failed(tmp_path, many):
    options = ("--null-draws", 20, "--no-detectors", "--jobs", 2, "--seed", 7)
    done = succeed("analyze", "a", "b", "-o", tmp_path / "out", *options)
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/out/heads: 0 of 2 models failed"
    passed = {"null_draws": 20, "detectors": False, "n_jobs": 2, "seed": 7}
    assert many.given == [(["a", "b"], tmp_path / "out", passed)]
    many.failing = ["b"]
    done = run("analyze", "a", "b", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert done.stderr == "b: BadWeights: no weights\n"
    last = f"{tmp_path}/out/heads: 1 of 2 models failed, see {tmp_path}/out/failures"
    assert done.stdout.splitlines()[-1] == last
    many.failing = []
    (tmp_path / "models.txt").write_text("a\n")  # a list of one model is a dataset too
    succeed("analyze", tmp_path / "models.txt", "-o", tmp_path / "out")
    assert many.given[-1][0] == [str(tmp_path / "models.txt")]


def test_verify_prints_the_worst_error_of_each_layer(library, monkeypatch):
    def verify_scores(model, prompts=None):
        return pd.Series([1e-6, 2.5e-6], index=pd.Index([0, 1], name="layer"))

    monkeypatch.setattr(tls, "verify_scores", verify_scores, raising=False)
    done = succeed("verify", "tiny", "--revision", "v2")
    assert library.load == [("tiny", {"revision": "v2", "device": None, "dtype": None})]
    assert done.stdout.splitlines()[1:3] == ["    0  1.00e-06", "    1  2.50e-06"]
    assert "tiny: the operators reproduce the model's own scores on all 2 layers" in done.stdout


@pytest.mark.parametrize("said", ["2 of 3 layers are in out; the same call goes on from there", ""])
def test_ctrl_c_says_what_is_kept(library, monkeypatch, said):
    def load_model(name, **options):
        raise KeyboardInterrupt(*filter(None, [said]))

    monkeypatch.setattr(tls, "load_model", load_model)
    done = run("verify", "tiny")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", f"tlspectral: {said or 'interrupted'}\n")


@pytest.mark.parametrize("said", ["", "stopped, and nothing is kept: give folder= to keep finished work"])
def test_ctrl_c_names_the_folder_with_finished_parts(tmp_path, library, monkeypatch, said):
    def stop(*given, **options):
        raise KeyboardInterrupt(*filter(None, [said]))

    monkeypatch.setattr(tls, "analyze_heads", stop)
    hint = "tlspectral: stopped, and nothing is kept: give --folder to keep finished work\n"
    empty = run("analyze", "tiny", "--folder", tmp_path / "none")
    assert (empty.exit_code, empty.stderr) == (130, hint if said else "tlspectral: interrupted\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "settings.json").write_text("{}")
    kept = run("analyze", "tiny", "--folder", tmp_path / "parts")
    line = f"interrupted; finished parts are kept in {tmp_path}/parts, and the same command goes on from there"
    assert (kept.exit_code, kept.stderr) == (130, f"tlspectral: {line}\n")
    assert run("analyze", "tiny").stderr == (hint if said else "tlspectral: interrupted\n")  # not the folder before


def test_ctrl_c_before_the_command_begins_is_one_line(monkeypatch):
    def stop(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.core.TyperGroup.make_context", stop)
    done = run("verify", "tiny")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "tlspectral: interrupted\n")


@pytest.mark.parametrize(
    "failure",
    [ValueError("bad"), OSError("bad"), ImportError("bad"), ScoreMismatch("\n bad"), AttributeError("bad")],
)
def test_what_a_user_can_mend_is_one_line_unless_debug_and_a_mistake_of_ours_is_raised(library, monkeypatch, failure):
    def load_model(name, **options):
        raise failure

    monkeypatch.setattr(tls, "load_model", load_model)
    assert run("--debug", "verify", "tiny").exception is failure
    done = run("verify", "tiny")
    assert done.stdout == ""
    if isinstance(failure, AttributeError):
        assert (done.exception, done.stderr) == (failure, "")
    else:
        assert (done.exit_code, done.stderr) == (2, "tlspectral: error: bad\n")


@pytest.mark.parametrize("command", ["ablate", "positional", "study statistics"])
def test_the_other_commands_about_a_model_take_a_revision(table, library, command):
    given = {"ablate": ["tiny", table], "positional": ["tiny"], "study statistics": [table, "--model", "tiny"]}[command]
    run(*command.split(), *given, "--revision", "v2", "--device", "cpu", "--dtype", "float64")
    assert library.load == [("tiny", {"revision": "v2", "device": "cpu", "dtype": "float64"})]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_format_prints_the_table_and_nothing_else(library, form):
    done = succeed("analyze", "tiny", "--format", form)
    read = pd.read_csv if form == "csv" else pd.read_json
    printed = read(io.StringIO(done.stdout))
    # JSON rounds to 15 decimals; a column of integers for floats without a fraction is the same numbers.
    pd.testing.assert_frame_equal(printed, pd.DataFrame(heads()), check_dtype=False, atol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("analyze", "tiny", "-o", "heads.xlsx"), "heads.xlsx: tables are .parquet or .csv files"),
        (("analyze", "tiny", "-o", "heads"), "heads: tables are .parquet or .csv files: give -o a name"),
        (("analyze", "tiny", "-o", "FOLDER"), "is a folder: give -o a file name in it"),
        (("analyze", "tiny", "--heads", "first"), "'first' names no head"),
        (("analyze", "tiny", "--dtype", "float46"), "did you mean 'float64'?"),
        (("analyze", "a", "b"), "several models need a folder for their dataset"),
        (("analyze", "a", "b", "-o", "out", "--heads", "L3"), "works for one model"),
        (("analyze", "a", "b", "-o", "out", "--format", "csv"), "several models are written to -o"),
        (
            ("analyze", "a", "b", "-o", "out", "--no-detectors", "--folder", "d"),
            "with several models, -o keeps",
        ),
        (("verify", "tiny", "--dtype", "float46"), "did you mean 'float64'?"),
        (("verify", "tiny", "--device", "gpu"), "'gpu' is none of cpu, cuda, mps and xpu"),
        (("verify", "tiny", "--format", "xml"), "'xml' is none of json, csv"),
        (("show", "PLAIN"), "tlspectral did not write"),
        (("show", "none.parquet"), "does not exist"),
        (("show", "OTHER"), "other.parquet has no column head, D_head"),
        (("show", "ROWS"), "rows.csv is CSV"),
        (("plane", "PLAIN", "-o", "FOLDER"), "is a folder"),
        (("ablate", "tiny", "L9H9", "--part", "M_A"), "error: 'L9H9' is a head, not a table: give heads by --heads"),
        (("ablate", "tiny", "L5H1,L7"), "'L5H1,L7' are heads, not a table: give heads by --heads"),
        (("show", "L5"), "'L5' is a layer, not a table: give a parquet file that tlspectral wrote"),
        (("plane", "L5H1", "-o", "p.png"), "'L5H1' is a head, not a table: give a parquet file"),
        (("map", "L5H1", "prev", "-o", "p.png"), "'L5H1' is a head, not a table"),
        (("effects", "L5H1", "TABLE", "-o", "p.png"), "'L5H1' is a head, not a table"),
        (("effects", "TABLE", "L5H1", "-o", "p.png"), "'L5H1' is a head, not a table"),
        (("circuit", "L5H1", "-o", "p.png"), "'L5H1' is a head, not a table"),
        (("wall", "tiny", "--table", "L5H1", "-o", "p.png"), "'L5H1' is a head, not a table"),
        (("report", "tiny"), "tables and page of the model tiny need a folder: give -o FOLDER"),
        (("study", "statistics", "TABLE", "--revision", "v2"), "goes with --model"),
        (("study", "statistics", "TABLE", "--device", "cpu"), "goes with --model"),
        (("study", "statistics", "TABLE", "--dtype", "float64"), "goes with --model"),
    ],
)
def test_arguments_and_files_are_checked_before_the_model_is_loaded(tmp_path, table, library, many, arguments, said):
    heads().to_parquet(tmp_path / "plain.parquet")
    write_table(pd.DataFrame({"layer": [0], "theta": [1.0]}), tmp_path / "other.parquet")
    files = {name: tmp_path / f"{name.lower()}.parquet" for name in ("PLAIN", "OTHER")}
    (tmp_path / "rows.csv").write_text("layer\n0\n")
    files |= {"TABLE": table, "FOLDER": tmp_path, "ROWS": tmp_path / "rows.csv"}
    assert said in refusal(*(files.get(argument, argument) for argument in arguments))
    assert library.load == library.analyze == many.given == []


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from tlspectral.cli import app;"
        "print(CliRunner().invoke(app, ['--help']).exit_code);"
        "print([m for m in ('torch', 'transformer_lens', 'pandas', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["0", "[]"]


@pytest.mark.slow
def test_the_first_try_of_the_readme_needs_no_file():
    result = succeed("analyze", "tiny-rope", "--null-draws", 20)
    assert "tiny-rope: 8 heads in" in result.output
    assert "L0H3" in result.output  # its previous-token head


def test_the_help_is_a_table_of_contents_and_every_command_has_an_example():
    assert run("--version").stdout == f"tlspectral {tls.__version__}\n"
    names = {str(command.name or command.callback.__name__) for command in app.registered_commands}
    shown = run("--help").stdout
    listed = [line.split()[0] for line in shown.split("Commands", 1)[-1].splitlines() if line.startswith("  ")]
    assert names <= set(listed)
    for name in names:
        text = run(name, "--help").stdout
        assert f"Example: tlspectral {name} " in " ".join(text.split()), name


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_shows_no_bars(library, monkeypatch, quiet):
    found = []
    monkeypatch.setattr(tls, "load_model", lambda name, **_: found.append(progress.hidden()))
    run("analyze", "tiny", *(["--quiet"] if quiet else []))
    assert found == [quiet]
    assert not progress.hidden()


@pytest.mark.slow
def test_one_load_gives_table_figure_and_ablation(tmp_path, monkeypatch):
    loads = []
    real = tls.load_model
    monkeypatch.setattr(demo, "_MODEL", "tiny-rope")
    monkeypatch.setattr(tls, "load_model", lambda *given, **options: (loads.append(given), real(*given, **options))[1])
    # Few draws of the null: how many there are without that is the library's to say.
    monkeypatch.setattr(tls, "analyze_heads", partial(tls.analyze_heads, null_draws=5))
    done = succeed("demo", "-o", tmp_path / "out", "--jobs", 1)
    assert loads == [("tiny-rope",)]
    heads, sweep = (tls.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("smollm2", "rope_phase"))
    assert len(heads) == 8
    assert sweep.attrs["n_sequences"] == 8
    assert sweep["delta_se"].notna().all()
    strongest = heads.loc[heads["prev"].idxmax(), "name"]
    # Without the phase of the one previous-token head the model does not copy: 1.7 against .1 nats.
    assert sweep.loc[sweep["delta"].idxmax(), ["layer", "head"]].tolist() == [0, 3]
    assert done.output.split("rope_phase removed")[1].splitlines()[2].startswith(f"{strongest} ")
    assert (tmp_path / "out" / "smollm2.png").stat().st_size > 10_000
