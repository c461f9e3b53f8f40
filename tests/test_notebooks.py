"""Notebooks as a visitor finds them: what one will know, what is installed, results, an exercise."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LARGEST = 2_000_000  # bytes


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def text(cell):
    return "".join(cell["source"])


def printed(path):
    """All text that the outputs of a notebook hold."""
    outputs = [output for cell in cells(path) for output in cell.get("outputs", [])]
    assert all(output["output_type"] != "error" for output in outputs)
    shown = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs]
    html = [output.get("data", {}).get("text/html", "") for output in outputs]
    return "\n".join("".join(part) for part in [*shown, *html])


def used(path):
    """Packages that a notebook needs besides those that TransformerLens brings, by what installs each."""
    code = "\n".join(text(cell) for cell in cells(path)[2:] if cell["cell_type"] == "code")
    return [
        install
        for needing, install in (
            (r"\bmatplotlib\b|\bplots\b", '"..[plots]"'),
            (r"\bduckdb\b", "duckdb"),
            (r"\btlspectral_studies\b", "../studies"),
            (r'"gemma3-270m"', '"..[demo-gemma]"'),
        )
        if re.search(needing, code)
    ]


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if used(path)], ids=lambda path: path.stem)
def test_without_what_it_uses_the_first_cell_says_what_to_install(path, monkeypatch):
    source = text(cells(path)[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # all of it is here
    exec(source.replace("%pip", "pass  #"), {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True if name == "tlspectral" else None)
    with pytest.raises(ImportError, match=re.escape(f"-c ../constraints.txt {' '.join(used(path))}") + "$"):
        exec(source.replace("%pip", "pass  #"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cell_that_installs_is_folded_and_nothing_needs_a_formula_or_shows_an_error_stream(path):
    installing = cells(path)[1]
    assert "%pip install" in text(installing)
    assert installing["metadata"] == {
        "cellView": "form",
        "jupyter": {"source_hidden": True},
        "tags": ["hide-input"],
    }
    assert not [output for cell in cells(path) for output in cell.get("outputs", []) if output.get("name") == "stderr"]
    prose = "\n".join(text(cell) for cell in cells(path) if cell["cell_type"] == "markdown")
    assert re.findall(r"\$[^$\n]{1,80}\$", prose) == []  # the site has no MathJax


def test_they_make_one_path():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 13)]


def test_a_notebook_on_hookedtransformer_says_so_and_is_not_what_runs_on_transformerlens_4():
    makefile = (NOTEBOOKS[0].parents[1] / "Makefile").read_text(encoding="utf-8")
    newest = re.findall(r"^NEWEST_NOTEBOOK := (\S+)$", makefile, flags=re.MULTILINE)
    needing = [path for path in NOTEBOOKS if any("HookedTransformer(" in text(cell) for cell in cells(path)[2:])]
    assert needing
    assert newest[0] in {path.name for path in NOTEBOOKS} - {path.name for path in needing}
    assert all("needs TransformerLens 3.9" in " ".join(text(cells(path)[0]).split()) for path in needing)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_says_what_one_will_know_installs_what_is_missing_and_ends_with_an_exercise(path):
    first, install, *_, last = cells(path)
    assert re.search(r"After this notebook", text(first))
    assert re.search(r"minutes?|core", text(first))
    installs, uses, _ = text(install).partition("\n\nuses = ")
    assert installs == text(cells(NOTEBOOKS[0])[1]).partition("\n\nuses = ")[0]
    assert bool(uses) == bool(used(path))
    assert "## Your turn" in text(last)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_each_stores_is_of_one_run_from_top_to_bottom(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert not any("execution" in cell["metadata"] for cell in code)  # times of the run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_shows_its_results_and_nothing_of_the_machine(path):
    assert path.stat().st_size < LARGEST
    shown = printed(path)
    assert len(shown) > 200
    assert not re.search(r"/(work|root|home|usr)/", shown)
    assert "Warning" not in shown
