"""The texts about the columns of every table: complete, in sentences, looked up by name."""

import ast
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from docstring_columns import PACKAGE, docstrings, listed, lists, rewritten
from docstring_columns import SCHEMAS as TABLES

from tlspectral.tables import describe_table
from tlspectral.tables.head_columns import COLUMNS
from tlspectral.tables.schema import columns

pytestmark = pytest.mark.lowest

SOURCES = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
DOCSTRINGS = [(name, docstring.value) for source in SOURCES for name, docstring in docstrings(source)]
FUNCTIONS = {name for name, _ in DOCSTRINGS}
MOST_LISTED = 30  # a longer list is no help to a reader: the table's page is


def broken(schema):
    """Names against the rules of all tables, and why. The head table, and what holds its columns, keep their names."""
    names = {column.name for column in schema.columns}
    if {"layer", "head"} <= names and not names & {"name", "sender"}:
        yield "no name", "a head is read by its name, L16H0"
    for column in schema.columns:
        name, base = column.name, column.name.removesuffix("_se")
        other = name in ("se", "sem", "stderr") or name.endswith(("_sem", "_stderr", "_err"))
        if other or (column.meaning.startswith("Standard error") and base == name):
            yield name, "an error is called <number>_se"
        elif base != name and base not in names:
            yield name, "the number of this error is not in the table"
        if name.endswith("_pct") and column.unit != "%" and name not in COLUMNS and "D_head_pct" not in names:
            yield name, "a percentage runs to 100; a share is called a share"


def test_every_table_is_there_once():
    names = list(TABLES)
    assert len(names) == len(set(names)) == 132


def test_no_two_schemas_have_one_name():
    """The second would be read with the columns of the first, whichever module is imported first."""
    studies = PACKAGE.parent / "studies/tlspectral_studies"
    sources = [*SOURCES, *(path.read_text(encoding="utf-8") for path in sorted(studies.rglob("*.py")))]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    schemas = [call.args[0] for call in calls if getattr(call.func, "id", "") == "Schema" and call.args]
    names = [name.value for name in schemas if isinstance(name, ast.Constant)]
    assert len(names) > 60
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.slow
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
def test_heads_have_names_errors_one_spelling_and_shares_no_percent(name):
    """A table without these columns keeps the rules too; the second test below says which tables they bind."""
    assert list(broken(TABLES[name])) == []


def test_a_broken_rule_of_names_is_seen():
    kept = "layer | a | A.\nhead | a | A.\nname | a | A.\nloss | a | A.\nloss_se | a | A.\ndup_pct | % | A."
    for given, said in (
        (kept, []),
        (kept.replace("name |", "word |"), ["no name"]),
        (kept.replace("loss_se", "se"), ["se"]),
        (kept.replace("loss_se", "loss_sem"), ["loss_sem"]),
        (kept.replace("A.\nloss_se | a | A.", "A.\nerror | a | Standard error of loss."), ["error"]),
        (kept.replace("loss |", "value |"), ["loss_se"]),
        (kept.replace("| % |", "| share |"), ["dup_pct"]),
    ):
        assert [fault for fault, _ in broken(SimpleNamespace(columns=columns(given)))] == said, given


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
    with pytest.raises(ValueError, match=r"there is no table 'heads': choose one of ablation_sweep, .*analyze_heads, "):
        describe_table("heads")


@pytest.mark.slow
def test_head_columns_are_described_without_the_makers_and_core_tables_without_studies():
    code = (
        "import sys, tlspectral as tls; tls.tables.describe_columns(); assert 'torch' not in sys.modules; "
        "tls.tables.describe_table('band_effects'); print([m for m in sys.modules if '.studies' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
