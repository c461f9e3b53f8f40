"""Sweeps of sets of heads: all heads of a set at once, beside random sets of the same layers."""

import numpy as np
import pytest
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.hooks.sweeps.controls import head_sets

SETS = {"two layers": ["L0H1", "L1H2"], "one": ["L1H0"]}


def task():
    clean, other = prompt_pairs(6, 9, seed=4, at=3)
    return tls.logit_difference(clean, 7, 10, counterfactual=other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["output", "antisymmetric", tls.parts.Output(replace="mean", reference=task().prompts), tls.parts.LongRange(3, 1)],
    ids=["output", "antisymmetric", "mean", "long range"],
)
def test_a_set_is_a_block_of_all_its_heads(part):
    model, asked = zoo.shared("bridge", "llama"), task()
    table = tls.ablation_sweep(model, part, heads=SETS, task=asked)
    assert list(table["name"]) == list(SETS)
    assert (table[["layer", "head"]] == -1).all(axis=None)
    for name, heads in SETS.items():
        with tls.ablate(model, heads, part, task=asked):
            expected = tls.evaluate(model, asked)
        row = table.set_index("name").loc[name]
        assert row["value"] == pytest.approx(
            float(expected), abs=2e-6
        )  # float32 replay: 2e-7 measured, effects of 1e-2
        assert row["delta"] == pytest.approx(float(expected - float(tls.evaluate(model, asked))), abs=2e-6)


@pytest.mark.slow
def test_the_control_is_random_sets_of_the_same_layers():
    model, asked = zoo.shared("bridge", "llama"), task()
    part = tls.parts.Output(replace="counterfactual")
    table = tls.ablation_sweep(model, part, heads=SETS, task=asked, control="random", draws=5, seed=3)
    row = table.set_index("name").loc["two layers"]
    sets = head_sets({0: 4, 1: 4}, {0: [1], 1: [2]}, 5, np.random.default_rng(3))
    assert len(sets) == 5
    alone = tls.ablation_sweep(model, part, heads={str(one): one for one in sets}, task=asked)
    assert row["control_delta"] == pytest.approx(alone["delta"].mean(), abs=1e-6)
    larger = (alone["delta"].abs() >= abs(row["delta"])).sum()
    assert row["control_p"] == pytest.approx((1 + larger) / 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": {}}, "has no sets of heads"),
        ({"heads": {"none": []}}, "the set 'none' has no heads"),
        ({"heads": SETS, "screen": "gradient"}, "estimates single heads"),
    ],
)
def test_what_is_no_set_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        tls.ablation_sweep(zoo.shared("bridge", "llama"), "output", task=task(), **arguments)
