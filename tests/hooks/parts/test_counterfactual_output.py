"""`parts.Output("counterfactual")`: what a head writes on the pair of each prompt, in blocks, sweeps and the screen."""

import numpy as np
import pytest
import torch
import zoo
from pair_prompts import first_order, patched_by_pair, prompt_pairs

import tlspectral as tls
from tlspectral.hooks.sweeps import sweep as sweep_module

PART = tls.parts.Output(replace="counterfactual")


def pairs():
    return prompt_pairs(6, 9, seed=3, at=3)


def unequal():
    clean, other = pairs()
    lengths = [9, 8, 7, 9, 6, 9]
    return [row[:n] for row, n in zip(clean, lengths, strict=True)], [
        row[:n] for row, n in zip(other, lengths, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [pairs, unequal])
def test_a_sweep_writes_what_the_pair_writes(prompts):
    model, (clean, other) = zoo.shared("bridge", "llama"), prompts()
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    table = tls.ablation_sweep(model, PART, heads=["L0H1", "L1H2"], task=task)
    for row in table.itertuples():
        expected = patched_by_pair(model, clean, other, row.layer, row.head)
        assert row.value == pytest.approx(expected.mean(), abs=1e-5)  # float32: 3e-7 measured, effects of 1e-2
    assert table["delta"].abs().min() > 1e-4


@pytest.mark.fast(1)
@pytest.mark.parametrize("part", ["output", tls.parts.Output()], ids=["name", "value"])
def test_an_output_of_a_task_of_pairs_is_cut_to_them(part):
    """Beside it the two replacements that are asked for, and zero where the task has no pairs."""
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    table = tls.ablation_sweep(model, part, heads=["L0H1"], task=task)
    expected = patched_by_pair(model, clean, other, 0, 1)
    assert table["value"].item() == pytest.approx(expected.mean(), abs=1e-5)  # float32: 3e-7 measured, effects of 1e-2
    assert table.attrs["replace"] == "counterfactual"
    assert table["part"].item() == "output"
    with tls.ablate(model, "L0H1", part, task=task):
        np.testing.assert_allclose(tls.evaluate(model, task).per_sequence, expected, atol=1e-5)  # as above
    zero = tls.ablation_sweep(model, tls.parts.Output("zero"), heads=["L0H1"], task=task)
    assert zero.attrs["replace"] == "zero"
    assert abs(zero["value"].item() - expected.mean()) > 1e-3
    with tls.ablate(model, "L0H1", tls.parts.Output("zero"), task=task):
        assert float(tls.evaluate(model, task)) == pytest.approx(zero["value"].item(), abs=1e-5)
    without = tls.ablation_sweep(model, part, heads=["L0H1"], task=tls.logit_difference(clean, 7, 10))
    assert without["value"].item() == zero["value"].item()
    assert without.attrs["replace"] == "zero"


def test_a_pair_that_is_the_prompt_has_no_effect():
    """To the bit, alone and in a set, so that no rounding has a p; the other prompts have the whole effect."""
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    other[1:] = clean[1:]
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    with pytest.warns(
        UserWarning, match="5 of 6 pairs are equal, such as the pair of prompt 1: every effect is 0 there"
    ):
        table = tls.ablation_sweep(model, "output", heads="L0", task=task, control="random")
    expected = patched_by_pair(model, clean[:1], other[:1], 0, 1) - patched_by_pair(model, clean[:1], clean[:1], 0, 1)
    assert table["delta"][1] == pytest.approx(expected.item() / 6, abs=1e-5)  # float32: 3e-7 measured, effects of 1e-2
    same = tls.logit_difference(clean, 7, 10, counterfactual=clean)
    with pytest.warns(UserWarning, match="6 of 6 pairs are equal"):
        alone = tls.ablation_sweep(model, "output", heads="L0", task=same, control="random")
    with pytest.warns(UserWarning, match="6 of 6 pairs are equal"):
        together = tls.ablation_sweep(model, "output", heads={"two": ["L0H1", "L1H2"]}, task=same)
    assert not alone[["delta", "delta_se", "control_delta"]].to_numpy().any()
    assert (alone["delta_p"] == 1).all()
    assert together["delta"].item() == 0


def test_a_block_takes_its_pairs_as_the_reference():
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    part = tls.parts.Output(replace="counterfactual", reference=other)
    with tls.ablate(model, "L0H1", part), torch.no_grad():
        logits = model(clean)[:, -1]
        with pytest.raises(ValueError, match="has 6 pairs, and this run has 2 prompts"):
            model(clean[:2])
    found = (logits[:, 7] - logits[:, 10]).numpy()
    np.testing.assert_allclose(found, patched_by_pair(model, clean, other, 0, 1), atol=1e-5)  # as above


def test_the_screen_is_the_gradient_times_the_difference(monkeypatch):
    monkeypatch.setattr(sweep_module, "SCREENED", 4)
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    table = tls.ablation_sweep(model, PART, task=task, screen="gradient")
    for layer, rows in table.groupby("layer"):
        expected = first_order(model, clean, other, layer).sum((0, 1, 3)).numpy()
        np.testing.assert_allclose(rows["estimate"], expected, atol=1e-6)  # float32: 3e-8 measured, effects of 1e-2


def test_runs_without_pairs_are_refused_in_words():
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    with pytest.raises(ValueError, match="needs counterfactual prompts, and this task has none"):
        tls.ablation_sweep(model, PART)
    with pytest.raises(ValueError, match="has no use with replace="):
        tls.parts.Output(reference=other)
    with (
        pytest.raises(ValueError, match="needs counterfactual prompts: give task=Task"),
        tls.ablate(model, "L0H1", PART),
    ):
        pass
    with pytest.raises(ValueError, match="prompt 0 has 9 tokens and its counterfactual 8"):
        tls.evaluate(model, tls.logit_difference(clean, 7, 10, counterfactual=other[:, :-1]))
    with pytest.raises(ValueError, match="counterfactual= has 5 prompts, and prompts= has 6"):
        tls.evaluate(model, tls.logit_difference(clean, 7, 10, counterfactual=other[:5]))


def test_pairs_of_a_task_are_exchanged_split_and_watched():
    model, (clean, other) = zoo.shared("bridge", "llama"), pairs()
    task = tls.logit_difference(
        clean, [7] * 6, [10, 11] * 3, counterfactual=other, positions={"changed": 3, "END": [-1] * 6}
    )
    swapped = task.denoising()
    assert torch.equal(swapped.prompts, other)
    assert torch.equal(swapped.counterfactual, clean)
    assert swapped.metric is task.metric
    fit, held_out = task.split(0.5, seed=1)
    whole = tls.evaluate(model, task).per_sequence
    halves = [tls.evaluate(model, half).per_sequence for half in (fit, held_out)]
    assert sorted(np.concatenate(halves)) == pytest.approx(sorted(whole))
    assert len(fit.positions["END"]) == 3
    early = tls.logit_difference(clean, 7, 10, counterfactual=other, positions={"later": 5})
    with pytest.warns(
        UserWarning, match="6 of 6 pairs differ before every named position, such as the pair of prompt 0 at position 3"
    ):
        tls.evaluate(model, early)
    # Warnings are errors: a name for the last token of a prompt says nothing about where its pair may differ.
    for names in ({"END": -1}, {"END": -1, "changed": 3}):
        tls.evaluate(model, tls.logit_difference(clean, 7, 10, counterfactual=other, positions=names))
    some_end = tls.logit_difference(clean, 7, 10, counterfactual=other, positions={"END": [-1] * 5 + [-2]})
    with pytest.warns(UserWarning, match="1 of 6 pairs differ before .* prompt 5 at position 3"):
        tls.evaluate(model, some_end)
    with pytest.warns(UserWarning, match="6 of 6 pairs are equal"):
        tls.evaluate(model, tls.logit_difference(clean, 7, 10, counterfactual=clean))
    with pytest.raises(TypeError, match="of_prompts"):
        tls.Task(clean, lambda logits, tokens, mask: logits[:, -1, 0]).split()
    with pytest.raises(ValueError, match="no counterfactual prompts to exchange"):
        tls.logit_difference(clean, 7, 10).denoising()
