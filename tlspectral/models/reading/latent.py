"""Latent attention (DeepSeek V2 and V3, GLM 4.7 flash and 5, Youtu): all heads project from a shared latent.

Let n be the normalised residual stream and g the gain of a latent's norm. W_D projects n down to the latent, and W_U
projects the latent up to each head. The rotating columns of the keys are shared by all heads. The score of a head is

    scale * a_i * (b_j n_i M_c n_j^T + n_i M_r(offset) n_j^T)
    M_c = [W_DQ g_q W_UQ] [W_DKV g_kv W_UK]^T over the columns that do not rotate.

a_i is 1/rms of the query's latent (1 without such a latent), and b_j is 1/rms of the key's latent. Source: DeepSeek-V2
(2024), section 2.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import in_float64, widened
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.norms import Castable, Normalization, folded_bias, folded_weight
from tlspectral.models.reading.special_cases import special_attention


class HeadInputs(NamedTuple):
    """Queries or keys of all heads before norm and rotation.

    projected: the queries or keys.
    token_scale: factor of the norm (1/rms of the latent) on each column; None if the norm computes it from `projected`.
    """

    projected: Float[Tensor, "*batch rows heads d_head"]
    token_scale: Float[Tensor, "*batch rows heads d_head"] | None


@dataclass(frozen=True)
class Latent(Castable):
    """A projection through a latent: x W_D + bias, then the norm, then W_U of each head.

    Norm and W_U act on the first `rank` columns of x W_D. The remaining columns, the keys that rotate, skip both and
    are the same for all heads.

    Attributes:
        down: W_D, which projects the residual stream down to the latent and to the columns that rotate.
        bias: bias of W_D, None without one.
        gain: gain of the latent's norm, None without one.
        eps: eps of the latent's norm.
        up: W_U of each head, which projects the latent up to the head's columns.
        family: class name of the attention, for messages.
        measured_scale: mean 1/rms of the latent on real tokens, used in M. None: 1/rms for white input.
    """

    down: Float[Tensor, "d_model width"]
    bias: Float[Tensor, "width"] | None
    gain: Float[Tensor, "rank"] | None
    eps: float
    up: Float[Tensor, "heads rank columns"]
    family: str
    measured_scale: float | None = None

    over_heads = False

    @property
    def rank(self) -> int:
        """Number of columns of the latent, to which the norm and W_U apply."""
        return self.up.shape[1]

    @property
    def bias_or_zero(self) -> Float[Tensor, "width"]:
        """The bias of W_D, the projection down to the latent; zeros without a bias."""
        return self.down.new_zeros(self.down.shape[1]) if self.bias is None else self.bias

    @property
    def white_scale(self) -> Float[Tensor, ""]:
        """1/rms of the latent for white input (covariance I): sqrt(rank) / ||W_D||, a tensor with one number.

        The gain of the norm before W_D has to be folded into W_D first (`behind`). W_D's own scale is arbitrary because
        the norm removes it. The product of W_D and 1/rms does not depend on it.
        """
        return math.sqrt(self.rank) / torch.linalg.matrix_norm(self.down[:, : self.rank])

    def of_heads(self, heads: list[int] | slice) -> "Latent":
        """Return a new `Latent` with the projection W_U of only these heads (indices or a slice), in the given order.

        The other tensors are shared with this object.
        """
        return replace(self, up=self.up[heads])

    def behind(self, norm: Normalization) -> "Latent":
        """Return a new `Latent` with gain and bias of the input norm `norm` folded into W_D and the bias of W_D."""
        bias = folded_bias(self.down[None], self.bias_or_zero[None], norm)[0]
        return replace(self, down=folded_weight(self.down[None], norm)[0], bias=bias)

    def projection(self) -> Float[Tensor, "heads d_model d_head"]:
        """Return each head's projection from the residual stream: W_D g W_U, then rotating columns; differentiable.

        W_D projects down to the latent, g is the gain of its norm, and W_U projects up to each head. The norm's 1/rms
        is left out.
        """
        return self.by_head(self.down)

    def values(self, up: Float[Tensor, "heads rank d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return the projection W_D g W_U to each head's values, for their own W_U (`up`).

        W_D projects down to the latent, and g is the gain of its norm.
        """
        return replace(self, down=self.down[:, : self.rank], bias=None, up=up).projection()

    def folded_into(self, weight: Float[Tensor, "heads d_model d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return W_K with its latent columns times 1/rms of the latent: `measured_scale`, or by default `white_scale`.

        weight: W_K or W_Q of some heads. W_Q is returned unchanged, because its whole query is scaled by one number per
        token.
        """
        columns = self.up.shape[2]
        if weight.shape[2] == columns:
            return weight
        scale = self.white_scale if self.measured_scale is None else self.measured_scale
        return torch.cat([weight[..., :columns] * scale, weight[..., columns:]], dim=-1)

    def scale_of(self, latents: Float[Tensor, "*batch rows width"]) -> Float[Tensor, "*batch rows heads d_head"]:
        """Return the norm's factor 1/rms of each token's latent, repeated for each column of each head.

        latents: the output of W_D before the norm. The factor is 1 for the columns that skip the norm (the rotating
        keys).
        """
        scale = (latents[..., : self.rank].square().mean(-1) + self.eps).rsqrt()
        unscaled = latents.new_ones(*scale.shape, latents.shape[-1] - self.rank)
        columns = torch.cat([scale[..., None].expand(*scale.shape, self.up.shape[2]), unscaled], dim=-1)
        return columns[..., None, :].expand(*scale.shape, len(self.up), columns.shape[-1])

    def inputs(self, captured: Float[Tensor, "*batch rows width"]) -> HeadInputs:
        """Return queries or keys of all heads as `HeadInputs`.

        captured: the latents of a run, the output of W_D before the norm.
        """
        latents = widened(captured)

        def alike(value: Tensor) -> Tensor:
            # Through float64 on the CPU, because one of the two devices may lack it.
            return in_float64(value).to(latents.dtype).to(latents.device)

        latent = replace(self, gain=None if self.gain is None else alike(self.gain), up=alike(self.up))
        return HeadInputs(
            rearrange(latent.by_head(latents), "... head row d_head -> ... row head d_head"), self.scale_of(latents)
        )

    def token_scale(self, x: Float[Tensor, "*batch heads d_head"]) -> Float[Tensor, "*batch heads"]:
        """Raise UnsupportedArchitecture: the norm acts on latents, so its 1/rms cannot be computed from `x`, the
        queries or keys.
        """
        raise UnsupportedArchitecture(
            f"latent attention ({self.family}): its norm acts on latents, and only queries or keys of heads were "
            "given: take a model without latent attention"
        )

    def applied(
        self, x: Float[Tensor, "*batch heads d_head"], token_scale: Float[Tensor, "*batch heads d_head"] | None = None
    ) -> Float[Tensor, "*batch heads d_head"]:
        """Return the queries or keys `x` times `token_scale`, the 1/rms of their latents. The gain is in W_U already.

        Without `token_scale` an UnsupportedArchitecture is raised, because it cannot be computed from `x`.
        """
        return x * (self.token_scale(x) if token_scale is None else token_scale)

    def by_head(self, rows: Float[Tensor, "*batch rows width"]) -> Float[Tensor, "*batch heads rows d_head"]:
        """Return queries or keys by head from rows after W_D (latents), without the norm's factor 1/rms.

        The columns that skip the norm (the rotating keys) are appended unchanged.
        """
        latents, unscaled = rows[..., None, :, : self.rank], rows[..., None, :, self.rank :]
        projected = (latents if self.gain is None else latents * self.gain) @ self.up
        return torch.cat([projected, unscaled.expand(*projected.shape[:-1], unscaled.shape[-1])], dim=-1)


def latent_projections(wrapped: Any, read_norm: Callable[..., Normalization], layer: int) -> dict[str, Any]:
    """Return weights and norms of a latent attention, as a dict from field of `RawAttention` to value.

    W_Q, W_K and W_V are W_U of each head, which projects up from the latent.

    wrapped: the attention module of transformers. read_norm: function of (norm module, shape of its gain, place for
    messages) that returns a `Normalization`. layer: for messages.
    """
    family = type(wrapped).__name__
    heads, content = wrapped.num_heads, wrapped.qk_nope_head_dim
    keys_values = weight_by_head(wrapped.kv_b_proj.weight, heads)
    w_k, w_v = keys_values[..., :content], keys_values[..., content:]
    down = wrapped.kv_a_proj_with_mqa
    norm = _latent_norm(wrapped.kv_a_layernorm, w_k.shape[1], read_norm, f"layer {layer}, norm of the keys' latent")
    k_norm = Latent(down.weight.mT, down.bias, norm.gain, norm.eps, w_k, family)
    if wrapped.q_lora_rank is None:
        w_q, q_norm = weight_by_head(wrapped.q_proj.weight, heads), None
    else:
        w_q = weight_by_head(wrapped.q_b_proj.weight, heads)
        norm = _latent_norm(wrapped.q_a_layernorm, w_q.shape[1], read_norm, f"layer {layer}, norm of queries' latent")
        q_norm = Latent(wrapped.q_a_proj.weight.mT, wrapped.q_a_proj.bias, norm.gain, norm.eps, w_q, family)
    w_o = rearrange(wrapped.o_proj.weight, "d_model (head d_head) -> head d_head d_model", head=heads)
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    return weights | {"b_q": None, "b_k": None, "q_norm": q_norm, "k_norm": k_norm}


def weight_by_head(weight: Float[Tensor, "rows width"], heads: int) -> Float[Tensor, "heads width d_head"]:
    """Return the weight of a projection by head, as a view, transposed so that rows multiply it from the left. heads:
    number of heads.
    """
    return rearrange(weight, "(head d_head) width -> head width d_head", head=heads)


def _latent_norm(module: Any, rank: int, read_norm: Callable[..., Normalization], where: str) -> Normalization:
    """Return the norm of a latent as a `Normalization`, from its module.

    rank: number of columns of the latent. read_norm: function that reads a norm module. where: layer and role, for
    messages. Raises UnsupportedArchitecture unless it is an RMS norm without bias and the rank is not 0.
    """
    if rank == 0:
        raise UnsupportedArchitecture(
            f"{where}: the latent has rank 0, so no head can be read from it: take another model"
        )
    norm = read_norm(getattr(module, "original_component", module), shape=(rank,), where=where)
    if norm.kind != "RMS" or norm.bias is not None:
        raise UnsupportedArchitecture(
            f"{where}: found a {norm.kind} norm{'' if norm.bias is None else ' with bias'}; only an RMS norm without "
            "bias is supported, because otherwise scores have terms that are not in M. Take another model"
        )
    return norm


def adjacent_pairs(wrapped: Any) -> bool:
    """Return True if `wrapped`, an attention module of transformers, rotates columns (0, 1), (2, 3), ... as pairs.

    Some latent attention does, and Llama 4.
    """
    stated = hasattr(wrapped, "kv_b_proj") and bool(getattr(wrapped.config, "rope_interleave", False))
    return special_attention(wrapped).adjacent_pairs or stated


def complex_tables(module: Any, n_positions: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [n_positions, pairs], scaled, of `module`, a rotary module of transformers that computes
    complex numbers.
    """
    # In the type that the module computes in.
    angles = torch.arange(n_positions, device=module.inv_freq.device)[:, None].float() * module.inv_freq.float()
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
