"""Make the pictures of docs/gallery.md, docs/wall.html and docs/images/report.png.

The Python of the page is run from top to bottom, from the root of the repository. The last picture is a screenshot of
docs/wall.html by Chromium; where Chromium is not installed, the old one stays.
"""

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
REPORT = ROOT / "docs" / "images" / "report.png"
WINDOW = "800,2100"  # pixels; a page column of 688 pixels shows the report's letters of 11 pixels with 9.5


def screenshot() -> str:
    """Write the picture of docs/wall.html, and return a sentence that says so, or why not."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return f"{REPORT.name} is not made again: install chromium, which takes the screenshot"
    look = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    page = (ROOT / "docs" / "wall.html").as_uri()
    subprocess.run([browser, *look, f"--screenshot={REPORT}", f"--window-size={WINDOW}", page], check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return f"{REPORT.name} is made again"


def main() -> None:
    """Run the page's code, print the seconds of each block, and take the screenshot."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        start = time.process_time()
        exec(compile(code, str(PAGE), "exec"), names)
        print(f"{time.process_time() - start:6.1f} CPU s: {code.strip().splitlines()[-1]}", flush=True)
    print(screenshot())


if __name__ == "__main__":
    typer.run(main)
