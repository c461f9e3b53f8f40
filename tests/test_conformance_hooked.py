"""Every HookedTransformer of the zoo has every property of `conformance`, folded those that depend on folding."""

import pytest
from conformance import cases


@pytest.mark.parametrize(("row", "holds", "case"), cases("hooked"), indirect=["row"])
def test_conformance(row, holds, case):
    holds(row, *case)


@pytest.mark.parametrize(("row", "holds", "case"), cases("hooked", "folded"), indirect=["row"])
def test_folded(row, holds, case):
    holds(row, *case)
