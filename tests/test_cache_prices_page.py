"""docs/results/cache_prices.md gives what the stored tables of benchmarks/cache_prices.py hold."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m"


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("cache_prices")


@pytest.fixture
def page():
    return " ".join((ROOT / "docs/results/cache_prices.md").read_text(encoding="utf-8").split())


def written(value, digits=3):
    """A number as the sentences of the page have it, such as ".070"."""
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def test_the_page_has_the_rows_of_the_stored_tables(benchmark, page):
    rows = list(benchmark.rows_of_page())
    assert len(rows) == sum(map(len, benchmark.SETS.values())) + 1 + 2 + 10
    for row in rows:
        assert " ".join(row.split()) in page


def test_each_stored_set_is_half_of_the_groups_beside_39_random_sets(benchmark):
    for name in benchmark.MODELS:
        alone = benchmark.priced_groups(name)
        every = alone["name"].str.split("KV").str[0].value_counts()
        for _, row in benchmark.all_sets(name).iterrows():
            names = row["groups"].split()
            assert len({*names}) == row["n_groups"] == len(alone) // 2
            assert {*names} <= {*alone["name"]}
            chosen = pd.Series(names).str.split("KV").str[0].value_counts()
            # A random set can exchange groups only in layers of which some are not chosen.
            assert row["could_differ"] == sum(min(n, every[layer] - n) for layer, n in chosen.items())
            if not row["could_differ"]:
                assert np.isnan(row["excess"])
                continue
            draws = benchmark.numbers(row["excess_draws"])
            assert len(draws) == benchmark.DRAWS
            assert row["excess"] == pytest.approx(draws.mean(), abs=1e-5)  # written with five digits
            assert row["excess_p"] == pytest.approx((1 + (draws >= 0).sum()) / 40)
            assert row["qvalue"] >= row["excess_p"]


def test_halves_of_all_layers_are_halves_and_their_chosen_one_is_that_of_the_sets(benchmark):
    table = pd.read_csv(benchmark.FOLDER / f"{MODEL}-layers.csv")
    assert len(table) == 1 + benchmark.DRAWS
    assert {len({*names.split()}) for names in table["groups"]} == {45}
    own = benchmark.priced_set(MODEL, *benchmark.OF_LAYERS)
    assert {*table.loc[0, "groups"].split()} == {*own["groups"].split()}
    # Two programs, `ablate` here and `cache_prices` there: measured 1e-6, of tables with five digits.
    assert table.loc[0, "delta"] == pytest.approx(own["delta"], abs=1e-5)


def test_prices_alone_are_of_all_groups(benchmark):
    for name in benchmark.MODELS:
        alone = benchmark.priced_groups(name)
        assert (alone["window"] == benchmark.ALONE[name][2]).all()
        assert not alone[["layer", "kv_head"]].duplicated().any()
        intact = alone["loss"] - alone["delta"]
        assert np.ptp(intact) < 1e-4  # written with six digits


def test_the_sentences_of_the_page_are_those_of_the_stored_tables(benchmark, page):
    table, alone = benchmark.all_sets(MODEL), benchmark.priced_groups(MODEL)
    price = [
        written(row.delta) + ("" if np.isnan(row.delta_se) else f" ± {written(row.delta_se)}")
        for row in table.itertuples()
    ]
    random = [written(row.delta - row.excess) for row in table.itertuples()]
    q = [written(row.qvalue) for row in table.itertuples()]
    assert f"In rows of 256 tokens it is not proved ({price[0]} and {random[0]}, q {q[0]})" in page
    assert f"costs {price[1]} nats, random halves {random[1]}, and none of 39 costs as little (q {q[1]})" in page
    assert f"With a window of 128 it is {price[2]} and {random[2]} (q {q[2]})" in page
    assert f"of 256 {price[3]} and {random[3]} (q {q[3]})" in page
    assert f"it is {price[4]} and {random[4]}, and none of 39 costs as little (q {q[4]})" in page
    assert [int((benchmark.numbers(draws) >= 0).sum()) for draws in table["excess_draws"]] == [2, 0, 0, 0, 0]
    late = [sum(int(name[1:].split("KV")[0]) >= 11 for name in names.split()) for names in table["groups"]]
    assert (min(late), max(late), table["could_differ"].min(), table["could_differ"].max()) == (43, 45, 9, 12)
    halves = benchmark.of_layers(MODEL)
    assert f"Beside random halves of all layers, p is {written(halves['excess_p'])}" in page
    assert (halves["drawn"] <= halves["delta"]).sum() == 6
    gemma = benchmark.all_sets("gemma3-270m").iloc[1]
    assert f"its half costs {written(gemma['delta'])} ± {written(gemma['delta_se'])} nats in rows of 1,024" in page
    told, own = alone["qvalue"] < 0.05, alone["name"].isin(table.loc[2, "groups"].split())
    assert (told.sum(), (told & own).sum(), alone.loc[told & (alone["delta"] < 0), "name"].tolist()) == (
        16,
        6,
        ["L24KV1"],
    )
    dearest = alone.loc[alone["delta"].idxmax()]
    assert (dearest["name"], round(alone["delta"].sum() / dearest["delta"])) == ("L8KV0", 9)
    assert f"costs {price[2]} together, its groups alone {written(alone.loc[own, 'delta'].sum())} in all" in page
    alone = benchmark.priced_groups("gemma3-270m").set_index("name")
    dearest = [written(alone.loc[name, "delta"]) for name in ("L5KV0", "L11KV0")]
    assert f"In Gemma {(alone['qvalue'] < 0.05).sum()} of 18 groups have a price" in page
    assert f"L5KV0 and L11KV0, in layers without a window, cost {dearest[0]} and {dearest[1]}" in page
    assert alone["delta"].nlargest(2).index.tolist() == ["L5KV0", "L11KV0"]
    together = f"{written(gemma['delta'])} ± {written(gemma['delta_se'])} together, its groups alone"
    assert f"{together} {written(alone.loc[gemma['groups'].split(), 'delta'].sum())} in all" in page
