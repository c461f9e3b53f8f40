"""The norms of an attention layer: of its input, and of its queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor

NormalizationKind = Literal["LN", "RMS", "none"]
_Record = TypeVar("_Record", bound="Castable")


# Largest root mean square of means over d_model, in units of rms / sqrt(d_model) and of the type's eps. Measured on
# twelve families with centred weights: .2 to 2.3 eps (float32, bfloat16 and float16), and .3 to 1.3, without eps, where
# weights are not centred.
_CENTRED_WITHIN = 8


def double(value: Tensor) -> Tensor:
    """Return a copy of the tensor `value` in float64 on the CPU, never the model's own memory."""
    return value.detach().cpu().to(torch.float64, copy=True)


@dataclass(frozen=True)
class Castable:
    """Base class of records that hold tensors and settings; `as_` makes a copy in another type."""

    def as_(self: _Record, cast: Callable[[Tensor], Tensor]) -> _Record:
        """Return a copy of the record with `cast` applied to each of its tensors, but not to records in it.

        cast: function from tensor to tensor, such as `double`.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: cast(value) for name, value in values.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class Normalization(Castable):
    """A normalisation x -> (x - mean) / sqrt(var + eps) * gain + bias.

    kind: "LN"; "RMS" (no mean is subtracted); "none" (identity).
    gain: factor that is applied (Gemma stores gain - 1); None if there is none or it is already folded into weights.
    bias: None if there is none or it is already folded.
    eps: added to the variance.
    """

    kind: NormalizationKind
    gain: Float[Tensor, "*width"] | None
    bias: Float[Tensor, "*width"] | None
    eps: float

    def normalized(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return x without its mean (LN only) and divided by its root mean square; gain and bias are not applied."""
        if self.kind == "none":
            return x
        x = self.centred(x)
        return x / self._root(x)

    def token_scale(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """Return the norm's factor 1 / sqrt(var + eps) for each token of the input x; 1 for kind "none"."""
        return self.scale_of_centred(self.centred(x))

    def scale_of_centred(self, centred: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """Return the norm's factor 1 / sqrt(var + eps) for each token, from an input that is already centred."""
        if self.kind == "none":
            return centred.new_ones(centred.shape[:-1])
        return self._root(centred).squeeze(-1).reciprocal()

    def gradient(
        self, of_normalized: Float[Tensor, "*receivers batch pos width"], x: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "*receivers batch pos width"]:
        """Return the gradient at x from `of_normalized`, the gradient at `normalized(x)`: its product with the
        transposed Jacobian.
        """
        if self.kind == "none":
            return of_normalized
        scale, centred = self.token_scale(x)[..., None], self.centred(x)
        along = (centred * of_normalized).mean(-1, keepdim=True) * scale.square() * centred
        return self.centred(scale * (of_normalized - along))

    def centred(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return x minus its mean for LayerNorm; x itself for other norms."""
        return x - x.mean(-1, keepdim=True) if self.kind == "LN" else x

    def _root(self, centred: Tensor) -> Tensor:
        """Return sqrt(mean(x^2) + eps) over the last axis, which stays with length 1. centred: x without its mean."""
        return (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


NO_NORM = Normalization("none", None, None, 0.0)
"""The norm of a layer whose attention reads the residual stream without a norm."""


class MlpInput(NamedTuple):
    """Where a layer shows the input of its MLP.

    Attributes:
        point: hook point, without the name of the layer.
        norm: norm between the residual stream and this point; gain and bias only if they act before the point.
    """

    point: str
    norm: Normalization


def folded_bias(
    weight: Float[Tensor, "heads d_model d_head"], bias: Float[Tensor, "heads d_head"] | None, norm: Normalization
) -> Float[Tensor, "heads d_head"]:
    """Return bias + norm.bias W: a projection's bias with the bias of the norm before it; differentiable.

    weight: W of the projection. bias: None counts as zeros.
    """
    folded = weight.new_zeros(weight.shape[0], weight.shape[2]) if bias is None else bias
    return folded if norm.bias is None else folded + torch.einsum("d,hdk->hk", norm.bias, weight)


def folded_weight(
    weight: Float[Tensor, "heads d_model d_head"], norm: Normalization
) -> Float[Tensor, "heads d_model d_head"]:
    """Return gain * W: the weight of a projection with the gain of the norm before it folded in; differentiable.

    For LayerNorm the mean over d_model is subtracted too.
    """
    if norm.gain is not None:
        # The type first: a gain read in float64 lies on the CPU where the device has no such type.
        weight = weight * norm.gain.to(weight.dtype).to(weight.device)[:, None]
    return weight - weight.mean(1, keepdim=True) if norm.kind == "LN" else weight


@dataclass(frozen=True)
class QueryKeyNorm(Castable):
    """x -> x / sqrt(mean(x^2) + eps) * gain on queries or on keys, before any rotation.

    A LayerNorm without bias first subtracts the mean of a head's columns, which is linear in x (`centred`). Mean and
    gain are folded into M, the query-key matrix W_Q W_K^T. One positive factor per token and head remains, which only
    scales the score. If the mean runs over all heads, all heads of a token have the same factor.

    Attributes:
        gain: factor that is applied: [d_head] if all heads share it, [heads, d_head] if it differs by head (key/value
            heads for keys); None without a gain.
        eps: added to the mean square.
        over_heads: the mean runs over all heads of a token (OLMo 2), not over each head's columns (Qwen3, Gemma 3).
        centred: the mean of a head's columns is subtracted first (StableLM 2 12B, Command R+).
    """

    gain: Float[Tensor, "*heads d_head"] | None
    eps: float
    over_heads: bool
    centred: bool = False

    def token_scale(self, x: Float[Tensor, "*batch heads d_head"]) -> Float[Tensor, "*batch heads"]:
        """Return the norm's factor 1/rms per token and head.

        x: queries or keys; of all heads if the mean runs over heads.
        """
        mean = self._without_mean(x).square().mean(-1)
        if self.over_heads:
            mean = mean.mean(-1, keepdim=True).expand_as(mean)
        return (mean + self.eps).rsqrt()

    def applied(
        self, x: Float[Tensor, "*batch heads d_head"], token_scale: Float[Tensor, "*batch heads"] | None = None
    ) -> Float[Tensor, "*batch heads d_head"]:
        """Return queries or keys after the norm, gain included. token_scale: used instead of the 1/rms of x."""
        scaled = self._without_mean(x) * (self.token_scale(x) if token_scale is None else token_scale)[..., None]
        return scaled if self.gain is None else scaled * self._gain_of(x.shape[-2]).to(x.dtype).to(x.device)

    def folded_into(self, weight: Float[Tensor, "heads d_model d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return `weight` (W_Q or W_K) times the norm's gain as a new tensor; a centred norm first removes the mean
        over a head's columns.
        """
        weight = self._without_mean(weight)
        if self.gain is None:
            return weight
        return weight * self._gain_of(len(weight)).to(weight.dtype).to(weight.device)[..., None, :]

    def of_heads(self, heads: list[int] | slice) -> "QueryKeyNorm":
        """Return a new `QueryKeyNorm` with the gains of these heads (indices or a slice), in the given order.

        A mean over heads still needs all heads.
        """
        if self.gain is None or self.gain.ndim == 1:
            return self
        return replace(self, gain=self.gain[heads])

    def _without_mean(self, x: Tensor) -> Tensor:
        """Return x minus the mean of its last axis if the norm is centred, else x itself."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _gain_of(self, n_heads: int) -> Tensor:
        """Return the gain for `n_heads` heads, repeated if several query heads share a key/value head."""
        assert self.gain is not None
        if self.gain.ndim == 1:
            return self.gain
        return repeat(self.gain, "kv_head d_head -> (kv_head group) d_head", group=n_heads // len(self.gain))


def is_centred(rows: Tensor, eps: float) -> bool:
    """Return True if the mean over the last axis is zero in every row of `rows`, up to rounding.

    eps: resolution of the stored type.
    """
    rows = double(rows)
    sizes = rows.square().mean(-1)
    rows, sizes = rows[sizes > 0], sizes[sizes > 0]
    # The root mean square over rows, because a single mean can be small by chance.
    means = (rows.mean(-1).square() * rows.shape[-1] / sizes).mean().sqrt()
    return bool(means <= _CENTRED_WITHIN * eps)  # False for NaN, where all rows are zero
