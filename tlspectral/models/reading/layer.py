"""The parameters of one attention layer as tensors: as stored, and in float64 with norms folded in."""

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
    """Everything about an attention layer except its projections.

    norm: norm between the residual stream and the attention's input.
    q_norm, k_norm: norms of queries and keys, or the latents that they are projected from; None without one.
    score_scale: factor on the product of query and key.
    softcap: bound on scores; None without one.
    alibi, rotary: position bias and rotary geometry; None without one.
    even_scale_up_to: prompt length up to which no query is scaled by its position (Ministral 3, Llama 4); None if none
    ever is.
    selected_keys: in longer prompts an indexer picks this many keys for each query (GLM 5); None without an indexer.
    v_norm: norm of values (Gemma 4). What a head writes is then linear in the stream up to a factor per token.
    keys_are_values: True if values are the keys before norm and rotation (some layers of Gemma 4).
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
        """Return queries or keys by head, before query/key norm and rotation, as `HeadInputs`.

        what: "query" or "key". captured: activation at the hook point of queries or keys: the latents, in latent
        attention.
        """
        norm = self.q_norm if what == "query" else self.k_norm
        if isinstance(norm, Latent):
            return norm.inputs(captured)
        if isinstance(self.k_norm, Latent):  # queries without a latent of their own
            captured = rearrange(captured, "... (head d_head) -> ... head d_head", head=len(self.k_norm.up))
        return HeadInputs(captured, None)

    def values(self, captured: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch pos kv_heads d_head"]:
        """Return values by head from `captured`, the activation at their hook point, after the norm of values, if any.

        In latent attention this point shows each head's keys, then its values; only the values are returned.
        """
        if not isinstance(self.k_norm, Latent):
            return captured if self.v_norm is None else self.v_norm.applied(captured)
        heads, _, columns = self.k_norm.up.shape
        return rearrange(captured, "... (head d_head) -> ... head d_head", head=heads)[..., columns:]

    def normed(self, what: Literal["query", "key"], captured: Float[Tensor, "*captured"]) -> Float[Tensor, "*by_head"]:
        """Return queries or keys by head after their norm (if any) and before rotation, in float32 or wider.

        what: "query" or "key". captured: activation at the hook point of queries or keys.
        """
        x, scale = self.inputs(what, widened(captured))
        norm = self.q_norm if what == "query" else self.k_norm
        return x if norm is None else norm.applied(x, scale)

    def without_weights(self) -> "LayerSettings":
        """Return a new `LayerSettings` with the fields of this object, without projections such as W_Q, which a
        subclass adds.
        """
        return LayerSettings(**{field.name: getattr(self, field.name) for field in fields(LayerSettings)})

    @property
    def valid_up_to(self) -> int | None:
        """Prompt length in tokens up to which rotary frequencies and scale of scores stay the same; None without a
        limit.
        """
        limits = (self.even_scale_up_to, self.rotary and self.rotary.valid_up_to)
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, kw_only=True, repr=False)
class RawAttention(LayerSettings):
    """The parameters of an attention layer as the model holds them, before any folding.

    Order of axes as in TransformerLens: `q = x @ W_Q + b_Q`. It also has the fields of `LayerSettings`: norms, score
    scale, softcap, ALiBi, rotary geometry.

    w_q, w_k, w_v: [heads or kv_heads, d_model, d_head]; [heads, rank, columns] if they read a latent.
    w_o: [heads, d_head, d_model].
    b_q, b_k, b_v: biases by head; None without one.
    w_gate, b_gate: [heads, d_model, columns] of gated attention (Qwen3-Next, AFMoE), else None. It multiplies z, a
    head's output before W_O, by activation(x W_gate), where x is the input of the queries.
    gate_behind_queries: W_Q and W_gate are one projection, W_gate second.
    computed_in: type in which quantised projections compute; None for plain weights.
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
    computed_in: torch.dtype | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """Type in which the projections are stored, or in which quantised ones compute: it decides their rounding."""
        return self.computed_in or self.w_q.dtype

    @property
    def n_kv_receivers(self) -> int:
        """Number of different keys per token in the layer: one per key/value head; 1 in latent attention."""
        return 1 if isinstance(self.k_norm, Latent) else len(self.w_k)


