"""The engine of long work: order, workers, a live bar, folders that continue, and what stops it."""

import errno
import json
import os
import time
from functools import partial

import joblib
import pandas as pd
import pytest
from tqdm.auto import tqdm
from work_jobs import fails, finished, numbers, parts_of, prepared_by, table_of, until_the_bar_moves, wait_for_both

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks.sweeps.sweep import ABLATION_SWEEP
from tlspectral.tables import measurement
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, bundled, stacked, unbundled, workers_kept
from tlspectral.tables.resume_folder import open_resume_folder

pytestmark = pytest.mark.lowest


def workers_of(tables):
    return {int(table["pid"].item()) for table in tables.values()}


# --- shared out ---


def slow_first(number):
    """The first part is finished last."""
    time.sleep(0.5 if number == 0 else 0)
    return table_of(number)


@pytest.mark.fast(1)
@pytest.mark.parametrize("n_jobs", [1, 2])
def test_tables_come_in_the_order_given(n_jobs):
    with joblib.parallel_config(backend="threading"):
        found = finished(parts_of(4, slow_first), n_jobs=n_jobs)
    assert list(found) == ["part0", "part1", "part2", "part3"]
    assert numbers(found) == [0, 1, 2, 3]
    assert workers_of(found) == {os.getpid()}


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_worker_processes_end_with_the_outermost_call(tmp_path):
    parts = parts_of(4, partial(wait_for_both, folder=tmp_path))
    with workers_kept():
        first = workers_of(finished(parts, n_jobs=2))
        second = workers_of(finished(parts, n_jobs=2))
        assert len(first) == 2
        assert os.getpid() not in first
        assert second <= first  # started once
        assert all(is_running(pid) for pid in first)
    assert not any(is_running(pid) for pid in first)
    third = workers_of(finished(parts_of(4), n_jobs=2))
    assert not any(is_running(pid) for pid in third)


@pytest.mark.slow
def test_worker_processes_end_with_an_error_and_finished_parts_stay(tmp_path, monkeypatch):
    folder, started = open_resume_folder(tmp_path / "parts", {}), []
    real = measurement.get_reusable_executor
    monkeypatch.setattr(
        measurement, "get_reusable_executor", lambda **given: started.append(real(**given)) or started[-1]
    )
    with pytest.raises(ValueError, match="part 1 cannot be made"):
        finished(parts_of(2, fails), folder, n_jobs=2)
    assert len(started) == 1
    assert numbers(finished(parts_of(1), folder)) == [0]


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_part_that_fails_is_noted_and_the_others_are_made(tmp_path, n_jobs):
    folder, failures = open_resume_folder(tmp_path / "parts", {}), {}
    (folder.path / "part2.parquet").write_bytes(b"PAR1 and no more")
    with joblib.parallel_config(backend="threading"):
        found = finished(parts_of(4, fails), folder, n_jobs=n_jobs, failed=failures.__setitem__)
    assert list(found) == ["part0", "part3"]
    assert {name: failure.error for name, failure in failures.items()} == {
        "part1": "ValueError",
        "part2": "IncompatibleCheckpoint",
    }
    assert failures["part1"].message == "part 1 cannot be made"
    assert failures["part1"].raised_in.endswith(f"work_jobs.py:{fails.__code__.co_firstlineno + 2} in fails")
    assert sorted(file.stem for file in folder.path.glob("*.parquet")) == ["part0", "part2", "part3"]


def test_a_backend_that_returns_all_results_at_the_end_is_refused():
    with (
        joblib.parallel_config(backend="multiprocessing"),
        pytest.raises(ValueError, match='MultiprocessingBackend cannot return results one by one: use "loky"'),
    ):
        finished(parts_of(2), n_jobs=2)


@pytest.mark.slow
def test_workers_that_the_caller_configured_are_left_alone():
    with joblib.parallel_config(backend="loky"):
        found = workers_of(finished(parts_of(4), n_jobs=2))
        assert all(is_running(pid) for pid in found)
    joblib.externals.loky.get_reusable_executor(reuse=True).shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.usefixtures("dask_cluster")
