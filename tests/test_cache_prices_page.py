"""docs/results/cache_prices.md gives what the stored tables of benchmarks/cache_prices.py hold."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    import cache_prices

    return cache_prices


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
