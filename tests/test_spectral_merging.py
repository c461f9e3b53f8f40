"""Merging a spectral model: gain and phase fold into the query weights, and what does not fold is refused."""

import importlib

import pytest
import torch
import zoo
from spectral_zoo import BRIDGES, HOOKED, NORMED, base, logits, move

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.spectral_rope import SpectralModel, merge, to_spectral

MERGED = [("bridge", name) for name in BRIDGES if name not in NORMED]
MERGED += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in HOOKED if name not in NORMED]


@pytest.mark.parametrize(("backend", "name"), MERGED)
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


@pytest.mark.parametrize("only", ["omega", "log_omega_shift"])
def test_a_frequency_that_moved_is_not_folded(only):
    spectral = to_spectral(base("bridge", "llama"), log_omega=only != "omega")
    with torch.no_grad():
        getattr(spectral.spectral["1"], only)[1, 2] += 1e-3
    with pytest.raises(ValueError, match=r"layer 1: omega has moved \(most in head 2, pair 2"):
        merge(spectral)


def test_nothing_folds_through_a_query_norm():
    spectral = to_spectral(base("bridge", "qwen3"))
    assert torch.equal(logits(merge(spectral)), logits(spectral))
    for only in ("gain", "phase"):
        with pytest.raises(UnsupportedArchitecture, match="layer 0: a query norm"):
            merge(move(to_spectral(base("bridge", "qwen3")), only=(only,)))


def test_an_ordinary_model_is_not_merged():
    with pytest.raises(TypeError, match="not a spectral model"):
        merge(base("bridge", "llama"))


def test_a_merge_that_does_not_reach_the_model_is_refused(monkeypatch):
    module = importlib.import_module("tlspectral.spectral_rope.merge")  # as an attribute this is the function
    monkeypatch.setattr(module, "with_gain_and_phase", lambda weight, geometry: weight)
    with pytest.raises(UnsupportedArchitecture, match="merged model's logits differ"):
        merge(move(to_spectral(base("bridge", "llama")), only=("phase",)))
