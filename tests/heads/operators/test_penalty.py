"""`qk_penalty` beside the head table, in 16 bits and as stored, its gradients by head, and what it refuses.

That it is the share of the dense operator, and its gradient that of finite differences, is asked of every model by
`conformance/penalties.py`.
"""

import inspect
from dataclasses import replace

import pytest
import torch
import zoo
from conformance.penalties import PENALISED, dense_mean, dense_share
from spectral_zoo import moved
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.heads import qk_penalty
from tlspectral.heads.operators.factored import QKOperator
from tlspectral.models.reading import attention_view

every_part = pytest.mark.parametrize("part", PENALISED)


def in_double(name):
    return zoo.converted(zoo.bridge(name), torch.float64)


# --- the number ---


@pytest.mark.slow
def test_it_is_the_square_of_dir_frac_in_the_head_table():
    model = shared("bridge", "gemma3")
    table = tls.analyze_heads(model, null_draws=2, detectors=False)
    for row in table.itertuples():
        assert qk_penalty(model, "antisymmetric", row).item() == pytest.approx(row.dir_frac**2, abs=1e-6)
    mean = (table["dir_frac"] ** 2).mean()
    assert qk_penalty(model, "M_A", table).item() == pytest.approx(mean, abs=1e-6)
    assert qk_penalty(model, "M_S").item() == pytest.approx(1 - mean, abs=1e-6)
    model = shared("bridge", "llama")
    expected = qk_penalty(model, "rope_phase", [(1, 0), (0, 3)])
    for heads in (["L1H0", "L0H3"], ["-1.0", "0.3"], ["L0H3", "L1H0"]):
        assert torch.equal(qk_penalty(model, "Im(M_t)", heads), expected)


@pytest.mark.slow
@every_part
def test_in_16_bits_and_in_mixed_precision_it_is_computed_in_float32(part):
    model = zoo.bridge("qwen3").to(torch.bfloat16)
    found = qk_penalty(model, part)
    assert found.dtype == torch.float32
    # The reference reads the same rounded weights; in bfloat16 the sums would be off by 1e-2.
    assert found.item() == pytest.approx(dense_mean(model, part), abs=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(qk_penalty(model, part), found)


@pytest.mark.slow
@every_part
def test_as_stored_nothing_is_folded(part):
    model = in_double("qwen3")
    for layer in range(2):
        raw = attention_view(model).raw(layer)
        for head in range(zoo.HEADS):
            plain = QKOperator(layer, head, raw.w_q[head].detach(), raw.w_k[head // 2].detach(), raw.rotary)
            found = qk_penalty(model, part, (layer, head), folded=False).item()
            assert found == pytest.approx(dense_share(plain, part), abs=1e-12)
            assert abs(found - qk_penalty(model, part, (layer, head)).item()) > 1e-4


# --- gradients ---


@pytest.mark.slow
@every_part
def test_the_gradient_of_the_stored_weights_is_that_of_finite_differences(part):
    """Of the parameters of the model, put in place of its own for each call."""
    model = in_double("qwen3")

    class Penalty(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return qk_penalty(self.model, part, ["L0H1", "L1H2"], folded=False)

    module = Penalty()
    everything = dict(module.named_parameters())
    gradients = torch.autograd.grad(module(), list(everything.values()), allow_unused=True)
    names = [name for name, g in zip(everything, gradients, strict=True) if g is not None and "layers.0" not in name]
    given = [everything[name].detach().clone().requires_grad_() for name in names]

    def penalty_of(*values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), ())

    assert torch.autograd.gradcheck(penalty_of, given, fast_mode=True)


@pytest.mark.slow
@every_part
@pytest.mark.parametrize("folded", [True, False])
def test_a_detached_denominator_is_a_constant_of_the_gradient(part, folded):
    """The gradient is then that of `share * ||M||^2` over today's `||M||^2`; the value is the same."""
    model = in_double("qwen3")
    weight = model.blocks[0].attn.q.original_component.weight
    true, frozen = (
        qk_penalty(model, part, "L0H1", folded=folded, detach_denominator=detached) for detached in (False, True)
    )
    assert torch.equal(true, frozen)
    slopes = []
    for share in (true, frozen):
        (gradient,) = torch.autograd.grad(share, weight)
        slopes.append((gradient * weight).sum().item())
    # A share does not change when W_Q is scaled; its numerator alone has twice its value as slope along W_Q.
    assert slopes[0] == pytest.approx(0, abs=1e-12)
    assert slopes[1] == pytest.approx(2 * true.item(), rel=1e-9)


def test_a_chosen_head_moves_its_queries_and_the_keys_of_its_group():
    model = zoo.bridge("llama")
    qk_penalty(model, "antisymmetric", "L0H3").backward()
    attention = model.blocks[0].attn
    query, key = (
        side.original_component.weight.grad.unflatten(0, (heads, -1)).abs().amax((1, 2)) > 0
        for side, heads in ((attention.q, 4), (attention.k, 2))
    )
    assert query.tolist() == [False, False, False, True]
    assert key.tolist() == [False, True]
    assert model.blocks[1].attn.q.original_component.weight.grad is None
    assert qk_penalty(zoo.bridge("bloom"), "symmetric", "L0H3") > 0  # with ALiBi in place of rotary positions


def test_frozen_parameters_get_no_gradient():
    model = zoo.bridge("llama").requires_grad_(False)
    assert not qk_penalty(model, "antisymmetric").requires_grad
    model.blocks[1].attn.o.original_component.weight.requires_grad_()
    assert not qk_penalty(model, "antisymmetric").requires_grad
    model.blocks[1].ln1.original_component.weight.requires_grad_()
    assert qk_penalty(model, "antisymmetric").requires_grad
    assert not qk_penalty(model, "antisymmetric", folded=False).requires_grad
    with torch.no_grad():
        assert not qk_penalty(model, "antisymmetric").requires_grad


@pytest.mark.fast(1)
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=[zoo.needs_hooked, pytest.mark.slow])])
@every_part
def test_gain_and_phase_of_a_spectral_model(backend, part):
    spectral = moved(backend, "qwen3")
    share = qk_penalty(spectral, part)
    assert share.item() == pytest.approx(dense_mean(spectral, part), abs=1e-6)
    share.backward(inputs=list(spectral.spectral_parameters()))
    for name, parameter in spectral.spectral.named_parameters():
        assert bool(parameter.grad is not None and parameter.grad.any()) == (not name.endswith("log_omega_shift")), name
    gain, gradient = spectral.spectral["0"].gain, spectral.spectral["0"].gain.grad
    step, values = 1e-3, []
    for sign in (1, -1):
        with torch.no_grad():
            gain += sign * step * gradient / gradient.norm()
            values.append(dense_mean(spectral, part))
            gain -= sign * step * gradient / gradient.norm()
    # Parameters are float32 and the step is 1e-3: measured off by at most 6e-5.
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(gradient.norm()), rel=1e-3)
    own = qk_penalty(spectral.base, part, folded=False)
    assert torch.equal(qk_penalty(spectral, part, folded=False), own)


