"""Every picture of the documentation is shown, has a command, and has letters that can be read in a page column."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from figure_parts import small_texts

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "studies").rglob("*.md")]


def shown(pages: dict[Path, str]) -> dict[Path, str]:
    """The pictures that pages show, as Markdown or as HTML, with a page that shows each."""
    return {
        (page.parent / target).resolve(): page.name
        for page, text in pages.items()
        for target in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text)
        for target in target
        if target.endswith(".png")
    }


def test_every_picture_is_shown_by_a_page_and_every_shown_picture_exists():
    found = shown({page: page.read_text(encoding="utf-8") for page in PAGES})
    assert set(found) == set(IMAGES.glob("*.png"))
    text = '![a\nb](images/one.png) <img src="images/two.png" width="200"> [no](images/three.png)'
    assert {path.name for path in shown({ROOT / "docs" / "page.md": text})} == {"one.png", "two.png"}


def test_thumbnails_of_the_gallery_are_its_pictures_and_lead_to_their_sections():
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    thumbnails = re.findall(r'<a href="#([^"]+)"><img src="(images/[^"]+)" width="200"', text)
    assert len(thumbnails) == 13
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for anchor, picture in thumbnails:
        (section,) = [part for part in sections if part.partition("\n")[0].lower().replace(" ", "-") == anchor]
        assert f"({picture})" in section


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was made before a change")
def test_every_picture_has_one_command_and_letters_of_nine_pixels(monkeypatch):
    monkeypatch.chdir(ROOT)
    for folder in ("benchmarks", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    pictures, gallery = import_module("pictures"), import_module("gallery")
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    made = [*re.findall(r'savefig\("docs/images/([^"]+)"\)', page), gallery.REPORT.name, *pictures.TRAINED]
    for source in pictures.SOURCES:
        for name, figure in source():
            assert small_texts(figure) == {}, name
            made.append(name)
    assert sorted(made) == sorted(file.name for file in IMAGES.glob("*.png"))
