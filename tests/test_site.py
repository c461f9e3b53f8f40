"""Pages of the site that docs/site/pages.py makes."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
