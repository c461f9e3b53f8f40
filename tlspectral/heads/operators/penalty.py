"""`qk_penalty`: the share of M_S, M_A or phase in the query-key operators of heads, as a term of a training loss.

Everything is computed from thin factors. `||M||^2 = <W_Q^T W_Q, W_K^T W_K>` and `||M_A||^2 = (||M||^2 - tr M^2) / 2`
with `tr M^2 = tr (W_K^T W_Q)^2` cost O(d_model d_head^2) per head; the norms of M_t cost O(d_model d_head).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import phase_squares
from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.errors.settings import checked_settings
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import LiveFactors
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import head_name
from tlspectral.selection.parts_as_written import Symbol, chosen_part

PenalizedPart = Literal["symmetric", "antisymmetric", "rope_phase"]
PENALIZED_PARTS: tuple[PenalizedPart, ...] = get_args(PenalizedPart)


@checked_settings
def qk_penalty(
    model: Any,
    part: PenalizedPart | Symbol,
    heads: Heads | None = None,
    *,
    folded: bool = True,
    detach_denominator: bool = False,
) -> Float[Tensor, ""]:
    """Return the share of M_S, M_A or phase in the query-key operators of heads: their mean, differentiable.

    Add it to a training loss to lower that part ("Fingerprint, Not Blueprint", section 10).

    >>> import torch, tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> share = tls.heads.qk_penalty(model, "antisymmetric", "L0H1")
    >>> round(share.item(), 3), share.requires_grad
    (0.383, True)
    >>> loss = model(torch.arange(16)[None], return_type="loss") + 10 * share
    >>> loss.backward()

    Args:
        model: a TransformerBridge or HookedTransformer, with norms folded or not.
        part: the part whose share is returned, between 0 and 1:

            * `"antisymmetric"` (`"M_A"`): ||M_A||^2 / ||M||^2, the square of `dir_frac`.
            * `"symmetric"` (`"M_S"`): ||M_S||^2 / ||M||^2, 1 less the share of M_A.
            * `"rope_phase"` (`"Im(M_t)"`): sum_t ||Im M_t||^2 / sum_t ||M_t||^2 over the rotary pairs of a head.

        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a table with columns
            `layer` and `head`. Default: all (for `"rope_phase"`: all with rotary positions). Heads that share keys
            share W_K: a step on W_K changes all of them.
        folded: True uses M with norm gains folded in, as the head table does. False uses the stored W_Q and W_K, as the
            paper does; gains then get no gradient.
        detach_denominator: True treats the denominator as a constant in the gradient, as the paper's runs do. The value
            is the same; a step then shrinks the part without enlarging the rest of M.

    Returns:
        A scalar tensor on the model's device, in float32 (float64 for a float64 model), also under `torch.autocast`.

    Raises:
        TypeError: `model` is a name or path; files have no parameters to train.
        ValueError: an unknown part.
        BadHead: a head does not exist, or `heads` is empty.
        UnsupportedArchitecture: phase of a head without rotary positions; a layer that cannot be read with gradients.
        BadWeights: weights are not finite or are quantised, or an operator is 0.

    Not established: that the head works without the part; other heads may take over. More: docs/training.md.
    """
    name: PenalizedPart = chosen_part(part, PENALIZED_PARTS)
    with measured(model, report_hooks=False) as view:
        chosen = dict.fromkeys(view.layers) if heads is None else heads_by_layer(view, heads)
        if not chosen:
            raise BadHead("heads= is empty: give at least one head, such as heads='L5H1', or heads=None for all")
        shares, kind = [], view.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            for layer, indices in chosen.items():
                factors = view.live_factors(layer, indices, folded=folded)
                if name == "rope_phase" and factors.rotary is None:
                    if indices is None:
                        continue
                    raise UnsupportedArchitecture(
                        f"{head_name(layer, indices[0])} has no rotary positions, so no phase: leave it out of heads=, "
                        "or give part='antisymmetric'"
                    )
                part_square, whole = _squares(factors, name)
                _require_a_share(view, whole, layer, indices)
                shares.append((part_square / (whole.detach() if detach_denominator else whole)).to(view.device))
        if not shares:
            raise UnsupportedArchitecture(
                "no layer of the model has rotary positions, so no head has phase: give part='antisymmetric'"
            )
        return torch.cat(shares).mean()


def antisymmetric_squares(
    w_q: Float[Tensor, "heads d_model d_head"], w_k: Float[Tensor, "heads d_model d_head"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Return ||M_A||^2 and ||M||^2 of each head, two tensors [heads], both differentiable, with M = `w_q` `w_k`^T.

    Rounding can make the first slightly negative near 0.
    """
    squared = ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((-2, -1))  # heads
    core = w_k.mT @ w_q  # heads d_head d_head
    trace = (core * core.mT).sum((-2, -1))  # heads; tr M^2
    return (squared - trace) / 2, squared


def _squares(factors: LiveFactors, part: PenalizedPart) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Return two differentiable tensors [heads]: the squared norm of the part `part` and the squared norm of the whole
    operator.

    `factors` has W_Q, W_K and the rotary geometry of the heads.
    """
    if part == "rope_phase":
        assert factors.rotary is not None
        real, imag = phase_squares(factors.w_q, factors.w_k, factors.rotary)
        return imag.sum(1), (real + imag).sum(1)
    antisymmetric, whole = antisymmetric_squares(factors.w_q, factors.w_k)
    return antisymmetric if part == "antisymmetric" else whole - antisymmetric, whole


def _require_a_share(view: AttentionView, whole: Float[Tensor, " heads"], layer: int, heads: list[int] | None) -> None:
    """Raise BadWeights if the squared norm of the query-key operator of some head of `layer` is 0 or not finite.

    `view` is the model, whose weights then tell whether NaN is in them. `whole` has these squared norms, `heads` the
    numbers of the heads; None: all heads of the layer.
    """
    zero = torch.nonzero(~((whole > 0) & whole.isfinite())).flatten().tolist()
    if not zero:
        return
    view.layer(layer)  # names a weight that is NaN or infinite
    head = zero[0] if heads is None else heads[zero[0]]
    raise BadWeights(
        f"{head_name(layer, head)}: the squared norm of its query-key operator is {whole[zero[0]].item()}, so no part "
        "has a share in it; leave the head out of heads="
    )