@dataclass(frozen=True)
class OutputFactors:
    """Value and output weights of the heads of a layer.

    w_v: W_V with the input norm's gain folded in (centred for LayerNorm).
    w_o: W_O as stored.
    storage_dtype: type in which the model stores W_V.
    """

    w_v: Float64[Tensor, "kv_heads d_model d_head"]
    w_o: Float64[Tensor, "heads d_head d_model"]
    storage_dtype: torch.dtype

    __repr__ = one_line


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionLayer(LayerSettings):
    """Query and key weights of a layer with the input norm folded in: score = scale * (n W_Q + b_Q) . (n W_K + b_K).

    n is the normalised residual stream without gain and bias. For LayerNorm both weights are centred, so `W_Q W_K^T` is
    C M C, with C the projection that removes the mean ("Fingerprint, Not Blueprint", section 3). Keys are stored once
    per key/value head. It also has the fields of `LayerSettings`: norms, score scale, softcap, ALiBi, rotary geometry.

    layer: number of the layer.
    w_q, b_q: W_Q and b_Q of each query head.
    w_k, b_k: W_K and b_K of each key/value head.
    storage_dtype: type in which the model stores W_Q.
    """

    layer: int
    w_q: Float64[Tensor, "heads d_model d_head"]
    b_q: Float64[Tensor, "heads d_head"]
    w_k: Float64[Tensor, "kv_heads d_model d_head"]
    b_k: Float64[Tensor, "kv_heads d_head"]
    storage_dtype: torch.dtype

    @property
    def n_heads(self) -> int:
        """Number of query heads of this layer."""
        return self.w_q.shape[0]

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads of this layer; fewer than query heads if these share keys."""
        return self.w_k.shape[0]

    @property
    def d_model(self) -> int:
        """Width of the residual stream that this layer reads."""
        return self.w_q.shape[1]

    @property
    def d_head(self) -> int:
        """Number of columns of a query or key of a head of this layer."""
        return self.w_q.shape[2]

    @property
    def effective_dimension(self) -> int:
        """Dimension of the space on which M acts: d_model, or d_model - 1 for LayerNorm, which removes the mean."""
        return self.d_model - (self.norm.kind == "LN")

    @property
    def bilinear(self) -> Literal["exact", "up_to_token_scale", "up_to_content_scale", "softcapped"]:
        """How the score depends on n M n^T, with n the normalised stream; a column of the head table shows this word.

        "exact": it is n M n^T with rotations, plus biases. "up_to_token_scale": a query/key norm adds a positive factor
        per token. "up_to_content_scale": latent attention, whose norm adds a factor per token to the columns that do
        not rotate. "softcapped": a tanh bounds the score.
        """
        if self.softcap is not None:
            return "softcapped"
        if isinstance(self.k_norm, Latent):
            return "up_to_content_scale"
        return "exact" if self.q_norm is None else "up_to_token_scale"

    def kv_head(self, head: int) -> int:
        """Return the index of the key/value head that the query head `head` reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def operator_factors(
        self,
    ) -> tuple[Float64[Tensor, "heads d_model d_head"], Float64[Tensor, "heads d_model d_head"]]:
        """Return (W_Q, W_K) of each query head, so that M = W_Q W_K^T; gains of query/key norms are folded in.

        Keys that query heads share are repeated. Latent columns of W_K carry the latent's 1/rms (`Latent.white_scale`,
        or measured). W_Q of a layer with learnable rotary positions also carries its gain and phase.
        """
        w_q = self.w_q if self.q_norm is None else self.q_norm.folded_into(self.w_q)
        w_k = self.w_k if self.k_norm is None else self.k_norm.folded_into(self.w_k)
        if self.rotary is not None:
            w_q = with_gain_and_phase(w_q, self.rotary)
        groups = self.n_heads // self.n_kv_heads
        return w_q, w_k if groups == 1 else w_k.repeat_interleave(groups, dim=0)


def _query_key_parameters(raw: RawAttention) -> dict[str, Tensor | None]:
    """Return all parameters in `raw` that affect queries and keys, as a dict from role (for messages, such as "W_Q") to
    tensor or None.
    """
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
    """Return two lists of parameters of the layer `raw`, for its two hashes: parameters of queries and keys; then [W_V,
    W_O].

    Raises BadWeights for a weight on the meta device, for example if accelerate loads it only when it is used.
    """
    sides: tuple[list[Tensor | None], list[Tensor | None]]
    sides = list(_query_key_parameters(raw).values()), [raw.w_v, raw.w_o]
    if any(value is not None and value.is_meta for side in sides for value in side):
        raise BadWeights(
            "a weight is on the meta device and has no data to hash: load the model with all weights in memory"
        )
    return sides


