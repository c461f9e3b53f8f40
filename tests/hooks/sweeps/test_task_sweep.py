"""Sweeps, bands, screens and summaries of a task of one's own, against plain loops of ablated forward passes."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import ROUTES, recorded, rows_are_ablated_runs
from pair_prompts import accuracy
from zoo import shared

import tlspectral as tls
from tlspectral.hooks.parts import Band, LongRange, Output, RopePhase, Symmetric

UNEQUAL = [[1, 4, 9, 3], [1, 5, 2], [1, 8, 2, 6, 7], [1, 3, 3, 9]]
EQUAL = [[1, 4, 9, 3], [1, 5, 2, 7], [1, 8, 2, 6], [1, 3, 3, 9]]
# Replay from stored residual streams and stacked copies differ from whole passes by 1e-6 in float32 (measured); the
# effects themselves are 1e-2 and more.
NOISE = 1e-5


def margin_task(prompts=UNEQUAL):
    return tls.logit_difference(prompts, [3, 4, 5, 6], 7)


def sweep(model, part="symmetric", task=None, **options):
    return tls.ablation_sweep(model, part, task=task or margin_task(), **options)


REFERENCE = zoo.prompt(batch=5, seed=3)[:, :4]
LOOPS = [
    (UNEQUAL, Symmetric(), None),
    (UNEQUAL, Output(), None),
    (EQUAL, Output("mean"), Output("mean", torch.tensor(EQUAL))),
    (EQUAL, Output("resample", REFERENCE, seed=2), None),
    (EQUAL, LongRange(2, sinks=1), None),
    (UNEQUAL, Band([0, 2]), None),
    (UNEQUAL, RopePhase(range(3), include_bias=True), None),
]
IDS = ["symmetric", "zero", "mean", "resample", "far", "band", "phase"]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), ROUTES[:3])
@pytest.mark.parametrize(("prompts", "part", "ablated_part"), LOOPS, ids=IDS)
def test_a_sweep_of_a_task_is_a_loop_of_ablations(backend, name, prompts, part, ablated_part):
    """`ablated_part`: the part with the reference that a sweep takes from its task, where that is another value."""
    model, task = shared(backend, name), margin_task(prompts)
    intact = tls.evaluate(model, task)
    table = sweep(model, part, task)
    rows_are_ablated_runs(model, table.sample(3, random_state=0), ablated_part or part, task)
    assert table["delta"].abs().max() > 1e-2
    assert table["score_rms"].isna().all() == (part.acts_on != "scores")
    assert table.attrs["intact_value"] == pytest.approx(intact.value, abs=NOISE)
    assert (table.attrs["task"], table.attrs["higher_is_better"]) == ("logit difference", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("symmetric", {"control": "random"}),
        (Output("resample"), {"task": margin_task(EQUAL)}),
        (LongRange(2, sinks=1), {}),
    ],
    ids=["control", "resample", "far"],
)
def test_batches_do_not_change_a_sweep(part, options, batch_size):
    model = shared("bridge", "llama")
    whole = sweep(model, part, heads=["L0H1", "L1H2"], **options)
    batch_size(tokens=10)  # two prompts at a time
    found = sweep(model, part, heads=["L0H1", "L1H2"], **options)
    pd.testing.assert_frame_equal(found, whole, atol=NOISE, rtol=0)


def test_means_of_prompts_of_unequal_length_are_over_real_tokens():
    model = shared("bridge", "llama")
    value = sweep(model, Output("mean"), heads="L1H2")["value"].item()
    seen = [recorded(model, ("z",), torch.tensor([prompt]))[1, "z"][0, :, 2] for prompt in UNEQUAL]
    mean = torch.cat(seen).mean(0)

    def put(z, hook):
        z = z.clone()
        z[:, :, 2] = mean
        return z

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", put)]):
        assert value == pytest.approx(tls.evaluate(model, margin_task()).value, abs=NOISE)


def test_one_prompt_has_a_reference_of_its_own():
    task = tls.logit_difference(EQUAL[:1], 3, 7)
    table = sweep(shared("bridge", "llama"), Output("mean", REFERENCE), task, heads="L0H0")
    assert np.isfinite(table["value"].item())


@pytest.mark.slow
def test_filling_is_not_counted_in_the_size_of_an_edit():
    """The RMS of each prompt by itself, over its own unmasked pairs of tokens, and then over prompts."""
    model = shared("bridge", "llama")
    alone = [
        tls.ablation_sweep(model, "symmetric", heads="L1H2", task=tls.logit_difference([prompt], 3, 7))[
            "score_rms"
        ].item()
        for prompt in UNEQUAL
    ]
    together = sweep(model, heads="L1H2")["score_rms"].item()
    assert together == pytest.approx(np.sqrt(np.mean(np.square(alone))), rel=1e-5)  # float32, measured 1e-7


@pytest.mark.slow
def test_a_screen_estimates_the_effect_on_the_task(batch_size):
    """The derivative is that of a small step along the same edit."""
    model, task = shared("bridge", "llama"), margin_task()
    batch_size(tokens=40)  # several batches of the backward pass
    screened = sweep(model, screen="gradient")
    intact = tls.evaluate(model, task).value
    row = screened.loc[screened["estimate"].abs().idxmax()]
    step = 1e-2
    # The edit of hook_attn_scores, scaled down.

    hooks = tls.ablation_hooks(model, row, "symmetric")
    edit = hooks[-1][1]

    def scaled(scores, hook):
        return scores + step * (edit(scores, hook) - scores).masked_fill(scores < -1e30, 0.0)

    with model.hooks(fwd_hooks=[*hooks[:-1], (hooks[-1][0], scaled)]):
        stepped = tls.evaluate(model, task).value
    # First order in the step: measured within 2 % of the estimate; a wrong sign or prompt is off by 100 %.
    assert (stepped - intact) / step == pytest.approx(row["estimate"], rel=0.1)


def test_bands_take_a_task():
    model, task = shared("bridge", "llama"), margin_task()
    table = tls.hooks.band_effects(model, "L1H2", task=task, draws=1)
    order = np.argsort(-np.abs(tls.qk_operators(model)["L1H2"].rotary.theta.flatten().numpy()), kind="stable")
    band = table[table["band"] == "high"].iloc[0]
    chosen = order[int(band["first"]) : int(band["last"]) + 1].tolist()
    with tls.ablate(model, "L1H2", Band(chosen)):
        ablated = tls.evaluate(model, task)
    assert band["delta"] == pytest.approx((ablated - tls.evaluate(model, task)).value, abs=NOISE)
    assert table.attrs["higher_is_better"] is True


def test_harm_is_ranked_by_what_is_better():
    """The head whose ablation lowers a score of which more is better does the most harm."""
    model = shared("bridge", "llama")
    heads = tls.analyze_heads(model, null_draws=5)
    table = sweep(model, "output")
    lowest = table.loc[table["delta"].idxmin()]
    summary = tls.hooks.summarize_sweep(table, heads, small=0.05)
    ranks = summary[summary["statement"] == "detector_rank"]
    assert set(ranks["note"]) >= {f"L{int(lowest['layer'])}H{int(lowest['head'])}"}
    share = summary[(summary["statement"] == "share_small") & (summary["size_control"] == "none")]["value"].item()
    assert share == (table["delta"].abs() < 0.05).mean()
    with pytest.raises(ValueError, match="small= has no default for the task"):
        tls.hooks.summarize_sweep(table, heads)
    unsaid = sweep(model, task=tls.Task(UNEQUAL, accuracy, predict=-1), heads=["L0H0", "L0H1"])
    with pytest.raises(ValueError, match="does not say whether a higher value is better"):
        tls.hooks.summarize_sweep(unsaid, heads, small=0.05)
