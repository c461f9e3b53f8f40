"""`qk_penalty`: shares against dense operators, gradients against finite differences."""

import numpy as np
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.heads.operators.factored import QKOperators
from tlspectral.models.reading import attention_view

from .rows import asked

PENALISED = ("antisymmetric", "symmetric", "rope_phase")
# Gains that the penalty reaches beside W_Q and W_K in a layer: of the norm in front, and of queries and keys.
GAINS = {"gpt2": 1, "neox": 1, "llama": 1, "gptj": 1, "gemma3": 3, "olmo2": 2, "qwen3": 3, "opt": 1, "qwen2": 1,
         "gemma2": 1, "bloom": 1}  # fmt: skip


def penalised(row, part):
    return row.rotary or part != "rope_phase"


def counted(row, part):
    return penalised(row, part) and row.name in GAINS


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


def dense_mean(model, part, heads=None):
    operators = QKOperators(attention_view(model))
    found = [operators[head] for head in heads] if heads is not None else list(operators)
    shares = [share for operator in found if (share := dense_share(operator, part)) is not None]
    return np.mean(shares) if shares else None


@asked(penalised, every=9, forms=True, part=PENALISED, encoders=True)
def every_head_has_the_share_of_its_dense_operator(row, part):
    shares = {(one.layer, one.head): dense_share(one, part) for one in QKOperators(row.view)}
    shares = {head: share for head, share in shares.items() if share is not None}
    for head, expected in shares.items():
        found = tls.heads.qk_penalty(row.model, part, head)
        assert found.dtype == torch.float32
        assert found.shape == ()
        # Measured: float32 is off by at most 1e-7; a gain or a mean left out moves shares by 1e-3 and more.
        assert found.item() == pytest.approx(expected, abs=1e-6)
    found = tls.heads.qk_penalty(row.model, part).item()
    assert found == pytest.approx(np.mean(list(shares.values())), abs=1e-6)


@asked(every=6, encoders=True)
def in_float64_live_factors_are_those_of_the_head_table(row):
    view = attention_view(row.fresh(torch.float64))
    for layer in row.layers:
        live = view.live_factors(layer, None, folded=True)
        some = view.live_factors(layer, [2, 1], folded=True)
        for own, chosen, expected in zip(live, some, view.layer(layer).operator_factors(), strict=False):
            # Equal to the bit, but for LayerNorm's mean, which sums in the order of memory: measured 2e-16.
            torch.testing.assert_close(own.detach(), expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(chosen.detach(), expected[[2, 1]], rtol=0, atol=1e-14)


@asked(counted, every=15, part=PENALISED, encoders=True)
def gradients_are_those_of_finite_differences(row, part):
    """Against the dense route, which shares no line with the penalty, through the parameters of the model itself."""
    model = row.fresh(torch.float64)
    heads = [(0, 1), (0, 2), (1, 3 % row.view.n_heads(1))]
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(tls.heads.qk_penalty(model, part, heads), list(parameters.values()), allow_unused=True)
    reached = {id(p): (p, g) for p, g in zip(parameters.values(), found, strict=True) if g is not None and g.any()}
    assert len(reached) == 2 * (2 + GAINS[row.name])  # W_Q, W_K and gains, in two layers
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


@asked(every=6, encoders=True)
def a_loss_trains_the_parameters_that_the_penalty_moves(row):
    parameters = [parameter for parameter in row.model.parameters() if parameter.requires_grad]
    reached = torch.autograd.grad(tls.heads.qk_penalty(row.model, "antisymmetric"), parameters, allow_unused=True)
    trained = torch.autograd.grad(row.model(zoo.prompt(), return_type="loss"), parameters, allow_unused=True)
    by_penalty = [i for i, gradient in enumerate(reached) if gradient is not None and gradient.any()]
    assert len(by_penalty) >= 4
    for i in by_penalty:
        assert trained[i] is not None
        assert bool(trained[i].any())
