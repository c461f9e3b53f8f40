"""The model that a spectral model was made from: untouched, its names kept; copies and files of what was made."""

import copy
import io
import pickle

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import assert_on_its_own, base, logits, move, moved, on_both_backends, some_models, train

from tlspectral.models.attention import attention_view
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
    assert spectral.training
    assert not to_spectral(model.eval()).training


@on_both_backends
def test_names_state_dicts_files_and_copies(backend, name):
    model, spectral = base(backend, name), moved(backend, name)
    own = [f"spectral.{index}.{part}" for index in range(2) for part in ("log_omega_shift", "phase", "gain")]
    assert sorted(dict(spectral.named_parameters())) == sorted([*dict(model.named_parameters()), *own])
    assert sorted(spectral.state_dict()) == sorted([*model.state_dict(), *own])
    assert [id(p) for p in spectral.spectral_parameters()] == [
        id(p) for key, p in spectral.named_parameters() if key.startswith("spectral.")
    ]
    assert {f"0.{key}" for key in own} <= set(torch.nn.Sequential(spectral).state_dict())
    file = io.BytesIO()
    torch.save(spectral.state_dict(), file)
    file.seek(0)
    other = to_spectral(getattr(zoo, backend)(name))
    other.load_state_dict(torch.load(file))
    assert torch.equal(logits(other), logits(spectral))
    kept = {key: value for key, value in spectral.state_dict().items() if key != "spectral.0.log_omega_shift"}
    with pytest.raises(RuntimeError, match=r"0\.log_omega_shift"):
        other.load_state_dict(kept)
    assert_on_its_own(copy.deepcopy(spectral), spectral)
    if backend == "hooked":  # TransformerLens' bridges cannot be pickled
        assert_on_its_own(pickle.loads(pickle.dumps(spectral)), spectral)


@some_models
def test_a_shared_phase_has_a_gradient_of_rounding_alone(backend, name):
    spectral = to_spectral(base(backend, name), shared_phase=True, log_omega=False)
    spectral(zoo.prompt(), return_type="loss").backward(inputs=list(spectral.spectral_parameters()))
    for module in spectral.spectral.values():
        assert float(module.phase.grad.abs().max()) < 1e-5 * float(module.omega.grad.abs().max())
    before = logits(spectral)
    move(spectral, only=("phase",))
    # Rounding of logits of order 1: 1e-6; on the query alone the same phases move them by tenths.
    torch.testing.assert_close(logits(spectral), before, rtol=0, atol=2e-5)


def test_the_inverse_frequencies_are_the_models_own():
    for name in ("llama3", "yarn", "gemma3"):
        model = base("bridge", name)
        view = attention_view(model)
        for index, module in to_spectral(model).spectral.items():
            own = view.rotary(int(index)).theta
            assert torch.equal(module.theta, own.float())
            assert torch.equal(module.omega, own.float().expand_as(module.omega))


@on_both_backends
def test_to_moves_the_spectral_parameters_too(backend, name):
    model = getattr(zoo, backend)(name)
    spectral = to_spectral(model)
    assert spectral.to(torch.float64) is spectral
    assert {parameter.dtype for parameter in spectral.parameters()} == {torch.float64}
    found = logits(spectral)
    assert found.dtype == torch.float64
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(found, logits(copy.deepcopy(model).to(torch.float64)))
    move(spectral)
    assert not torch.equal(logits(spectral), found)
    for change, dtype in ((spectral.float, torch.float32), (spectral.bfloat16, torch.bfloat16)):
        assert {parameter.dtype for parameter in change().parameters()} == {dtype}


def test_half_precision_keeps_parity_and_float32_frequencies():
    model = zoo.bridge("llama").to(torch.bfloat16)
    spectral = to_spectral(model)
    assert {parameter.dtype for parameter in spectral.spectral_parameters()} == {torch.float32}
    assert torch.equal(logits(spectral), logits(model))
