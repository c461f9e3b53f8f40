"""The parameters of one attention layer as plain tensors: as a backend stores them, and folded in float64."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from tlspectral.algebra.records import one_line
from tlspectral.algebra.rotary import RotaryGeometry, widened, with_gain_and_phase
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.reading.alibi import Alibi
from tlspectral.models.reading.latent import HeadInputs, Latent
from tlspectral.models.reading.norms import Normalization, QueryKeyNorm, double, folded_bias, folded_weight


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What a layer has beside its projections.

    Past `even_scale_up_to` tokens some models scale a query by its position (Ministral 3, Llama 4); None where none is
    scaled. In prompts longer than `selected_keys` an indexer picks so many keys for each query (GLM 5); None without.
    Gemma 4 has a norm of values, `v_norm`, so that what a head writes is linear in the stream up to a factor per token.
    In some of its layers values are the keys before norm and rotation.
    """

    norm: Normalization
    q_norm: QueryKeyNorm | Latent | None
    k_norm: QueryKeyNorm | Latent | None
    score_scale: float
    softcap: float | None
    alibi: Alibi | None
    rotary: RotaryGeometry | None
    even_scale_up_to: int | None = None
    selected_keys: int | None = None
    v_norm: QueryKeyNorm | None = None
    keys_are_values: bool = False

    __repr__ = one_line

    def inputs(self, what: Literal["query", "key"], captured: Float[Tensor, "*captured"]) -> HeadInputs:
        """Return queries or keys by head, before a query/key norm and rotation, from what passes their hook point."""
        norm = self.q_norm if what == "query" else self.k_norm
        if isinstance(norm, Latent):
            return norm.inputs(captured)
        if isinstance(self.k_norm, Latent):  # queries without a latent of their own
            captured = rearrange(captured, "... (head d_head) -> ... head d_head", head=len(self.k_norm.up))
        return HeadInputs(captured, None)

    def values(self, captured: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch pos kv_heads d_head"]:
        """Return values by head from what passes their hook point; there values of a latent follow the head's keys."""
        if not isinstance(self.k_norm, Latent):
            return captured if self.v_norm is None else self.v_norm.applied(captured)
        heads, _, columns = self.k_norm.up.shape
        return rearrange(captured, "... (head d_head) -> ... head d_head", head=heads)[..., columns:]

    def normed(self, what: Literal["query", "key"], captured: Float[Tensor, "*captured"]) -> Float[Tensor, "*by_head"]:
        """Return `inputs` behind the norm of queries or keys, where there is one, in float32 at least."""
        x, scale = self.inputs(what, widened(captured))
        norm = self.q_norm if what == "query" else self.k_norm
        return x if norm is None else norm.applied(x, scale)

    def without_weights(self) -> "LayerSettings":
        """Return the settings alone, of a layer whose weights may be copies."""
        return LayerSettings(**{each.name: getattr(self, each.name) for each in fields(LayerSettings)})

    @property
    def valid_up_to(self) -> int | None:
        """Tokens up to which frequencies and score scale hold, None where they hold at every length."""
        limits = (self.even_scale_up_to, self.rotary and self.rotary.valid_up_to)
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, kw_only=True, repr=False)
class RawAttention(LayerSettings):
    """The parameters of a layer as a backend holds them, before any folding.

    Weights are [heads, d_model, d_head] for W_Q, W_K and W_V ([kv_heads, ...] for the last two) and
    [heads, d_head, d_model] for W_O, in TransformerLens order: `q = x @ W_Q + b_Q`. Those that read a latent, which is
    then the norm of queries or keys, are [heads, rank, columns].

    A gated attention has W_gate, [heads, d_model, columns], which makes of the same input what z is multiplied by,
    behind an activation (Qwen3-Next, AFMoE); `gate_behind_queries`: in one projection with W_Q.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None = None
    w_gate: Tensor | None = None
    b_gate: Tensor | None = None
    gate_behind_queries: bool = False

    @property
    def n_kv_receivers(self) -> int:
        """Receivers of keys, and as many of values: a head each, or all heads together where they read one latent."""
        return 1 if isinstance(self.k_norm, Latent) else len(self.w_k)


@dataclass(frozen=True)
class OutputFactors:
    """Value and output weights of the heads: `W_V` carries the input norm's gain (LN: centred), `W_O` is as stored."""

    w_v: Float64[Tensor, "kv_heads d_model d_head"]
    w_o: Float64[Tensor, "heads d_head d_model"]
    storage_dtype: torch.dtype

    __repr__ = one_line


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionLayer(LayerSettings):
    """A layer's query-key side with the input norm folded in: `score = scale * (n W_Q + b_Q) . (n W_K + b_K)`.

    `n` is the normalised residual stream without gain and bias. For LayerNorm both factors are centred, so that
    `W_Q W_K^T` is `C M C` (FP section 3), and C is never formed. Keys are as stored, one per key/value head.
    """

    layer: int
    w_q: Float64[Tensor, "heads d_model d_head"]
    b_q: Float64[Tensor, "heads d_head"]
    w_k: Float64[Tensor, "kv_heads d_model d_head"]
    b_k: Float64[Tensor, "kv_heads d_head"]
    storage_dtype: torch.dtype

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.w_q.shape[0]

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads."""
        return self.w_k.shape[0]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.w_q.shape[1]

    @property
    def d_head(self) -> int:
        """Columns of a head."""
        return self.w_q.shape[2]

    @property
    def effective_dimension(self) -> int:
        """Dimension of the space that M acts on: d_model, less 1 for LayerNorm, which removes the mean."""
        return self.d_model - (self.norm.kind == "LN")

    @property
    def bilinear(self) -> Literal["exact", "up_to_token_scale", "up_to_content_scale", "softcapped"]:
        """How the score depends on `n M n^T`; the column `bilinear` explains the values."""
        if self.softcap is not None:
            return "softcapped"
        if isinstance(self.k_norm, Latent):
            return "up_to_content_scale"
        return "exact" if self.q_norm is None else "up_to_token_scale"

    def kv_head(self, head: int) -> int:
        """Return the key/value head that a query head reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def operator_factors(
        self,
    ) -> tuple[Float64[Tensor, "heads d_model d_head"], Float64[Tensor, "heads d_model d_head"]]:
        """Return W_Q and W_K with the gains of a query/key norm folded in, and keys repeated, one per query head.

        Columns of keys from a latent carry its 1/rms for white input (`Latent.white_scale`), or what was measured.
        W_Q of a spectral layer also carries its gain and phase, as its M_t do.
        """
        w_q = self.w_q if self.q_norm is None else self.q_norm.folded_into(self.w_q)
        w_k = self.w_k if self.k_norm is None else self.k_norm.folded_into(self.w_k)
        if self.rotary is not None:
            w_q = with_gain_and_phase(w_q, self.rotary)
        groups = self.n_heads // self.n_kv_heads
        return w_q, w_k if groups == 1 else w_k.repeat_interleave(groups, dim=0)


