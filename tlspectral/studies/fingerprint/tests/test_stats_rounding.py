"""The noise of rounding in a statistic is the spread of that statistic over the drawn tables."""

import numpy as np
import pytest
import zoo
from described import assert_described

import tlspectral as tls
from tlspectral.heads import weight_noise_draws
from tlspectral.studies.fingerprint.statistics import statistic_noise


def test_noise_of_a_statistic_is_that_of_the_drawn_tables() -> None:
    model = zoo.bridge("llama")
    moved = weight_noise_draws(model, draws=6)
    heads = tls.analyze_heads(model, detectors=False, null_draws=2, show_progress=False)
    heads["prev"] = np.arange(len(heads)) / 10
    table = statistic_noise(
        heads.iloc[::-1],
        moved,
        {
            "mean": lambda at: at["D_head"].mean(),
            "behaviour": lambda at: at["prev"].sum(),
            "weighted": lambda at: (at["D_head"] * at["prev"]).sum(),
            "rank": lambda at: at["D_head_pct"].max(),
        },
    )
    assert_described(table)
    table = table.set_index("statistic")
    means = moved[moved["draw"] >= 0].groupby("draw")["D_head"].mean()
    np.testing.assert_allclose(table.loc["mean", ["mean", "sd"]].astype(float), [means.mean(), means.std()], rtol=1e-7)
    assert table.loc["mean", "value"] == pytest.approx(heads["D_head"].mean(), rel=1e-12)
    # Behaviour is not measured again, so a statistic of it alone does not move, but for the rounding of a mean.
    assert table.loc["behaviour", "sd"] < 1e-12
    by_head = [
        (moved[moved["draw"] == draw]["D_head"].to_numpy() * heads["prev"].to_numpy()).sum() for draw in range(6)
    ]
    np.testing.assert_allclose(table.loc["weighted", "mean"], np.mean(by_head), rtol=1e-12)
    assert table.loc["weighted", "low"] == pytest.approx(np.quantile(by_head, 0.025))
    assert table.loc["rank", ["low", "high"]].tolist() == [1, 1]
    assert (table["draws"] == 6).all()


def test_a_drawn_d_head_is_ranked_again() -> None:
    model = zoo.bridge("llama")
    moved = weight_noise_draws(model, draws=2)
    last = (moved["layer"] == 1) & (moved["head"] == 3) & (moved["draw"] >= 0)
    moved.loc[last, "D_head"] = -1.0
    heads = tls.analyze_heads(model, detectors=False, null_draws=2, show_progress=False)
    found = statistic_noise(heads, moved, {"last": lambda at: at["D_head_pct"].iloc[-1]})
    assert found["mean"].item() == 1 / len(heads)