# --- what is refused ---


REFUSED = {
    "no phase": ("gpt2", "rope_phase", [(1, 2)], UnsupportedArchitecture, "L1H2 has no rotary positions"),
    "no phase anywhere": ("gpt2", "rope_phase", None, UnsupportedArchitecture, "no layer of the model has rotary"),
    "no phase in a layer": ("smollm3", "rope_phase", (1, 0), UnsupportedArchitecture, "L1H0 has no rotary positions"),
    "no such head": ("llama", "symmetric", "L0H4", BadHead, "L0H4 does not exist"),
    "no head": ("llama", "symmetric", [], BadHead, "heads= is empty"),
    "no such part": ("llama", "antisymetric", None, ValueError, "did you mean 'antisymmetric'"),
}


@pytest.mark.parametrize(("name", "part", "heads", "error", "said"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_penalty_is_refused(name, part, heads, error, said):
    with pytest.raises(error, match=said):
        inspect.unwrap(qk_penalty)(shared("bridge", name), part, heads)  # below beartype, which checks the Literal


def test_a_head_without_an_operator_is_refused():
    model = zoo.bridge("llama")
    weight = model.blocks[1].attn.q.original_component.weight
    with torch.no_grad():
        weight.unflatten(0, (zoo.HEADS, -1))[2] = 0
    with pytest.raises(BadWeights, match=r"L1H2: the squared norm of its query-key operator is 0\.0"):
        qk_penalty(model, "symmetric")
    assert qk_penalty(model, "symmetric", ["L1H1", "L0H2"]).isfinite()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(BadWeights, match="layer 1, W_Q: 1 of"):
        qk_penalty(model, "symmetric", ["L0H1", "L1H0"])


@pytest.mark.parametrize("copied", ["w_q", "w_k"])
def test_a_weight_that_is_read_as_a_copy_is_refused(copied, monkeypatch):
    from tlspectral.models.reading import bridge

    model, real = zoo.bridge("llama"), bridge.read_attention

    def copying(model, layer):
        raw = real(model, layer)
        return replace(raw, **{copied: getattr(raw, copied).detach().clone()})

    monkeypatch.setattr(bridge, "read_attention", copying)
    with pytest.raises(UnsupportedArchitecture, match=f"layer 0, {copied.upper()}: it is read as a copy"):
        qk_penalty(model, "antisymmetric")
    with torch.no_grad():
        assert qk_penalty(model, "antisymmetric").isfinite()
