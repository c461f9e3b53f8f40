"""Bars: where they are shown, and what switches them off."""

import sys

import joblib
import pandas as pd
import pytest
import zoo

import tlspectral as tls
from tlspectral.progress import bar, hidden, without_bars
from tlspectral.tables import WorkPart, finished_parts


@pytest.fixture
def terminal(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return capfd


def moved(description="work"):
    with bar(3, description, "part", initial=1) as shown:
        shown.update(2)


def test_a_bar_is_shown_on_a_terminal_alone(capfd, monkeypatch):
    moved()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    moved()
    out, err = capfd.readouterr()
    assert out == ""
    assert "work" in err
    assert "1/3" in err


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_one_line_switches_bars_off(terminal, monkeypatch, value, off):
    monkeypatch.setenv("TQDM_DISABLE", value)
    moved()
    assert hidden() == off
    assert (terminal.readouterr().err == "") == off


def test_a_context_switches_bars_off(terminal):
    with without_bars():
        moved()
    assert terminal.readouterr() == ("", "")
    moved("again")
    assert "again" in terminal.readouterr().err


def part(name):
    moved(f"inside {name}")
    return pd.DataFrame({"name": [name]})


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_workers_show_no_bars_of_their_own(terminal, n_jobs):
    parts = [WorkPart(name, lambda name=name: part(name)) for name in ("a", "b")]
    with joblib.parallel_config(backend="threading"):
        finished_parts(parts, description="outside", unit="part", n_jobs=n_jobs)
    shown = terminal.readouterr().err
    assert "outside" in shown
    assert ("inside" in shown) == (n_jobs == 1)


def test_analyze_heads_shows_what_it_is_at(terminal):
    tls.analyze_heads(zoo.shared("bridge", "llama"), null_draws=2, n_sequences=2)
    out, err = terminal.readouterr()
    assert out == ""
    for description in ("spectra", "null", "detectors"):
        assert description in err
