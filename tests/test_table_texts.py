"""The texts about the columns of every table: complete, in sentences, looked up by name."""

import subprocess
import sys

import pytest
from docstring_columns import PACKAGE, SCHEMAS, docstrings, listed, lists, rewritten

from tlspectral.tables import COLUMNS, describe_table

TABLES = SCHEMAS
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
DOCSTRINGS = [(name, docstring.value) for source in SOURCES for name, docstring in docstrings(source)]
FUNCTIONS = {name for name, _ in DOCSTRINGS}
MOST_LISTED = 30  # a longer list is no help to a reader: the table's page is


def test_every_table_is_there_once():
    names = list(TABLES)
    assert len(names) == len(set(names)) == 119


@pytest.mark.parametrize("name", TABLES)
def test_every_text_is_complete(name):
    described = describe_table(name)
    assert described["name"].is_unique
    assert TABLES[name].made_by.count("`") % 2 == 0
    for column in TABLES[name].columns:
        assert column.unit, column.name
        for field, text in column.texts().items():
            assert text == text.strip(), (column.name, field)
            assert "  " not in text, f"{column.name}.{field}: a seam between two strings"
            assert ".." not in text.replace(" .. ", "").replace("...", ""), (column.name, field)
        assert column.meaning.endswith("."), column.name
        assert column.does_not_establish.endswith(".") or not column.does_not_establish, column.name


@pytest.mark.parametrize("name", TABLES)
def test_the_docstring_lists_the_columns_of_its_schema(name):
    """`make docstrings` writes them."""
    found = [texts[name] for function, text in DOCSTRINGS if name in (texts := lists(function, text))]
    assert set(found) <= {listed(name)}
    assert found or name not in FUNCTIONS or len(TABLES[name].columns) > MOST_LISTED, "the docstring lists no columns"


def test_every_list_is_of_a_table_and_the_command_writes_it():
    assert {table for function, text in DOCSTRINGS for table in lists(function, text)} <= set(TABLES)
    source = '''def frequency_norms():
    """Norms.

    Returns:
        DataFrame. Columns: `layer, mass`. Sorted.
    """
'''
    assert rewritten(source) == source.replace("layer, mass", listed("frequency_norms"))
    assert rewritten(rewritten(source)) == rewritten(source)


def test_a_name_has_the_meaning_of_its_table():
    def meaning(table, column):
        return describe_table(table).set_index("name").loc[column, "meaning"]

    assert meaning("analyze_heads", "rank") == COLUMNS["rank"].meaning
    assert "among all heads of all earlier layers" in meaning("k_composition", "rank")
    assert meaning("band_effects", "delta") != meaning("ablation_sweep", "delta")
    with pytest.raises(ValueError, match="there is no table 'heads'; there are analyze_heads, "):
        describe_table("heads")


def test_head_columns_are_described_without_the_makers_and_core_tables_without_studies():
    code = (
        "import sys, tlspectral as tls; tls.tables.describe_columns(); assert 'torch' not in sys.modules; "
        "tls.tables.describe_table('band_effects'); print([m for m in sys.modules if '.studies' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
