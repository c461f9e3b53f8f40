"""The wall of the report in a real browser: numbers where they belong, by mouse, finger and keyboard, at any width."""

import shutil

import numpy as np
import pytest
from chromium import Browser, Page
from made_up_heads import heads
from made_up_walls import STRANGE, wall

from tlspectral.report import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's package)"),
]

CHOSEN = "document.getElementById('wallbands').dataset.head"
WORDS = "[...document.querySelectorAll('#words .word')]"


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


def written(path, table=None, **more):
    table = heads() if table is None else table
    report(table, path / "report.html", walls=[wall(), wall(task=True, tokens=[" a", " b", " c", " d"])], **more)
    return (path / "report.html").as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return written(tmp_path_factory.mktemp("wall"))


def text(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).textContent")


def later(page: Page, expression: str, milliseconds: int = 300):
    return page.run(f"new Promise((done) => setTimeout(() => done({expression}), {milliseconds}))")


def clean(page: Page, address: str) -> bool:
    return page.errors == [] and [one for one in page.requests if not one.startswith("data:")] == [address]


def pixel(page: Page, head: str, across: float, down: float) -> list[int]:
    """The colour of a point of a head's square, which are shares of its side, on a screen of one pixel per point."""
    return page.run(
        f"(() => {{ const layer = Number({head!r}.match(/L(\\d+)/)[1]), row = Number({head!r}.match(/H(\\d+)/)[1]);"
        "const canvas = document.querySelector('#wallbands canvas'), box = canvas.getBoundingClientRect();"
        "const cell = Math.round((canvas.width - 40) / 3), side = cell - 3, pitch = cell + 8;"
        f"const x = 38 + cell * layer + 1 + {across} * side, y = 16 + pitch * row + 1 + {down} * side;"
        "return [...canvas.getContext('2d').getImageData(Math.floor(x), Math.floor(y), 1, 1).data]; })()"
    )


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (768, True), (390, False), (390, True)])
def test_it_opens_first_without_a_complaint_a_request_or_a_cut(browser, address, width, dark):
    with browser.open(address, width=width, dark=dark) as page:
        assert page.run("document.querySelector('main > section').id") == "wall"
        assert page.run(CHOSEN) == "L1H2"  # the largest change
        assert later(page, "document.querySelector('#wallbands canvas').width") > 100
        assert page.run("document.documentElement.scrollWidth") <= width
        cut = (
            "[...document.querySelectorAll('#wallhead > div, #walllegend, .chips')]"
            ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"
        )
        assert page.run(cut) == []
        assert page.run("document.querySelectorAll('#wallhead [hidden]').length") == 0
        background, ink = page.run(
            "['backgroundColor', 'color']"
            ".map((name) => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
        )
        assert (sum(background) < sum(ink)) == dark
        assert clean(page, address)


def test_a_square_is_the_attention_of_its_head_and_a_bar_its_change(browser, address):
    one = wall()
    n = len(STRANGE) - 1
    with browser.open(address) as page:
        later(page, "0")
        found, shares = [], []
        for head in ("L0H0", "L2H3"):
            index = list(one.heads["name"]).index(head)
            for query in range(1, n + 1):
                for key in range(1, query + 1):
                    red = pixel(page, head, (key - 0.5) / n, (query - 0.5) / n)[0]
                    found.append(red)
                    shares.append(min(1.0, float(one.attention[index, query, key]) / 0.5))
        # From #f6f7f9 to #1b5e9b; a colour is a whole number.
        np.testing.assert_allclose(found, 246 + (27 - 246) * np.array(shares), atol=1.01)
        assert pixel(page, "L0H0", 0.9, 0.1)[0] == 246  # no query sees a later key
        # The bar under L1H2 is as wide as its square, those of the others are not.
        red, green, blue, _ = pixel(page, "L1H2", 0.95, 1.043)
        assert (red, green, blue) == (200, 16, 46)
        assert pixel(page, "L1H1", 0.95, 1.043)[3] == 0
        # The second sink of layer 1 is grey: red, green and blue are nearer each other than in the blue of a key.
        grey = pixel(page, "L1H0", 2.5 / n, (n - 0.5) / n)
        assert max(grey[:3]) - min(grey[:3]) < 30


