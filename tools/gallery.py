"""Make the pictures of docs/gallery.md: its Python is run from top to bottom, from the root of the repository."""

import re
import time
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gallery.md"


def main() -> None:
    """Run the page's code, and print the seconds of each block."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        start = time.process_time()
        exec(compile(code, str(PAGE), "exec"), names)
        print(f"{time.process_time() - start:6.1f} CPU s: {code.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    typer.run(main)
