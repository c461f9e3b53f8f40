"""Pages of the site that docs/site/pages.py makes."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

import tlspectral as tls

ROOT = Path(__file__).parents[1]


def hook(name):
    """Import a file of docs/site, as mkdocs does."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / f"docs/site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages():
    return hook("pages")


ROOMS = (
    "heads",
    "history",
    "hooks",
    "parts",
    "plots",
    "positional",
    "report",
    "spectral_rope",
    "stats",
    "tables",
    "tasks",
)


def test_each_public_name_stands_on_one_page_of_the_reference():
    api = hook("api_pages")
    listed = [name for _, names in api.PAGES.values() for name in names]
    documented = [api.public(name) for name in listed]
    assert len(set(listed)) == len(listed)
    assert set(tls.__all__) == {name for name in listed if "." not in name}
    public = [(room, name) for room in ROOMS for name in getattr(tls, room).__all__]
    missing = [f"{room}.{name}" for room, name in public if getattr(getattr(tls, room), name) not in documented]
    assert missing == ["parts.PartName"]  # a type for annotations
    index = api.index_page()
    assert all(f"`tls.{name}`" in index for name in listed)


def test_an_example_of_a_docstring_is_code_and_no_quotation():
    markdown = pytest.importorskip("markdown")
    text = "Return it.\n\n>>> f(1)\n2\n>>> g(\n...     1)\n3\n\nArgs follow."
    html = markdown.markdown(text, extensions=[hook("api_pages").Doctests(), "fenced_code"])
    assert "blockquote" not in html
    assert html.count("<pre>") == 1
    assert html.endswith("<p>Args follow.</p>")
    assert "blockquote" in markdown.markdown(text)  # the check itself can fail


def test_words_for_the_search_belong_to_pages_and_to_one_page_each():
    words = hook("search_words").WORDS
    made = {"index.md"}  # from README
    assert all((ROOT / "docs" / page).exists() for page in words.keys() - made)
    every = [word.lower() for page in words.values() for word in page]
    assert len(every) == len(set(every))


def test_a_csv_stands_on_its_page_as_a_table_with_a_filter(pages):
    html = pages.on_page_markdown("Before\n\n<!-- filter results/replication.csv -->")
    rows = list(csv.DictReader((ROOT / "docs/results/replication.csv").read_text(encoding="utf-8").splitlines()))
    verdicts = re.findall('<tr data-verdict="([^"]+)">', html)
    assert verdicts == [row["verdict"] for row in rows]
    assert len(verdicts) > 300
    assert html.startswith("Before\n\n<style>")
    assert '<input type="search"' in html
    assert "https://" not in html.split("</table>")[1]  # the script asks no other server


def test_text_of_a_csv_is_escaped(pages, tmp_path):
    (tmp_path / "table.csv").write_text('verdict,why\nholds,"p < .05 & <b>"\n', encoding="utf-8")
    assert "<td>p &lt; .05 &amp; &lt;b&gt;</td>" in pages.filtered_table(tmp_path / "table.csv")