def test_a_dask_cluster_makes_the_parts(tmp_path):
    folder = open_resume_folder(tmp_path / "parts", {})
    (tmp_path / "begun").mkdir()
    parts = parts_of(4, partial(wait_for_both, folder=tmp_path / "begun"))
    found = finished(parts, folder, n_jobs=-1, prepare=partial(prepared_by, tmp_path))
    assert numbers(found) == [0, 1, 2, 3]
    assert os.getpid() not in workers_of(found)
    assert len(list(tmp_path.glob("prepared*"))) == len(workers_of(found)) == 2
    assert len(list(folder.path.glob("*.parquet"))) == 4


# --- prepared once per worker ---


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "threading"])
def test_what_parts_share_is_prepared_once_per_worker(tmp_path, backend):
    begun = tmp_path / "begun"
    begun.mkdir()
    parts = parts_of(6, partial(wait_for_both, folder=begun))
    with joblib.parallel_config(**({} if backend is None else {"backend": backend})):
        found = finished(parts, n_jobs=2, prepare=partial(prepared_by, tmp_path))
    assert len(list(tmp_path.glob("prepared*"))) == 2
    assert all(table["prepared"].item() == f"by {table['pid'].item()}" for table in found.values())


def test_nothing_is_prepared_for_a_finished_work(tmp_path):
    folder = open_resume_folder(tmp_path / "parts", {})
    for _ in range(2):
        finished(parts_of(2), folder, prepare=partial(prepared_by, tmp_path))
    assert len(list(tmp_path.glob("prepared*"))) == 1


@pytest.mark.slow
def test_two_works_do_not_share_what_they_prepared(tmp_path):
    with workers_kept():
        for text in ("one", "two"):
            found = finished(parts_of(4), n_jobs=2, prepare=lambda text=text: text)
            assert {table["prepared"].item() for table in found.values()} == {text}


# --- the bar ---


class Bar(tqdm):
    """A bar that is shown, and notes where it begins, ends and stands."""

    def __init__(self, total, initial):
        super().__init__(total=total, initial=initial)
        self.began.append(initial)
        self.ahead.append(total)

    def update(self, n=1):
        super().update(n)
        self.stood.append(self.n)
        if self.moved and self.n:
            self.moved.touch()


@pytest.fixture
def shown(monkeypatch):
    Bar.began, Bar.ahead, Bar.stood, Bar.moved = [], [], [], None
    monkeypatch.setattr(measurement, "bar", lambda total, *_, initial: Bar(total, initial))
    return Bar


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_the_bar_moves_while_work_is_under_way(tmp_path, shown, backend):
    shown.moved = tmp_path / "moved"
    with joblib.parallel_config(backend=backend):
        finished(parts_of(4, partial(until_the_bar_moves, folder=tmp_path)), n_jobs=2)
    assert shown.stood == [1, 2, 3, 4]


def test_the_bar_begins_where_the_folder_stands_and_counts_what_the_parts_measure(tmp_path, shown):
    parts = [Job(f"L{layer}", partial(table_of, layer), items=10**layer) for layer in range(4)]
    finished(parts[:2], open_resume_folder(tmp_path, {}))
    finished(parts, open_resume_folder(tmp_path, {}))
    assert shown.began == [0, 11]
    assert shown.stood == [1, 11, 111, 1111]
    assert shown.ahead == [11, 1111]


# --- continued ---


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_stopped_work_continues(tmp_path, n_jobs):
    def stops(number):
        if number == 2:
            raise KeyboardInterrupt
        return table_of(number)

    folder = open_resume_folder(tmp_path / "parts", {"a": 1})
    with pytest.raises(KeyboardInterrupt, match=r"2 of 3 parts are in .*parts; the same call goes on") as raised:
        finished(parts_of(3, stops), folder)
    assert raised.value.__suppress_context__  # a notebook shows no second traceback
    with pytest.raises(KeyboardInterrupt, match="nothing is kept: give folder="):
        finished(parts_of(3, stops))
    made = []
    with joblib.parallel_config(backend="threading"):
        found = finished(
            parts_of(4, lambda number: made.append(number) or table_of(number)),
            open_resume_folder(folder.path, {"a": 1}),
            n_jobs=n_jobs,
        )
    assert sorted(made) == [2, 3]
    assert numbers(found) == [0, 1, 2, 3]


