"""Bars: where they are shown, and what switches them off."""

import sys

import joblib
import pandas as pd
import pytest
import zoo

import tlspectral as tls
from tlspectral.tables.progress import bar, hidden, without_bars
from tlspectral.tables.work import finished_parts
from tlspectral.tables.work_part import WorkPart


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
    parts = [WorkPart(name, lambda name=name: part(name)) for name in ("a", "b")]
    with joblib.parallel_config(backend="threading"):
        shown = terminal(lambda: finished_parts(parts, description="outside", unit="part", n_jobs=n_jobs))
    assert "outside" in shown
    assert ("inside" in shown) == (n_jobs == 1)


@pytest.mark.slow
def test_analyze_heads_shows_what_it_is_at(terminal):
    shown = terminal(lambda: tls.analyze_heads(zoo.shared("bridge", "llama"), null_draws=2))
    for description in ("spectra", "null", "detectors"):
        assert description in shown
