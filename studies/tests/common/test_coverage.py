"""What is covered of the three papers: names exist, every numbered item is there, the page has the table."""

import importlib
import re
from pathlib import Path

import pytest
from tlspectral_studies.coverage import ITEMS, MISSING, NUMBERED, coverage_table

import tlspectral as tls
from tlspectral.tables.head_columns import COLUMNS
from tlspectral.tables.schema import known_schemas

PAGE = Path(__file__).parents[3] / "docs" / "from_the_papers.md"


def found(name):
    """The object of a dotted name: `tls.stats.attenuation`, or `bifocal.ARMS` of the studies."""
    first, *rest = name.split(".")
    at = tls if first == "tls" else importlib.import_module(f"tlspectral_studies.{first}")
    for step in rest:
        # A module may not be loaded yet, and a package may give names only when they are asked for.
        at = getattr(at, step, None) or importlib.import_module(f"{at.__name__}.{step}")
    return at


def test_every_name_exists_and_every_missing_item_says_why():
    importlib.import_module("tlspectral.positional")
    known = {column.name for schema in known_schemas().values() for column in schema.columns} | set(COLUMNS)
    for item in ITEMS:
        names = re.findall(r"`([^`]+)`", item.names)
        if item.note.startswith(f"{MISSING}: "):
            assert (names, item.page) == ([], ""), item
            continue
        assert names, item
        assert re.fullmatch(r"\[.+\]\(.+\)", item.page), item
        for name in names:
            assert name in known if "." not in name else found(name) is not None, name
    assert {item.paper for item in ITEMS} == set(NUMBERED)


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_numbered_item_of_a_paper_is_there(paper):
    text = "; ".join(item.what for item in ITEMS if item.paper == paper)
    for kind, count in NUMBERED[paper].items():
        plural = {"Corollary": "Corollar(?:y|ies)", "Lemma": "Lemmas?"}.get(kind, f"{kind}s?")
        named = set()
        for numbers in re.findall(rf"{plural} ([0-9A-F, and to]+)", text):
            for low, high in re.findall(r"(\d+)[A-F]?(?: to (\d+))?", numbers):
                named |= set(range(int(low), int(high or low) + 1))
        assert named == set(range(1, count + 1)), kind


def test_the_page_has_the_table_that_the_command_prints():
    assert coverage_table() in PAGE.read_text(encoding="utf-8")
