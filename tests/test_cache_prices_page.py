"""docs/results/cache_prices.md gives what the stored tables of benchmarks/cache_prices.py hold."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("cache_prices")


def test_the_page_has_the_rows_of_the_stored_tables(benchmark):
    page = (ROOT / "docs/results/cache_prices.md").read_text(encoding="utf-8")
    rows = list(benchmark.rows_of_page())
    assert len(rows) >= 2 + 2 + 10
    for row in rows:
        assert row in page


def test_each_stored_set_is_half_of_the_groups_beside_39_random_sets(benchmark):
    for name in benchmark.MODELS:
        row, alone = benchmark.priced_set(name), benchmark.priced_groups(name)
        names = row["groups"].split()
        assert len({*names}) == row["n_groups"] == len(alone) // 2
        assert {*names} <= {*alone["name"]}
        chosen, every = (pd.Series(of).str.split("KV").str[0].value_counts() for of in (names, alone["name"].tolist()))
        # A random set can exchange groups only in layers of which some are not chosen.
        assert row["could_differ"] == sum(min(n, every[layer] - n) for layer, n in chosen.items())
        if row["could_differ"]:
            draws = benchmark.numbers(row["excess_draws"])
            assert len(draws) == benchmark.DRAWS
            assert row["excess"] == pytest.approx(draws.mean(), abs=1e-5)  # written with five digits
            assert row["excess_p"] == pytest.approx((1 + (draws >= 0).sum()) / 40)
        else:
            assert np.isnan(row["excess"])


def test_prices_alone_are_of_all_groups(benchmark):
    for name in benchmark.MODELS:
        alone = benchmark.priced_groups(name)
        assert (alone["window"] == benchmark.WINDOW).all()
        assert not alone[["layer", "kv_head"]].duplicated().any()
        intact = alone["loss"] - alone["delta"]
        assert np.ptp(intact) < 1e-4  # written with six digits


def test_the_sentences_of_the_page_are_those_of_the_stored_tables(benchmark):
    page = " ".join((ROOT / "docs/results/cache_prices.md").read_text(encoding="utf-8").split())
    (own, alone), (gemma, of_gemma) = (
        (benchmark.priced_set(name), benchmark.priced_groups(name)) for name in benchmark.MODELS
    )
    price = f"{own['delta']:.3f} ± {own['delta_se']:.3f} nats".replace("0.", ".")
    assert f"the chosen half of all groups costs {price}" in page
    assert f"the same layers {own['delta'] - own['excess']:.3f}".replace("0.", ".") in page
    as_good = (benchmark.numbers(own["excess_draws"]) >= 0).sum()
    assert f"and {as_good} of 39 cost no more (p {own['excess_p']:.3f})".replace("0.", ".") in page
    assert f"Only {own['could_differ']} of its {own['n_groups']} groups could differ" in page
    names = own["groups"].split()
    layers = [int(name.partition("KV")[0][1:]) for name in names]
    assert (min(layers), max(layers), len(names), 3 * (29 - 11 + 1)) == (11, 29, 45, 57)
    assert f"is {abs(own['excess'] / own['excess_se']):.1f} of its errors" in page
    assert f"{gemma['delta']:.3f} ± {gemma['delta_se']:.3f} nats, without a control".replace("0.", ".") in page
    assert min(alone["qvalue"].min(), of_gemma["qvalue"].min()) > 0.05
    least = alone.loc[alone["qvalue"].idxmin()]
    assert (least["name"], f"{least['qvalue']:.3f}", least["delta"] < 0) == ("L24KV1", "0.055", True)
    assert (
        f"its groups alone {alone.loc[alone['name'].isin(names), 'delta'].sum():.3f} in all".replace("0.", ".") in page
    )
