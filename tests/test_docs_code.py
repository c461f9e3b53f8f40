"""Python in README, pages and docstrings: what runs on packaged models runs."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from installed import needs_smollm2
from page_code import ROOT, blocks

import tlspectral as tls


@pytest.mark.slow
def test_each_line_for_those_who_come_from_transformerlens_runs():
    _, code = blocks("docs/from_transformerlens.md")
    exec(compile(code, "from_transformerlens.md", "exec"), {})


@pytest.mark.slow
@zoo.needs_hooked
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_lines_for_a_hookedtransformer_run_and_folding_changes_no_d_head(name):
    code, _ = blocks("docs/from_transformerlens.md")
    tables = []
    for fold_ln in (True, False):
        own = re.sub(r"HookedTransformer\.from_pretrained\(.*\)", "model", code).replace(
            "(model)", "(model, null_draws=2)", 1
        )
        known = {"tls": tls, "model": zoo.hooked(name, fold_ln=fold_ln)}
        exec(compile(own, "from_transformerlens.md", "exec"), known)
        assert known["loss"].value > 0
        tables.append(known["table"])
    folded, plain = tables
    assert len(folded) == zoo.LAYERS * zoo.HEADS
    # Weights that TransformerLens folded in float32: measured 2.5e-8. A gain that is left out moves D_head by .01.
    assert (folded["D_head"] - plain["D_head"]).abs().max() < 1e-6


EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "tlspectral").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_of_docstrings_run(module):
    imported = importlib.import_module(module)
    if '>>> model = tls.load_model("smollm2-135m")' in inspect.getsource(imported):
        needs_smollm2()
    found = doctest.testmod(imported, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/results").glob("*.md"))]


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_python_of_every_page_is_python(page):
    for code in blocks(page):
        compile(code, page, "exec")


PRINTED = [
    "docs/write_your_own.md",
    *zoo.also_slow("docs/circuits.md", "docs/concepts.md", "docs/from_the_papers.md", "docs/grouped_keys.md"),
    "docs/head_mask.md",
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTED)
def test_a_page_on_packaged_models_prints_what_it_shows(page):
    text, names = (ROOT / page).read_text(encoding="utf-8"), {}
    if "smollm2-135m" in text:
        pytest.importorskip("gguf")
    found = re.findall(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", text, flags=re.DOTALL)
    assert sum(bool(shown) for _, shown in found) > 3
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert [line.rstrip() for line in printed.getvalue().splitlines()] == [
            line.rstrip() for line in shown.splitlines()
        ]


@pytest.mark.slow
def test_the_papers_statistics_run_on_any_model(capsys):
    """The page shows them of SmolLM2; a model of two layers has no numbers for what takes three clusters."""
    names: dict = {}
    for code in blocks("docs/from_the_papers.md"):
        assert "smollm2-135m" in code or names
        exec(compile(code.replace("smollm2-135m", "tiny-rope"), "from_the_papers.md", "exec"), names)
    assert len(names["table"]) == 9
    assert names["table"]["q"].between(0, 1).all()
    assert (names["test"].n, names["test"].n_class, names["found"].n) == (8, 1, 99)
    assert names["alike"].reason == "every cluster has one row"
    assert set(names["groups"]) == set(names["tables"])
    rows = capsys.readouterr().out.splitlines()[-2:]
    positional, symbolic = ([float(value) for value in row.split()] for row in rows)
    assert positional.index(min(positional)) == 4
    assert symbolic.index(max(symbolic)) in (3, 4)


@pytest.mark.slow
def test_the_lines_beside_other_tools_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    drawn = []
    stand_in = SimpleNamespace(attention=SimpleNamespace(attention_heads=lambda *given: drawn.append(given)))
    monkeypatch.setitem(sys.modules, "circuitsvis", stand_in)  # which takes attention [heads, pos, pos], tokens, names
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks("docs/other_tools.md"):
        exec(compile(code, "other_tools.md", "exec"), names)
    assert len(names["beside"]) == 2
    assert "0.01" in capsys.readouterr().out
    with pytest.raises(ValueError, match="weights"):
        tls.tables.join(names["heads"], names["headvis"])
    ((attention, tokens, said),) = drawn
    assert attention.shape == (9, len(tokens), len(tokens))
    assert said[8] == "L16H8"
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:2]))
    # As both tools read the file: SmolLM2 has 30 layers with 3 key/value heads, of 3 query heads each.
    found = np.clip(np.loadtxt("full_attention_heads.tsv", dtype=float, delimiter="\t"), 0, 1)
    by_head = names["heads"].sort_values(["layer", "head"])["ind"].to_numpy().reshape(30, 3, 3)
    np.testing.assert_array_equal(found, by_head.max(2))