def _query_key_parameters(raw: RawAttention) -> dict[str, Tensor | None]:
    parameters = {
        "W_Q": raw.w_q,
        "b_Q": raw.b_q,
        "W_K": raw.w_k,
        "b_K": raw.b_k,
        "input norm gain": raw.norm.gain,
        "input norm bias": raw.norm.bias,
        "query norm gain": raw.q_norm.gain if raw.q_norm else None,
        "key norm gain": raw.k_norm.gain if raw.k_norm else None,
    }
    for role, latent in (("queries", raw.q_norm), ("keys and values", raw.k_norm)):
        if isinstance(latent, Latent):
            parameters |= {f"W_D of {role}": latent.down, f"bias of W_D of {role}": latent.bias}
    if raw.rotary is not None and raw.rotary.per_head:
        parameters |= {
            "spectral omega": raw.rotary.theta,
            "spectral phase": raw.rotary.phase,
            "spectral gain": raw.rotary.gain,
        }
    return parameters


def hashed_sides(raw: RawAttention) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return what the hash of a layer is of: the parameters of its query-key side, and of its values and output.

    Raises BadWeights for a weight on the meta device, such as one that accelerate loads when it is used.
    """
    sides: tuple[list[Tensor | None], list[Tensor | None]]
    sides = list(_query_key_parameters(raw).values()), [raw.w_v, raw.w_o]
    if any(value is not None and value.is_meta for side in sides for value in side):
        raise BadWeights("a weight is on the meta device, so the layer has no hash; load the model with its weights")
    return sides


def fold_attention(raw: RawAttention, layer: int) -> AttentionLayer:
    """Fold the input norm into float64 copies of query and key weights, on the CPU. Raises as `require_readable`."""
    for role, value in _query_key_parameters(raw).items():
        require_readable(value, f"layer {layer}, {role}")
    (w_q, b_q), (w_k, b_k) = (_fold(*projection(raw, what, double), raw.norm) for what in ("q", "k"))
    settings: dict[str, Any] = {**vars(raw.without_weights())}
    for name, norm in (("q_norm", raw.q_norm), ("k_norm", raw.k_norm)):
        norm = norm and norm.as_(double)
        settings[name] = norm.behind(raw.norm.as_(double)) if isinstance(norm, Latent) else norm
    return AttentionLayer(layer=layer, w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, storage_dtype=raw.w_q.dtype, **settings)


def fold_output(raw: RawAttention, layer: int) -> OutputFactors:
    """Fold the input norm's gain into float64 copies of the value weights, on the CPU. Raises as `fold_attention`."""
    for role, value in (("W_V", raw.w_v), ("W_O", raw.w_o), ("input norm gain", raw.norm.gain)):
        require_readable(value, f"layer {layer}, {role}")
    w_v = _fold(projection(raw, "v", double)[0], None, raw.norm)[0]
    if isinstance(raw.k_norm, Latent):
        w_v = w_v * raw.k_norm.as_(double).behind(raw.norm.as_(double)).white_scale
    return OutputFactors(w_v, double(raw.w_o), raw.w_v.dtype)