def test_what_is_said_of_a_head_is_what_the_wall_holds(browser, address):
    task = wall(task=True, tokens=[" a", " b", " c", " d"])
    with browser.open(address) as page:
        assert text(page, "#wallname") == "L1H2"
        rows = text(page, "#next")
        assert "0.80 \N{RIGHTWARDS ARROW} 0.20" in rows
        assert "(answer)" in rows
        assert "The model then says \N{LEFT DOUBLE QUOTATION MARK}\N{NO-BREAK SPACE}other" in text(page, "#instead")
        assert "One sentence has no standard error." in text(page, "#amongall")
        assert "number 1" in text(page, "#amongall")
        assert "1 of 4 heads of the layer" in text(page, "#amongall")
        assert page.run("document.querySelectorAll('#strip .tick').length") == 12
        scores = text(page, "#scores")
        for name in ("prev", "dup", "ind"):
            assert f"{heads()[name][6]:.2f}" in scores
        assert "chance 0.06" in scores
        assert "shares keys and values with L1H3" in text(page, "#wallkind")
        page.click("#sentences button:nth-child(2)")
        assert text(page, "#wallname") == "L1H2"
        assert "mean over 8 prompts: 0.80 ± 0.02" in text(page, "#wallanswer")
        assert "\N{MINUS SIGN}0.60 ± 0.01" in text(page, "#strip")
        assert "(wrong)" in text(page, "#next")
        page.click("#wallmost button:nth-of-type(2)")
        second = task.heads["name"][np.argsort(-np.abs(task.removal.deltas))[1]]
        assert text(page, "#wallname") == second
        assert "Only the twelve largest changes are compared" in text(page, "#amongall")
        assert page.errors == []


def test_words_show_what_the_head_looks_at_from_the_word_pointed_at(browser, address):
    one = wall()
    with browser.open(address) as page:
        attention = one.attention[6]
        shown = page.run(f"{WORDS}.map((word) => word.title)")
        assert shown[-1] == f"{100 * attention[-1, -1]:.0f} %"
        page.hover("#words .word:nth-child(5)")
        assert page.run(f"{WORDS}.map((word) => word.classList.contains('later')).indexOf(true)") == 5
        assert page.run(f"{WORDS}[2].title") == f"{100 * attention[4, 2]:.0f} %"
        assert page.run(f"{WORDS}[5].title") == ""
        sinks = text(page, "#sinks")
        assert "start token" in sinks
        assert f"{100 * attention[4, 3]:.0f} % (a second sink" in sinks
        page.hover("h1")
        assert page.run(f"{WORDS}.some((word) => word.classList.contains('later'))") is False
        # Tokens are as they are: nothing of them is markup, and what cannot be seen has a sign.
        assert page.run(f"{WORDS}.map((word) => word.textContent)") == [
            "\N{MATHEMATICAL LEFT ANGLE BRACKET}start\N{MATHEMATICAL RIGHT ANGLE BRACKET}", *STRANGE[1:3],
            "\N{RETURN SYMBOL}", *STRANGE[4:7], "\N{RIGHTWARDS ARROW TO BAR}&amp;", *STRANGE[8:]]  # fmt: skip
        assert page.run("window.ran === undefined")
        assert page.errors == []


def test_the_keyboard_does_what_the_mouse_does(browser, address):
    with browser.open(address) as page:
        page.run("document.getElementById('wallbands').focus()")
        for key, expected in (("ArrowRight", "L2H2"), ("ArrowRight", "L2H2"), ("ArrowDown", "L2H3"), ("Home", "L0H3"),
                              ("ArrowUp", "L0H2")):  # fmt: skip
            page.press(key)
            assert page.run(CHOSEN) == expected
        assert text(page, "#wallspoken").startswith("L0H2; ")
        assert "answer 0.80 \N{RIGHTWARDS ARROW}" in text(page, "#wallspoken")
        assert page.run("location.hash") == "#L0H2"
        page.press("Enter")
        assert page.run("document.activeElement.id") == "wallhead"
        page.press("Tab")
        assert page.run("document.activeElement.className").startswith("word query")
        page.press("ArrowLeft")
        assert page.run(f"{WORDS}.indexOf(document.activeElement)") == len(STRANGE) - 2
        assert page.run("document.activeElement.getAttribute('aria-label')").endswith("of the attention")
        page.press("Tab")  # one stop for all words
        assert page.run("document.activeElement.id") == "wallcard"
        assert page.errors == []


