"""`qk_penalty`: shares against dense operators, gradients against finite differences, on every backend that is read."""

import doctest
import inspect

import numpy as np
import pytest
import torch
import zoo
from attention_models import every_model, fresh
from model_state import assert_unchanged, state_of, warm
from spectral_zoo import moved
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.operators import QKOperator, QKOperators, penalty

PARTS = ("antisymmetric", "symmetric", "rope_phase")
# LayerNorm and one matrix for queries, keys and values; partial rotary; grouped keys; adjacent pairs; a gain that is
# stored less 1, with query/key norm; a query/key norm over all heads; per-head query/key norm; learned positions.
FAMILIES = [("bridge", name) for name in ("gpt2", "neox", "llama", "gptj", "gemma3", "olmo2", "qwen3", "opt")]
FAMILIES += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen2", "qwen3", "gpt2")]
some_models = pytest.mark.parametrize(("backend", "name"), FAMILIES)


def in_double(backend, name, **options):
    model = fresh(backend, name, **options).to(torch.float64)
    if backend == "bridge":
        model.original_model.to(torch.float64)
    return model


def dense_share(operator, part):
    """The share from d_model x d_model matrices in float64; None for phase without rotary positions."""
    m = operator.dense()
    anti, whole = ((m - m.T) / 2).square().sum(), m.square().sum()
    if part != "rope_phase":
        return float(anti / whole if part == "antisymmetric" else ((m + m.T) / 2).square().sum() / whole)
    if operator.rotary is None:
        return None
    re = im = 0.0
    for a, b in zip(operator.rotary.real_index.tolist(), operator.rotary.imag_index.tolist(), strict=True):
        query, key = (torch.complex(w[:, a], w[:, b]) for w in (operator.w_q, operator.w_k))
        m_t = torch.outer(query, key.conj())
        re, im = re + m_t.real.square().sum(), im + m_t.imag.square().sum()
    return float(im / (re + im))


def operators(model):
    return QKOperators(attention_view(model))


def dense_mean(model, part, heads=None):
    found = [operators(model)[head] for head in heads] if heads is not None else list(operators(model))
    shares = [share for operator in found if (share := dense_share(operator, part)) is not None]
    return np.mean(shares) if shares else None


# --- the number ---


@every_model
@pytest.mark.parametrize("part", PARTS)
def test_every_head_has_the_share_of_its_dense_operator(backend, name, part):
    model = shared(backend, name)
    for operator in operators(model):
        expected = dense_share(operator, part)
        if expected is None:
            continue
        found = tls.heads.qk_penalty(model, part, (operator.layer, operator.head))
        assert found.dtype == torch.float32
        assert found.shape == ()
        # Measured: float32 is off by at most 1e-7; a gain or a mean left out moves shares by 1e-3 and more.
        assert found.item() == pytest.approx(expected, abs=1e-6)
    expected = dense_mean(model, part)
    if expected is not None:
        assert tls.heads.qk_penalty(model, part).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_it_is_the_square_of_dir_frac_in_the_head_table(name):
    model = shared("bridge", name)
    table = tls.analyze_heads(model, null_draws=2, detectors=False, show_progress=False)
    for row in table.itertuples():
        assert tls.heads.qk_penalty(model, "antisymmetric", row).item() == pytest.approx(row.dir_frac**2, abs=1e-6)
    mean = (table["dir_frac"] ** 2).mean()
    assert tls.heads.qk_penalty(model, "M_A", table).item() == pytest.approx(mean, abs=1e-6)
    assert tls.heads.qk_penalty(model, "M_S").item() == pytest.approx(1 - mean, abs=1e-6)


