"""Sweeps, bands, screens and summaries of a task of one's own, against plain loops of ablated forward passes."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from zoo import shared

import tlspectral as tls

PROMPTS = [[1, 4, 9, 3], [1, 5, 2], [1, 8, 2, 6, 7], [1, 3, 3, 9]]
# Replay from stored residual streams and stacked copies differ from whole passes by 1e-6 in float32 (measured); the
# effects themselves are 1e-2 and more.
NOISE = 1e-5


def margin_task(**options):
    return tls.logit_difference(PROMPTS, [3, 4, 5, 6], 7, **options)


def accuracy(logits, tokens, mask):
    return (logits[:, -1].argmax(-1) == 3).float()


def sweep(model, part="symmetric", task=None, **options):
    return tls.ablation_sweep(model, part, task=task or margin_task(), show_progress=False, **options)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "llama"), ("bridge", "opt"), pytest.param("hooked", "llama", marks=zoo.needs_hooked)],
)
@pytest.mark.parametrize("part", ["symmetric", "output"])
def test_a_sweep_of_a_task_is_a_loop_of_ablations(backend, name, part):
    model, task = shared(backend, name), margin_task()
    intact = tls.evaluate(model, task)
    table = sweep(model, part)
    for row in table.sample(3, random_state=0).itertuples():
        with tls.ablate(model, row, part):
            ablated = tls.evaluate(model, task)
        effect = ablated - intact
        assert row.value == pytest.approx(ablated.value, abs=NOISE)
        assert row.delta == pytest.approx(effect.value, abs=NOISE)
        assert row.delta_stderr == pytest.approx(effect.stderr, abs=NOISE)
    assert table["delta"].abs().max() > 1e-2
    assert table.attrs["intact_value"] == pytest.approx(intact.value, abs=NOISE)
    assert (table.attrs["task"], table.attrs["higher_is_better"]) == ("logit difference", True)


def test_batches_do_not_change_a_sweep(monkeypatch):
    model = shared("bridge", "llama")
    whole = sweep(model, heads=["L0H1", "L1H2"], control="random")
    monkeypatch.setattr("tlspectral.tasks.scoring._CPU_TOKENS", 10)  # two prompts at a time
    pd.testing.assert_frame_equal(sweep(model, heads=["L0H1", "L1H2"], control="random"), whole, atol=NOISE, rtol=0)


def test_filling_is_not_counted_in_the_size_of_an_edit():
    """The RMS of each prompt by itself, over its own unmasked pairs of tokens, and then over prompts."""
    model = shared("bridge", "llama")
    alone = [
        tls.ablation_sweep(
            model, "symmetric", heads="L1H2", task=tls.logit_difference([prompt] * 2, 3, 7), show_progress=False
        )["score_rms"].item()
        for prompt in PROMPTS
    ]
    together = sweep(model, heads="L1H2")["score_rms"].item()
    assert together == pytest.approx(np.sqrt(np.mean(np.square(alone))), rel=1e-5)  # float32, measured 1e-7


def test_a_screen_estimates_the_effect_on_the_task(monkeypatch):
    """The derivative is that of a small step along the same edit."""
    model, task = shared("bridge", "llama"), margin_task()
    monkeypatch.setattr("tlspectral.tasks.scoring._CPU_TOKENS", 40)  # several batches of the backward pass
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


def test_a_metric_without_a_gradient_refuses_the_screen():
    task = tls.Task(PROMPTS, accuracy, predict=-1, name="accuracy")
    with pytest.raises(ValueError, match="needs a metric with a gradient, and that of accuracy has none"):
        sweep(shared("bridge", "llama"), task=task, screen="gradient")
    assert sweep(shared("bridge", "llama"), task=task, heads="L0H0")["value"].between(0, 1).all()


def test_bands_take_a_task():
    model, task = shared("bridge", "llama"), margin_task()
    table = tls.ablation.band_effects(model, "L1H2", task=task, draws=1, show_progress=False)
    order = np.argsort(-np.abs(tls.qk_operators(model)["L1H2"].rotary.theta.flatten().numpy()), kind="stable")
    band = table[table["band"] == "high"].iloc[0]
    chosen = order[int(band["first"]) : int(band["last"]) + 1].tolist()
    with tls.ablate(model, "L1H2", "rotary_band", frequencies=chosen):
        ablated = tls.evaluate(model, task)
    assert band["delta"] == pytest.approx((ablated - tls.evaluate(model, task)).value, abs=NOISE)
    assert table.attrs["higher_is_better"] is True


def test_a_task_brings_its_own_tokens():
    with pytest.raises(ValueError, match="a Task has its own"):
        sweep(shared("bridge", "llama"), tokens=torch.tensor([[1, 2, 3]]))


def test_harm_is_ranked_by_what_is_better():
    """The head whose ablation lowers a score of which more is better does the most harm."""
    model = shared("bridge", "llama")
    heads = tls.analyze_heads(model, null_draws=5, show_progress=False)
    table = sweep(model, "output")
    lowest = table.loc[table["delta"].idxmin()]
    summary = tls.ablation.summarize_sweep(table, heads, small=0.05)
    ranks = summary[summary["statement"] == "detector_rank"]
    assert set(ranks["note"]) >= {f"L{int(lowest['layer'])}H{int(lowest['head'])}"}
    share = summary[(summary["statement"] == "share_small") & (summary["size_control"] == "none")]["value"].item()
    assert share == (table["delta"].abs() < 0.05).mean()
    with pytest.raises(ValueError, match="say with small= what a small effect is"):
        tls.ablation.summarize_sweep(table, heads)
    unsaid = sweep(model, task=tls.Task(PROMPTS, accuracy, predict=-1), heads=["L0H0", "L0H1"])
    with pytest.raises(ValueError, match="does not say whether a higher score is better"):
        tls.ablation.summarize_sweep(unsaid, heads, small=0.05)
