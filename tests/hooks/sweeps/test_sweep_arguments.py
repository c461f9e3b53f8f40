"""What a sweep can be asked for, what its table says of that, and what is refused."""

import inspect

import numpy as np
import pytest
import zoo
from ablation_runs import repetitions as drawn
from pair_prompts import accuracy
from zoo import shared

import tlspectral as tls
import tlspectral.hooks.sweeps.sweep as sweep_module
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.hooks import ablate
from tlspectral.hooks import ablation_sweep as sweep
from tlspectral.hooks.parts import Band, LongRange, Output, RopePhase
from tlspectral.models.reading import attention_view
from tlspectral.tasks import induction, induction_loss
from tlspectral.tasks.task import task_of


def margin(prompts):
    return tls.logit_difference(prompts, 3, 7)


@pytest.mark.slow
def test_the_table_says_how_it_was_made():
    model, tokens = shared("bridge", "llama"), drawn()
    table = sweep(model, "rope_phase", task=induction(tokens), seed=4)
    assert table["layer"].tolist() == [0] * 4 + [1] * 4
    assert table["part"].unique().tolist() == ["rope_phase"]
    assert {"task", "control", "screen", "seed", "n_sequences", "tokens_sha256", "backend"} <= set(table.attrs)
    assert not {"replace", "window"} & set(table.attrs)
    assert table.attrs["seed"] == 4
    assert table.attrs["n_sequences"] == 5
    np.testing.assert_allclose(np.mean(table.attrs["sums_per_sequence"]["delta"]), table["delta"].sum())
    near = sweep(model, LongRange(2, sinks=1), task=induction(tokens), heads="L0H0")
    assert (near.attrs["window"], near.attrs["sinks"]) == (2, 1)
    mean = sweep(model, Output("mean"), task=induction(tokens), heads="L0H0")
    assert mean.attrs["replace"] == "mean"
    assert len(mean.attrs["reference_sha256"]) == 64


def test_sixteen_sequences_are_drawn_by_default():
    table = sweep(shared("bridge", "llama"), "symmetric", heads=[(1, 0)])
    with ablate(shared("bridge", "llama"), [(1, 0)], "symmetric"):
        expected = induction_loss(shared("bridge", "llama"), n_sequences=16)
    assert table["value"].item() == pytest.approx(expected.value, abs=1e-5)


def test_layers_without_positions_are_left_out_of_a_phase_sweep():
    model = shared("bridge", "smollm3")  # some layers have none
    rotary = [layer for layer in range(4) if attention_view(model).rotary(layer) is not None]
    assert 0 < len(rotary) < 4
    assert sweep(model, "rope_phase", task=induction(drawn("smollm3")))["layer"].unique().tolist() == rotary
    still = next(layer for layer in range(4) if layer not in rotary)
    with pytest.raises(UnsupportedArchitecture, match="no rotary positions"):
        sweep(model, "rope_phase", task=induction(drawn("smollm3")), heads=[(still, 0)])
    with pytest.raises(UnsupportedArchitecture, match="no rotary positions"):
        sweep(shared("bridge", "gpt2"), "rope_phase", task=induction(drawn()))


FOUR, ONE, UNEQUAL = [[1, 4, 9, 3], [1, 5, 2, 7]], [[1, 4, 9, 3]], [[1, 4, 9], [1, 5, 2, 7, 8]]
REFUSED = [
    (Band([]), {}, r"the part has frequencies=\[\], so nothing is removed"),
    (RopePhase([]), {}, r"frequencies=\[\], so nothing is removed"),
    (Band([0, 6]), {}, r"layer 0: frequencies are 0 to 5, found \[0, 6\]"),
    ("output", {"control": "random", "draws": 0}, "draws is how many controls .* from 1 up; found 0"),
    ("output", {"control": "random", "draws": 2.5}, "draws is how many controls .* from 1 up; found 2.5"),
    ("output", {"control": "random", "draws": True}, "draws is how many controls .* from 1 up; found True"),
    ("output", {"draws": 19}, "draws=19 needs control='random': give that too"),
    ("symmetric", {"heads": []}, "heads= names no heads"),
    ("output", {"heads": [], "control": "random"}, "heads= names no heads"),
    ("symmetric", {"task": "language"}, "no tokenizer"),
    (Output("mean"), {"task": margin(ONE)}, "needs other sequences, and the task has one"),
    (Output("resample"), {"task": margin(UNEQUAL)}, "3 to 5 tokens: give prompts of one length"),
    (Output("resample", zoo.prompt()), {"task": margin(FOUR)}, "these have 4 to 24 tokens"),
    (Output("mean"), {"screen": "gradient"}, "it needs replace='zero'"),
    (
        "symmetric",
        {"task": tls.Task(FOUR, accuracy, predict=-1, name="accuracy"), "screen": "gradient"},
        "a metric with a gradient, and the metric of accuracy has none",
    ),
]


@pytest.mark.parametrize(("part", "options", "said"), REFUSED)
def test_arguments_without_meaning_are_refused(part, options, said):
    with pytest.raises(ValueError, match=said):
        # Unwrapped, since the type check of the tests would refuse some of these first.
        inspect.unwrap(sweep)(shared("bridge", "llama"), part, **options)


@pytest.mark.parametrize("option", ["control", "screen"])
def test_words_that_it_does_not_know_are_refused(option):
    # Called within: while tests run, the annotations of the public function refuse them first.
    given = {"control": None, "draws": None, "screen": None, option: "other"}
    with pytest.raises(ValueError, match=f"{option} must be .*not 'other'"):
        sweep_module._check(Output(), **given)


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"'other' is not a task: task must be a tls\.Task"):
        task_of("other")
    with pytest.raises(BadHead, match="L1H9 does not exist"):
        sweep(shared("bridge", "llama"), "symmetric", heads=[(1, 9)])
