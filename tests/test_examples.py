"""Examples in docstrings print what they show. Those of parts are run by test_part_values, on more Pythons."""

import doctest
import importlib
from pathlib import Path

import pytest

import tlspectral

PACKAGE = Path(tlspectral.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if not {"tests", "parts"} & set(path.parts) and ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module_run(module):
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
