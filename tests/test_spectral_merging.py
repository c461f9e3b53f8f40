"""Merging a spectral model: gain and phase fold into the query weights, shared frequencies go into a config."""

import pytest
import torch
import transformers
import zoo
from spectral_zoo import base, logits, move

from tlspectral.spectral_rope import SpectralModel, merge, to_spectral
from tlspectral.spectral_rope.hugging_face import logits_of


# A joint projection; the other backend. All other rows are asked by `conformance`.
@pytest.mark.parametrize(
    ("backend", "name"), [("bridge", "neox"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)]
)
def test_gain_and_phase_fold_into_the_query_weights(backend, name):
    spectral = move(to_spectral(base(backend, name)), only=("gain", "phase"))
    before = logits(spectral.base)
    merged = merge(spectral)
    assert type(merged) is type(spectral.base)
    assert not isinstance(merged, SpectralModel)
    found, expected = logits(merged), logits(spectral)
    # Rounding of W_Q in float32: 2e-6 of the largest logit; the effect of gain and phase is a tenth of it and more.
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 2e-5 * scale
    assert float((expected - before).abs().max()) > 0.02 * scale
    assert torch.equal(logits(spectral.base), before)
    assert torch.equal(logits(spectral), expected)


def test_a_query_norm_is_no_hindrance_where_nothing_has_moved():
    spectral = to_spectral(base("bridge", "qwen3"))
    assert torch.equal(logits(merge(spectral)), logits(spectral))


# --- models of transformers, whose config holds frequencies that all layers share ---


@torch.no_grad()
@pytest.mark.parametrize("name", ["yarn", "neox", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_shared_frequencies_go_into_the_config(name, tmp_path):
    model = zoo.hf_model(name)
    only = ("log_omega_shift",) if name == "neox" else ("log_omega_shift", "gain", "phase")
    spectral = move(to_spectral(model, scope="model"), only=only)
    tokens = zoo.prompt(length=40)  # beyond lengths at which some rotary modules switch
    merged = merge(spectral)
    assert type(merged) is type(model)
    merged.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert plain.state_dict().keys() == model.state_dict().keys()
    # Rounding of frequencies and weights, 5e-6; the effect of the frequencies is tenths.
    torch.testing.assert_close(logits_of(plain, tokens), logits_of(spectral, tokens), rtol=0, atol=5e-5)
    assert float((logits_of(plain, tokens) - logits_of(model, tokens)).abs().max()) > 0.05


@torch.no_grad()
def test_gain_and_phase_alone_leave_the_config():
    model = zoo.hf_model("llama")
    spectral = move(to_spectral(model), only=("gain", "phase"))
    merged = merge(spectral)
    assert merged.config.rope_parameters == model.config.rope_parameters
    # Rounding of W_Q, 2e-6.
    torch.testing.assert_close(logits_of(merged, zoo.prompt()), logits_of(spectral, zoo.prompt()), rtol=0, atol=2e-5)
