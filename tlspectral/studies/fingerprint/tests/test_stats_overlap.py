"""The overlap of two sets of heads, against plain counting."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.studies.fingerprint.statistics import hypergeometric_overlap

invariant = settings(max_examples=40, derandomize=True)


@given(st.data())
@invariant
def test_it_counts_the_sets_that_overlap_as_much(data):
    population = data.draw(st.integers(0, 9))
    marked, drawn = (data.draw(st.integers(0, population)) for _ in range(2))
    overlap = data.draw(st.integers(max(0, marked + drawn - population), min(marked, drawn)))
    hits = [sum(head < marked for head in chosen) for chosen in itertools.combinations(range(population), drawn)]
    found = hypergeometric_overlap(population, marked, drawn, overlap)
    assert found.pvalue == pytest.approx(np.mean(np.array(hits) >= overlap))
    assert found.expected == pytest.approx(np.mean(hits))
    assert hypergeometric_overlap(population, drawn, marked, overlap).pvalue == pytest.approx(found.pvalue)


def test_the_overlap_of_the_paper():
    # Two of the five heads that need M_A most are in GPT-2's circuit of six.
    found = hypergeometric_overlap(144, 6, 5, 2)
    expected = sum(math.comb(6, i) * math.comb(138, 5 - i) for i in range(2, 6)) / math.comb(144, 5)
    assert found.pvalue == pytest.approx(expected, rel=1e-10)
    assert found.pvalue == pytest.approx(0.01376, abs=5e-6)
    assert (found.statistic, found.n) == (2, 144)


@pytest.mark.parametrize("counts", [(10, 11, 2, 1), (10, 3, -1, 0), (10, 3, 2, 3), (10, 8, 7, 4), (10, 3, 2, -1)])
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="heads"):
        hypergeometric_overlap(*counts)
