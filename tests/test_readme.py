"""The README's first screen: its lines run and print what it says they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_python_block_prints_what_the_readme_shows(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    text = README.read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    code, shown = found.groups()
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    # The README rounds to two or three digits, which do not depend on the TransformerLens line or the workers.
    assert run.stdout.splitlines() == shown.splitlines()
    assert (tmp_path / "smollm2.parquet").stat().st_size > 100_000


def test_every_picture_and_link_of_the_readme_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert local
    for target in local:
        assert (README.parent / target).is_file(), target