def test_all_files_are_checked_before_a_part_is_made(tmp_path):
    folder, made = open_resume_folder(tmp_path / "parts", {}), []
    finished(parts_of(3)[2:], folder)

    def refuse(kept):
        raise IncompatibleCheckpoint(f"part {kept['number'].item()} is of another work")

    parts = [Job(f"part{number}", partial(made.append, number), refuse) for number in range(3)]
    with pytest.raises(IncompatibleCheckpoint, match="part 2 is of another work"):
        finished(parts, folder)
    assert made == []


def test_parts_of_a_generator_are_taken_one_by_one(tmp_path):
    folder, order = open_resume_folder(tmp_path / "parts", {}), []
    finished(parts_of(2)[1:], folder)

    def parts():
        for number in range(3):
            order.append(f"asked for {number}")
            yield Job(f"part{number}", lambda number=number: order.append(f"made {number}") or table_of(number))

    assert numbers(finished(parts(), folder)) == [0, 1, 2]
    assert order == ["asked for 0", "made 0", "asked for 1", "asked for 2", "made 2"]


# --- folders ---


def test_hidden_files_do_not_make_a_folder_foreign(tmp_path):
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / ".settings.1a2b.part.json").write_text('{"for')  # the machine went down while it was written
    assert numbers(finished(parts_of(2), open_resume_folder(tmp_path, {"a": 1}))) == [0, 1]
    (tmp_path / "._part0.parquet").write_bytes(b"\0")
    assert numbers(finished(parts_of(2), open_resume_folder(tmp_path, {"a": 1}))) == [0, 1]


UNREADABLE = r"settings\.json cannot be read"


@pytest.mark.parametrize("text", ["", '{"format": 1, "a'])
def test_a_manifest_that_was_cut_off_is_written_again_while_there_are_no_parts(tmp_path, text):
    (tmp_path / "settings.json").write_text(text)
    folder = open_resume_folder(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "settings.json").read_text())["a"] == 1
    finished(parts_of(1), folder)
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(IncompatibleCheckpoint, match=UNREADABLE):
        open_resume_folder(tmp_path, {"a": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "a": 1}', "by an older version: remove it, or choose another folder"),
        ("[]", UNREADABLE),
        ('{"format": 2, "a": 1}', "by an older version"),
        ('{"format": 3, "a": 1}', "by an older version"),
        ('{"format": 4, "a": 1}', UNREADABLE),
        ('{"format": 5, "b": 1}', r"by a newer version of tlspectral \(format 5; this version has 4\): upgrade"),
        ('{"a": 1}', "by an older version"),
    ],
)
def test_a_manifest_of_another_version_or_another_shape_is_refused(tmp_path, text, said):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        open_resume_folder(tmp_path, {"a": 1}, noted={"noted": 2})
    assert (tmp_path / "settings.json").read_text() == text


@pytest.mark.parametrize("change", ["damaged", "newer"])
def test_a_part_that_cannot_be_read_says_why_and_that_it_can_be_made_again(tmp_path, monkeypatch, change):
    folder = open_resume_folder(tmp_path, {"a": 1})
    with monkeypatch.context() as later:
        later.setattr("tlspectral.tables.parquet._FORMAT", 9 if change == "newer" else 2)
        finished(parts_of(1), folder)
    [file] = tmp_path.glob("*.parquet")
    if change == "damaged":
        file.write_bytes(file.read_bytes()[:-20])
    said = {"damaged": "is a damaged or cut-off", "newer": "has table format 9; .*upgrade tlspectral"}[change]
    with pytest.raises(
        IncompatibleCheckpoint, match=rf"{file.name} .*{said}.*: remove the file, and the job is made again"
    ):
        finished(parts_of(1), folder)


