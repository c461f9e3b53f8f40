"""A column of a table is printed in fixed notation throughout, or scientific throughout."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlspectral.tables.printed import number_texts, printed

pytestmark = pytest.mark.lowest


NUMBERS = st.floats(-1e300, 1e300, allow_subnormal=False) | st.just(np.nan) | st.just(np.inf)


@given(st.lists(NUMBERS, min_size=1), st.integers(1, 5))
def test_a_column_has_one_notation_and_as_many_decimals_in_each_number(values, digits):
    texts = number_texts(values, digits)
    numbers = [text for text, value in zip(texts, values, strict=True) if np.isfinite(value)]
    assert len({"e" in text for text in numbers}) <= 1
    assert len({len(text.partition(".")[2].partition("e")[0]) for text in numbers}) <= 1
    for text, value in zip(texts, values, strict=True):
        if np.isnan(value):
            assert text == "-"
        elif np.isinf(value):
            assert float(text) == value
        elif "e" in text:
            assert float(text) == pytest.approx(value, rel=0.5 * 10.0 ** (1 - digits))
        else:  # half of the last decimal, and what the sixth leaves
            assert abs(float(text) - value) <= 0.5 * 10.0**-digits * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "digits", "texts"),
    [
        ([0.5, 0.25], 3, ["0.500", "0.250"]),
        ([0.5, 2e-5], 3, ["0.50000", "0.00002"]),
        ([0.5, 1e-9], 3, ["0.500000", "0.000000"]),  # six decimals at most
        ([3e-4, -1e-5], 3, ["3.00e-04", "-1.00e-05"]),
        ([5e-4, 0.0], 3, ["0.001", "0.000"]),
        ([2e7, 1.0], 3, ["2.00e+07", "1.00e+00"]),
        ([9e6, 1.0], 2, ["9000000.00", "1.00"]),
        ([0.0, np.nan, np.inf], 2, ["0.00", "-", "inf"]),
        ([12.0, 0.2], 0, ["12", "0"]),
        ([None], 2, ["-"]),
    ],
)
def test_known_columns(values, digits, texts):
    assert number_texts(values, digits) == texts


def test_a_table_is_printed_column_by_column_and_is_as_before():
    table = pd.DataFrame({"name": ["a", "b"], "n": [3, 40], "p": [0.5, 1e-4], "tiny": [1e-9, np.nan]})
    before, options = table.copy(), pd.get_option("display.float_format")
    assert printed(table, 2).splitlines() == [
        "name  n      p    tiny",
        "   a  3 0.5000 1.0e-09",
        "   b 40 0.0001       -",
    ]
    pd.testing.assert_frame_equal(table, before)
    assert pd.get_option("display.float_format") is options
