"""Shards of one folder: who makes which part, what they say while parts are missing, and the table in the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import joblib
import pandas as pd
import pytest
import zoo
from command_line import run
from page_code import ROOT, blocks
from work_jobs import finished, numbers, parts_of, table_of
from zoo_words import reader

import tlspectral as tls
from tlspectral.errors import MissingParts
from tlspectral.heads import analyze_models
from tlspectral.tables import read_table, shard
from tlspectral.tables.job import Job
from tlspectral.tables.resume_folder import open_resume_folder
from tlspectral.tables.sharing import Shard, sharing


class Work:
    """Seven parts in a folder, and the numbers of those that were made."""

    def __init__(self, folder):
        self.folder, self.made = open_resume_folder(folder, {"a": 1}), []

    def table_of(self, number):
        self.made.append(number)
        return table_of(number)

    def parts(self, count=7):
        return parts_of(count, self.table_of)

    def __call__(self, **options):
        return numbers(finished(self.parts(), self.folder, **options))


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path / "work")


# --- the engine ---


def test_a_shard_makes_every_nth_part_and_the_last_has_them_all_in_order(work):
    found = {}
    for index in (2, 3, 1):
        with shard(index, 3):
            found[index] = work()
        found["made", index], work.made = work.made, []
    assert found == {("made", 2): [1, 4], ("made", 3): [2, 5], ("made", 1): [0, 3, 6], 1: list(range(7))}
    with shard(2, 3):
        assert work() == list(range(7))
    assert work() == list(range(7))
    assert work.made == []


def test_shards_of_another_number_finish_what_others_began(work):
    with shard(1, 2):
        work()
    for index in (1, 2, 3):
        with shard(index, 3):
            found = work()
    assert sorted(work.made) == found == list(range(7))


def test_more_shards_than_parts_leave_some_without_any(work):
    with shard(9, 9):
        pytest.fail(f"all jobs are there: {work()}")
    assert work.made == []


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_workers_share_the_parts_of_a_shard(work, n_jobs):
    with joblib.parallel_config(backend="threading"), shard(2, 2):
        work(n_jobs=n_jobs)
    assert sorted(work.made) == [1, 3, 5]


def test_what_is_missing_is_named_and_the_message_stays_short(work):
    with sharing(Shard.numbered(1, 7)), pytest.raises(MissingParts) as error:
        work()
    assert str(error.value) == (
        f"{work.folder.path}: 1 of 7 jobs are there; missing: part1, part2, part3, part4, part5, part6. "
        "Run the other shards"
    )
    with (
        sharing(Shard.numbered(1, 1000)),
        pytest.raises(MissingParts, match=r"part7, part8 and 92 others\. Run the other shards$"),
    ):
        finished(work.parts(101), work.folder)


@pytest.mark.parametrize(("index", "count"), [(0, 16), (17, 16), (-1, 16), (0, 0)])
def test_a_shard_that_does_not_exist_is_refused(index, count):
    with pytest.raises(ValueError, match=f"no shard {index} of {count}: shards count from 1"), shard(index, count):
        pytest.fail("the block runs")


def test_a_shard_that_is_never_entered_warns():
    with pytest.warns(UserWarning, match=r"without `with`, so this process makes all jobs: write `with tls"):
        shard(1, 2)


def test_what_cannot_be_shared_is_refused(work):
    with shard(1, 2), pytest.raises(ValueError, match="needs a folder that all shards can read"):
        finished(work.parts())
    with shard(1, 2), pytest.raises(ValueError, match="a generator of models or jobs cannot be shared out"):
        finished(iter(work.parts()), work.folder)
    assert work.made == []


def test_what_a_part_measures_inside_is_not_shared_out(work, tmp_path):
    inner = Work(tmp_path / "inner")
    with shard(1, 2):
        finished([Job("outer", lambda: pd.DataFrame({"numbers": inner()}))], work.folder)
    assert inner.made == list(range(7))


def test_a_shard_ends_with_its_own_failures_noted_and_those_of_others_missing(work):
    def fails(number):
        if number in (2, 3):
            raise ValueError(f"part {number} cannot be made")
        return work.table_of(number)

    parts, failures = parts_of(4, fails), {}
    with (
        sharing(Shard.numbered(1, 2)),
        pytest.raises(MissingParts, match=r"1 of 3 .*missing: part1, part3\. Run the other shards$"),
    ):
        finished(parts, work.folder, failed=failures.__setitem__)
    assert failures.pop("part2").message == "part 2 cannot be made"
    with (
        sharing(Shard.numbered(2, 2)),
        pytest.raises(MissingParts, match=r"2 of 3 .*missing: part2\. Run the other shards$"),
    ):
        finished(parts, work.folder, failed=failures.__setitem__)
    assert list(failures) == ["part3"]


def test_an_error_of_a_part_leaves_the_block(work):
    def refuse():
        raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk"), shard(1, 2):
        finished([Job("part0", refuse)], work.folder)


# --- functions (that every shard of each makes what all need first: test_resumable_functions) ---


@pytest.mark.slow
def test_models_are_dealt_out_the_largest_files_first(tmp_path, monkeypatch):
    from tlspectral.heads import many_models

    small, large = (zoo.save_folder("llama", tmp_path / name) for name in ("small", "large"))
    (large / "more.model").write_bytes(b"0" * 10_000_000)
    seen, real = [], many_models.analyze_heads
    monkeypatch.setattr(many_models, "analyze_heads", lambda model, **how: seen.append(model) or real(model, **how))
    few = {"null_draws": 2, "detectors": False}
    with shard(1, 2):
        pytest.fail(f"one model is missing: {analyze_models([small, large], tmp_path / 'many', **few)}")
    assert [Path(name).name for name in seen] == ["large"]
    failures = analyze_models([small, large, "no/such/model"], tmp_path / "many", **few)
    assert failures["model"].tolist() == ["no/such/model"]
    assert failures.attrs["models"] == [str(small), str(large), "no/such/model"]


# --- commands ---

SWEEP = ["ablate", "tiny-rope", "--heads", "all", "--part", "output", "--folder", "sweep", "-o", "sweep.parquet"]


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_collect_says_what_is_missing_and_then_makes_the_table(inside, monkeypatch):
    done = run(*SWEEP, "--shard", "1/2")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "sweep: 1 of 2 jobs are there; missing: output_L001. Run the other shards\n"
    done = run("collect", "sweep")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "sweep: 1 of 2 jobs are there; missing: output_L001. Run the other shards\n"
    assert not (inside / "sweep.parquet").exists()

    done = run(*SWEEP, "--shard=2/2")
    assert done.exit_code == 0, done.output
    by_last, printed = (inside / "sweep.parquet").read_bytes(), done.stdout
    (inside / "sweep.parquet").unlink()
    (inside / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # paths are those of the folder where the command was given
    done = run("collect", inside / "sweep")
    assert done.exit_code == 0, done.output
    assert done.stdout == printed
    assert done.stderr == f"{inside / 'sweep'}: all 2 jobs are there\n"
    assert (inside / "sweep.parquet").read_bytes() == by_last

    monkeypatch.chdir(inside)
    assert run(*SWEEP[:-4], "--folder", "one", "-o", "one.parquet").exit_code == 0
    assert (inside / "one.parquet").read_bytes() == by_last


@pytest.mark.usefixtures("inside")
def test_collect_makes_no_part(monkeypatch):
    """A part that is gone between the look and the run is named, and not made."""
    for index in (1, 2):
        assert run(*SWEEP, "--shard", f"{index}/2").exit_code == 0
    real = tls.load_model

    def removes(name, **how):
        Path("sweep/output_L000.parquet").unlink()
        return real(name, **how)

    monkeypatch.setattr(tls, "load_model", removes)
    done = run("collect", "sweep")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "sweep: 1 of 2 jobs are there; missing: output_L000. Run the other shards"


@pytest.mark.slow
@pytest.mark.usefixtures("inside")
def test_collect_of_parts_that_a_function_made():
    model = tls.load_model("tiny-rope")
    assert "has no work of shards" in run("collect", ".").stderr
    for index, status in ((1, 1), (2, 0)):
        with shard(index, 2):
            tls.ablation_sweep(model, "output", folder="sweep")
        done = run("collect", "sweep")
        assert done.exit_code == status
    assert done.output == "sweep: all 2 jobs are there\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["ablate", "tiny-rope", "--heads", "all"], "needs --folder, a folder"),
        (["analyze", "tiny-rope", "--no-detectors"], "needs --folder, a folder"),
        (["positional", "tiny-rope"], "needs --output, a folder"),
        (["ablate", "tiny-rope", "--heads", "all", "--folder", "sweep", "--shard", "0/16"], "shards count from 1"),
        (["ablate", "tiny-rope", "--heads", "all", "--folder", "sweep", "--shard", "3-16"], "such as 3/16"),
    ],
)
@pytest.mark.usefixtures("inside")
def test_refusals_come_before_the_model_is_loaded(command, said, monkeypatch):
    monkeypatch.setattr(tls, "load_model", lambda *_, **__: pytest.fail("loaded"))
    done = run(*command, *([] if "--shard" in command else ["--shard", "1/2"]))
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_a_task_of_block_swaps_is_shared_out(inside, monkeypatch):
    monkeypatch.setattr(tls, "load_model", lambda name, **_: reader("llama"))
    asked = ["--task", "binding", "--mode", "key", "--pairs", "3", "--draws", "2"]
    command = ["positional", "any", *asked, "-o", "out"]
    assert run(*command, "--shard", "1/2").exit_code == 0
    parts = [file.name for file in (inside / "out" / "runs").glob("*.parquet")]
    assert {name.split("_")[0] for name in parts} == {"key"}
    assert not list((inside / "out").glob("*.parquet"))
    assert run("collect", "out").exit_code == 1
    assert run(*command, "--shard", "2/2").exit_code == 0
    assert len(read_table(inside / "out" / "heads_key.parquet")) == 8


@pytest.mark.slow
def test_tables_of_a_report_are_shared_out(inside):
    command = ["report", "tiny-rope", "-o", "tiny"]
    assert run(*command, "--shard", "1/2").exit_code == 0
    first = ["directions", "heads", "kernels"]  # every shard that does not find the heads makes them
    assert sorted(file.stem for file in (inside / "tiny").glob("*.parquet")) == first
    done = run(*command, "--shard", "2/2")
    assert done.exit_code == 0, done.output
    names = ["directions", "heads", "kernel_prediction", "kernels", "wall"]
    assert sorted(file.stem.split("_8")[0] for file in (inside / "tiny").glob("*.parquet")) == names
    assert (inside / "tiny" / "report.html").exists()


def test_a_dataset_of_models_is_shared_out(inside):
    command = ["analyze", "tiny-rope", "tiny-ape", "no/such/model", "--no-detectors", "--null-draws", "2", "-o", "many"]
    failing, *others = (run(*command, "--shard", f"{index}/3") for index in (1, 2, 3))
    assert failing.exit_code == 1  # it could be one of the hub, which come first
    assert "1 of 3 models failed" in failing.stdout
    assert failing.stderr.startswith("no/such/model: ")
    assert [done.exit_code for done in others] == [0, 0]
    assert "2 of 3 jobs are there; missing: heads/no--such--model" in others[-1].stderr
    assert len(list((inside / "many" / "heads").iterdir())) == 2
    assert run("collect", "many").exit_code == 1


# --- the page's recipes, as they are ---


def recipe(kind, containing):
    """The block of the page that has these words."""
    (block,) = [block for block in blocks("docs/scale.md", kind) if containing in block]
    return block


@pytest.fixture
def shell(inside):
    """Runs a script in an empty folder, with `tlspectral` on the path and a tiny model of the page's name."""
    (inside / "bin").mkdir()
    program = inside / "bin" / "tlspectral"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tlspectral "$@"\n')
    program.chmod(0o755)
    path = f"{inside / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run_script(script, **variables):
        script = script.replace("MODEL", "tiny-rope").replace("16", "2")
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **ours, **variables}
        done = subprocess.run(
            ["bash", "-e"], input=script, text=True, capture_output=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done

    return run_script


@pytest.mark.slow
def test_the_slurm_array_with_a_shell_loop_in_place_of_slurm(shell, inside):
    script = recipe("bash", "#SBATCH")
    assert "#SBATCH --array=1-16\n" in script
    for task in (2, 1):
        shell(script, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT="2")
    assert len(read_table(inside / "sweep.parquet")) == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.usefixtures("dask_cluster")
def test_the_workers_of_a_dask_cluster(inside):
    """The block of the recipe; the cluster is the fixture's."""
    block = recipe("python", "dask").partition("with joblib")[2].replace("/shared", str(inside))
    model = tls.load_model("tiny-rope")
    exec(compile(f"with joblib{block}", "scale.md", "exec"), {"joblib": joblib, "tls": tls, "model": model})
    assert len(read_table(inside / "sweep.parquet")) == 8


@pytest.mark.slow
def test_notes_of_shards_are_the_same_for_all(inside):
    for index in (1, 2):
        run(*SWEEP, "--shard", f"{index}/2")
    (note,) = (inside / "sweep" / ".shards").iterdir()
    assert json.loads(note.read_text()) == {
        "parts": ["output_L000", "output_L001"],
        "command": SWEEP,
        "directory": str(inside),
    }
