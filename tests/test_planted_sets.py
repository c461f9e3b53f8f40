"""Planted sets of heads: `sufficient_heads` finds them, also where single effects are 0."""

from pathlib import Path

import pandas as pd
import pytest

import tlspectral as tls

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("planted_sets")


def test_one_head_of_a_redundant_pair_is_found_although_its_single_effect_is_nothing(benchmark):
    kind = benchmark.Planted(2, False, True)
    planted = benchmark.planted_model(kind, 0)
    table = tls.sufficient_heads(planted.model, *benchmark.tasks_of(0), n=3, penalties=[0.01, 0.03])
    assert benchmark.is_found(table.attrs["heads"], planted)
    assert len({*table.attrs["heads"]} & {*planted.redundant}) == 1
    assert table.attrs["verdict"] == "sufficient"
    effects = table.set_index("name")["delta"].abs()
    assert effects[planted.redundant].max() < 0.1 * effects[planted.additive].min()
    sets = pd.DataFrame(table.attrs["sets"]).set_index("set")
    assert not benchmark.is_found(sets.loc["single effects", "heads"], planted)


@pytest.mark.slow
def test_two_heads_that_work_only_together_are_found_together(benchmark):
    planted = benchmark.planted_model(benchmark.Planted(2, True), 0)
    table = tls.sufficient_heads(planted.model, *benchmark.tasks_of(0), n=4)
    assert sorted(table.attrs["heads"]) == sorted([*planted.additive, *planted.chain])
    leaves = table.set_index("name")["leaves_delta"][planted.chain]
    # Without either head of the chain the answer loses the same third, but for the noise of the heads (.02 of it each).
    assert leaves.iloc[0] == pytest.approx(leaves.iloc[1], rel=0.2)
