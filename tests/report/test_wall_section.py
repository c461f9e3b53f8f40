"""The wall of the report as data and as text: numbers of the wall, nothing that runs, and 1 MB for a sentence."""

import base64
import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from made_up_heads import Structure, heads
from made_up_walls import STRANGE, wall

from tlspectral.hooks.measured_wall import LEVELS
from tlspectral.report import report
from tlspectral.report.wall_section import MOST_BYTES


def blocks(page: str) -> list[dict]:
    """The data of the walls: what sentences share, then each sentence."""
    texts = re.findall(r'<script type="application/json" id="wall\w*">(.*?)</script>', page)
    return [json.loads(text) for text in texts]


def test_the_data_are_those_of_the_walls():
    walls = [wall(), wall(task=True, tokens=[" a", " b", " c"])]
    table = heads()
    page = report(table, walls=walls)
    shared, *sentences = blocks(page)
    assert [shared[name] for name in ("layer", "head", "kv")] == [
        walls[0].heads[name].tolist() for name in ("layer", "head", "kv_head")
    ]
    assert shared["row"] == list(range(len(table)))
    leading = table[["prev", "dup", "ind"]].idxmax(axis=1).where(table[["prev", "dup", "ind"]].max(axis=1) >= 0.3, "")
    assert shared["kind"] == list(leading)
    assert shared["sentences"][0] == walls[0].sentence
    assert "(8 prompts)" in shared["sentences"][1]
    for one, data in zip(walls, sentences, strict=True):
        n = len(one.tokens)
        assert data["tokens"] == list(one.tokens)
        kept = np.frombuffer(base64.b64decode(data["pattern"]), dtype=np.uint8).reshape(len(one.heads), -1)
        np.testing.assert_array_equal(kept, one.levels[:, np.tril(np.ones((n, n), dtype=bool))])
        removed = data["removal"]
        # Five digits are kept.
        np.testing.assert_allclose(removed["without"], one.removal.without, rtol=5.1e-5)
        np.testing.assert_allclose(removed["delta"], one.removal.deltas, rtol=5.1e-5)
        assert [removed["texts"][place] for place in removed["top"]] == [text for text, _ in one.removal.top]
        assert data["sinks"] == {"1": [3, 0.25]}
    assert sentences[0]["removal"]["delta_se"] == [None] * len(table)
    assert sentences[1]["removal"]["delta_se"] == [0.01] * len(table)


def test_the_section_is_the_first_and_says_the_largest_changes_as_text():
    page = report(heads(), walls=[wall(), wall(task=True)])
    found = Structure(page)
    assert page.index('id="wall"') < page.index("Which heads do what")
    text = found.text()
    for said in ("One sentence has no standard error", "mean over 8 prompts: 0.80 ± 0.02", "next token without it",
                 "\N{LEFT DOUBLE QUOTATION MARK} other\N{RIGHT DOUBLE QUOTATION MARK} (0.50)"):  # fmt: skip
        assert said in text, said
    rows = re.findall(r"<tr><td><a href=\"#(L\dH\d)\">", page)
    assert rows[0] == rows[12] == "L1H2"
    identifiers = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    script = found.scripts()[-1]
    asked = set(re.findall(r'part\("(\w+)"\)', script))
    assert len(asked) > 30
    assert asked - {"cards"} <= set(identifiers)


def test_a_page_without_a_wall_has_none():
    page = report(heads())
    assert 'id="wall"' not in page
    assert "IntersectionObserver" not in page
    assert "The query&#8211;key operator" in page


def test_no_token_leaves_its_place():
    page = report(heads(), walls=wall())
    assert "</script><b>" not in page
    assert "</p>' " not in page
    Structure(page)
    assert blocks(page)[1]["tokens"] == list(STRANGE)


@pytest.mark.slow
def test_a_thousand_heads_take_less_than_a_megabyte_for_a_sentence():
    table, one = heads(32, 32), wall(32, 32, [f" word{place}" for place in range(34)])
    with_wall, without = report(table, walls=[one, one]), report(table)
    assert (len(with_wall) - len(without)) / 2 < MOST_BYTES
    pattern = blocks(with_wall)[1]["pattern"]
    assert len(pattern) == pytest.approx(1024 * 34 * 35 / 2 * 4 / 3, rel=0.001)


def test_a_sentence_without_room_is_refused_with_the_room_there_is():
    table = heads(32, 32)
    with pytest.raises(ValueError, match=r"has 60 tokens, and a page has room for 35 tokens of 1024 heads \(1 MB\)"):
        report(table, walls=wall(32, 32, [" a"] * 60))
    report(table, walls=wall(32, 32, [" a"] * 35))
    with pytest.raises(ValueError, match="room for 25 tokens"):
        report(table, walls=wall(32, 32, [" a"] * 26, causal=False, removal=False))


def test_a_wall_without_removals_and_an_encoder_say_why_there_are_no_bars():
    for causal in (True, False):
        page = report(heads(), walls=wall(causal=causal, removal=False))
        assert "No head was removed" in Structure(page).text()
        data = blocks(page)[1]
        assert data["removal"] is None
        n = len(STRANGE)
        levels = np.frombuffer(base64.b64decode(data["pattern"]), dtype=np.uint8)
        assert len(levels) == 12 * (n * (n + 1) // 2 if causal else n * n)


def test_a_table_of_some_heads_or_without_scores_frames_what_it_knows():
    some = heads().iloc[[5, 2]].reset_index(drop=True)
    some.attrs = heads().attrs
    shared = blocks(report(some, walls=wall()))[0]
    assert [place for place, row in enumerate(shared["row"]) if row is not None] == [2, 5]
    assert shared["row"][5] == 0
    bare = heads().drop(columns=["prev", "dup", "ind"])
    bare.attrs = heads().attrs
    shared = blocks(report(bare, walls=wall()))[0]
    assert set(shared["kind"]) == {""}
    assert shared["detectors"] == {}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("text", TypeError, "walls= has a str: give the result of"),
        ([heads()], TypeError, "walls= has a DataFrame"),
        (heads(), TypeError, "walls= has a DataFrame"),
        ([wall(), wall(2, 4)], ValueError, "the walls have different heads"),
    ],
)
def test_other_walls_are_refused(given, error, said):
    with pytest.raises(error, match=said):
        report(heads(), walls=given)


def test_walls_of_other_weights_are_refused():
    table = heads()
    table.attrs |= {"revision": "other"}
    with pytest.raises(ValueError, match="the walls with revision"):
        report(table, walls=wall())


def test_levels_are_steps_of_attention():
    one = wall()
    np.testing.assert_allclose(one.attention.sum(-1), 1.0, atol=len(one.tokens) * 0.5 / LEVELS)
    assert pd.Series(one.heads["name"]).is_unique


def test_a_page_is_made_without_torch():
    """A table of heads is shown where no model is."""
    code = "import sys, tlspectral.report.page; assert not {'torch', 'transformer_lens'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
