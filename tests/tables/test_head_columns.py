"""The headings of `head_columns.txt` say to which group a column belongs, wherever in the file it stands."""

from importlib.resources import files

import pytest

from tlspectral.tables.head_columns import EXTRA_COLUMNS, HEAD_COLUMNS, LATENT_COLUMNS, columns_under_headings

TEXT = files("tlspectral.tables").joinpath("head_columns.txt").read_text(encoding="utf-8")
GROUPS = {"heads": HEAD_COLUMNS, "latent": LATENT_COLUMNS, "extras": EXTRA_COLUMNS}
ADDED = "added | ratio | 0 .. 1 | this package | an added column\n    What it means.\n"


def names(columns):
    return [column.name for column in columns]


def test_the_groups_are_the_sections_of_the_file():
    found = columns_under_headings(TEXT)
    assert {heading: names(columns) for heading, columns in found.items()} == {
        heading: names(columns) for heading, columns in GROUPS.items()
    }
    assert TEXT[: TEXT.index("[heads]\n")].replace("\n#", "").count("\n") == 1  # no column in front of a heading


@pytest.mark.parametrize("heading", GROUPS)
@pytest.mark.parametrize("last", [True, False])
def test_a_column_belongs_to_the_section_that_it_is_added_to(heading, last):
    """Also behind all others of the file, and all others stay where they were."""
    before, mark, section = TEXT.partition(f"[{heading}]\n")
    own, bracket, behind = section.partition("\n[")
    own = f"{own.rstrip()}\n{ADDED.rstrip()}" if last else f"{ADDED}{own}"
    found = columns_under_headings(f"{before}{mark}{own}{bracket}{behind}")
    for other, columns in GROUPS.items():
        assert [name for name in names(found[other]) if name != "added"] == names(columns)
        assert ("added" in names(found[other])) == (other == heading)
    added = found[heading][-1 if last else 0]
    assert (added.name, added.meaning, added.unit) == ("added", "What it means.", "ratio")
