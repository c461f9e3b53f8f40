"""Links of the pages lead to something that is in the repository: who reads there has no site."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tracked() -> set[str]:
    """Files of the repository, and the folders that hold them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = set(listed.stdout.splitlines())
    return files | {folder.as_posix() for file in files for folder in Path(file).parents}


def links(text: str) -> list[str]:
    """Targets of the links of a page that lead to a file; code is left out."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)", prose) if not re.match(r"\w+:", target)]


def headings(text: str) -> set[str]:
    """Anchors of a page, as GitHub and the site make them of headings."""
    found = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def dead(page: str, text: str, there: set[str]) -> list[str]:
    """Links of a page that lead to no file, or to no heading of one."""
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = os.path.normpath(Path(page).parent / path) if path else page
        if Path(target).as_posix() not in there:
            found.append(f"{page}: {link}")
        elif anchor and target.endswith(".md"):
            of_target = text if target == page else (ROOT / target).read_text(encoding="utf-8")
            if anchor not in headings(of_target):
                found.append(f"{page}: {link}")
    return found


def test_every_link_of_a_page_leads_to_a_file_or_heading_of_the_repository():
    there = tracked()
    pages = sorted(file for file in there if file.endswith(".md"))
    assert len(pages) > 40
    assert [link for page in pages for link in dead(page, (ROOT / page).read_text(encoding="utf-8"), there)] == []


def test_a_link_to_a_page_of_the_site_alone_or_to_no_heading_is_seen():
    text = "# One two\n[a](architectures.md) [b](#one-two) [c](#three) [d](parts.md#nothing) [e](https://host/x.md)\n"
    there = {"docs/page.md", "docs/parts.md"}
    expected = ["architectures.md", "#three", "parts.md#nothing"]
    assert dead("docs/page.md", text, there) == [f"docs/page.md: {link}" for link in expected]
