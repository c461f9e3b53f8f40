"""Every HookedTransformer of the zoo has every property of `conformance`."""

import pytest
from conformance import cases


@pytest.mark.parametrize(("row", "holds", "case"), cases("hooked"), indirect=["row"])
def test_conformance(row, holds, case):
    holds(row, *case)
