"""The model that a spectral model was made from: untouched, its names kept, copies on their own."""

import copy

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import base, logits, move, moved, some_models, train

from tlspectral.spectral_rope import to_spectral


@some_models
def test_the_base_is_untouched_before_during_and_after_training(backend, name):
    model = getattr(zoo, backend)(name).train()
    before = logits(model)  # first: transformers puts hooks of its own on a model's modules when it first runs
    about = state_of(model)
    spectral = to_spectral(model)
    assert_unchanged(model, about)
    with spectral.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: x)]):
        logits(spectral)
        assert torch.equal(logits(model), before)
    train(spectral)
    assert_unchanged(model, about)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(spectral), before)
    assert spectral.base is model


@some_models
def test_names_and_numbers_of_parameters_are_the_bases_and_the_spectral_ones(backend, name):
    model = base(backend, name)
    spectral = to_spectral(model)
    own = [f"spectral.{index}.{part}" for index in range(2) for part in ("log_omega_shift", "phase", "gain")]
    assert sorted(dict(spectral.named_parameters())) == sorted([*dict(model.named_parameters()), *own])
    assert sorted(spectral.state_dict()) == sorted([*model.state_dict(), *own])
    assert len(list(spectral.parameters())) == len(list(model.parameters())) + 6
    assert [id(p) for p in spectral.spectral_parameters()] == [
        id(p) for key, p in spectral.named_parameters() if key.startswith("spectral.")
    ]
    kept = torch.nn.Sequential(spectral).state_dict()
    assert {f"0.{key}" for key in own} <= set(kept)


@some_models
def test_state_dict_round_trip(backend, name):
    spectral = moved(backend, name)
    other = to_spectral(getattr(zoo, backend)(name))
    other.load_state_dict(spectral.state_dict())
    assert torch.equal(logits(other), logits(spectral))
    kept = {key: value for key, value in spectral.state_dict().items() if key != "spectral.0.log_omega_shift"}
    with pytest.raises(RuntimeError, match=r"0\.log_omega_shift"):
        other.load_state_dict(kept)


@some_models
def test_a_copy_is_on_its_own(backend, name):
    spectral = moved(backend, name)
    before = logits(spectral)
    other = copy.deepcopy(spectral)
    assert torch.equal(logits(other), before)
    move(other, seed=1)
    assert torch.equal(logits(spectral), before)
    assert not torch.equal(logits(other), before)
