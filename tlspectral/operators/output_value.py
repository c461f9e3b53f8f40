"""The output-value operator W_V W_O of a head, which writes `x @ W_V @ W_O` to the residual stream."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models import AttentionView, attention_view
from tlspectral.records import one_line
from tlspectral.spectra import ThinProduct


@dataclass(frozen=True)
class OVOperator:
    """`w_v @ w_o` of one head, acting on rows. `w_v` carries the input norm's gain.

    Under LayerNorm both sides are centred: the reading side because the norm removes the mean, the writing side because
    every later norm does. TransformerLens's `center_writing_weights` does the latter to the weights themselves. A norm
    behind the attention (Gemma 2 and 3, OLMo 2) is left out, with its gain.
    """

    layer: int
    head: int
    w_v: Float64[Tensor, "d_model d_head"]
    w_o: Float64[Tensor, "d_head d_model"]

    __repr__ = one_line

    def product(self) -> ThinProduct:
        """The operator as thin factors."""
        return ThinProduct(self.w_v, self.w_o.T.contiguous())

    def dense(self) -> Float64[Tensor, "d_model d_model"]:
        """The operator itself."""
        return self.w_v @ self.w_o


def ov_operators(model: Any, layer: int) -> list[OVOperator]:
    """Return the output-value operators of a layer's heads, in float64; grouped values are repeated per query head.

    Raises:
        BadHead: no such layer.
        UnsupportedArchitecture, BadWeights: the layer cannot be read.
    """
    return layer_ov_operators(attention_view(model), layer)


def layer_ov_operators(view: AttentionView, layer: int) -> list[OVOperator]:
    """Return `ov_operators` of a view."""
    factors = view.output(layer)
    w_o = factors.w_o
    if view.layer(layer).norm.kind == "LN":
        w_o = w_o - w_o.mean(2, keepdim=True)
    groups = len(w_o) // len(factors.w_v)
    return [OVOperator(layer, head, factors.w_v[head // groups], torch.clone(w_o[head])) for head in range(len(w_o))]