def test_heads_and_parts_are_read_as_everywhere():
    model = shared("bridge", "llama")
    expected = tls.heads.qk_penalty(model, "rope_phase", [(1, 0), (0, 3)])
    for heads in (["L1H0", "L0H3"], ["-1.0", "0.3"], ["L0H3", "L1H0"]):
        assert torch.equal(tls.heads.qk_penalty(model, "Im(M_t)", heads), expected)
    with pytest.raises(BadHead, match="L0H4 does not exist"):
        tls.heads.qk_penalty(model, "symmetric", "L0H4")
    with pytest.raises(ValueError, match="did you mean 'antisymmetric'"):
        inspect.unwrap(tls.heads.qk_penalty)(model, "antisymetric")  # below beartype, which checks the Literal first
    with pytest.raises(BadHead, match="no heads to penalise"):
        tls.heads.qk_penalty(model, "symmetric", [])


@pytest.mark.parametrize("part", PARTS)
def test_in_16_bits_it_is_computed_in_float32(part):
    model = fresh("bridge", "qwen3").to(torch.bfloat16)
    found = tls.heads.qk_penalty(model, part)
    assert found.dtype == torch.float32
    # The reference reads the same rounded weights; in bfloat16 the sums would be off by 1e-2.
    assert found.item() == pytest.approx(dense_mean(model, part), abs=1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_mixed_precision_does_not_reach_it(part):
    model = shared("bridge", "llama")
    plain = tls.heads.qk_penalty(model, part)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tls.heads.qk_penalty(model, part), plain)


