"""The bridge of every architecture has every property of `conformance`; compatibility mode what depends on it."""

import pytest
from conformance import cases

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("row", "holds", "case"), cases("bridge"), indirect=["row"])
def test_conformance(row, holds, case):
    holds(row, *case)


@pytest.mark.parametrize(("row", "holds", "case"), cases("bridge", "compatible"), indirect=["row"])
def test_compatibility_mode(row, holds, case):
    holds(row, *case)