def test_a_folder_is_found_in_the_home_folder_and_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert open_resume_folder("~/sweeps/a", {}).path == tmp_path / "sweeps" / "a"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"folder='.*file' is a file: give a folder"):
        open_resume_folder(tmp_path / "file", {})
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is a link to .*nowhere, which does not exist"):
        open_resume_folder(tmp_path / "link", {})


def test_folders_of_other_files_settings_or_scores_are_refused(tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(IncompatibleCheckpoint, match=r"holds files but no settings\.json"):
        open_resume_folder(other, {})
    long = "x" * 60

    def opened(settings, score=1.5, then=2.5, **identity):
        return Measurement(ABLATION_SWEEP, settings, identity=identity, folder=ours, score=lambda: [score, then]).kept

    opened({"a": 1}, b=lambda: long)
    with pytest.raises(
        IncompatibleCheckpoint,
        match=r"other a, b, c \(a: 1 there, 2 now\): use the same",
    ):
        opened({"a": 2}, c=3)
    with pytest.raises(IncompatibleCheckpoint, match=r'other b \(b: "x{36}\.\.\. there, null now\)'):
        opened({"a": 1})
    # Another machine moves a score by 1e-6, other hooks by more than 1e-4.
    assert opened({"a": 1}, 1.5 + 1e-5, b=long).noted == {"intact_values": [1.5, 2.5]}
    for score in (1.5 - 2e-4, 1.5 + 2e-4, float("nan")):
        with pytest.raises(IncompatibleCheckpoint, match=r"score 1\.500000 on prompt 0.*[Oo]ther hooks on the model"):
            opened({"a": 1}, score, b=long)
    with pytest.raises(IncompatibleCheckpoint, match=r"score 1\.500000 on prompt 0, now it has 2\.500000"):
        opened({"a": 1}, 2.5, 1.5, b=long)  # the mean is the same
    settings = json.loads((ours / "settings.json").read_text())
    (ours / "settings.json").write_text(json.dumps({**settings, "intact_values": "high"}))
    with pytest.raises(IncompatibleCheckpoint, match="intact_values is 'high'"):
        opened({"a": 1}, b=long)


def test_a_full_disk_names_the_file_and_stops_the_work_though_failures_are_noted(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no file is named")

    folder, failures = open_resume_folder(tmp_path / "parts", {}), {}
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    for noted in ({}, {"failed": failures.__setitem__}):
        with pytest.raises(OSError, match=r"No space left on device: '.*part0\.parquet'") as error:
            finished(parts_of(2), folder, **noted)
        assert error.value.errno == errno.ENOSPC
    assert failures == {}
    with pytest.raises(OSError, match=r"No space left on device: '.*settings\.json'"):
        open_resume_folder(tmp_path / "new", {})


# --- below one another ---


def test_attrs_of_stacked_tables_are_left_to_the_tables():
    tables = [table_of(number) for number in range(2)]
    for number, table in enumerate(tables):
        table.attrs = {"number": [number]}
    assert stacked(tables)["number"].tolist() == [0, 1]
    assert stacked(tables).index.tolist() == [0, 1]
    assert stacked(tables).attrs == {}
    assert [table.attrs for table in tables] == [{"number": [0]}, {"number": [1]}]


def test_a_bundle_gives_its_tables_back():
    tables = {
        "empty": pd.DataFrame({"step": pd.Series(dtype="int64"), "omega": pd.Series(dtype="float64")}),
        "whole": pd.DataFrame({"step": [2**53, 1], "right": [True, False], "name": ["a", "b"]}),
        "other": pd.DataFrame({"loss": [0.1]}),
    }
    found = unbundled(bundled(tables))
    assert list(found) == list(tables)
    for name, table in tables.items():
        pd.testing.assert_frame_equal(found[name], table)