@pytest.mark.parametrize("part", PARTS)
def test_as_stored_nothing_is_folded(part):
    model = in_double("bridge", "qwen3")
    for layer in range(2):
        raw = attention_view(model).raw(layer)
        for head in range(zoo.HEADS):
            plain = QKOperator(layer, head, raw.w_q[head].detach(), raw.w_k[head // 2].detach(), raw.rotary)
            found = tls.heads.qk_penalty(model, part, (layer, head), folded=False).item()
            assert found == pytest.approx(dense_share(plain, part), abs=1e-12)
            assert abs(found - tls.heads.qk_penalty(model, part, (layer, head)).item()) > 1e-4


def test_a_model_that_is_processed_in_place_is_read_as_it_is_then():
    model = fresh("bridge", "llama")
    before = tls.heads.qk_penalty(model, "antisymmetric").item()
    model.enable_compatibility_mode(disable_warnings=True)
    after = tls.heads.qk_penalty(model, "antisymmetric")
    assert after.requires_grad
    # Folding the gain into the weights leaves M as it was. Measured: 1e-7.
    assert after.item() == pytest.approx(before, abs=1e-6)


@every_model
def test_in_float64_the_factors_are_those_of_the_head_table(backend, name):
    view = attention_view(in_double(backend, name))
    for layer in range(view.n_layers):
        live = view.live_factors(layer, None, folded=True)
        some = view.live_factors(layer, [2, 1], folded=True)
        for own, chosen, expected in zip(live, some, view.layer(layer).operator_factors(), strict=False):
            # Equal to the bit, but for LayerNorm's mean, which sums in the order of memory: measured 2e-16.
            torch.testing.assert_close(own.detach(), expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(chosen.detach(), expected[[2, 1]], rtol=0, atol=1e-14)


# --- gradients ---


@some_models
@pytest.mark.parametrize("part", PARTS)
def test_gradients_are_those_of_finite_differences(backend, name, part):
    """Against the dense route, which shares no line with the penalty, through the parameters of the model itself."""
    model = in_double(backend, name, **({"fold_ln": False} if backend == "hooked" else {}))
    heads = [(0, 1), (0, 2), (1, 3 % attention_view(model).n_heads(1))]
    if dense_mean(model, part, heads) is None:
        return
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(tls.heads.qk_penalty(model, part, heads), list(parameters.values()), allow_unused=True)
    reached = {id(p): (p, g) for p, g in zip(parameters.values(), found, strict=True) if g is not None and g.any()}
    gains = {"gpt2": 1, "neox": 1, "llama": 1, "gptj": 1, "gemma3": 3, "olmo2": 2, "qwen3": 3, "opt": 1, "qwen2": 1}
    assert len(reached) == 2 * (2 + gains[name])  # W_Q, W_K and gains, in two layers
    step = 1e-5
    for number, (parameter, gradient) in enumerate(reached.values()):
        stream = torch.Generator().manual_seed(number)
        size = parameter.detach().abs().mean()
        direction = size * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                values.append(dense_mean(model, part, heads))
                parameter -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        # Slopes are 1e-4 to 6e-2, measured off by at most 6e-8 of themselves. A path that is cut off loses tenths.
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-10)


@some_models
def test_a_loss_trains_the_parameters_that_the_penalty_moves(backend, name):
    model = fresh(backend, name)
    parameters = list(model.parameters())
    reached = torch.autograd.grad(tls.heads.qk_penalty(model, "antisymmetric"), parameters, allow_unused=True)
    trained = torch.autograd.grad(model(zoo.prompt(), return_type="loss"), parameters, allow_unused=True)
    moved_by_penalty = [i for i, gradient in enumerate(reached) if gradient is not None and gradient.any()]
    assert len(moved_by_penalty) >= 4
    for i in moved_by_penalty:
        assert trained[i] is not None
        assert bool(trained[i].any())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("folded", [True, False])
def test_gradcheck(part, folded):
    """Of the parameters of the model, put in place of its own for each call."""
    model = in_double("bridge", "qwen3")

    class Penalty(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return tls.heads.qk_penalty(self.model, part, ["L0H1", "L1H2"], folded=folded)

    module = Penalty()
    everything = dict(module.named_parameters())
    gradients = torch.autograd.grad(module(), list(everything.values()), allow_unused=True)
    names = [name for name, g in zip(everything, gradients, strict=True) if g is not None and "layers.0" not in name]
    given = [everything[name].detach().clone().requires_grad_() for name in names]

    def penalty_of(*values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), ())

    assert torch.autograd.gradcheck(penalty_of, given, fast_mode=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("folded", [True, False])
def test_a_detached_denominator_is_a_constant_of_the_gradient(part, folded):
    """The gradient is then that of `share * ||M||^2` over today's `||M||^2`; the value is the same."""
    model = in_double("bridge", "qwen3")
    weight = model.blocks[0].attn.q.original_component.weight
    true, frozen = (
        tls.heads.qk_penalty(model, part, "L0H1", folded=folded, detach_denominator=detached)
        for detached in (False, True)
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
    model = fresh("bridge", "llama")
    tls.heads.qk_penalty(model, "antisymmetric", "L0H3").backward()
    attention = model.blocks[0].attn
    query, key = (
        side.original_component.weight.grad.unflatten(0, (heads, -1)).abs().amax((1, 2)) > 0
        for side, heads in ((attention.q, 4), (attention.k, 2))
    )
    assert query.tolist() == [False, False, False, True]
    assert key.tolist() == [False, True]
    assert model.blocks[1].attn.q.original_component.weight.grad is None


def test_descent_takes_the_part_away_and_keeps_the_rest():
    model = in_double("bridge", "llama")
    before = [dense_share(operator, "antisymmetric") for operator in operators(model)]
    weight = model.blocks[1].attn.q.original_component.weight
    optimizer = torch.optim.Adam([weight], lr=3e-2)
    for _ in range(150):
        optimizer.zero_grad()
        tls.heads.qk_penalty(model, "antisymmetric", "L1H2").backward()
        optimizer.step()
    after = [dense_share(operator, "antisymmetric") for operator in operators(model)]
    assert before[6] > 0.2
    assert after[6] < 0.02
    assert after[:6] + after[7:] == before[:6] + before[7:]


# --- spectral models ---


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("part", PARTS)
def test_gain_and_phase_of_a_spectral_model(backend, part):
    spectral = moved(backend, "qwen3")
    share = tls.heads.qk_penalty(spectral, part)
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
    own = tls.heads.qk_penalty(spectral.base, part, folded=False)
    assert torch.equal(tls.heads.qk_penalty(spectral, part, folded=False), own)


# --- what is refused, and what is not ---


def test_phase_needs_rotary_positions():
    with pytest.raises(UnsupportedArchitecture, match="L1H2: no rotary positions, so it has no phase"):
        tls.heads.qk_penalty(shared("bridge", "gpt2"), "rope_phase", [(1, 2)])
    with pytest.raises(UnsupportedArchitecture, match="no layer of the model has rotary positions"):
        tls.heads.qk_penalty(shared("bridge", "gpt2"), "rope_phase")


def test_phase_of_every_head_is_that_of_rotary_layers():
    model = shared("bridge", "smollm3")
    without = [layer for layer in range(model.cfg.n_layers) if attention_view(model).rotary(layer) is None]
    assert 0 < len(without) < model.cfg.n_layers
    assert tls.heads.qk_penalty(model, "rope_phase").item() == pytest.approx(dense_mean(model, "rope_phase"), abs=1e-6)
    with pytest.raises(UnsupportedArchitecture, match=f"L{without[0]}H0: no rotary positions"):
        tls.heads.qk_penalty(model, "rope_phase", (without[0], 0))


def test_files_have_no_parameters(tmp_path):
    folder = zoo.save_folder("llama", tmp_path)
    for source in (str(folder), folder):
        with pytest.raises(TypeError, match=r"neither a TransformerBridge nor a HookedTransformer.*load_model"):
            tls.heads.qk_penalty(source, "antisymmetric")


def test_a_head_without_an_operator_is_refused():
    model = fresh("bridge", "llama")
    weight = model.blocks[1].attn.q.original_component.weight
    with torch.no_grad():
        weight.unflatten(0, (zoo.HEADS, -1))[2] = 0
    with pytest.raises(BadWeights, match=r"L1H2: the squared norm of its operator is 0\.0"):
        tls.heads.qk_penalty(model, "symmetric")
    assert tls.heads.qk_penalty(model, "symmetric", ["L1H1", "L0H2"]).isfinite()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(BadWeights, match="layer 1, W_Q: 1 of"):
        tls.heads.qk_penalty(model, "symmetric", ["L0H1", "L1H0"])


def test_frozen_parameters_get_no_gradient():
    model = fresh("bridge", "llama").requires_grad_(False)
    assert not tls.heads.qk_penalty(model, "antisymmetric").requires_grad
    model.blocks[1].attn.o.original_component.weight.requires_grad_()
    assert not tls.heads.qk_penalty(model, "antisymmetric").requires_grad
    model.blocks[1].ln1.original_component.weight.requires_grad_()
    assert tls.heads.qk_penalty(model, "antisymmetric").requires_grad
    assert not tls.heads.qk_penalty(model, "antisymmetric", folded=False).requires_grad
    with torch.no_grad():
        assert not tls.heads.qk_penalty(model, "antisymmetric").requires_grad


@pytest.mark.parametrize("copied", ["w_q", "w_k"])
def test_a_weight_that_is_read_as_a_copy_is_refused(copied, monkeypatch):
    from dataclasses import replace

    from tlspectral.models.attention import bridge

    model, real = fresh("bridge", "llama"), bridge.read_attention

    def copying(model, layer):
        raw = real(model, layer)
        return replace(raw, **{copied: getattr(raw, copied).detach().clone()})

    monkeypatch.setattr(bridge, "read_attention", copying)
    with pytest.raises(UnsupportedArchitecture, match=f"layer 0, {copied.upper()}: it is read as a copy"):
        tls.heads.qk_penalty(model, "antisymmetric")
    with torch.no_grad():
        assert tls.heads.qk_penalty(model, "antisymmetric").isfinite()


@some_models
def test_the_model_is_not_changed(backend, name):
    model = warm(fresh(backend, name))
    before = state_of(model)
    tls.heads.qk_penalty(model, "antisymmetric")
    assert_unchanged(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_example_runs():
    found = doctest.testmod(penalty)
    assert found.attempted > 0
    assert found.failed == 0
