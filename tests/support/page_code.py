"""The code of pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, kind: str = "python") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
