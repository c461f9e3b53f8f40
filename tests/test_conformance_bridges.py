"""The bridge of every architecture has every property of `conformance`."""

import pytest
from conformance import cases


@pytest.mark.parametrize(("row", "holds", "case"), cases("bridge"), indirect=["row"])
def test_conformance(row, holds, case):
    holds(row, *case)
