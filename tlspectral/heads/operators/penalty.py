"""`qk_penalty`: the share of one part in the query-key operators of heads, as a term of a training loss.

From thin factors: `||M||^2 = <W_Q^T W_Q, W_K^T W_K>`, `||M_A||^2 = (||M||^2 - tr M^2) / 2` with
`tr M^2 = tr (W_K^T W_Q)^2`. That takes products of d_head x d_head, O(d_model d_head^2) a head; the norms of the `M_t`
take inner products of columns, O(d_model d_head).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import phase_squares
from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.models.reading import measured
from tlspectral.models.reading.layer import LiveFactors
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.selection import Heads, Symbol, chosen_part, head_name

PenalizedPart = Literal["symmetric", "antisymmetric", "rope_phase"]
PENALIZED_PARTS: tuple[PenalizedPart, ...] = get_args(PenalizedPart)


def qk_penalty(
    model: Any,
    part: PenalizedPart | Symbol,
    heads: Heads | None = None,
    *,
    folded: bool = True,
    detach_denominator: bool = False,
) -> Float[Tensor, ""]:
    """Return the share of a part in the query-key operator, mean over heads, as a function of the model's parameters.

    Added to a loss, it lowers that part of the heads during training ("Fingerprint, Not Blueprint", section 10).
    Gradients reach W_Q, W_K, the gain of the norm in front, the gains of a query/key norm, and gain and phase of a
    spectral model.

    >>> import torch, tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> share = tls.heads.qk_penalty(model, "antisymmetric", "L0H1")
    >>> round(share.item(), 3), share.requires_grad
    (0.383, True)
    >>> loss = model(torch.arange(16)[None], return_type="loss") + 10 * share
    >>> loss.backward()

    Args:
        model: a TransformerBridge or HookedTransformer, folded or not.
        part: whose share is returned, in [0, 1] up to rounding. M_S and M_A are parts of the one matrix M, under rotary
            positions the M of two tokens at distance 0: what `ablate` removes as `"symmetric_static"`.
            `"antisymmetric"` (`"M_A"`): ||M_A||^2 / ||M||^2, the square of `dir_frac`.
            `"symmetric"` (`"M_S"`): ||M_S||^2 / ||M||^2, 1 less that.
            `"rope_phase"` (`"Im(M_t)"`): sum_t ||Im M_t||^2 / sum_t (||Re M_t||^2 + ||Im M_t||^2) over the rotary pairs
            of a head. Norms are squared here and plain in `rope_imag_frac`, so the two differ.
        heads: as in `ablate`; None is every head (for `"rope_phase"`: of layers with rotary positions). Heads that
            share keys share W_K: a step on it moves all of them, whichever is chosen.
        folded: of the operator that the head table describes: norm gains folded in, centred under LayerNorm. With False
            of W_Q and W_K as stored, which is what FP penalises; a norm's gain then gets no gradient.
        detach_denominator: take the denominator for a constant in the gradient, as FP's runs do: a step then shrinks
            the part, and does not enlarge the rest of M. The value is the same. It is not the gradient of the share.

    Returns:
        A scalar on the model's device, in float32, or float64 for a model in float64; `torch.autocast` does not lower
        that. In float32 the rounding is some 1e-7. It requires a gradient where one of the parameters does.

    Raises:
        TypeError: a name or path: files have no parameters to train.
        ValueError: an unknown part.
        BadHead: a head that does not exist, or no heads at all.
        UnsupportedArchitecture: phase of a head without rotary positions; a layer that cannot be read, or only without
            gradient.
        BadWeights: weights that are not finite or quantised, or an operator that is 0, of which nothing has a share.

    What it does not establish: that the head does without the part. It says nothing of the loss, of what the head
    attends to, or of other heads that take the part over; under rotary positions the phase may stay when M_A goes.
    """
    name: PenalizedPart = chosen_part(part, PENALIZED_PARTS)
    with measured(model, report_hooks=False) as view:
        chosen = dict.fromkeys(view.layers) if heads is None else heads_by_layer(view, heads)
        if not chosen:
            raise BadHead("no heads to penalise: heads is empty; None means every head")
        shares = []
        with _without_autocast(view.device):
            for layer, indices in chosen.items():
                factors = view.live_factors(layer, indices, folded=folded)
                if name == "rope_phase" and factors.rotary is None:
                    if indices is None:
                        continue
                    raise UnsupportedArchitecture(
                        f"{head_name(layer, indices[0])}: no rotary positions, so it has no phase"
                    )
                part_square, whole = _squares(factors, name)
                _require_a_share(view, whole, layer, indices)
                shares.append((part_square / (whole.detach() if detach_denominator else whole)).to(view.device))
        if not shares:
            raise UnsupportedArchitecture("no layer of the model has rotary positions, so no head has phase")
        return torch.cat(shares).mean()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without mixed precision, in which the products would have three digits."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def antisymmetric_squares(
    w_q: Float[Tensor, "heads d_model d_head"], w_k: Float[Tensor, "heads d_model d_head"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Return ||M_A||^2 and ||M||^2 of each head, differentiable. Near 0 the first is rounding of either sign."""
    squared = ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((-2, -1))  # heads
    core = w_k.mT @ w_q  # heads d_head d_head
    trace = (core * core.mT).sum((-2, -1))  # heads; tr M^2
    return (squared - trace) / 2, squared


def _squares(factors: LiveFactors, part: PenalizedPart) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Return, for each head, the squared norm of the part and the squared norm of the whole."""
    if part == "rope_phase":
        assert factors.rotary is not None
        real, imag = phase_squares(factors.w_q, factors.w_k, factors.rotary)
        return imag.sum(1), (real + imag).sum(1)
    antisymmetric, whole = antisymmetric_squares(factors.w_q, factors.w_k)
    return antisymmetric if part == "antisymmetric" else whole - antisymmetric, whole


def _require_a_share(view: AttentionView, whole: Float[Tensor, " heads"], layer: int, heads: list[int] | None) -> None:
    wrong = torch.nonzero(~((whole > 0) & whole.isfinite())).flatten().tolist()
    if not wrong:
        return
    view.layer(layer)  # names a weight that is NaN or infinite
    head = wrong[0] if heads is None else heads[wrong[0]]
    raise BadWeights(
        f"{head_name(layer, head)}: the squared norm of its operator is {whole[wrong[0]].item()}, so no part has a "
        "share in it; leave the head out of heads="
    )
