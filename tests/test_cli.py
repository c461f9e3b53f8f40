"""The command line: what it prints, what it passes on, and how it refuses."""

import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import tlspectral
from tlspectral.cli import app
from tlspectral.errors import ScoreMismatch
from tlspectral.tables import HEAD_COLUMNS, read_table, write_table

ATTRS = {
    "model": "tiny-model",
    "revision": "abc123",
    "backend": "bridge",
    "weights_sha256": "0123456789abcdef" * 4,
    "versions": {"tlspectral": "0.1.0", "torch": "2.13.0"},
    "seed": 0,
    "null_draws": 300,
    "null_blocks": "shared",
    "score_check": {"worst_error": 2.5e-6, "tolerance": 1.3e-5, "layer": 1, "compared": "scores"},
    "detectors": {"n_sequences": 200, "segment_length": 64, "bos": 0},
    "control_variate": {},
    "rotary_valid_up_to": None,
    "columns": {},
}


def heads() -> pd.DataFrame:
    """Two layers of three heads: L1H2 leads by prev and stands furthest above its null, L0H1 furthest below."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({column.name: generator.uniform(0.2, 0.4, 6) for column in HEAD_COLUMNS})
    frame["layer"], frame["head"] = [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]
    frame["kv_head"], frame["rank"], frame["status"], frame["bilinear"] = 0, 8, "ok", "exact"
    frame["name"] = [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame["prev"] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.876]
    frame["prev_se"] = 0.0012
    frame["D_head_z"] = [-1.0, -7.5, 0.5, 1.5, 2.0, 4.2]
    frame["rope_imag_frac"] = np.nan
    frame.attrs = dict(ATTRS)
    return frame


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

    monkeypatch.setattr(tlspectral, "load_model", load_model, raising=False)
    monkeypatch.setattr(tlspectral, "analyze_heads", analyze_heads, raising=False)
    monkeypatch.setattr(tlspectral, "write_table", write_table, raising=False)
    return calls


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def section(output: str, title: str) -> list[str]:
    """The head names listed under a title."""
    (part,) = [part for part in output.split("\n\n") if part.startswith(title)]
    return [line.split()[0] for line in part.splitlines()[2:]]


def test_show_lists_the_top_heads_and_where_the_table_comes_from(table):
    done = run("show", table, "--top", 2)
    assert done.exit_code == 0, done.output
    assert section(done.output, "Previous-token heads") == ["L1H2", "L1H1"]
    assert section(done.output, "D_head furthest above its null") == ["L1H2", "L1H1"]
    assert section(done.output, "D_head furthest below its null") == ["L0H1", "L0H0"]
    for said in (
        "tiny-model (abc123): 6 heads in 2 layers",
        "weights 0123456789ab;",
        "300 null draws (shared blocks)",
        "200 sequences [BOS, r, r], r of 64 tokens",
        "worst error 2.5e-06 in the model's own scores, layer 1, tolerance 1.3e-05",
        "status: ok for all 6 heads",
    ):
        assert said in done.output
    # Medians over the heads' own nulls, beside which the lists are read.
    median = heads()[["D_head_null_mean", "dir_frac_null_mean"]].median()
    of_random = f"Random heads: D_head {median.iloc[0]:.3f}, dir_frac {median.iloc[1]:.3f} "
    assert of_random in done.output.split("Previous-token heads")[0]
    row = next(line for line in done.output.splitlines() if line.split()[:1] == ["L1H2"])
    assert row.split()[4] == f"{heads()['D_head_null_mean'].iloc[-1]:.3f}"
    assert row.split()[1:3] == ["0.876", "0.0012"]
    assert row.split()[-1] == "-", "rope_imag_frac is NaN: a dash"
    assert "-7.5" in done.output
    assert "nan" not in done.output


def test_show_counts_the_heads_that_are_not_ok(tmp_path):
    frame = heads()
    frame.loc[[0, 1], "status"] = "zero"
    frame.loc[2, "status"] = "defective"
    frame.loc[[0, 1, 2], ["D_head", "D_head_z"]] = np.nan
    write_table(frame, tmp_path / "heads.parquet")
    done = run("show", tmp_path / "heads.parquet")
    assert done.exit_code == 0, done.output
    assert "status: 2 zero, 1 defective, 3 ok" in done.output
    assert "below its null" not in done.output


def test_show_without_detectors_null_or_provenance(tmp_path):
    frame = heads()
    frame[["prev", "dup", "ind", "D_head_z"]] = np.nan
    frame.attrs = {}
    write_table(frame.drop(columns="name"), tmp_path / "heads.parquet")
    done = run("show", tmp_path / "heads.parquet")
    assert done.exit_code == 0, done.output
    assert "unnamed model: 6 heads" in done.output
    assert "self-check: not made" in done.output
    assert "No detector scores in this table." in done.output
    assert "No null in this table." in done.output


def test_analyze_loads_analyses_writes_and_shows(tmp_path, library):
    output = tmp_path / "out" / "heads.parquet"
    options = ("--null-draws", 20, "--null-dtype", "float64", "--backend", "hooked", "--jobs", 2, "--seed", 7)
    options += ("--revision", "v2", "--device", "cuda:1", "--dtype", "float64", "--layers", "0,-1")
    done = run("analyze", "tiny", "-o", output, *options)
    assert done.exit_code == 0, done.output
    assert library.load == [("tiny", {"backend": "hooked", "revision": "v2", "device": "cuda:1", "dtype": "float64"})]
    ((model, passed),) = library.analyze
    assert model.loaded == "tiny"
    assert passed == {
        "null_draws": 20,
        "null_dtype": "float64",
        "detectors": True,
        "n_jobs": 2,
        "seed": 7,
        "show_progress": True,
        "revision": None,  # the model that is loaded is of that revision
        "layers": [0, -1],
        "checkpoint_dir": None,
    }
    assert len(read_table(output)) == 6
    assert f"{output}: 6 heads in " in done.output
    assert "worst error 2.5e-06" in done.output.splitlines()[0]
    assert section(done.output, "Previous-token heads")[0] == "L1H2"


def test_analyze_without_detectors_hands_over_the_path_unloaded(tmp_path, library):
    done = run("analyze", "maker/model", "-o", tmp_path / "h.parquet", "--no-detectors", "--revision", "v2")
    assert done.exit_code == 0, done.output
    assert library.load == []
    assert library.analyze[0][0] == "maker/model"
    assert library.analyze[0][1]["revision"] == "v2"
    assert library.analyze[0][1]["detectors"] is False
    # A backend, device or type that was asked for is used.
    for option, value in (("backend", "bridge"), ("device", "cpu"), ("dtype", "float64")):
        run("analyze", "tiny", "-o", tmp_path / "h.parquet", "--no-detectors", f"--{option}", value)
        assert library.load.pop()[1] == {
            "backend": "auto",
            "revision": None,
            "device": None,
            "dtype": None,
            option: value,
        }


def test_analyze_refuses_a_folder_as_output_before_loading(tmp_path, library):
    done = run("analyze", "tiny", "-o", tmp_path)
    assert done.exit_code == 2
    assert "is a folder: give -o a file name in it" in done.stderr
    assert library.load == []


@pytest.fixture
def many(monkeypatch):
    """What `analyze_models` is given; of the models, `many.failing` fail."""
    import tlspectral.heads

    calls = SimpleNamespace(given=[], failing=[])

    def analyze_models(models, folder, **options):
        calls.given.append((models, folder, options))
        failures = pd.DataFrame(
            [(model, "BadWeights", "no\nweights", "") for model in calls.failing],
            columns=["model", "error", "message", "raised_in"],
        )
        failures.attrs["models"] = models
        return failures

    monkeypatch.setattr(tlspectral.heads, "analyze_models", analyze_models, raising=False)
    return calls


def test_analyze_of_several_models_says_how_many_failed(tmp_path, many):
    options = ("--null-draws", 20, "--no-detectors", "--jobs", 2, "--seed", 7)
    done = run("analyze", "a", "b", "-o", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/out/heads: 0 of 2 models failed"
    passed = {"null_draws": 20, "null_dtype": "float32", "detectors": False, "backend": "auto", "n_jobs": 2, "seed": 7}
    passed["show_progress"] = True
    assert many.given == [(["a", "b"], tmp_path / "out", passed)]
    many.failing = ["b"]
    done = run("analyze", "a", "b", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert done.stderr == "b: BadWeights: no weights\n"
    last = f"{tmp_path}/out/heads: 1 of 2 models failed, see {tmp_path}/out/failures"
    assert done.stdout.splitlines()[-1] == last


def test_a_list_of_one_model_is_a_dataset_too(tmp_path, many):
    (tmp_path / "models.txt").write_text("a\n")
    assert run("analyze", tmp_path / "models.txt", "-o", tmp_path / "out").exit_code == 0
    assert many.given[0][0] == [str(tmp_path / "models.txt")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "several models need a folder for their dataset"),
        (("-o", "out", "--no-detectors", "--checkpoint-dir", "parts"), "several keep theirs in -o"),
    ],
)
def test_several_models_refuse_what_is_for_one(many, options, said):
    done = run("analyze", "a", "b", *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert many.given == []


def test_several_models_refuse_a_file_as_output(tmp_path):
    done = run("analyze", "a", "b", "-o", tmp_path / "heads.parquet")
    assert done.exit_code == 2
    assert "heads.parquet is a file, and several models make a dataset: name a folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_verify_prints_the_worst_error_of_each_layer(library, monkeypatch):
    def verify_scores(model, tokens=None):
        return pd.Series([1e-6, 2.5e-6], index=pd.Index([0, 1], name="layer"))

    monkeypatch.setattr(tlspectral, "verify_scores", verify_scores, raising=False)
    done = run("verify", "tiny", "--revision", "v2")
    assert done.exit_code == 0, done.output
    assert library.load == [("tiny", {"backend": "auto", "revision": "v2", "device": None, "dtype": None})]
    assert done.stdout.splitlines()[1:3] == ["    0  1.00e-06", "    1  2.50e-06"]
    assert "tiny: the operators reproduce the model's own scores on all 2 layers" in done.stdout


def test_a_mismatch_is_one_line_and_exit_code_2(library, monkeypatch):
    def verify_scores(model, tokens=None):
        raise ScoreMismatch("tiny, layer 1:\n  worst error 0.3")

    monkeypatch.setattr(tlspectral, "verify_scores", verify_scores, raising=False)
    done = run("verify", "tiny")
    assert done.exit_code == 2
    assert done.stderr == "tlspectral: error: tiny, layer 1: worst error 0.3\n"
    assert done.stdout == ""


@pytest.mark.parametrize("failure", [ValueError("bad"), OSError("bad"), ImportError("bad")])
def test_what_a_user_can_mend_is_one_line_unless_debug(library, monkeypatch, failure):
    def load_model(name, **options):
        raise failure

    monkeypatch.setattr(tlspectral, "load_model", load_model)
    done = run("verify", "tiny")
    assert (done.exit_code, done.stderr) == (2, "tlspectral: error: bad\n")
    done = run("--debug", "verify", "tiny")
    assert done.exception is failure


def test_a_mistake_of_ours_keeps_its_traceback(library, monkeypatch):
    def load_model(name, **options):
        raise AttributeError("a bug")

    monkeypatch.setattr(tlspectral, "load_model", load_model)
    done = run("verify", "tiny")
    assert isinstance(done.exception, AttributeError)
    assert str(done.exception) == "a bug"
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["ablate", "positional", "study statistics"])
def test_the_other_commands_about_a_model_take_a_revision(table, library, command):
    given = {"ablate": ["tiny", table], "positional": ["tiny"], "study statistics": [table, "--model", "tiny"]}[command]
    run(*command.split(), *given, "--revision", "v2", "--device", "cpu", "--dtype", "float64")
    assert library.load == [("tiny", {"revision": "v2", "device": "cpu", "dtype": "float64"})]


@pytest.mark.parametrize("option", [("--revision", "v2"), ("--device", "cpu"), ("--dtype", "float64")])
def test_a_choice_of_weights_of_no_model_is_refused(table, option):
    done = run("study", "statistics", table, *option)
    assert done.exit_code == 2
    assert "goes with --model" in done.stderr


@pytest.mark.parametrize("form", ["json", "csv"])
def test_format_prints_the_table_and_nothing_else(tmp_path, library, form):
    done = run("analyze", "tiny", "--format", form, "-o", tmp_path / "heads.parquet")
    assert done.exit_code == 0, done.output
    read = pd.read_csv if form == "csv" else pd.read_json
    printed = read(io.StringIO(done.stdout))
    # JSON rounds to 15 decimals; a column of integers for floats without a fraction is the same numbers.
    pd.testing.assert_frame_equal(printed, pd.DataFrame(heads()), check_dtype=False, atol=1e-15)
    assert len(read_table(tmp_path / "heads.parquet")) == 6


def test_quiet_prints_nothing_and_shows_no_bar(tmp_path, library):
    done = run("analyze", "tiny", "--quiet", "-o", tmp_path / "heads.parquet")
    assert (done.exit_code, done.output) == (0, "")
    assert library.analyze[0][1]["show_progress"] is False
    assert (tmp_path / "heads.parquet").exists()


def test_a_csv_has_the_meaning_of_its_columns_beside_it(tmp_path, table):
    done = run("study", "statistics", table, "-o", tmp_path / "row.csv", "--top", 1)
    assert done.exit_code == 0, done.output
    columns = pd.read_csv(tmp_path / "row.columns.csv")
    assert columns["name"].tolist() == pd.read_csv(tmp_path / "row.csv").columns.tolist()
    assert columns["meaning"].notna().all()
    done = run("show", tmp_path / "row.csv")
    assert done.exit_code == 2
    assert "row.csv is CSV" in done.stderr
    assert "pandas.read_csv" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("analyze", "tiny", "-o", "heads.xlsx"), "heads.xlsx: a table is a .parquet or .csv file"),
        (("analyze", "tiny", "-o", "heads"), "heads: a table is a .parquet or .csv file: give -o such a name"),
        (("analyze", "tiny", "--layers", "first"), "'first' is not a layer, or several as 0,5,-1"),
        (("analyze", "tiny", "--backend", "brigde"), "did you mean 'bridge'?"),
        (("verify", "tiny", "--dtype", "float46"), "did you mean 'float64'?"),
        (("verify", "tiny", "--device", "gpu"), "'gpu' is none of cpu, cuda, mps and xpu"),
        (("verify", "tiny", "--format", "xml"), "'xml' is none of json, csv"),
        (
            ("analyze", "tiny", "--device", "cpu", "--no-detectors", "--checkpoint-dir", "d"),
            "without --backend, --device",
        ),
        (("analyze", "a", "b", "-o", "out", "--layers", "3"), "is for one model"),
        (("analyze", "a", "b", "-o", "out", "--format", "csv"), "several are written to -o"),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(library, arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert library.load == library.analyze == []


def test_files_that_are_not_ours_are_refused(tmp_path):
    heads().to_parquet(tmp_path / "plain.parquet")
    done = run("show", tmp_path / "plain.parquet")
    assert done.exit_code == 2
    assert "tlspectral did not write" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "does not exist" in run("show", tmp_path / "none.parquet").stderr
    write_table(pd.DataFrame({"layer": [0], "theta": [1.0]}), tmp_path / "frequency.parquet")
    assert "frequency.parquet has no column head, D_head" in run("show", tmp_path / "frequency.parquet").stderr


def test_plane_draws_the_figure(table, tmp_path):
    done = run("plane", table, "-o", tmp_path / "plane.png", "--highlight", 2)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
    done = run("plane", table, "-o", tmp_path / "plane.xyz")
    assert done.exit_code == 2
    assert "xyz" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.parquet", "plane.png"]


def test_version_and_examples():
    assert run("--version").stdout == f"tlspectral {tlspectral.__version__}\n"
    for command in ("analyze", "show", "verify", "plane"):
        assert f"Example: tlspectral {command} " in run(command, "--help").stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from tlspectral.cli import app;"
        "print(CliRunner().invoke(app, ['--help']).exit_code);"
        "print([m for m in ('torch', 'transformer_lens', 'pandas', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["0", "[]"]


def test_the_first_try_of_the_readme_needs_no_file():
    result = CliRunner().invoke(app, ["analyze", "tiny-rope", "--null-draws", "20"])
    assert result.exit_code == 0, result.output
    assert "tiny-rope: 8 heads in" in result.output
    assert "L0H3" in result.output  # its previous-token head


def test_the_help_is_a_table_of_contents_and_every_command_has_an_example():
    names = {str(command.name or command.callback.__name__) for command in app.registered_commands}
    shown = CliRunner().invoke(app, ["--help"]).stdout
    listed = [line.split()[0] for line in shown.split("Commands", 1)[-1].splitlines() if line.startswith("  ")]
    assert names <= set(listed)
    for name in names:
        text = CliRunner().invoke(app, [name, "--help"]).stdout
        assert f"Example: tlspectral {name} " in " ".join(text.split()), name


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_shows_no_bars_of_what_the_hub_sends(library, monkeypatch, quiet):
    from huggingface_hub.utils import are_progress_bars_disabled

    hidden = []
    monkeypatch.setattr(tlspectral, "load_model", lambda name, **_: hidden.append(are_progress_bars_disabled()))
    before = are_progress_bars_disabled()
    run("analyze", "tiny", *(["--quiet"] if quiet else []))
    assert hidden == [quiet or before]
    assert are_progress_bars_disabled() == before
