"""The report page in a real browser: no complaint, no request, and it does what it says when pointed at."""

import base64
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, Page
from made_up_heads import heads, kernels

from tlspectral.report import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's package)"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    table = heads()
    table.loc[7, ["D_head", "dir_frac"]] = np.nan
    table["rope_imag_frac"] = np.nan
    path = tmp_path_factory.mktemp("page") / "report.html"
    report(table, path, kernels=kernels((0, 1), (2, 3)))
    return path.as_uri()


def clean(page: Page, address: str) -> bool:
    return page.errors == [] and [one for one in page.requests if not one.startswith("data:")] == [address]


def shown(page: Page) -> str:
    return page.run("document.getElementById('card').dataset.head")


def later(page: Page, expression: str, milliseconds: int = 50):
    """The value of an expression after the page has had the time to act."""
    return page.run(f"new Promise((done) => setTimeout(() => done({expression}), {milliseconds}))")


def visible(page: Page, selector: str) -> bool:
    return page.run(f"document.querySelector('{selector}').getAttribute('display') !== 'none'")


def test_what_a_bad_page_does_is_seen(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no"); undefined.x</script>')
    with browser.open(bad.as_uri()) as page:
        assert "http://127.0.0.1:9/x.png" in page.requests
        assert any("console.error: ['no']" in said for said in page.errors)
        assert any("TypeError" in said for said in page.errors)


def test_it_opens_without_a_complaint_or_a_request_and_draws_every_head_where_its_numbers_are(browser, address):
    with browser.open(address) as page:
        assert page.run("document.querySelectorAll('#grid rect[role=option]').length") == 12
        assert page.run("document.querySelectorAll('#plane .band').length") == 2
        assert page.run("document.querySelector('#column').selectedOptions[0].value") == "D_head"
        assert page.run("document.querySelector('#cell-7').getAttribute('fill')") == "url(#missing)"
        disabled = page.run("[...document.querySelectorAll('#column option:disabled')].map((one) => one.value)")
        assert disabled == ["rope_imag_frac"]
        places = page.run(
            "[...document.querySelectorAll('#plane .dots circle')]"
            ".map((one) => [one.cx.baseVal.value, one.cy.baseVal.value])"
        )
        assert clean(page, address)
    # Dots are drawn in the order of the chosen column, D_head; places have one decimal of a pixel.
    ordered = heads().drop(index=7).sort_values("D_head")
    for pixels, name, sign in zip(np.array(places).T, ("dir_frac", "D_head"), (1, -1), strict=True):
        line = np.polyfit(ordered[name], pixels, 1)
        assert sign * line[0] > 0
        assert np.abs(np.polyval(line, ordered[name]) - pixels).max() < 0.2


def test_a_wide_null_ends_at_the_axes(browser, tmp_path):
    """Heads of few dimensions have nulls wider than what a share can be."""
    table = heads(2, 2)
    table["D_head_null_mean"], table["D_head_null_std"] = 0.5, 0.4
    table["dir_frac_null_mean"], table["dir_frac_null_std"] = 0.7, 0.3
    report(table, tmp_path / "report.html")
    boxes = (
        "[...document.querySelectorAll('#plane .band, #plane .axis')].map((one) => one.getBBox())"
        ".map(({ x, y, width, height }) => [x, y, x + width, y + height])"
    )
    with browser.open((tmp_path / "report.html").as_uri()) as page:
        first, second, axes = np.array(page.run(boxes))
        labels = page.run("[...document.querySelectorAll('#plane > text')].map((one) => one.textContent)")
    for band in (first, second):
        assert (band[:2] >= axes[:2] - 0.01).all()
        assert (band[2:] <= axes[2:] + 0.01).all()
    np.testing.assert_allclose(second, axes, atol=0.01)  # D_head: the whole height, from 0 to 1
    assert "1.0" in labels
    assert not {"1.2", "\N{MINUS SIGN}0.2"} & set(labels)


def test_a_head_is_linked_with_its_public_page_where_the_model_has_one(browser, tmp_path):
    link = "document.getElementById('public')"
    for model, hidden, ends in (("gpt2", False, "/gpt2-small/head/1/1"), ("tiny-model", True, "")):
        table = heads()
        table.attrs |= {"model": model, "revision": None}
        report(table, tmp_path / f"{model}.html")
        address = (tmp_path / f"{model}.html").as_uri()
        with browser.open(address) as page:
            page.hover("#cell-5")
            assert shown(page) == "L1H1"
            assert page.run(f"{link}.hidden") == hidden
            assert page.run(f"{link}.href").endswith(ends)
            assert clean(page, address)


def test_a_column_of_tiny_numbers_is_scientific_and_others_have_three_digits(browser, tmp_path):
    table = heads()
    table["tiny"] = np.linspace(-3e-5, 1e-5, len(table))
    table["mixed"] = np.geomspace(2e-5, 0.5, len(table))
    report(table, tmp_path / "report.html")
    cell = "[...document.querySelectorAll('#numbers tr')].find((one) => one.cells[0].textContent === '{}').cells[1]"
    with browser.open((tmp_path / "report.html").as_uri()) as page:
        found: dict[str, list[str]] = {"tiny": [], "mixed": []}
        for index in range(len(table)):
            page.hover(f"#cell-{index}")
            for name, texts in found.items():
                texts.append(page.run(cell.format(name) + ".textContent"))
    assert all("e" in text for text in found["tiny"])
    assert found["mixed"][0] == "2e\N{MINUS SIGN}5"  # a tiny number alone has an exponent
    assert found["mixed"][-1] == "0.500"


def test_pointing_shows_a_head_and_a_click_pins_it(browser, address):
    with browser.open(address) as page:
        page.hover("#cell-5")
        assert shown(page) == "L1H1"
        assert page.run("document.getElementById('head').textContent") == "L1H1"
        assert visible(page, "#plane .ring.pointed")
        number = f"{heads()['D_head'][5]:.3f}"
        assert number in page.run("document.querySelector('#card .chosen').textContent")
        page.click("#cell-5")
        page.hover("h1")
        assert shown(page) == "L1H1"
        assert page.run("location.hash") == "#L1H1"
        assert visible(page, "#grid .ring.pinned")
        assert visible(page, "#plane .ring.pinned")
        page.hover("#cell-2")
        assert shown(page) == "L0H2"
        page.hover("h1")
        assert shown(page) == "L1H1"
        page.press("Escape")
        assert page.run("location.hash") == ""
        assert not visible(page, "#grid .ring.pinned")
        page.hover("#plane .dots circle:last-of-type")
        assert shown(page) == heads().drop(index=7).nlargest(1, "D_head")["name"].item()
        page.click("#cell-7")  # a head that is not in the plane
        assert shown(page) == "L1H3"
        assert not visible(page, "#plane .ring.pinned")
        assert "not computed" in page.run("document.querySelector('#card .chosen').textContent")
        page.click(".detectors a[href='#L2H0']")
        assert shown(page) == "L2H0"
        assert page.run("location.hash") == "#L2H0"
        page.run("location.hash = '#L0H0'")
        assert later(page, "document.getElementById('card').dataset.head") == "L0H0"
        assert clean(page, address)


def choose(name):
    """Choose the column that colours the heads; the milliseconds that it took."""
    return (
        f"(() => {{ const one = document.querySelector('#column'), start = performance.now(); one.value = {name!r};"
        "one.dispatchEvent(new Event('change')); document.body.offsetWidth; return performance.now() - start; })()"
    )


CARDS = "document.getElementById('opened')"


def swept(table):
    parts = [table[["layer", "head"]].assign(part=part, delta=0.25, delta_p=0.5) for part in ("rope_phase", "output")]
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def with_cards(tmp_path_factory):
    path = tmp_path_factory.mktemp("cards") / "report.html"
    report(heads(), path, kernels=kernels((0, 1), (2, 3)), sweep=swept(heads().iloc[:6]))
    return path.as_uri()


def test_a_pinned_head_opens_into_its_card(browser, with_cards):
    titles = "[...document.querySelectorAll('#evidence h3')].map((one) => one.textContent)"
    with browser.open(with_cards) as page:
        assert page.run(f"{CARDS}.hidden")
        page.click("#cell-1")
        assert page.run(titles) == ["By distance", "Ablation"]
        assert page.run("document.getElementById('openedhead').textContent") == "L0H1"
        page.run("location.hash = '#L2H3'")
        assert later(page, titles, 1000) == ["By distance"]  # and the page has come to rest at the card
        page.click("#cell-10")  # nothing was measured of it: no card, rather than an empty one
        assert page.run(f"{CARDS}.hidden && document.getElementById('open').hidden")
        assert clean(page, with_cards)


@pytest.mark.parametrize("width", [1600, 1280, 390])
def test_a_link_leads_to_the_card_of_which_nothing_is_cut_off(browser, tmp_path, width):
    table = heads()
    wide = swept(table).assign(task="greater-than", delta_se=0.012345, control_delta=-0.123456, control_p=0.04762)
    wide = wide.assign(delta_p_floor=0.0002, control_p_floor=0.04762)
    report(table, tmp_path / "report.html", kernels=kernels((0, 1)), sweep=wide)
    cut = (
        "[...document.querySelectorAll('#evidence section, #numbers, .detectors > div')]"
        ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
    )
    with browser.open((tmp_path / "report.html").as_uri() + "#L0H1", width=width) as page:
        assert -1 <= later(page, f"{CARDS}.getBoundingClientRect().top", 1000) < 200
        assert page.run(cut) == []
        assert page.run("document.documentElement.scrollWidth") <= width
        # The grid is coloured by what the other tables say of a head, and a head that is touched is named in the plane.
        chosen = "effect of removal (delta): rope_phase, greater-than"
        assert chosen in page.run("[...document.querySelectorAll('#column option')].map((one) => one.value)")
        page.run("document.getElementById('grid').scrollIntoView({ behavior: 'instant', block: 'center' })")
        page.click("#cell-5")
        assert page.run("document.querySelector('#plane .marked.pinned').textContent") == "L1H1"
        assert page.run("document.querySelector('#card .chosen').textContent").startswith("rotational share (D_head)0.")


def test_a_card_works_by_keyboard_on_a_telephone(browser, with_cards):
    focus = "document.activeElement.id"
    with browser.open(f"{with_cards}#L0H1", width=380) as page:
        page.run("document.getElementById('grid').focus()")
        for key, expected in (("Tab", "unpin"), ("Tab", "open"), ("Enter", "opened")):
            page.press(key)
            assert page.run(focus) == expected
        assert -1 <= later(page, f"{CARDS}.getBoundingClientRect().top", 1000) < 200
        page.press("Tab")
        assert page.run(focus) == "back"
        page.press("Escape")  # closes the card, and the focus is not lost with it
        assert page.run(f"{CARDS}.hidden")
        assert page.run(focus) == "grid"
        assert page.run("document.documentElement.scrollWidth") <= 380
        assert page.errors == []


def test_a_thousand_heads_with_their_cards_open_at_once_and_stay_responsive(browser, tmp_path):
    """From navigation to the end of the page's script, and from a choice to its drawing, as the browser measured it."""
    table = heads(32, 32)
    measured = kernels(*zip(table["layer"], table["head"], strict=True)).assign(predicted=0.5)
    parts = pd.concat([swept(table).assign(part=f"part {n}") for n in range(8)])
    report(table, tmp_path / "report.html", kernels=measured, sweep=[swept(table), parts])
    with browser.open((tmp_path / "report.html").as_uri()) as page:
        opened = page.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        # Milliseconds; measured 420 to 600 on a machine with six times as many processes as cores.
        assert opened < 5000
        # Measured 30; an algorithm that looks at all heads for each head would take seconds.
        assert page.run(choose("prev")) < 1000
        assert page.run("document.querySelectorAll('#evidence *').length") == 0  # no body is made before it is opened
        page.run("location.hash = '#L31H16'")
        assert later(page, "document.querySelectorAll('#evidence h3').length") == 2
        assert page.errors == []


def test_the_keyboard_does_what_the_mouse_does(browser, address):
    with browser.open(f"{address}#L1H1") as page:
        assert shown(page) == "L1H1"
        page.run("document.querySelector('#column').focus()")
        page.press("Tab")
        assert page.run("document.activeElement.id") == "grid"
        for key, expected in (("ArrowRight", "L2H1"), ("ArrowRight", "L2H1"), ("ArrowDown", "L2H2"), ("Home", "L0H2")):
            page.press(key)
            assert shown(page) == expected
        assert page.run("document.getElementById('grid').getAttribute('aria-activedescendant')") == "cell-2"
        page.press("Enter")
        assert page.run("location.hash") == "#L0H2"
        assert page.run("document.getElementById('cell-2').getAttribute('aria-selected')") == "true"
        assert page.run("document.querySelectorAll('[aria-selected=true]').length") == 1
        assert "L0H2, rotational share (D_head) " in page.run("document.getElementById('spoken').textContent")
        assert page.errors == []


def test_another_column_colours_grid_and_plane(browser, address):
    with browser.open(address) as page:
        before = page.run("document.querySelector('#cell-3').getAttribute('fill')")
        page.run(choose("D_head_z"))
        assert page.run("document.querySelector('#cell-3').getAttribute('fill')") != before
        fills = page.run("[...document.querySelectorAll('#plane .dots circle')].map((one) => one.getAttribute('fill'))")
        cells = page.run(
            "[...document.querySelectorAll('#grid rect[role=option]')].map((one) => one.getAttribute('fill'))"
        )
        assert sorted(fills) == sorted(fill for place, fill in enumerate(cells) if place != 7)
        assert "null 0 ± 2.0" in page.run("document.getElementById('legend').textContent")
        assert clean(page, address)


def test_text_of_tables_does_not_run(browser, tmp_path):
    ink, table = "<img src=x onerror=window.ran=1><script>window.ran=1</script>", heads()
    table["name"] = table["status"] = ink
    table.attrs["model"] = "</script><script>window.ran=1</script>"
    sweep = pd.DataFrame({"layer": [0], "head": [1], "part": [ink], "delta": [1.0]})
    report(table, tmp_path / "report.html", sweep=sweep)
    with browser.open((tmp_path / "report.html").as_uri()) as page:
        page.hover("#cell-3")
        page.click("#cell-1")
        assert ink in page.run("document.getElementById('evidence').textContent")
        assert page.run("window.ran === undefined")
        assert clean(page, (tmp_path / "report.html").as_uri())


def test_without_scripts_the_tables_remain(browser, address):
    with browser.open(address, script=False) as page:
        tree = page.send("DOMSnapshot.captureSnapshot", computedStyles=[])
        assert any("need JavaScript" in one for one in tree["strings"])
        assert page.errors == []
        assert "Previous-token" in " ".join(tree["strings"])


@pytest.mark.parametrize("width", [380, 1200])
def test_it_fits_in_any_font_and_in_a_dark_room(browser, address, width):
    """Fonts differ by machine, so any of them is made wide by space between the letters."""
    dark = width == 380
    with browser.open(address, width=width, dark=dark) as page:
        background, ink = page.run(
            "['backgroundColor', 'color']"
            ".map((name) => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
        )
        assert (sum(background) < sum(ink)) == dark
        page.run("document.querySelectorAll('details').forEach((one) => one.open = true)")
        for font in ("sans-serif", "'Liberation Sans', sans-serif", "'DejaVu Sans', monospace"):
            for spacing in (0, 2, 5):
                page.run(
                    f"document.documentElement.style.setProperty('--sans', {font!r});"
                    f"document.body.style.letterSpacing = '{spacing}px'"
                )
                assert page.run("document.documentElement.scrollWidth") <= width, (font, spacing)


def test_a_table_of_one_head_without_numbers_is_a_page(browser, tmp_path):
    path = tmp_path / "report.html"
    report(pd.DataFrame({"layer": [3], "head": [2], "dir_frac": [np.nan], "D_head": [np.nan]}), path)
    with browser.open(path.as_uri()) as page:
        page.hover("#cell-0")
        assert shown(page) == "L3H2"
        assert clean(page, path.as_uri())


def test_in_the_frame_of_a_notebook_the_page_works_without_a_request(browser, tmp_path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><title>cell</title>{report(heads())._repr_html_()}", encoding="utf-8")
    inside = "document.querySelector('iframe').contentDocument"
    with browser.open(notebook.as_uri()) as page:
        assert page.run(f"{inside}.querySelectorAll('#grid rect[role=option]').length") == 12
        link = f"{inside}.querySelector(\"main a[href^='#L']\")"
        name = page.run(f"{link}.textContent")
        page.run(f"{link}.click()")
        # By then a navigation away would have begun.
        assert later(page, f"{inside}.getElementById('card').dataset.head", 300) == name
        assert page.errors == []
        asked = [url for url in page.requests if not url.startswith(("data:", "about:srcdoc"))]
        assert asked == [notebook.as_uri()]


def test_an_open_card_is_printed_alone_on_one_page(browser, address):
    printed, names = {}, {}
    for at in ("", "#L0H1"):
        with browser.open(address + at) as page:
            file = base64.b64decode(page.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])  # A4
            printed[at] = len(re.findall(rb"/Type\s*/Page\b", file))
            page.send("Emulation.setEmulatedMedia", media="print")
            seen = "[...document.querySelectorAll('h1, h2, h3')].filter((one) => one.checkVisibility())"
            names[at] = page.run(f"{seen}.map((one) => one.textContent)")
    assert printed["#L0H1"] == 1 < printed[""]
    assert names["#L0H1"][1:] == ["L0H1", "L0H1", "By distance"]  # of its row, of its card, and what is on it
    assert "Head grid" in names[""]
    assert "L0H0" not in names[""]  # of the first row, at which nobody points
