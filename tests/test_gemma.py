"""Gemma 3 270M, a trained model with query/key norm and two rope bases, and what its large norm gains taught."""

import importlib.util
import math

import numpy as np
import pytest
import torch
import zoo
from tlspectral_studies.fingerprint.statistics.weight_noise import storage_steps

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.loading.finding import PACKAGED
from tlspectral.models.reading import attention_view

LAYERS, HEADS, GLOBAL = 18, 4, (5, 11, 17)
needs_gemma = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module, _ in PACKAGED["gemma3-270m"].parts)
    or importlib.util.find_spec("gguf") is None,
    reason="the extra [demo-gemma] is not installed",
)


# --- a gain that is read as 1 + weight, beside another that is large ---


def with_gains(name: str, largest: float):
    """A tiny model with some large input-norm gains, as trained Gemma has (up to 233)."""
    model = zoo.bridge(name)
    with torch.no_grad():
        for block in model.blocks:
            block.ln1.original_component.weight[::8] = largest
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gain_does_not_hide_how_the_others_enter(name, dtype):
    """Relative to the largest entry alone, gains that are off by 1 would pass for rounding."""
    model = with_gains(name, 200.0).to(dtype)
    for index, block in enumerate(model.blocks):
        weight = block.ln1.original_component.weight.double()
        expected = weight if name == "llama" else 1 + weight
        torch.testing.assert_close(attention_view(model).raw(index).norm.gain.double(), expected)
    if name == "gemma3" and dtype == torch.float32:
        tls.verify_scores(model)  # raises for scores that were rebuilt from other gains


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_of_two_forms_that_both_fit_the_better_is_read(name):
    """Where every gain is near 100, weight and 1 + weight are within what rounding in bfloat16 is allowed."""
    model = zoo.bridge(name)
    with torch.no_grad():
        for block in model.blocks:
            block.ln1.original_component.weight += 100.0
        model.ln_final.original_component.weight[::8] = 200.0
    view = attention_view(model)
    for norm, found in ((model.blocks[0].ln1, view.raw(0).norm), (model.ln_final, view.unembedding()[1])):
        weight = norm.original_component.weight.double()
        torch.testing.assert_close(found.gain.double(), weight if name == "llama" else 1 + weight)


def test_a_norm_of_no_known_form_is_refused_beside_a_large_gain_too(monkeypatch):
    model = with_gains("llama", 200.0)
    norm = type(model.blocks[0].ln1.original_component)
    plain = norm.forward
    # A gain of weight + 1/2: as far from the weight as from 1 + weight.
    monkeypatch.setattr(norm, "forward", lambda self, x: plain(self, x) * (self.weight + 0.5) / self.weight)
    with pytest.raises(
        UnsupportedArchitecture, match=r"layer 0, input norm: .* acts neither like a LayerNorm nor like an RMS norm"
    ):
        attention_view(model).raw(0)


# --- the packaged model ---


@pytest.fixture(scope="module")
def model():
    return tls.load_model("gemma3-270m")


@pytest.mark.slow
@needs_gemma
def test_every_layer_is_read_with_local_and_global_ones_at_their_own_base(model):
    errors = tls.verify_scores(model)  # raises past 1e-5 + 1e-5 max|score|
    assert errors.index.tolist() == list(range(LAYERS))
    # Measured: at most 9e-6 at scores of 15; norm gains read as the weight without its 1 are off by 8.6.
    assert errors.between(0, 1e-4, inclusive="neither").all()
    view = attention_view(model)
    for index in range(LAYERS):
        layer = view.layer(index)
        base = 1e6 if index in GLOBAL else 1e4
        # float32 frequencies: 1e-7 relative; the other base is off by up to a factor of 100.
        np.testing.assert_allclose(layer.rotary.theta.numpy(), base ** (-np.arange(128) / 128), rtol=1e-6)
        assert (layer.n_heads, layer.n_kv_heads, layer.d_head, layer.d_model) == (HEADS, 1, 256, 640)
        assert (layer.bilinear, layer.score_scale) == ("up_to_token_scale", 1 / 16)
        # 1 + weight: a trained gain of the input norm is positive everywhere.
        assert (layer.norm.gain > 0).all()


@pytest.mark.slow
@needs_gemma
def test_it_reads_english(model):
    """Weights, tokenizer and windows together: text is far more likely than chance."""
    loss = tls.tasks.language_loss(model, n_sequences=8)
    # Measured 3.6 nats per token on the packaged book; ln of the vocabulary is 12.5.
    assert loss.value < 4.5 < math.log(model.cfg.d_vocab)
    source = model.tlspectral_source
    assert (source["model"], source["file"]) == ("gemma3-270m", "gemma-3-270m-q4_k_m.gguf")
    assert source["sha256"] == PACKAGED["gemma3-270m"].sha256


@pytest.mark.slow
@needs_gemma
def test_its_five_bit_weights_are_read_as_such(model):
    raw = attention_view(model).raw(0)
    for weight in (raw.w_q, raw.w_k):
        found = storage_steps(weight)
        assert found.kind == "5-bit blocks of 32"
        # Every weight is a whole number of steps.
        parts = weight.detach().double() / found.step.double().clamp_min(1e-30)
        assert (parts - parts.round()).abs().max() < 1e-3
        assert parts.abs().max() < 16.001