def key_value_groups(raw: RawAttention) -> Iterator[tuple[slice, RawAttention]]:
    """Yield the key/value groups of a layer: the slice of query heads that read one key/value head, and its parameters.

    Only one group need then be in float64. The M of a group are the layer's. Its scores are not, where a
    query/key norm takes its mean over all heads.
    """
    for heads, key in _slices_of_groups(raw.w_q, raw.w_k):
        yield heads, _of_heads(raw, heads, key)


def folded_groups(layer: AttentionLayer, output: OutputFactors) -> list[tuple[AttentionLayer, OutputFactors]]:
    """Return the key/value groups of a layer that is folded already, with their values and outputs, as views of it."""
    return [
        (
            replace(
                layer,
                w_q=layer.w_q[heads],
                b_q=layer.b_q[heads],
                w_k=layer.w_k[key],
                b_k=layer.b_k[key],
                **_settings_of_heads(layer, heads, key),
            ),
            replace(output, w_v=output.w_v[key], w_o=output.w_o[heads]),
        )
        for heads, key in _slices_of_groups(layer.w_q, layer.w_k)
    ]


def _slices_of_groups(w_q: Tensor, w_k: Tensor) -> list[tuple[slice, slice]]:
    size = len(w_q) // len(w_k)
    return [(slice(index * size, (index + 1) * size), slice(index, index + 1)) for index in range(len(w_k))]


def _settings_of_heads(layer: LayerSettings, heads: list[int] | slice, keys: list[int] | slice) -> dict[str, Any]:
    return {
        "q_norm": layer.q_norm and layer.q_norm.of_heads(heads),
        "k_norm": layer.k_norm and layer.k_norm.of_heads(keys),
        "alibi": layer.alibi and layer.alibi.of_heads(heads),
        "rotary": layer.rotary and layer.rotary.of_heads(heads),
    }


def _of_heads(raw: RawAttention, heads: list[int] | slice, keys: list[int] | slice) -> RawAttention:
    """Return the parameters of some query heads and of the key/value heads that they read, in the given order."""
    return replace(
        raw,
        w_q=raw.w_q[heads],
        w_k=raw.w_k[keys],
        w_v=raw.w_v[keys],
        w_o=raw.w_o[heads],
        b_q=None if raw.b_q is None else raw.b_q[heads],
        b_k=None if raw.b_k is None else raw.b_k[keys],
        b_v=None if raw.b_v is None else raw.b_v[keys],
        **_settings_of_heads(raw, heads, keys),
    )