def test_a_click_chooses_a_head_and_its_link_opens_its_card(browser, tmp_path):
    table = heads()
    pairs = table[["layer", "head"]].assign(
        interval="top", attention=0.9, query=3, key=2, query_token=" b", key_token=" <a", kind="previous",
        context="some text [ <a]< b> more")  # fmt: skip
    address = written(tmp_path, table, pairs=pairs)
    with browser.open(address + "#L0H1") as page:
        assert page.run(CHOSEN) == "L0H1"
        later(page, "0")
        page.run(
            "(() => { const canvas = document.querySelector('#wallbands canvas');"
            "canvas.scrollIntoView({ block: 'start', behavior: 'instant' });"
            "const box = canvas.getBoundingClientRect();"
            "const place = { bubbles: true, clientX: box.x + 60, clientY: box.y + 40 };"
            "canvas.dispatchEvent(new MouseEvent('click', place)); })()"
        )
        assert page.run(CHOSEN) == "L0H0"
        assert "some text  <a b more" in text(page, "#texts")
        assert page.run("document.querySelector('#texts mark').textContent") == " <a"
        page.click("#wallcard")
        assert page.run("document.getElementById('card').dataset.head") == "L0H0"
        assert later(page, "document.getElementById('openedhead').textContent") == "L0H0"
        page.run("location.hash = '#L2H3'")
        assert later(page, CHOSEN) == "L2H3"
        assert page.errors == []


def test_a_thousand_heads_are_drawn_in_bands_as_they_come_into_view(browser, tmp_path):
    report(heads(64, 16), tmp_path / "report.html", walls=wall(64, 16, [f" word{place}" for place in range(34)]))
    address = (tmp_path / "report.html").as_uri()
    for width, most in ((1280, 2), (390, 6)):
        with browser.open(address, width=width) as page:
            # Milliseconds from navigation to the end of the script; measured 300 to 700 on a busy machine.
            assert page.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") < 5000
            bands = later(page, "[...document.querySelectorAll('#wallbands canvas')].map((one) => one.width)")
            assert 2 <= len(bands) <= most
            assert bands[0] > 300  # an undrawn canvas is 300 wide, the size of a new one
            assert page.run("document.documentElement.scrollWidth") <= width
            box = page.run("document.getElementById('wallbands').getBoundingClientRect().height")
            assert box < 900  # what is said of a head stands below it
            spent = page.run(
                "(() => { const bands = document.getElementById('wallbands'), start = performance.now(); bands.focus();"
                "const right = () => new KeyboardEvent('keydown', { key: 'ArrowRight' });"
                "for (let step = 0; step < 20; step++) bands.dispatchEvent(right());"
                "return performance.now() - start; })()"
            )
            assert spent < 2000  # of twenty steps; measured 60 to 150
            page.run("document.getElementById('wallbands').dispatchEvent(new KeyboardEvent('keydown', { key: 'End' }))")
            assert page.run(CHOSEN).startswith("L63")
            drawn = later(page, "[...document.querySelectorAll('#wallbands canvas')].at(-1).width")
            assert drawn != 300
            assert clean(page, address)


def test_an_encoder_and_a_wall_without_removals_have_no_bars(browser, tmp_path):
    for causal in (True, False):
        report(heads(), tmp_path / "report.html", walls=wall(causal=causal, removal=False))
        with browser.open((tmp_path / "report.html").as_uri()) as page:
            assert page.run("document.getElementById('removed').hidden && document.getElementById('wallmost').hidden")
            assert "No head was removed" in text(page, "#wallanswer")
            page.hover("#words .word:nth-child(3)")
            assert page.run(f"{WORDS}.some((word) => word.classList.contains('later'))") is causal
            assert page.errors == []


def test_without_scores_and_outside_of_the_table_heads_have_no_frame(browser, tmp_path):
    some = heads().iloc[[5, 2]].drop(columns=["prev", "dup", "ind"]).reset_index(drop=True)
    some.attrs = heads().attrs
    report(some, tmp_path / "report.html", walls=wall())
    with browser.open((tmp_path / "report.html").as_uri()) as page:
        assert "no frames" in text(page, "#walllegend")
        assert page.run("document.getElementById('scored').hidden && document.getElementById('wallcard').hidden")
        assert page.errors == []


def test_without_scripts_the_largest_changes_remain(browser, address):
    with browser.open(address, script=False) as page:
        strings = " ".join(page.send("DOMSnapshot.captureSnapshot", computedStyles=[])["strings"])
        assert "next token without it" in strings
        assert page.errors == []
