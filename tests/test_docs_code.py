"""Python in README and pages: what runs on packaged models runs."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_each_line_for_those_who_come_from_transformerlens_runs():
    (code,) = blocks("docs/from_transformerlens.md")
    exec(compile(code, "from_transformerlens.md", "exec"), {})


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *sorted(
            str(path.relative_to(ROOT)) for folder in ("docs", "docs/results") for path in (ROOT / folder).glob("*.md")
        ),
    ],
)
def test_python_of_every_page_is_python(page):
    for code in blocks(page):
        compile(code, page, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/circuits.md"])
def test_a_page_on_packaged_models_prints_what_it_shows(page):
    text, names = (ROOT / page).read_text(encoding="utf-8"), {}
    found = re.findall(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", text, flags=re.DOTALL)
    assert sum(bool(shown) for _, shown in found) > 3
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert [line.rstrip() for line in printed.getvalue().splitlines()] == [
            line.rstrip() for line in shown.splitlines()
        ]
