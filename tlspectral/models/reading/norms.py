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
    """Return a copy in float64 on the CPU, never the model's own memory."""
    return value.detach().cpu().to(torch.float64, copy=True)


@dataclass(frozen=True)
class Castable:
    """Tensors and settings, of which copies in other types are made."""

    def as_(self: _Record, cast: Callable[[Tensor], Tensor]) -> _Record:
        """Return a copy with what `cast` makes of each tensor; records within it stay as they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: cast(value) for name, value in values.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class Normalization(Castable):
    """A normalisation `x -> (x - mean) / sqrt(var + eps) * gain + bias`; RMS has no mean, "none" is the identity.

    `gain` is the factor applied (Gemma stores it less 1); None where there is none or it is already folded.
    """

    kind: NormalizationKind
    gain: Float[Tensor, "*width"] | None
    bias: Float[Tensor, "*width"] | None
    eps: float

    def normalized(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return `x` without its mean (LN) and scaled to unit variance; gain and bias are folded into weights."""
        if self.kind == "none":
            return x
        x = self.centred(x)
        return x / self._root(x)

    def token_scale(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """Return the factor `1 / sqrt(var + eps)` of each token; 1 without a norm."""
        return self.scale_of_centred(self.centred(x))

    def scale_of_centred(self, centred: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """Return `token_scale` of what is without its mean already, as `centred` has it."""
        if self.kind == "none":
            return centred.new_ones(centred.shape[:-1])
        return self._root(centred).squeeze(-1).reciprocal()

    def gradient(
        self, of_normalized: Float[Tensor, "*receivers batch pos width"], x: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "*receivers batch pos width"]:
        """Carry a gradient at `normalized(x)` back to `x`: multiply it by the transposed Jacobian of the norm."""
        if self.kind == "none":
            return of_normalized
        scale, centred = self.token_scale(x)[..., None], self.centred(x)
        along = (centred * of_normalized).mean(-1, keepdim=True) * scale.square() * centred
        return self.centred(scale * (of_normalized - along))

    def centred(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return `x` without its mean under LayerNorm; as it is under the others."""
        return x - x.mean(-1, keepdim=True) if self.kind == "LN" else x

    def _root(self, centred: Tensor) -> Tensor:
        return (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


NO_NORM = Normalization("none", None, None, 0.0)
"""The norm of a layer whose attention reads the residual stream as it is."""


class MlpInput(NamedTuple):
    """Where a layer shows what its MLP reads.

    Attributes:
        point: hook point behind the name of the layer.
        norm: between the residual stream and this point. It has gain and bias only if they act in front of the point.
    """

    point: str
    norm: Normalization


def folded_bias(
    weight: Float[Tensor, "heads d_model d_head"], bias: Float[Tensor, "heads d_head"] | None, norm: Normalization
) -> Float[Tensor, "heads d_head"]:
    """Return a projection's bias plus the projected bias of the norm in front of it, differentiable."""
    folded = weight.new_zeros(weight.shape[0], weight.shape[2]) if bias is None else bias
    return folded if norm.bias is None else folded + torch.einsum("d,hdk->hk", norm.bias, weight)


def folded_weight(
    weight: Float[Tensor, "heads d_model d_head"], norm: Normalization
) -> Float[Tensor, "heads d_model d_head"]:
    """Return a projection times the gain of the norm in front of it, centred under LayerNorm; differentiable."""
    if norm.gain is not None:
        # The type first: a gain read in float64 lies on the CPU where the device has no such type.
        weight = weight * norm.gain.to(weight.dtype).to(weight.device)[:, None]
    return weight - weight.mean(1, keepdim=True) if norm.kind == "LN" else weight


@dataclass(frozen=True)
class QueryKeyNorm(Castable):
    """`x -> x / sqrt(mean(x^2) + eps) * gain` on queries or on keys, before any rotation.

    A LayerNorm without bias subtracts the mean of a head's columns first, which is linear in x (`centred`). That and
    the gain are folded into M. What is left is one positive factor per token and head, which only scales the bilinear
    score. Where the mean runs over all heads, a token has the same factor in all of them.

    Attributes:
        gain: the factor applied, [d_head] where all heads share it and [heads, d_head] where each has its own
            (key/value heads of a norm of keys); None where there is none.
        over_heads: the mean runs over all heads of a token (OLMo 2), not over each head's columns (Qwen3, Gemma 3).
        centred: the mean of a head's columns is subtracted first (StableLM 2 12B, Command R+).
    """

    gain: Float[Tensor, "*heads d_head"] | None
    eps: float
    over_heads: bool
    centred: bool = False

    def token_scale(self, x: Float[Tensor, "*batch heads d_head"]) -> Float[Tensor, "*batch heads"]:
        """Return 1/rms per token and head. `x` holds all heads of a token where the mean runs over them."""
        mean = self._without_mean(x).square().mean(-1)
        if self.over_heads:
            mean = mean.mean(-1, keepdim=True).expand_as(mean)
        return (mean + self.eps).rsqrt()

    def applied(
        self, x: Float[Tensor, "*batch heads d_head"], token_scale: Float[Tensor, "*batch heads"] | None = None
    ) -> Float[Tensor, "*batch heads d_head"]:
        """Return queries or keys, normalised and times the gain. `token_scale` stands in for the 1/rms of `x`."""
        scaled = self._without_mean(x) * (self.token_scale(x) if token_scale is None else token_scale)[..., None]
        return scaled if self.gain is None else scaled * self._gain_of(x.shape[-2]).to(x.dtype).to(x.device)

    def folded_into(self, weight: Float[Tensor, "heads d_model d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return W_Q or W_K times the gain, its columns without their mean where the norm is centred."""
        weight = self._without_mean(weight)
        if self.gain is None:
            return weight
        return weight * self._gain_of(len(weight)).to(weight.dtype).to(weight.device)[..., None, :]

    def of_heads(self, heads: list[int] | slice) -> "QueryKeyNorm":
        """Return the norm of some of the heads, in the given order. A mean over all heads still needs all of them."""
        if self.gain is None or self.gain.ndim == 1:
            return self
        return replace(self, gain=self.gain[heads])

    def _without_mean(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _gain_of(self, n_heads: int) -> Tensor:
        assert self.gain is not None
        if self.gain.ndim == 1:
            return self.gain
        return repeat(self.gain, "kv_head d_head -> (kv_head group) d_head", group=n_heads // len(self.gain))


def is_centred(rows: Tensor, eps: float) -> bool:
    """Return whether the mean over the last axis is zero in every row, up to the rounding of a type."""
    rows = double(rows)
    sizes = rows.square().mean(-1)
    rows, sizes = rows[sizes > 0], sizes[sizes > 0]
    # The root mean square over rows, because a single mean can be small by chance.
    means = (rows.mean(-1).square() * rows.shape[-1] / sizes).mean().sqrt()
    return bool(means <= _CENTRED_WITHIN * eps)  # False for NaN, where all rows are zero
