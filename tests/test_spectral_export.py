"""Spectral Hugging Face models merged into ordinary ones, whose config holds frequencies that all layers share."""

import pytest
import torch
import transformers
import zoo
from spectral_zoo import move
from test_spectral_hugging_face import logits

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.spectral_rope import merge, to_spectral


@pytest.mark.parametrize("name", ["llama", "yarn", "neox", "qwen2"])
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
    torch.testing.assert_close(logits(plain, tokens), logits(spectral, tokens), rtol=0, atol=5e-5)
    assert float((logits(plain, tokens) - logits(model, tokens)).abs().max()) > 0.05


def test_gain_and_phase_alone_leave_the_config():
    model = zoo.hf_model("llama")
    spectral = move(to_spectral(model), only=("gain", "phase"))
    merged = merge(spectral)
    assert merged.config.rope_parameters == model.config.rope_parameters
    torch.testing.assert_close(logits(merged), logits(spectral), rtol=0, atol=2e-5)  # rounding of W_Q, 2e-6


@pytest.mark.parametrize(
    ("name", "scope", "error", "said"),
    [
        ("llama", "layer", ValueError, "layer 1 has frequencies of its own"),
        ("llama", "head", ValueError, "layer 0 has frequencies of its own, or its heads have"),
        ("gemma3", "layer", ValueError, "frequencies of its own"),
        ("qwen3", "model", UnsupportedArchitecture, "a query norm"),
    ],
)
def test_what_a_config_cannot_hold_is_refused(name, scope, error, said):
    only = ("phase",) if error is UnsupportedArchitecture else ("log_omega_shift",)
    with pytest.raises(error, match=said):
        merge(move(to_spectral(zoo.hf_model(name), scope=scope), only=only))
