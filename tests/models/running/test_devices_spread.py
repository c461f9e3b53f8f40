"""A model whose layers lie on two devices, as `device_map` of transformers spreads it, gives the numbers of the CPU.

The devices are stand-ins (`stand_in_device.py`), so that an operation on tensors of two devices raises. Activations
are moved between layers by accelerate's own hooks.
"""

import functools

import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import ablated
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conformance.devices import on
from positional_measurements import block_prompt
from spectral_zoo import move
from stand_in_device import DEVICE, SECOND_DEVICE, StandInDevice
from torch import nn

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import to_spectral
from tlspectral.tasks.repeated import repeated_sequences

same = functools.partial(pd.testing.assert_frame_equal, rtol=1e-9, atol=1e-9)  # rounding of LAPACK: at most 2e-13
MORE = (("gemma2", False), ("qwen3", True))


def spread(name):
    """A bridge whose first half of layers lies on one device and whose second half lies on another."""
    model = zoo.hf_model(name)
    inner = model.base_model
    layers = next(module for module in inner.children() if isinstance(module, nn.ModuleList))
    half, ends = (
        len(layers) // 2,
        [module for path, module in inner.named_children() if "norm" in path or path == "ln_f"],
    )
    first = [module for module in inner.children() if module is not layers and module not in ends]
    for device, modules in (
        (DEVICE, [*first, *layers[:half]]),
        (SECOND_DEVICE, [*layers[half:], *ends, model.get_output_embeddings()]),
    ):
        for module in modules:
            module.to(device)
            add_hook_to_module(module, AlignDevicesHook(execution_device=device))
    return zoo.wrapped(model)


# Scores route with grouped keys; with softcap, windows and query/key norm; delegated attention with local windows.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
@pytest.mark.parametrize(
    ("name", "float64"),
    [("llama", True), ("gptneo", False), *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)],
)
def test_a_model_on_two_devices(name, float64):
    with StandInDevice(float64=float64):
        assert_same_on_two_devices(name)


def assert_same_on_two_devices(name):
    cpu, model, tokens = zoo.shared("bridge", name), spread(name), zoo.prompt()
    places = {str(parameter.device) for parameter in model.parameters()}
    assert places == {DEVICE, SECOND_DEVICE}
    last = attention_view(cpu).n_layers - 1
    parts = ["symmetric", "antisymmetric", "output"] + (
        ["rope_phase", tls.parts.Band([0, 1])] if name != "gptneo" else []
    )
    heads = [(0, 1), (last, 0), (last, 2)]
    ablations = [(heads, part, {}) for part in parts]
    ablations += [((0, 1), "output", {"into": f"L{last}H1.{what}"}) for what in ("q", "k", "v")]
    for chosen, part, into in ablations:
        here, there = (ablated(one, chosen, part, on(one, tokens), **into) for one in (cpu, model))
        assert torch.equal(here, there.cpu()), (part, into)
    task = tls.tasks.induction(repeated_sequences(attention_view(cpu), n_sequences=3, segment_length=6, seed=1))
    for options in ({"control": "random"}, {"screen": "gradient"}):
        here, there = (tls.ablation_sweep(one, "symmetric", heads=heads, task=task, **options) for one in (cpu, model))
        if "estimate" in here:
            # A gradient: autograd adds its terms in another order, which moves it by 3e-6 of its size.
            pd.testing.assert_series_equal(here.pop("estimate"), there.pop("estimate"), rtol=1e-4)
        same(here, there)
    same(*(tls.analyze_heads(one, null_draws=3, extras=("score_asym",)) for one in (cpu, model)))
    assert tls.verify_scores(cpu).equals(tls.verify_scores(model))
    for mode in ("prompt", "key"):
        options = {"mode": mode, "per_frequency": name != "gptneo", "swaps": "all"}
        same(*(tls.positional_symbolic(one, block_prompt(), **options) for one in (cpu, model)))


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("float64", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_spectral_model_on_two_devices(float64):
    with StandInDevice(float64=float64):
        gradients = spectral_gradients()
    assert {str(gradient.device) for gradient in gradients[1]} == {DEVICE, SECOND_DEVICE}
    for one, other in zip(*gradients, strict=True):
        # Autograd adds terms in another order: measured 3e-6 of a gradient's size. A term left out moves it by tenths.
        assert float((one - other.cpu()).norm()) < 1e-4 * float(one.norm())


def spectral_gradients():
    gradients = []
    for base in (zoo.shared("bridge", "llama"), spread("llama")):
        spectral = move(to_spectral(base))
        loss = spectral(on(base, zoo.prompt()), return_type="loss")
        loss.backward(inputs=list(spectral.spectral_parameters()))
        gradients.append([parameter.grad for parameter in spectral.spectral_parameters()])
    return gradients