def fold_attention(raw: RawAttention, layer: int) -> AttentionLayer:
    """Return the query and key weights of the layer `raw` as an `AttentionLayer`: copies in float64 on the CPU, with
    the input norm folded in.

    layer: the layer's number. Raises BadWeights for a weight that is quantised, NaN, infinite or without data.
    """
    for role, value in _query_key_parameters(raw).items():
        require_readable(value, f"layer {layer}, {role}")
    (w_q, b_q), (w_k, b_k) = (_fold(*projection(raw, what, double), raw.norm) for what in ("q", "k"))
    settings: dict[str, Any] = {**vars(raw.without_weights())}
    for name, norm in (("q_norm", raw.q_norm), ("k_norm", raw.k_norm)):
        norm = norm and norm.as_(double)
        settings[name] = norm.behind(raw.norm.as_(double)) if isinstance(norm, Latent) else norm
    return AttentionLayer(layer=layer, w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, storage_dtype=raw.storage_dtype, **settings)


def fold_output(raw: RawAttention, layer: int) -> OutputFactors:
    """Return the value and output weights of the layer `raw` as `OutputFactors`: copies in float64 on the CPU, the
    input norm's gain in W_V.

    layer: the layer's number. Raises BadWeights for a weight that is quantised, NaN, infinite or without data.
    """
    for role, value in (("W_V", raw.w_v), ("W_O", raw.w_o), ("input norm gain", raw.norm.gain)):
        require_readable(value, f"layer {layer}, {role}")
    w_v = _fold(projection(raw, "v", double)[0], None, raw.norm)[0]
    if isinstance(raw.k_norm, Latent):
        w_v = w_v * raw.k_norm.as_(double).behind(raw.norm.as_(double)).white_scale
    return OutputFactors(w_v, double(raw.w_o), raw.computed_in or raw.w_v.dtype)


def key_value_groups(raw: RawAttention) -> Iterator[tuple[slice, RawAttention]]:
    """Yield (slice of its query heads, `RawAttention` of these heads and their key) for each key/value group of the
    layer `raw`.

    The tensors are views. With groups, only one group at a time has to be in float64. M is the same as in the whole
    layer. Scores are not the same if a query/key norm takes its mean over all heads.
    """
    for heads, key in _slices_of_groups(raw.w_q, raw.w_k):
        yield heads, _of_heads(raw, heads, key)


def folded_groups(layer: AttentionLayer, output: OutputFactors) -> list[tuple[AttentionLayer, OutputFactors]]:
    """Return a list of (layer, output), one per key/value head, with only its weights and its query heads' weights.

    The tensors are views of the given ones.
    """
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
    """Return a list with two slices for each key/value head: of the query heads that read it, and of the key/value head
    itself.

    w_q, w_k: W_Q and W_K; only their numbers of heads are read.
    """
    size = len(w_q) // len(w_k)
    return [(slice(index * size, (index + 1) * size), slice(index, index + 1)) for index in range(len(w_k))]


def _settings_of_heads(layer: LayerSettings, heads: list[int] | slice, keys: list[int] | slice) -> dict[str, Any]:
    """Return the settings of a layer that differ by head, for some heads: a dict from field name to value.

    heads: indices of query heads. keys: indices of their key/value heads.
    """
    return {
        "q_norm": layer.q_norm and layer.q_norm.of_heads(heads),
        "k_norm": layer.k_norm and layer.k_norm.of_heads(keys),
        "alibi": layer.alibi and layer.alibi.of_heads(heads),
        "rotary": layer.rotary and layer.rotary.of_heads(heads),
    }


def _of_heads(raw: RawAttention, heads: list[int] | slice, keys: list[int] | slice) -> RawAttention:
    """Return a new `RawAttention` with only the query heads `heads` and the key/value heads `keys` of `raw`, in the
    given order.

    Slices give views of the tensors, lists of indices give copies.
    """
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
    """Return scaled scores bounded by a softcap, `cap * tanh(scores / cap)` (Gemma 2); unchanged for None."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def projection(
    raw: RawAttention, what: Literal["q", "k", "v"], cast: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "heads d_model d_head"], Float[Tensor, "heads d_head"] | None]:
    """Return (weight, bias or None) of a projection of the layer `raw` from the normalised residual stream to each
    head; differentiable.

    what: "q", "k" or "v" for W_Q, W_K or W_V. cast: applied to each parameter. Through a latent, the weight includes
    the gain of the latent's norm but not its factor per token. The bias of W_V is left out.
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
    """Return (weight, bias) of a projection as new tensors in float64, with gain and bias of the input norm `norm`
    folded in.
    """
    norm = norm.as_(double)
    return folded_weight(weight, norm), folded_bias(weight, bias, norm)


