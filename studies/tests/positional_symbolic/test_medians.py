"""The median test of the paper, by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from tlspectral_studies.positional_symbolic.medians import median_tests


def test_the_median_test_is_that_of_a_two_by_two_table():
    heads = pd.DataFrame({"layer": np.repeat(range(5), 4), "head": [*range(4)] * 5, "s_pos": 0.5, "s_sym": np.nan})
    heads["s_pos"] = np.r_[np.linspace(0.7, 0.9, 7), 0.1, np.linspace(0.2, 0.6, 10), 0.95, 0.96]
    tests = median_tests(heads).set_index("score")
    row = tests.loc["s_pos"]
    # Layers 0 and 1 are early, 2 to 4 late. Above the median of all: 7 of 8 early heads, 3 of 12 late ones.
    assert row["early_median"] == pytest.approx(np.median(heads["s_pos"][:8]))
    assert row["late_median"] == pytest.approx(np.median(heads["s_pos"][8:]))
    above, below = np.array([7, 3]), np.array([1, 9])
    expected = np.array([8, 12]) / 2
    statistic = sum(((abs(seen - expected) - 0.5) ** 2 / expected).sum() for seen in (above, below))  # with Yates
    assert row["statistic"] == pytest.approx(statistic)
    assert row["pvalue"] == pytest.approx(math.erfc(math.sqrt(statistic / 2)))  # chi-square, one degree of freedom
    assert tests.loc["s_sym"].isna().all()
    # Where the last layers have no row, the table says how many there are.
    some = heads[heads["layer"] < 4]
    some.attrs["n_layers"] = 6
    assert median_tests(some)["late_median"][0] == np.median(some["s_pos"][12:])


def test_a_median_test_of_nothing_is_nan():
    equal = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "s_pos": 0.5, "s_sym": 0.5})
    assert median_tests(equal)[["statistic", "pvalue"]].isna().all(axis=None)
    assert (median_tests(equal)[["early_median", "late_median"]] == 0.5).all(axis=None)
    one_layer = pd.DataFrame({"layer": 0, "head": range(3), "s_pos": [0.1, 0.5, 0.7], "s_sym": [0.1, 0.5, 0.7]})
    assert median_tests(one_layer)[["early_median", "statistic"]].isna().all(axis=None)
