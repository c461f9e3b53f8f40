"""What a run of the notebooks prints, beside what they store: what is the same, and what is said of what is not."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_outputs import differences, same_line, store

TABLE = "<table><thead><tr><th></th><th>name</th><th>{}</th><th>500</th></tr></thead><tr><th>0</th></tr></table>"


def printed(*texts, name="stdout"):
    return [new_output("stream", name=name, text=text) for text in texts]


def shown(text, **data):
    return [new_output("execute_result", {"text/plain": text, **data})]


def notebook(*outputs):
    cells = [new_code_cell(f"print({at})", id=f"cell-{at}", outputs=list(out)) for at, out in enumerate(outputs)]
    return new_notebook(cells=[new_markdown_cell("# Title", id="title"), *cells])


def apart(stored, fresh, **how):
    return differences(notebook(stored), notebook(fresh), "01_first.ipynb", **how)


@pytest.mark.parametrize(
    ("stored", "fresh"),
    [
        ("L16H0  0.891  0.000", "L16H0  0.892 -0.000"),  # one more in the last place, which is rounding
        ("r 0.9490996398559424", "r 0.9490996398559901"),
        ("p 9.825061337293218e-31", "p 9.9e-31"),
        ("delta \u22122.825 ± 0.26", "delta \u22122.824  ± 0.26"),
        ("worst 1.24e-05", "worst 8.5e-06"),  # printed to show that it is next to nothing
        ("14 CPU seconds", "6.2 CPU seconds"),
        ("{'torch': '2.13.0+cpu', 'seed': 0}", "{'torch': '2.14.1', 'seed': 0}"),
        ("{'train_runtime': '4.846', 'loss': '2.6'}", "{'train_runtime': '9.1', 'loss': '2.6'}"),
    ],
)
def test_rounding_seconds_and_versions_are_no_difference(stored, fresh):
    assert same_line(stored, fresh)
    assert same_line(fresh, stored)


@pytest.mark.parametrize(
    ("stored", "fresh"),
    [
        ("L16H0  0.891  0.000", "L16H0  0.893  0.000"),
        ("L16H0  0.891", "L16H1  0.891"),
        ("L16H0  0.891", "L16H0  0.891  0.000"),
        ("delta \u22122.825", "delta 2.825"),
        ("r 0.9490996398559424", "r 0.9470996398559424"),
        ("loss 11.33", "loss 11.36"),
        ("7 of 315 edges", "8 of 315 edges"),
        ("7 of 315 edges", "7.0 of 315 edges"),
        ("p 0.012", "p NaN"),
        ("reproduced 235", "differs 235"),
        ("(28, 91)", "(28, 90)"),
        ("{'torch': '2.13.0+cpu', 'seed': 0}", "{'torch': '2.13.0+cpu', 'seed': 1}"),
        ("{'train_runtime': '4.846', 'loss': '2.6'}", "{'train_runtime': '4.846', 'loss': '2.8'}"),
    ],
)
def test_other_words_and_numbers_are_a_difference(stored, fresh):
    assert not same_line(stored, fresh)
    assert not same_line(fresh, stored)


def test_the_same_outputs_are_no_difference():
    stored = [*printed("one\n", "two 2.5\n"), *shown("   a\n0  1.50", **{"image/png": "old"})]
    # Streams come in other parts, tables with other blanks, pictures with other pixels; bars go to stderr.
    fresh = [
        *printed("one\ntwo 2.5\n"),
        *printed("9%", name="stderr"),
        *shown("    a\n0  1.50", **{"image/png": "new"}),
    ]
    assert apart(stored, fresh) == []


def test_the_message_has_notebook_cell_and_both_lines():
    first, second = (notebook(printed("x\n"), shown(text)) for text in ("a 1.5\nb 2.5\nc", "a 1.5\nb 2.8\nd"))
    assert differences(first, second, "01_first.ipynb") == [
        "01_first.ipynb, code cell 2:\n  stored: b 2.5\n  now:    b 2.8\n  and 1 more lines"
    ]


@pytest.mark.parametrize(
    ("stored", "fresh", "said"),
    [
        (printed("one\n"), [], "stored: [stdout]\n  now:    (nothing)"),
        (printed("one\n"), printed("one\ntwo\n"), "stored: (nothing)\n  now:    two"),
        (shown("x"), printed("x"), "stored: [text/plain]\n  now:    [stdout]"),
        (shown("x", **{"image/png": "old"}), shown("x"), "stored: [image/png, text/plain]\n  now:    [text/plain]"),
        (shown("x"), [new_output("error", ename="E", evalue="v", traceback=[])], "now:    [error]"),
    ],
)
def test_missing_and_additional_outputs_are_said(stored, fresh, said):
    (text,) = apart(stored, fresh)
    assert said in text


def test_of_a_training_words_are_compared():
    stored = notebook(printed("grad_norm 0.31 of L0H1\n"))
    stored["cells"][1]["metadata"]["tags"] = ["numbers-vary"]
    assert differences(stored, notebook(printed("grad_norm 0.37 of L0H1\n")), "01_first.ipynb") == []
    for other in ("grad_norm 0.31 of L0H2\n", "grad_norm 0.31\n", ""):
        (text,) = differences(stored, notebook(printed(other)), "01_first.ipynb")
        assert "stored: grad_norm 0.31 of L0H1" in text


@pytest.mark.parametrize("change", ["source", "id"])
def test_a_copy_of_other_code_is_said(change):
    stored, fresh = notebook(printed("one")), notebook(printed("one"))
    fresh["cells"][1][change] = "other"
    (text,) = differences(stored, fresh, "01_first.ipynb")
    assert "code cell 1: the copy that was run has other code" in text


def test_of_a_shorter_copy_kinds_and_columns_are_compared():
    stored = shown("   ind of L1H0  500\n0  0.5  0.6", **{"text/html": TABLE.format("ind of L1H0")})
    # Of fewer draws, another head may be the strongest.
    fewer = shown("   x\n0  0.9\n1  0.9", **{"text/html": TABLE.format("ind of L1H12").replace("500", "700")})
    other = shown("   dup of L1H0  500\n0  0.5  0.6", **{"text/html": TABLE.format("dup of L1H0")})
    assert apart(stored, fewer, columns=True) == []
    (text,) = apart(stored, other, columns=True)
    assert "name, ind of L0H0\n  now:    [text/html, text/plain] name, dup of L0H0" in text
    (text,) = apart(stored, [*fewer, *printed("more")], columns=True)
    assert "now:    [stdout]" in text


def test_a_shorter_copy_has_other_code_and_a_cell_of_its_own():
    stored, fresh = notebook(printed("one 1.5")), notebook(printed("one 2.5"))
    fresh["cells"][1]["source"] = "print(1)"
    fresh["cells"].insert(0, new_code_cell("fewer = True", id="fewer"))
    assert differences(stored, fresh, "01_first.ipynb", columns=True) == []


def test_stored_outputs_are_those_of_the_run_without_its_times():
    stored, fresh = notebook(printed("old"), shown("x")), notebook(printed("new\n", "and\n"), shown("y"))
    stored["cells"][1]["metadata"]["execution"] = {"iopub.status.busy": "2026"}
    fresh["cells"][1]["metadata"]["execution"] = {"iopub.status.busy": "2027"}
    fresh["cells"][1]["execution_count"] = 4
    store(stored, fresh)
    assert stored["cells"][1]["outputs"] == printed("new\nand\n")
    assert stored["cells"][1]["execution_count"] == 4
    assert "execution" not in stored["cells"][1]["metadata"]
    assert differences(stored, fresh, "01_first.ipynb") == []


@pytest.mark.slow
def test_the_command_fails_where_a_number_differs(tmp_path):
    here = Path(__file__).parent
    for path in (here.parent / "notebooks").glob("*.ipynb"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, str(here / "support" / "notebook_outputs.py"), "compare", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    changed = nbformat.read(tmp_path / "01_analyze_heads.ipynb", as_version=4)
    cell = next(one for one in changed["cells"] if one["id"] == "table")
    cell["outputs"][0]["data"]["text/plain"] = "(271, 48)"
    nbformat.write(changed, tmp_path / "01_analyze_heads.ipynb")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "01_analyze_heads.ipynb, code cell 4:\n  stored: (270, 48)\n  now:    (271, 48)" in done.stderr
