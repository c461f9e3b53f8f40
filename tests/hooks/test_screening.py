"""Which edges a screen measures, and what it says of those that it did not."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import tlspectral as tls
from tlspectral.hooks.screening import screened_edges

pytestmark = pytest.mark.lowest


def table(n=6_000, most=50, seed=0):
    rng = np.random.default_rng(seed)
    estimates, to_logits = rng.normal(size=n), rng.random(n) < 0.1
    order, words = screened_edges(estimates, to_logits, most, seed)
    frame = pd.DataFrame({"estimate": estimates, "delta": estimates, "measured": words, "to_logits": to_logits})
    frame.loc[frame["measured"] == "", "delta"] = np.nan
    frame.attrs = {"screen": most, "n_edges": n}
    return frame, order


def test_others_are_drawn_by_rank_and_all_near_edges_to_the_logits_are_measured():
    frame, order = table()
    assert order.tolist() == frame["estimate"].abs().sort_values(ascending=False, kind="stable").index.tolist()
    ranked = frame.loc[order].reset_index(drop=True)
    assert (ranked["measured"][:50] == "top").all()
    near = ranked[50:200]
    assert ((near["measured"] == "logits") == near["to_logits"]).all()
    for name, low, high, count in (
        ("51 to 500", 50, 500, 30),
        ("501 to 5000", 500, 5_000, 20),
        ("beyond 5000", 5_000, 6_000, 20),
    ):
        places = ranked.index[ranked["measured"] == name]
        assert len(places) == count
        assert low <= places.min()
        assert places.max() < high
    assert ranked["measured"].value_counts()[""] == 6_000 - 50 - 70 - near["to_logits"].sum()


def test_bounds_are_of_each_layer_of_ranks():
    frame, _ = table()
    frame.loc[frame["measured"] == "top", "delta"] = 2.0
    drawn = frame.index[frame["measured"] == "501 to 5000"]
    frame.loc[drawn, "delta"] = 0.1
    frame.loc[drawn[:3], "delta"] = -2.5
    frame.loc[frame["measured"].isin(["51 to 500", "beyond 5000", "logits"]), "delta"] = 0.1
    frame.loc[frame.index[frame["measured"] == "logits"][0], "delta"] = 3.0
    found = tls.hooks.missed_edges(frame).set_index("ranks")
    assert found.attrs["bar"] == 2.0
    assert found["large"].to_dict() == {"51 to 500": 0, "501 to 5000": 3, "beyond 5000": 0, "logits": 1}
    row = found.loc["501 to 5000"]
    assert (row["n_edges"], row["drawn"]) == (4_500, 20)
    # One-sided: three or fewer of twenty have a probability of 5 % at the bound.
    assert scipy.stats.binom.cdf(3, 20, row["share_high"]) == pytest.approx(0.05)
    assert row["most"] == int(row["share_high"] * 4_500)
    assert found.loc["51 to 500", "share_high"] == pytest.approx(1 - 0.05 ** (1 / 30))
    assert found.loc["logits", "most"] == 1
    lower = tls.hooks.missed_edges(frame, bar=0.05).set_index("ranks")
    assert (lower["large"] == lower["drawn"]).all()
    assert (lower["share_high"] == 1).all()


def test_refusals_of_tables_that_no_screen_made():
    frame, _ = table(600, 10)
    with pytest.raises(ValueError, match="bar must be a positive number, not 0"):
        tls.hooks.missed_edges(frame, bar=0)
    with pytest.raises(ValueError, match="40 of 600 edges: give the whole table"):
        tls.hooks.missed_edges(frame.head(40))
    frame.attrs = {}
    with pytest.raises(ValueError, match=r"no attrs\['screen'\]"):
        tls.hooks.missed_edges(frame)
    with pytest.raises(ValueError, match="no column measured"):
        tls.hooks.missed_edges(frame.drop(columns="measured"))