class LiveFactors(NamedTuple):
    """W_Q and W_K of some query heads, connected to the model's parameters for gradients, and their rotary geometry.

    w_q, w_k: W_Q and W_K, on the model's device, in the stored type but at least float32. Shared keys are repeated.
    rotary: geometry of the rotary pairs, None without rotary positions.
    """

    w_q: Float[Tensor, "heads d_model d_head"]
    w_k: Float[Tensor, "heads d_model d_head"]
    rotary: RotaryGeometry | None


def live_factors(raw: RawAttention, layer: int, heads: list[int] | None, *, folded: bool) -> LiveFactors:
    """Return W_Q and W_K of some heads of the layer `raw` as differentiable functions of the model's parameters, with
    the rotary geometry: a `LiveFactors` (`.w_q`, `.w_k`, `.rotary`).

    layer: its number, for messages. heads: indices of query heads; None: all. folded: True folds in the norms of the
    input and of queries and keys. Raises BadWeights for meta or quantised weights. NaN and infinities are not looked
    for, because in a training step that would take as long as the products.
    """
    for role, value in _query_key_parameters(raw).items():
        _require_floating(value, f"layer {layer}, {role}")
    groups = len(raw.w_q) // len(raw.w_k)
    queries = list(range(len(raw.w_q))) if heads is None else heads
    keys = sorted({head // groups for head in queries})
    # Indexing would copy, so all heads are taken without it.
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
    """Raise ValueError if a prompt is longer than the length up to which the layer has one score scale for all queries.

    index: the layer's number, for the message. n_positions: tokens of the prompt.
    """
    limit = layer.even_scale_up_to
    if limit is not None and n_positions > limit:
        raise ValueError(
            f"layer {index}: the prompt has {n_positions} tokens, and from token {limit} on this model scales "
            "queries by their position (llama_4_scaling_beta, attn_temperature_tuning), which is not supported: use "
            f"prompts of at most {limit} tokens"
        )


def require_every_key(layers: Iterable[LayerSettings], n_positions: int, advice: str) -> None:
    """Raise ValueError if a prompt has more tokens than the keys that an indexer of one of `layers` picks for a query.

    n_positions: tokens of the prompt. advice: end of the message.
    """
    selected = min((layer.selected_keys for layer in layers if layer.selected_keys is not None), default=n_positions)
    if n_positions > selected:
        raise ValueError(
            f"the prompt has {n_positions} tokens, but an indexer of this model lets a query see {selected} keys that "
            f"it picks, {advice}"
        )


def require_own_projections(layer: LayerSettings, index: int, reason: str | None = None) -> None:
    """Raise UnsupportedArchitecture if a layer's values are its keys; with a `reason`, also for latent attention.

    index: the layer's number. reason: why latent attention is not supported, the end of its message.
    """
    if layer.keys_are_values:
        raise UnsupportedArchitecture(
            f"layer {index}: its values are its keys before norm and rotation, so keys and values cannot be treated "
            "apart: leave this layer out"
        )
    if reason is not None and isinstance(layer.k_norm, Latent):
        raise UnsupportedArchitecture(f"layer {index}: latent attention ({layer.k_norm.family}); {reason}")


def require_unclipped(limit: float | None, layer: int) -> None:
    """Raise UnsupportedArchitecture if a layer clips queries and keys at a limit (OLMo 1.7, MPT).

    limit: None passes.
    """
    if limit is not None:
        raise UnsupportedArchitecture(
            f"layer {layer}: queries and keys are clipped at {limit} (clip_qkv), so scores are not bilinear in the "
            "residual stream: such models are not supported, take another model"
        )


def require_readable(value: Tensor | None, where: str) -> None:
    """Raise BadWeights if the weight `value` has no data (meta device), is quantised, or contains NaN or infinity.

    where: layer and role, the beginning of the message. A `value` of None passes.
    """
    _require_floating(value, where)
    # A NaN makes both NaN. The extremes take a twentieth of the time of isfinite on every value.
    if value is not None and value.numel() and not bool(torch.stack(value.detach().aminmax()).isfinite().all()):
        bad = int((~torch.isfinite(value)).sum())
        raise BadWeights(f"{where}: {bad} of {value.numel()} values are NaN or infinite; load the checkpoint again")


def _require_floating(value: Tensor | None, where: str) -> None:
    """Raise BadWeights if the weight `value` has no data (meta device) or is quantised. None passes.

    where: layer and role, the beginning of the message.
    """
    if value is None:
        return
    if value.device.type == "meta":
        raise BadWeights(
            f"{where}: the weight is on the meta device and has no data: load the model with all weights in memory"
        )
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        raise BadWeights(f"{where}: stored as {value.dtype}, a quantised format; load de-quantised weights instead")
