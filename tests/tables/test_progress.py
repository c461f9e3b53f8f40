"""Progress: where a bar is shown, where lines are, and what switches them off."""

import io
import sys

import joblib
import pandas as pd
import pytest
import zoo

import tlspectral as tls
from tlspectral.tables import measurement, progress
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import finished_jobs
from tlspectral.tables.progress import bar, hidden, without_bars


@pytest.fixture
def terminal(monkeypatch, capfd):
    """What is written to stderr, which is a terminal."""

    def read(call):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stderr, "isatty", lambda: True)
            call()
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return read


def moved(description="work"):
    with bar(3, description, "part", initial=1) as shown:
        shown.update(2)


def test_a_bar_is_shown_on_a_terminal_alone(terminal, capfd):
    moved()
    assert capfd.readouterr() == ("", "")
    shown = terminal(moved)
    assert "work" in shown
    assert "1/3" in shown


def log_with_a_clock(monkeypatch):
    """A stderr that is a file, and a clock that the test sets forward."""

    class Log(io.StringIO):
        now = 0.0

    monkeypatch.setattr(sys, "stderr", stream := Log())
    monkeypatch.setattr(progress, "monotonic", lambda: stream.now)
    return stream


def test_a_log_gets_a_line_a_minute_however_often_it_is_updated(monkeypatch):
    log = log_with_a_clock(monkeypatch)
    with bar(500, "work", "part", initial=50) as shown:
        for second in range(1, 151):
            log.now = float(second)
            shown.update()
    assert log.getvalue() == (
        "work: 110 of 500 (part), 1:00 spent, 6:30 left\n"  # 60 a minute, and 390 are left
        "work: 170 of 500 (part), 2:00 spent, 5:30 left\n"
    )


def test_a_log_gets_no_line_of_short_work_and_a_bar_of_unknown_length_promises_no_end(monkeypatch):
    log = log_with_a_clock(monkeypatch)
    with bar(3, "short", "part") as shown:
        log.now += 59
        shown.update(3)
    assert log.getvalue() == ""
    with bar(None, "long", "part") as shown:
        log.now += 3_700
        shown.update(2)
        shown.set_postfix({"loss": "1"})  # as of a bar
    assert log.getvalue() == "long: 2 (part), 1:01:40 spent\n"
    with without_bars(), bar(None, "hidden", "part") as shown:
        log.now += 3_700
        shown.update(2)
    assert log.getvalue().count("\n") == 1


def test_long_work_has_a_line_after_its_first_item(monkeypatch):
    log = log_with_a_clock(monkeypatch)
    with bar(100, "work", "part") as shown:
        for _ in range(3):
            log.now += 10.0
            shown.update()
    assert log.getvalue() == "work: 1 of 100 (part), 0:10 spent, 16:30 left\n"


def timed(log, passes, seconds, n_jobs=1):
    """Work whose jobs take so many `passes`, each as long as what is prepared: `seconds`."""

    def prepare():
        log.now += seconds
        return "prepared"

    jobs = [Job(f"job{number}", lambda _: pd.DataFrame(), passes=n) for number, n in enumerate(passes)]
    with joblib.parallel_config(backend="threading"):
        finished_jobs(jobs, description="sweep", unit="head", prepare=prepare, n_jobs=n_jobs)
    return log.getvalue()


def test_the_cost_is_said_before_long_work(monkeypatch):
    log = log_with_a_clock(monkeypatch)
    monkeypatch.setattr(measurement, "monotonic", lambda: log.now)
    assert timed(log, [0.0, 0.0], 50.0) == ""
    assert timed(log, [4.0, 1.5], 10.0) == ""  # less than a minute
    said = "sweep: 270 passes of the model over all prompts, about 1:30:00: the first pass took 0:20\n"
    assert timed(log, [200.0, 70.0], 20.0) == said
    with without_bars():
        assert timed(log, [200.0, 70.0], 20.0) == said
    assert timed(log, [200.0, 70.0], 20.0, n_jobs=2) == said + "sweep: 270 passes of the model over all prompts\n"


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_one_line_switches_bars_off(terminal, monkeypatch, value, off):
    monkeypatch.setenv("TQDM_DISABLE", value)
    assert hidden() == off
    assert (terminal(moved) == "") == off


def test_a_context_switches_bars_off(terminal):
    with without_bars():
        assert terminal(moved) == ""
    assert "work" in terminal(moved)


def part(name):
    moved(f"inside {name}")
    return pd.DataFrame({"name": [name]})


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_workers_show_no_bars_of_their_own(terminal, n_jobs):
    parts = [Job(name, lambda name=name: part(name)) for name in ("a", "b")]
    with joblib.parallel_config(backend="threading"):
        shown = terminal(lambda: finished_jobs(parts, description="outside", unit="part", n_jobs=n_jobs))
    assert "outside" in shown
    assert ("inside" in shown) == (n_jobs == 1)


@pytest.mark.slow
def test_analyze_heads_shows_what_it_is_at(terminal):
    shown = terminal(lambda: tls.analyze_heads(zoo.shared("bridge", "llama"), null_draws=2))
    for description in ("heads", "detectors"):
        assert description in shown
