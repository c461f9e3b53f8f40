"""Several jobs on one folder: none loses work by another, whenever it is killed."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from work_jobs import finished, numbers, parts_of, table_of

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.job import Job
from tlspectral.tables.resume_folder import open_resume_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork and no SIGKILL")


def content(folder):
    """All files below a folder with their bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def make_old(file):
    os.utime(file, (time.time() - 25 * 3600,) * 2)


@pytest.fixture
def killed_jobs(import_benchmark):
    return import_benchmark("killed_jobs")


@pytest.mark.slow
@unix
def test_eight_jobs_of_which_half_are_killed_leave_the_folder_of_one(killed_jobs, tmp_path):
    killed_jobs.make_parts(tmp_path / "one")
    program = [sys.executable, killed_jobs.__file__, tmp_path / "many"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20, "too few were killed for a test"
    whole, left = content(tmp_path / "one"), content(tmp_path / "many")
    assert {name for name in left if name not in whole} == {name for name in left if name.endswith(".part")}
    for file in (tmp_path / "many").rglob(".*"):
        make_old(file)
    killed_jobs.make_parts(tmp_path / "many")
    assert content(tmp_path / "many") == whole


@pytest.mark.slow
@unix
def test_shards_that_are_killed_make_nothing_twice_but_what_was_cut_short():
    program = [sys.executable, BENCHMARKS / "shards.py", "--kills", "30", "--pause", "0.01"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 30
    assert counts["kills inside a part"], "none fell into a part, which is no test"
    assert counts["parts begun"] == counts["parts"] + counts["kills inside a part"]
    assert counts["jobs that found all parts"] >= 1
    assert counts["same bytes as one job"]


# --- manifests ---


def at_once(calls):
    """Make the calls in threads; return what each gave or raised."""

    def made(call):
        try:
            return call()
        except IncompatibleCheckpoint as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(made, calls)]


@pytest.fixture
def written_at_once(monkeypatch):
    """Let eight threads write their text at the same time."""
    barrier, written = threading.Barrier(8, timeout=60), Path.write_text

    def wait(self, *given, **options):
        barrier.wait()
        done = written(self, *given, **options)
        barrier.wait()
        return done

    monkeypatch.setattr(Path, "write_text", wait)


@pytest.mark.usefixtures("written_at_once")
def test_jobs_that_begin_a_folder_together_agree_on_one_manifest(tmp_path):
    calls = [partial(open_resume_folder, tmp_path, {"a": 1}, noted={"score": number}) for number in range(8)]
    noted = [folder.noted["score"] for folder in at_once(calls)]
    assert set(noted) == {json.loads((tmp_path / "settings.json").read_text())["score"]}
    assert list(content(tmp_path)) == ["settings.json"]


@pytest.mark.usefixtures("written_at_once")
def test_of_jobs_that_begin_a_folder_with_other_settings_one_goes_on(tmp_path):
    found = at_once([partial(open_resume_folder, tmp_path, {"a": number}) for number in range(8)])
    refused = [error for error in found if isinstance(error, IncompatibleCheckpoint)]
    assert len(refused) == 7
    assert all("was made with other a" in str(error) for error in refused)
    accepted = next(number for number, folder in enumerate(found) if folder not in refused)
    assert json.loads((tmp_path / "settings.json").read_text())["a"] == accepted


# --- parts ---


def test_a_part_that_another_job_stored_meanwhile_is_read(tmp_path):
    folder, made = open_resume_folder(tmp_path, {}), []

    def make(number):
        made.append(number)
        if number == 0:  # another job
            finished([Job("part1", partial(table_of, 10))], open_resume_folder(tmp_path, {}))
        return table_of(number)

    found = finished(parts_of(3, make), folder)
    assert made == [0, 2]
    assert numbers(found) == [0, 10, 2]


def test_a_part_stored_meanwhile_is_checked(tmp_path):
    folder = open_resume_folder(tmp_path, {})

    def make():
        folder.write("part1", table_of(1))
        return table_of(0)

    def refuse(table):
        raise IncompatibleCheckpoint("part1 is of another model")

    with pytest.raises(IncompatibleCheckpoint, match="part1 is of another model"):
        finished([Job("part0", make), Job("part1", table_of, refuse)], folder)


@pytest.mark.parametrize("error", [None, FileNotFoundError("what this job was reading")])
def test_a_part_that_another_job_stored_first_stays_and_is_taken(tmp_path, error):
    folder, failures = open_resume_folder(tmp_path, {}), {}

    def make():
        folder.write("part0", table_of(10))  # another job, on a machine that rounds otherwise
        if error is not None:
            raise error
        return table_of(0)

    found = finished([Job("part0", make)], folder, failed=failures.__setitem__)
    assert found["part0"]["number"].item() == folder.read("part0")["number"].item() == 10
    assert failures == {}
    assert folder.write("part0", table_of(10))
    assert not folder.write("part0", table_of(11))


def test_a_part_of_another_model_that_was_stored_first_is_noted(tmp_path):
    folder, failures = open_resume_folder(tmp_path, {}), {}

    def make():
        folder.write("part0", table_of(10))
        return table_of(0)

    def refuse(table):
        raise IncompatibleCheckpoint("part0 is of another model")

    assert finished([Job("part0", make, refuse)], folder, failed=failures.__setitem__) == {}
    assert failures["part0"].message == "part0 is of another model"


# --- unfinished files ---


def test_unfinished_files_name_their_job_and_are_no_tables(tmp_path):
    (tmp_path / "some").mkdir()
    with whole_file(tmp_path / "plane.parquet") as one, whole_file(tmp_path / "plane.parquet") as other:
        assert one != other
        for path in (one, other):
            assert path.parent == tmp_path
            assert path.name.startswith(".plane.parquet.")
            assert path.name.endswith(".part")
            assert f"-{os.getpid()}-" in path.name
            path.write_text("done")
    assert list(content(tmp_path)) == ["plane.parquet"]
    with whole_file(tmp_path / ("long" * 60)) as path:
        path.write_text("as long as a file's name may be, almost")


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_there_stays_where_it_is_not_to_be_replaced(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:  # as on some file systems
        monkeypatch.setattr("os.link", refuse)
    for text in ("first", "second"):
        with whole_file(tmp_path / "a.txt", replace=False) as path:
            path.write_text(text)
    assert {name: text.decode() for name, text in content(tmp_path).items()} == {"a.txt": "first"}


@unix
def test_what_dead_jobs_left_is_removed_when_it_is_old(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = open_resume_folder(tmp_path, {})
    with whole_file(tmp_path / "a") as path:
        path.touch()
    here, there = path.name.removeprefix(".a.").split(f"-{os.getpid()}-")[0], "another-machine"
    (tmp_path / "some").mkdir()
    names = {
        f".part0.parquet.{here}-{gone.pid}-0123abcd.part": (True, False),
        f".part0.parquet.{there}-{os.getpid()}-0123abcd.part": (True, False),
        f".part0.parquet.{here}-{os.getpid()}-0123abcd.part": (False, False),
        f".part0.parquet.{here}-1-0123abcd.part": (False, False),  # the first process of a machine
        ".part0.parquet": (False, False),
        f"part0.parquet.{here}-{gone.pid}-0123abcd.part": (False, False),  # not hidden, so not ours
    }
    for old in (True, False):
        paths = [parent / name for name in names for parent in (tmp_path, tmp_path / "some")]
        for path in paths:
            path.write_bytes(b"PAR1")
            if old:
                make_old(path)
        (tmp_path / "._part1.parquet").write_bytes(b"")
        open_resume_folder(tmp_path, {})
        removed = {path for path in paths if not path.exists()}
        assert removed == {path for path in paths if names[path.name][0] and old}
    assert numbers(finished(parts_of(1), folder)) == [0]
