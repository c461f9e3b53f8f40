"""TransformerLens' weight processing keeps the function: which numbers follow it, and what a table says of it."""

import functools

import numpy as np
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.models.reading import attention_view

TOKENS, PAIRS = zoo.prompt(6, 12), zoo.prompt(6, 12)
PAIRS[:, 4] = (PAIRS[:, 4] + 5) % 90 + 3
TASK = tls.logit_difference(TOKENS, 7, 11, counterfactual=PAIRS)
PARTS = {how: tls.parts.Output(how) for how in ("zero", "mean", "resample", "counterfactual")}


@functools.cache
def compatible():
    """GPT-2 in compatibility mode: norms and value biases folded, writing weights and unembedding centred."""
    model = zoo.bridge("gpt2")
    model.enable_compatibility_mode(disable_warnings=True)
    return model


def centred():
    """GPT-2 whose writing weights alone are centred, by hand."""
    whole = zoo.hf_model("gpt2")
    inside = whole.transformer
    with torch.no_grad():
        for weight in (inside.wte.weight, inside.wpe.weight):
            weight -= weight.mean(-1, keepdim=True)
        for block in inside.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):  # [in, out]
                layer.weight -= layer.weight.mean(-1, keepdim=True)
                layer.bias -= layer.bias.mean()
    return tls.load_model(whole)


def relative(found, expected):
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max())


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("part", [*PARTS, "M_A"])
def test_zero_is_the_one_replacement_that_follows_the_processing(part):
    one, other = (
        tls.ablation_sweep(model, PARTS.get(part, part), task=TASK)["delta"]
        for model in (zoo.shared("bridge", "gpt2"), compatible())
    )
    if part == "zero":  # b_V W_O of a head stays in b_O of the processed model: .83 measured
        assert relative(other, one) > 0.1
    else:  # float32: 5e-5 measured, of differences of logits
        assert relative(other, one) < 5e-4


def test_length_and_cosine_of_a_write_do_not_follow_centring():
    raw, without_means = zoo.shared("bridge", "gpt2"), centred()
    prompt, direction = TOKENS[:1], torch.arange(48.0)
    one, other = (
        tls.ov_attribution(model, prompt, "L1H1", query=8).sort_values("position") for model in (raw, without_means)
    )
    for name in ("norm", "cosine"):  # float32: 1e-6 measured; with the mean norms differ by hundredths
        np.testing.assert_allclose(other[name], one[name], atol=1e-5)
    whole, half = (
        tls.ov_attribution(model, prompt, "L1H1", query=8, by="head", direction=direction).loc[0, "contribution"]
        for model in (raw, without_means)
    )
    assert abs(whole - half) > 0.01  # a vector that no LayerNorm reads sees the mean


def test_sweeps_of_outputs_say_what_processing_left():
    for model, biases, means in ((zoo.shared("bridge", "gpt2"), True, False), (compatible(), False, True)):
        assert attention_view(model).processing == {"value_biases": biases, "centred_writes": means}
        sweep = tls.ablation_sweep(model, PARTS["zero"], heads="L1H0", task=TASK)
        assert sweep.attrs["processing"] == {"value_biases": biases, "centred_writes": means}
    assert attention_view(zoo.shared("bridge", "llama")).processing["value_biases"] is False  # it has none
