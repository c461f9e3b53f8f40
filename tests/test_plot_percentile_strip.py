"""The strip shows the percentiles of the strongest heads, their median and what random heads would give."""

import itertools

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part

from tlspectral.plots import percentile_strip
from tlspectral.plots.percentile_strip import _random_medians


def table(seed: int = 0, count: int = 12) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame({"layer": np.arange(count) // 4, "head": np.arange(count) % 4})
    frame["D_head"], frame["prev"], frame["ind"] = generator.random((3, count))
    frame.attrs["model"] = f"model-{seed}"
    return frame


def test_the_strongest_heads_stand_at_their_ranks():
    heads = table()
    figure = percentile_strip(heads, detector="ind", top=3)
    expected = (heads["D_head"].rank() / 12)[heads["ind"].nlargest(3).index]
    assert offsets(figure, "heads of model-0")[:, 0] == pytest.approx(expected.to_numpy())
    (median,) = part(figure, "median of model-0")
    assert median.get_xdata() == pytest.approx([expected.median()] * 2)


def test_every_model_has_a_strip_of_its_own_in_the_given_order():
    figure = percentile_strip({"one": table(1), "two": table(2, 20)}, top=2)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["one\n12 heads", "two\n20 heads"]
    assert offsets(figure, "heads of one")[0, 1] > offsets(figure, "heads of two")[0, 1]


@pytest.mark.parametrize(("n", "k"), [(9, 3), (8, 4), (10, 1), (5, 5), (6, 6), (40, 1), (12, 2), (14, 5)])
def test_the_band_is_that_of_all_choices_of_heads(n, k):
    medians = [np.median(chosen) / n for chosen in itertools.combinations(range(1, n + 1), k)]
    exact = [np.quantile(medians, share, method="inverted_cdf") for share in (0.025, 0.975 + 1e-9)]
    # 1e-12 is rounding; the medians lie 1 / (2 n) apart.
    assert _random_medians(n, k) == pytest.approx(exact, abs=1e-12)


def test_what_cannot_be_drawn_is_refused_by_the_models_name():
    with pytest.raises(ValueError, match="two: k=5"):
        percentile_strip({"one": table(), "two": table(1, 4)})
    with pytest.raises(ValueError, match=r"model-0.*nothing"):
        percentile_strip(table(), "nothing")
    with pytest.raises(ValueError, match="no table"):
        percentile_strip({})