def softcapped(scores: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    """Return scaled scores under a softcap (Gemma 2); as they are for None."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def projection(
    raw: RawAttention, what: Literal["q", "k", "v"], cast: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "heads d_model d_head"], Float[Tensor, "heads d_head"] | None]:
    """Return W_Q, W_K or W_V from the normalised residual stream to each head, and its bias; differentiable.

    Through a latent it has the gain of the latent's norm, and not the factor that this puts on each token.
    """
    latent = raw.q_norm if what == "q" else raw.k_norm
    if isinstance(latent, Latent):
        latent = latent.as_(cast)
        if what == "v":
            return latent.values(cast(raw.w_v)), None
        return latent.projection(), None if latent.bias is None else latent.by_head(latent.bias[None])[:, 0]
    weight, bias = {"q": (raw.w_q, raw.b_q), "k": (raw.w_k, raw.b_k), "v": (raw.w_v, None)}[what]
    return cast(weight), None if bias is None else cast(bias)


def _fold(weight: Tensor, bias: Tensor | None, norm: Normalization) -> tuple[Tensor, Tensor]:
    norm = norm.as_(double)
    return folded_weight(weight, norm), folded_bias(weight, bias, norm)


class LiveFactors(NamedTuple):
    """W_Q and W_K of some query heads, through which gradients reach the model's parameters, and their rotary geometry.

    They are on the model's device, in the type that it stores them in, float32 at least. Grouped keys are repeated.
    """

    w_q: Float[Tensor, "heads d_model d_head"]
    w_k: Float[Tensor, "heads d_model d_head"]
    rotary: RotaryGeometry | None


def live_factors(raw: RawAttention, layer: int, heads: list[int] | None, *, folded: bool) -> LiveFactors:
    """Return the factors of some heads (None: all), folded as `fold_attention` and `operator_factors` do, or as stored.

    Raises BadWeights. That a weight is finite is not checked: in a training step it would cost as much as the products.
    """
    for role, value in _query_key_parameters(raw).items():
        _require_floating(value, f"layer {layer}, {role}")
    groups = len(raw.w_q) // len(raw.w_k)
    queries = list(range(len(raw.w_q))) if heads is None else heads
    keys = sorted({head // groups for head in queries})
    # All of them without a copy.
    chosen = raw if queries == list(range(len(raw.w_q))) else _of_heads(raw, queries, keys)
    w_q, w_k = (projection(chosen, what, widened)[0] for what in ("q", "k"))
    rotary = chosen.rotary
    if folded:
        w_q, w_k = folded_weight(w_q, raw.norm), folded_weight(w_k, raw.norm)
        q_norm, k_norm = chosen.q_norm, chosen.k_norm
        if isinstance(k_norm, Latent):
            k_norm = k_norm.as_(widened).behind(raw.norm)
        w_q = w_q if q_norm is None else q_norm.folded_into(w_q)
        w_k = w_k if k_norm is None else k_norm.folded_into(w_k)
        w_q = w_q if rotary is None else with_gain_and_phase(w_q, rotary)
    read = [keys.index(head // groups) for head in queries]
    return LiveFactors(w_q, w_k if read == list(range(len(w_k))) else w_k[read], rotary)


def require_even_scale(layer: RawAttention | AttentionLayer, index: int, n_positions: int) -> None:
    """Refuse a prompt past the length up to which all queries of a layer have one score scale. Raises ValueError."""
    limit = layer.even_scale_up_to
    if limit is not None and n_positions > limit:
        raise ValueError(
            f"layer {index}: the prompt has {n_positions} tokens, and from token {limit} on this model scales "
            "queries by their position (llama_4_scaling_beta, attn_temperature_tuning), which is not modelled; use "
            f"prompts of at most {limit} tokens"
        )


def require_every_key(layers: Iterable[LayerSettings], n_positions: int, advice: str) -> None:
    """Refuse a prompt that is longer than what an indexer lets a query see. Raises ValueError."""
    selected = min((one.selected_keys for one in layers if one.selected_keys is not None), default=n_positions)
    if n_positions > selected:
        raise ValueError(
            f"the prompt has {n_positions} tokens, but an indexer of this model lets a query see {selected} keys that "
            f"it picks, {advice}"
        )


def require_own_projections(layer: LayerSettings, index: int, reason: str | None = None) -> None:
    """Refuse a layer whose values are its keys, and for a reason one of latents. Raises UnsupportedArchitecture."""
    if layer.keys_are_values:
        raise UnsupportedArchitecture(f"layer {index}: values are keys before norm and rotation, not told apart here")
    if reason is not None and isinstance(layer.k_norm, Latent):
        raise UnsupportedArchitecture(f"layer {index}: latent attention ({layer.k_norm.family}); {reason}")


def require_unclipped(limit: float | None, layer: int) -> None:
    """Refuse a layer that clips queries and keys at a limit (OLMo 1.7, MPT). Raises UnsupportedArchitecture."""
    if limit is not None:
        raise UnsupportedArchitecture(
            f"layer {layer}: queries and keys are clipped at {limit} (clip_qkv), so scores are no bilinear form of the "
            "residual stream"
        )


def require_readable(value: Tensor | None, where: str) -> None:
    """Refuse weights without data (meta device), quantised, NaN or infinite: BadWeights; `where` is layer and role."""
    _require_floating(value, where)
    # A NaN makes both NaN. The extremes take a twentieth of the time of isfinite on every value.
    if value is not None and value.numel() and not bool(torch.stack(value.detach().aminmax()).isfinite().all()):
        bad = int((~torch.isfinite(value)).sum())
        raise BadWeights(f"{where}: {bad} of {value.numel()} values are NaN or infinite; load the checkpoint again")


def _require_floating(value: Tensor | None, where: str) -> None:
    if value is None:
        return
    if value.device.type == "meta":
        raise BadWeights(f"{where}: the weight is on the meta device; load the model with its weights")
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        raise BadWeights(f"{where}: stored as {value.dtype}, a quantised format; load de-quantised weights instead")
