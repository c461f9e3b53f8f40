"""Public pages of heads: which models have one, and the links to them from the report and from a card."""

import json
import re
from importlib.resources import files

import pytest
from made_up_heads import Structure, heads

from tlspectral.report import head_card, report
from tlspectral.report.head_pages import page_address, page_link

pytestmark = pytest.mark.lowest

GPT2 = "https://www.neuronpedia.org/gpt2-small/head/{layer}/{head}"


def named(model, revision=None):
    table = heads()
    table.attrs |= {"model": model, "revision": revision}
    return table


def test_every_line_of_the_list_is_a_model_and_an_address_with_layer_and_head():
    text = files("tlspectral.report").joinpath("head_pages.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names, addresses = zip(*(re.split(r" +\| ", line) for line in lines), strict=True)
    assert len({name.lower() for name in names}) == len(names) > 5
    assert len({name.rpartition("/")[2].lower() for name in names}) == len(names)  # by the short name one is meant
    for address in addresses:
        assert re.fullmatch(r"https://www\.neuronpedia\.org/[\w.-]+/head/\{layer\}/\{head\}", address)
    assert text.startswith("# ")
    assert "57d8b1c9" in text  # the source


@pytest.mark.parametrize(
    ("attrs", "address"),
    [
        ({"model": "openai-community/gpt2"}, GPT2),
        ({"model": "gpt2", "revision": "main"}, GPT2),  # as TransformerLens names it
        ({"model": "gpt2", "revision": "step1000"}, None),
        ({"model": "somebody/gpt2"}, None),
        ({"model": "/home/me/gpt2"}, None),
        ({"model": "tiny-rope"}, None),
        ({}, None),
    ],
)
def test_a_page_is_that_of_the_model_by_name_and_of_no_other_revision(attrs, address):
    assert page_address(attrs) == address
    assert ("https" in page_link(attrs, (3, 1))) == (address is not None)


@pytest.mark.slow
def test_card_and_report_link_the_page_of_each_head_and_ask_for_nothing():
    card, page = head_card(named("gpt2"), (2, 1)).html, report(named("gpt2"))
    assert re.findall(r"https?://[^\"]+", card) == [GPT2.format(layer=2, head=1)]
    (link,) = [one for tag, one in Structure(card).tags if tag == "a"]
    assert (link["target"], link["rel"]) == ("_blank", "noopener noreferrer")
    assert json.loads(Structure(page).scripts()[0])["page"] == GPT2
    assert re.findall(r"https?://[^\"]+", page) == [GPT2]
    for other in (named("tiny-model"), named("gpt2", "step1000")):
        assert "https" not in head_card(other, (2, 1)).html
        assert json.loads(Structure(report(other)).scripts()[0])["page"] is None
