"""Latent attention (DeepSeek V2 and V3, GLM 4.7 flash and 5, Youtu): projections of all heads from a shared latent.

With n the normalised residual stream, g the gains of the latents' norms, and keys that all heads share in the columns
that rotate, a head's score is

    scale * a_i * (b_j n_i M_c n_j^T + n_i M_r(offset) n_j^T)
    M_c = [W_DQ g_q W_UQ] [W_DKV g_kv W_UK]^T over the columns that do not rotate,

with a_i and b_j 1/rms of the latents of queries and of keys and values. Without a latent of queries a_i is 1. Source:
DeepSeek-V2 (2024), section 2.1.
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
    """Queries or keys of all heads before norm and rotation, and the factor that a norm puts on each column."""

    projected: Float[Tensor, "*batch rows heads d_head"]
    token_scale: Float[Tensor, "*batch rows heads d_head"] | None


@dataclass(frozen=True)
class Latent(Castable):
    """`x -> x W_D + bias`, of which the first `rank` columns are normalised and projected by W_U of each head.

    What is left of the columns goes beside norm and W_U, to all heads alike: the keys that rotate.

    Attributes:
        down: W_D; its last columns are those beside the norm.
        bias: of W_D, None without one.
        gain: of the norm, None without one.
        up: W_U of each head.
        family: name of the attention's class.
        measured_scale: 1/rms of the latent of real tokens, which M then has; None for white input's.
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
        """Columns of the latent."""
        return self.up.shape[1]

    @property
    def bias_or_zero(self) -> Float[Tensor, "width"]:
        """The bias of W_D, 0 without one."""
        return self.down.new_zeros(self.down.shape[1]) if self.bias is None else self.bias

    @property
    def white_scale(self) -> Float[Tensor, ""]:
        """1/rms of the latent of white input, sqrt(rank) / ||W_D||, W_D with the gain of the input's norm (`behind`).

        The scale of W_D is arbitrary, since the norm takes it out again: W_D and 1/rms together are not.
        """
        return math.sqrt(self.rank) / torch.linalg.matrix_norm(self.down[:, : self.rank])

    def of_heads(self, heads: list[int] | slice) -> "Latent":
        """Return the latent as some of the heads read it, in the given order."""
        return replace(self, up=self.up[heads])

    def behind(self, norm: Normalization) -> "Latent":
        """Return the latent of a normalised residual stream, gain and bias of the input's norm folded in."""
        bias = folded_bias(self.down[None], self.bias_or_zero[None], norm)[0]
        return replace(self, down=folded_weight(self.down[None], norm)[0], bias=bias)

    def projection(self) -> Float[Tensor, "heads d_model d_head"]:
        """Return `W_D g W_U` of each head, with the columns beside the norm behind; differentiable."""
        return self.by_head(self.down)

    def values(self, up: Float[Tensor, "heads rank d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return `W_D g W_U` of another W_U, without the columns beside the norm."""
        return replace(self, down=self.down[:, : self.rank], bias=None, up=up).projection()

    def folded_into(self, weight: Float[Tensor, "heads d_model d_head"]) -> Float[Tensor, "heads d_model d_head"]:
        """Return W_K, its columns from the latent times the factor that M has; W_Q, scaled as a whole, as it is."""
        columns = self.up.shape[2]
        if weight.shape[2] == columns:
            return weight
        scale = self.white_scale if self.measured_scale is None else self.measured_scale
        return torch.cat([weight[..., :columns] * scale, weight[..., columns:]], dim=-1)

    def scale_of(self, latents: Float[Tensor, "*batch rows width"]) -> Float[Tensor, "*batch rows heads d_head"]:
        """Return 1/rms of the latents for each column of a head, 1 for those beside the norm."""
        scale = (latents[..., : self.rank].square().mean(-1) + self.eps).rsqrt()
        beside = latents.new_ones(*scale.shape, latents.shape[-1] - self.rank)
        columns = torch.cat([scale[..., None].expand(*scale.shape, self.up.shape[2]), beside], dim=-1)
        return columns[..., None, :].expand(*scale.shape, len(self.up), columns.shape[-1])

    def inputs(self, captured: Float[Tensor, "*batch rows width"]) -> HeadInputs:
        """Return queries or keys of all heads from latents as a run has them, behind W_D and before the norm."""
        latents = widened(captured)

        def alike(value: Tensor) -> Tensor:
            # By way of float64, which one of the two devices may lack.
            return in_float64(value).to(latents.dtype).to(latents.device)

        latent = replace(self, gain=None if self.gain is None else alike(self.gain), up=alike(self.up))
        return HeadInputs(
            rearrange(latent.by_head(latents), "... head row d_head -> ... row head d_head"), self.scale_of(latents)
        )

    def token_scale(self, x: Float[Tensor, "*batch heads d_head"]) -> Float[Tensor, "*batch heads"]:
        """Refuse queries or keys without their latents, of which the norm is. Raises UnsupportedArchitecture."""
        raise UnsupportedArchitecture(f"latent attention ({self.family}): 1/rms of a latent is not that of a head")

    def applied(
        self, x: Float[Tensor, "*batch heads d_head"], token_scale: Float[Tensor, "*batch heads d_head"] | None = None
    ) -> Float[Tensor, "*batch heads d_head"]:
        """Return queries or keys behind the norm, whose gain is in W_U already, given the scale of their latents."""
        return x * (self.token_scale(x) if token_scale is None else token_scale)

    def by_head(self, rows: Float[Tensor, "*batch rows width"]) -> Float[Tensor, "*batch heads rows d_head"]:
        """Return what W_U of each head makes of rows behind W_D, before the factor of the norm."""
        latents, beside = rows[..., None, :, : self.rank], rows[..., None, :, self.rank :]
        projected = (latents if self.gain is None else latents * self.gain) @ self.up
        return torch.cat([projected, beside.expand(*projected.shape[:-1], beside.shape[-1])], dim=-1)


def latent_projections(wrapped: Any, read_norm: Callable[..., Normalization], layer: int) -> dict[str, Any]:
    """Return weights and norms of a layer by the names of `RawAttention`: W_Q, W_K and W_V are W_U of each head.

    `read_norm` reads a module of a `shape`, and says `where` it is if it cannot.
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
    """Return the weight of a projection by head, as it multiplies rows from the right."""
    return rearrange(weight, "(head d_head) width -> head width d_head", head=heads)


def _latent_norm(module: Any, rank: int, read_norm: Callable[..., Normalization], where: str) -> Normalization:
    if rank == 0:
        raise UnsupportedArchitecture(f"{where}: the latent has rank 0, so there is nothing to read from it")
    norm = read_norm(getattr(module, "original_component", module), shape=(rank,), where=where)
    if norm.kind != "RMS" or norm.bias is not None:
        raise UnsupportedArchitecture(f"{where} is no RMS norm without bias, so scores have terms that M does not hold")
    return norm


def adjacent_pairs(wrapped: Any) -> bool:
    """Return whether columns form pairs (0, 1), (2, 3), ... by the attention's class: latent attention, and Llama 4."""
    stated = hasattr(wrapped, "kv_b_proj") and bool(getattr(wrapped.config, "rope_interleave", False))
    return special_attention(wrapped).adjacent_pairs or stated


def complex_tables(module: Any, n_positions: int) -> tuple[Tensor, Tensor]:
    """Return the scaled (cos, sin) of a rotary module that gives complex numbers."""
    # In the type that the module computes in.
    angles = torch.arange(n_positions, device=module.inv_freq.device)[:, None].float() * module.inv_freq.float()
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
