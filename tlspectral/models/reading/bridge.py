"""Read a TransformerBridge, raw or processed, from the Hugging Face or native modules that it wraps.

For several architectures the bridge's own config holds defaults for rotary base, score scale or query/key norms. The
wrapped modules are read instead. `verify_scores` checks the values on the running model.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.reading.alibi import Alibi, alibi_slopes
from tlspectral.models.reading.blocks import blocks_of, gates_queries, is_causal, is_encoder, is_latent, kind_of, unread
from tlspectral.models.reading.bridge_norms import input_norm, norm_behind, query_key_norm, read_normalization
from tlspectral.models.reading.computed_weights import computed_in, with_plain_weights
from tlspectral.models.reading.latent import (
    adjacent_pairs,
    complex_tables,
    latent_projections,
    weight_by_head,
)
from tlspectral.models.reading.layer import RawAttention, require_unclipped
from tlspectral.models.reading.norms import NO_NORM, MlpInput, Normalization
from tlspectral.models.reading.rotation import (
    Frequencies,
    frequencies_of_module,
    frequencies_of_stored,
)
from tlspectral.models.reading.special_cases import special_attention

_BEHIND_MLP = "post_feedforward_layernorm"  # OLMo 2 has no norm before its MLP; TransformerLens calls this one ln2


def read_attention(model: Any, layer: int) -> RawAttention:
    """Return the attention parameters of layer `layer` of a bridge as a `RawAttention`: tensors of the model or views
    of them, not folded.

    Raises UnsupportedArchitecture for attention that is not supported, and BadWeights for quantised weights.
    """
    block = blocks_of(model)[layer].module
    attention = getattr(block, "attn", None)
    if attention is None or getattr(attention, "original_component", None) is None:
        raise UnsupportedArchitecture(f"layer {layer}: {unread(kind_of(block))}")
    attention = with_plain_weights(attention, model)
    wrapped = attention.original_component
    if not is_causal(model, attention) and not is_encoder(model):
        raise UnsupportedArchitecture(
            f"layer {layer}: the attention of {type(wrapped).__name__} is not causal; of encoders only BERT and "
            "RoBERTa are read: load a causal language model"
        )
    # The limit stands in the module of MPT and DBRX, in the config of OLMo. 0 means no limit.
    limit = getattr(wrapped, "clip_qkv", None) or getattr(getattr(wrapped, "config", None), "clip_qkv", None)
    require_unclipped(limit or None, layer)
    if is_latent(attention):
        projections = latent_projections(wrapped, partial(read_normalization, model=model), layer)
        d_model, d_head = int(model.cfg.d_model), wrapped.qk_nope_head_dim + wrapped.qk_rope_head_dim
    else:
        projections = _projections(attention, model, wrapped, layer)
        d_model, d_head = projections["w_q"].shape[-2:]
    return RawAttention(
        **projections,
        norm=input_norm(block, model, d_model, layer),
        # Falcon-H1 multiplies its keys after their hook point.
        score_scale=_score_scale(wrapped, d_head) * float(getattr(wrapped, "key_multiplier", 1.0)),
        softcap=_softcap(wrapped, layer),
        alibi=_alibi(model, wrapped, layer, len(projections["w_q"])),
        rotary=_rotary(model, wrapped, layer, d_head),
        even_scale_up_to=_even_scale_up_to(wrapped),
        selected_keys=selected_keys(model, layer),
        computed_in=computed_in(blocks_of(model)[layer].module.attn),
    )


def _projections(attention: Any, model: Any, wrapped: Any, layer: int) -> dict[str, Any]:
    """Return the weights, biases and norms of a layer's projections: a dict from field of `RawAttention` to value.

    attention: the bridge's attention module. model: the bridge. wrapped: the module of transformers in `attention`.
    layer: the number of the layer. Raises UnsupportedArchitecture if the layer reuses the keys of another layer or has
    no weights by head, BadWeights for quantised weights.
    """
    reason = shared_keys(getattr(wrapped, "config", None), layer)
    if reason is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {reason}")
    try:
        if special_attention(wrapped).own_projections:
            weights = _own_projections(wrapped)
        else:
            weights = {f"w_{role}": getattr(attention, f"W_{role.upper()}") for role in "qkvo"}
            weights |= {f"b_{role}": getattr(attention, f"b_{role.upper()}") for role in "qkv"}
    except (NotImplementedError, AttributeError, ValueError) as error:
        if "quanti" in str(error).lower() or "meta device" in str(error):
            raise BadWeights(f"layer {layer}, W_Q: {error}") from error
        raise UnsupportedArchitecture(
            f"layer {layer}: {type(wrapped).__name__} has no separate query and key weights per head ({error}): "
            "take another model"
        ) from error
    if weights["b_q"] is not None:  # in gated attention the gate's bias follows the bias of the queries
        weights["b_q"] = weights["b_q"][..., : weights["w_q"].shape[-1]]
    weights |= _gate(attention, wrapped, *weights["w_q"].shape[::2])
    for role in "qkv" if "v_norm" in attention._modules else "qk":
        heads, _, d_head = weights[f"w_{role}"].shape
        weights[f"{role}_norm"] = query_key_norm(attention, f"{role}_norm", model, layer, heads, d_head)
    return weights


def _gate(attention: Any, wrapped: Any, n_heads: int, d_head: int) -> dict[str, Any]:
    """Return weight and bias of the gate of gated attention as a dict; empty without a gate.

    Keys: "w_gate" [heads, d_model, columns], "b_gate" [heads, columns] or None, and "gate_behind_queries" (True if W_Q
    and W_gate are one projection). attention: the bridge's attention module. wrapped: the module of transformers in it.
    n_heads, d_head: number of heads and columns of a head.
    """
    if "gate" in attention._modules:
        module, rows = attention.gate.original_component, slice(None)
    elif gates_queries(attention):
        module, rows = wrapped.q_proj, slice(d_head, None)
    else:
        return {}
    bias = module.bias
    return {
        "w_gate": weight_by_head(module.weight, n_heads)[..., rows],
        "b_gate": None if bias is None else rearrange(bias, "(head row) -> head row", head=n_heads)[:, rows],
        "gate_behind_queries": module is getattr(wrapped, "q_proj", None),
    }


def shared_keys(config: Any, layer: int) -> str | None:
    """Return why a layer that reuses an earlier layer's keys (Gemma 4) cannot be read, as text; otherwise None.

    config: of transformers.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None or modes[layer] != "reuse":
        return None
    types = config.layer_types
    source = next(i for i in range(layer - 1, -1, -1) if types[i] == types[layer] and modes[i] == "store")
    return (
        f"it reuses the keys and values of layer {source}, so a score multiplies the streams of two layers; operators "
        f"are read for one layer only: take heads of layer {source}"
    )


def _own_projections(wrapped: Any) -> dict[str, Any]:
    """Return weights and biases of a Gemma 4 layer with keys of its own: a dict from field of `RawAttention` to value.

    wrapped: the attention module of transformers, from which they are read and split by head. Heads that see all tokens
    have another size. Values may be the keys.
    """
    keys_are_values = wrapped.use_alternative_attention
    modules = {"q": wrapped.q_proj, "k": wrapped.k_proj, "v": wrapped.k_proj if keys_are_values else wrapped.v_proj}
    weights: dict[str, Any] = {
        f"w_{role}": rearrange(module.weight, "(head d_head) d_model -> head d_model d_head", d_head=wrapped.head_dim)
        for role, module in modules.items()
    }
    weights["w_o"] = rearrange(
        wrapped.o_proj.weight, "d_model (head d_head) -> head d_head d_model", d_head=wrapped.head_dim
    )
    for role in "qk":
        bias = modules[role].bias
        weights[f"b_{role}"] = (
            None if bias is None else rearrange(bias, "(head d_head) -> head d_head", d_head=wrapped.head_dim)
        )
    return weights | {"keys_are_values": keys_are_values}


def context_length(model: Any) -> int:
    """Return the longest prompt in tokens: from the wrapped model's config, else from TransformerLens.

    For some architectures TransformerLens has a default instead of the model's number (2048 tokens for MPT in 3.9).
    """
    config = getattr(model.original_model, "config", None)
    stated = None if config is None or is_encoder(model) else stated_context(config)  # RoBERTa's has two unused rows
    return int(model.cfg.n_ctx) if stated is None else stated


def stated_context(config: Any) -> int | None:
    """Return the longest prompt in tokens that a Hugging Face config states; None if it states none (BLOOM).

    MPT's config states two lengths; the shorter one counts.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min((int(length) for length in lengths if isinstance(length, int) and length > 0), default=None)


def read_output(model: Any, layer: int) -> tuple[Tensor | None, Normalization, float]:
    """Return (b_O, norm after the attention, factor on the heads' writes to the residual stream) of layer `layer` of
    the bridge `model`.

    b_O: the bias after W_O, None without one. The factor is 1 except in Granite and Falcon-H1.
    """
    block = blocks_of(model)[layer].module
    norm = norm_behind(block)
    where = f"layer {layer}, norm behind the attention"
    behind = (
        NO_NORM if norm is None else read_normalization(norm.original_component, model, (model.cfg.d_model,), where)
    )
    wrapped = getattr(block, "original_component", None)  # of Granite, and of Falcon-H1
    multiplier = getattr(wrapped, "residual_multiplier", getattr(wrapped, "attn_out_multiplier", 1.0))
    bias = block.attn.original_component.o_proj.bias if is_latent(block.attn) else getattr(block.attn, "b_O", None)
    return bias, behind, float(multiplier)


def read_mlp_input(model: Any, layer: int) -> MlpInput:
    """Return an `MlpInput` for layer `layer` of the bridge `model`: `.point`, the hook point that shows the MLP's
    input, and `.norm`, the norm between the residual stream and that point.

    The norm is the MLP's own, the attention's norm if the two are parallel (GPT-J, Phi, Command R), or none (OLMo 2).
    `ln2.hook_out` comes after the gain and bias of `ln2`.
    """
    block = blocks_of(model)[layer].module
    own, d_model = block._modules.get("ln2"), int(model.cfg.d_model)
    if own is None:
        return MlpInput("mlp.hook_in", input_norm(block, model, d_model, layer))
    if own is norm_behind(block) or own.name == _BEHIND_MLP:
        return MlpInput("mlp.hook_in", NO_NORM)
    where = f"layer {layer}, norm before the MLP"
    return MlpInput("ln2.hook_out", read_normalization(own.original_component, model, (d_model,), where))


def final_normalization(model: Any) -> Normalization:
    """Return the norm before the unembedding of the bridge `model` as a `Normalization`; `NO_NORM` if the model has
    none.
    """
    norm = getattr(model, "ln_final", getattr(model, "H_ln_final", None))
    if norm is None:
        return NO_NORM
    return read_normalization(norm.original_component, model, (model.cfg.d_model,), "final norm")


def rotary_tables(
    model: Any, layer: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the scaled (cos, sin) that layer `layer` of the bridge `model` applied in a run, each [(batch,) pos,
    columns]; None without tables.

    n_positions: tokens of the prompt. captured: activations of the run, from hook point name to tensor. Raises
    UnsupportedArchitecture if the layer has rotary hook points but did not apply its tables in the run.
    """
    name, block = blocks_of(model)[layer]
    cos, sin = (captured.get(f"{name}.attn.hook_{part}") for part in ("cos", "sin"))
    if cos is not None and sin is not None:
        return cos, sin
    attention, wrapped = block.attn, block.attn.original_component
    if (stored := _stored_tables(model, wrapped)) is not None:
        return stored[0][:n_positions], stored[1][:n_positions]
    tables = (
        complex_tables(_rotary_module(model, wrapped), n_positions)
        if special_attention(wrapped).rotation == "complex"
        else None
    )
    if tables is None and hasattr(attention, "hook_cos"):
        raise UnsupportedArchitecture(
            f"layer {layer}: cos and sin were not applied in this run although the layer's module has rotary "
            "frequencies: take off hooks that change the attention and try again"
        )
    return tables


def seen_keys(model: Any, layer: int, n_positions: int, first: int = 0) -> Tensor:
    """Return a bool tensor [query, key] for a prompt of `n_positions` tokens: True where the mask of layer `layer` lets
    the query see the key.

    first: the first query; rows of earlier queries are left out.
    """
    if is_encoder(model):
        return torch.ones(n_positions - first, n_positions, dtype=torch.bool)
    wrapped = blocks_of(model)[layer].module.attn.original_component
    stored = getattr(wrapped, "bias", None)
    if isinstance(stored, Tensor) and stored.dtype == torch.bool and stored.ndim == 4:  # GPT-Neo's windowed mask
        return stored[0, 0, first:n_positions, :n_positions]
    seen = torch.ones(n_positions - first, n_positions, dtype=torch.bool).tril(first)
    if _layer_type(wrapped) == "chunked_attention":  # Llama 4: keys of the query's own chunk
        chunk = torch.arange(n_positions) // int(wrapped.config.attention_chunk_size)
        seen &= chunk[first:, None] == chunk
    window = _window(wrapped)
    return seen if window is None else seen.triu(1 - window + first)


def _window(wrapped: Any) -> int | None:
    """Return how many keys a query of the attention module `wrapped` sees, itself included; None if it sees all earlier
    keys.
    """
    if not getattr(wrapped, "is_sliding", True):  # EXAONE 4: full layers have the attribute too
        return None
    window = getattr(wrapped, "sliding_window", None)
    if not hasattr(wrapped, "sliding_window"):
        # Mistral, Mixtral, Phi-3 and others have one mask for all layers, made by the model from its config. Where the
        # config names types of layers, a layer with a window has the attribute.
        config = getattr(wrapped, "config", None)
        window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def unmasked(model: Any, layer: int, scores: Tensor) -> Tensor:
    """Return a bool tensor of the shape of `scores`: True where the mask of layer `layer` of the bridge `model` lets
    the query see the key.

    scores: some or all scores that the layer's hook point shows. They show the mask by their values.
    """
    wrapped = blocks_of(model)[layer].module.attn.original_component
    masked_score = special_attention(wrapped).masked_score
    # Some models mask by -inf instead.
    masked = torch.finfo(scores.dtype).min if masked_score is None else masked_score(wrapped)
    return scores > masked / 2


def selected_keys(model: Any, layer: int) -> int | None:
    """Return how many of the keys an indexer picks for each query of layer `layer` (GLM 5); None without an indexer."""
    wrapped = blocks_of(model)[layer].module.attn.original_component
    return int(wrapped.config.index_topk) if hasattr(wrapped, "indexer") else None


def prefill_cache(model: Any, tokens: Tensor) -> Any:
    """Run the model on `tokens` [batch, pos] and return its key/value cache; None if it keeps none (native models)."""
    _, cache = model(tokens, return_type="logits_and_cache", use_cache=True)
    return cache if hasattr(cache, "layers") and hasattr(cache, "reorder_cache") else None


def joined_caches(caches: list[Any]) -> Any:
    """Return one key/value cache with the rows of all caches, which stay unchanged; None if a layer keeps more than
    keys and values.

    A single cache is returned itself.
    """
    if len(caches) == 1:
        return caches[0]
    joined = _copied(caches[0])
    for layer, *later in zip(joined.layers, *(cache.layers for cache in caches[1:]), strict=True):
        if not _plain(layer):
            return None
        for name in ("keys", "values"):
            setattr(layer, name, torch.cat([getattr(cached, name) for cached in (layer, *later)]))
    return joined


def _plain(layer: Any) -> bool:
    """Return True if a layer of a key/value cache keeps only keys and values, no further states."""
    tensors = {name for name, value in vars(layer).items() if isinstance(value, Tensor) and value.ndim}
    return tensors == {"keys", "values"} and not any(isinstance(value, dict) for value in vars(layer).values())


def cache_bytes(cache: Any) -> int:
    """Return the size in bytes of a cache's keys and values, all rows together."""
    return sum(value.nbytes for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor))


def continued_logits(model: Any, cache: Any, tokens: Tensor, rows: Tensor, alive: Sequence[int]) -> Tensor:
    """Return logits [rows, pos, d_vocab] of `tokens` [rows, pos] that continue cached prompts, from a run of `model`.

    cache: a key/value cache; it is not changed.
    rows: for each row of `tokens`, the row of the cache that it continues.
    alive: for each layer, how many rows it runs, counted from the first.
    """
    copied_cache = _copied(cache)  # a pass extends the cache it is given
    for layer, n in zip(copied_cache.layers, alive, strict=False):  # some models have layers without a cache
        if n and _plain(layer) and len(layer.keys) == 1:  # a step copies them anyway
            layer.keys, layer.values = (kept.expand(n, -1, -1, -1) for kept in (layer.keys, layer.values))
        elif n:
            layer.reorder_cache(rows[:n])
    return model(tokens, past_key_values=copied_cache, use_cache=True, return_type="logits")


def _copied(cache: Any) -> Any:
    """Return a copy of a cache whose layers can be changed. Tensors are shared with the original."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in copied.layers:  # dictionaries of states
        vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return copied


def _score_scale(wrapped: Any, d_head: int) -> float:
    """Return the factor on a layer's scores that its attention module (`wrapped`) states; default 1 / sqrt(d_head)."""
    for name in ("scaling", "softmax_scale", "inv_norm_factor"):
        if isinstance(getattr(wrapped, name, None), float):
            return getattr(wrapped, name)
    if getattr(wrapped, "scale_attn", None) is not None:
        return 1.0 / float(wrapped.scale_attn)
    stated = special_attention(wrapped).score_scale
    return d_head**-0.5 if stated is None else stated(wrapped)


def _alibi(model: Any, wrapped: Any, layer: int, n_heads: int) -> Alibi | None:
    """Return the ALiBi slopes of the `n_heads` heads of a layer as an `Alibi`, None without ALiBi.

    model: the bridge. wrapped: the attention module of transformers. layer: its number, for the message. Raises
    UnsupportedArchitecture for Falcon with ALiBi.
    """
    if model.cfg.positional_embedding_type != "alibi":
        return None
    refused = special_attention(wrapped).refused_alibi
    if refused is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {refused}")
    return Alibi(alibi_slopes(n_heads))


def _even_scale_up_to(wrapped: Any) -> int | None:
    """Return the prompt length up to which no query is scaled by its position; None if queries are never scaled.

    wrapped: the attention module of transformers. Ministral 3 and Llama 4 scale queries past this length.
    """
    if getattr(wrapped, "attn_temperature_tuning", False) and not wrapped.use_rope:
        return int(wrapped.floor_scale) - 1
    rope = getattr(getattr(wrapped, "config", None), "rope_parameters", None)
    if not isinstance(rope, dict) or not rope.get("llama_4_scaling_beta"):
        return None
    return int(rope["original_max_position_embeddings"])


def _softcap(wrapped: Any, layer: int) -> float | None:
    """Return the softcap on a layer's scores, None without one. wrapped: the attention module of transformers.

    Raises UnsupportedArchitecture if the softcap is not supported.
    """
    special, softcap = special_attention(wrapped), getattr(wrapped, "attn_logit_softcapping", None)
    if softcap and special.refused_softcap is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {special.refused_softcap.format(softcap=softcap)}")
    if special.softcap is not None:
        softcap = special.softcap(wrapped)
    return float(softcap) if softcap else None


def _rotary(model: Any, wrapped: Any, layer: int, d_head: int) -> RotaryGeometry | None:
    """Return the rotary geometry of a layer, None if the layer does not rotate queries and keys.

    model: the bridge. wrapped: the attention module of transformers. layer: its number, for messages. d_head: columns
    of a head. Raises UnsupportedArchitecture if no module with rotary frequencies is found.
    """
    if model.cfg.positional_embedding_type != "rotary" or not _is_rotated(wrapped):
        return None
    if (stored := _stored_tables(model, wrapped)) is not None:
        cos, sin = (table[1].detach().cpu().double() for table in stored)
        known = Frequencies(torch.atan2(sin, cos), 1.0)
        measured = frequencies_of_stored(wrapped, *stored, len(cos), known)
        real, imag = pair_columns(2 * len(cos), adjacent=True)
        return RotaryGeometry(measured.theta, real, imag, d_head, measured.scaling, mismatch=measured.mismatch)
    module = _rotary_module(model, wrapped)
    layer_type = _layer_type(wrapped)
    if module is None or not any(hasattr(module, f"{prefix}inv_freq") for prefix in ("", f"{layer_type}_")):
        raise UnsupportedArchitecture(
            f"layer {layer}: the model has rotary positions, but no rotary module with frequencies (inv_freq) was "
            "found: load the model again without changes of its modules"
        )
    prefix = f"{layer_type}_" if hasattr(module, f"{layer_type}_inv_freq") else ""
    kind = module.rope_type[layer_type] if prefix else getattr(module, "rope_type", "default")
    inv_freq, limit = getattr(module, f"{prefix}inv_freq"), _switch_length(module, kind, layer_type if prefix else None)
    # Kinds that depend on the length overwrite inv_freq in a longer prompt and use the original for short ones:
    # LongRoPE in each run, dynamic NTK after a longer prompt.
    longest = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 0))
    if kind == "longrope" or (kind == "dynamic" and int(longest) > module.original_max_seq_len):
        inv_freq = getattr(module, f"{prefix}original_inv_freq", inv_freq)
    known = Frequencies(inv_freq.detach().cpu().double(), float(getattr(module, f"{prefix}attention_scaling", 1.0)))
    n_positions = int(model.cfg.n_ctx) if limit is None else limit - 1  # dynamic NTK switches back under its limit
    measured = frequencies_of_module(module, layer_type if prefix else None, known, n_positions, d_head)
    theta = measured.theta
    names = ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
    adjacent = any(getattr(model.cfg, name, False) for name in names) or adjacent_pairs(wrapped)
    rotating = theta.nonzero().flatten()  # in a full layer of Gemma 4 most pairs do not rotate
    real, imag = (columns[rotating] for columns in pair_columns(2 * len(theta), adjacent=adjacent))
    if special_attention(wrapped).rotation == "negative":
        real, imag = imag, real
    first = getattr(wrapped, "qk_nope_head_dim", 0)  # columns of a latent come before those that rotate
    return RotaryGeometry(
        theta=theta[rotating],
        real_index=real + first,
        imag_index=imag + first,
        d_head=d_head,
        attention_scaling=measured.scaling,
        valid_up_to=limit,
        mismatch=measured.mismatch,
    )


def _rotary_module(model: Any, wrapped: Any) -> Any:
    """Return the module that carries a layer's rotary frequencies, None without one.

    It is looked for in the bridge, in the layer's attention module of transformers (`wrapped`), then in the whole
    model.
    """
    rotary: Any = getattr(model, "rotary_emb", None)
    with suppress(AttributeError):  # the module at this name in the wrapped model runs
        rotary = model.original_model.get_submodule(rotary.name)
    rotary = getattr(rotary, "original_component", rotary)
    rotary = getattr(wrapped, "rotary_emb", None) if rotary is None else rotary
    if rotary is None:  # the bridge may not hold it
        inner = (module for name, module in model.original_model.named_modules() if name.endswith("rotary_emb"))
        rotary = next(inner, None)
    return rotary


def _is_rotated(wrapped: Any) -> bool:
    """Return True if a layer of a rotary model rotates queries and keys; in some models only windowed layers do.

    wrapped: the layer's attention module of transformers.
    """
    rotates = special_attention(wrapped).rotates
    return bool(getattr(wrapped, "use_rope", True)) if rotates is None else rotates(wrapped)


def _layer_type(wrapped: Any) -> str | None:
    """Return the type of the layer of the attention module `wrapped` as its config names it, such as
    "sliding_attention"; None without types.
    """
    for name in ("layer_type", "attention_type"):
        if getattr(wrapped, name, None) is not None:
            return getattr(wrapped, name)
    types = getattr(getattr(wrapped, "config", None), "layer_types", None)
    return types[wrapped.layer_idx] if types and getattr(wrapped, "layer_idx", None) is not None else None


def _stored_tables(model: Any, wrapped: Any) -> tuple[Tensor, Tensor] | None:
    """Return (cos, sin), each [pos, pairs], if an attention stores them and rotates adjacent columns; otherwise None.

    wrapped: the attention module of transformers. GPT-J stores one table: in each attention or, from transformers 5.24
    on, in the model's rotary module.
    """
    stored = special_attention(wrapped).stored_tables
    if stored is not None and getattr(wrapped, "rotary", None) is not None:
        return stored(wrapped)
    tables = (getattr(holder, "embed_positions", None) for holder in (wrapped, _rotary_module(model, wrapped)))
    table = next((table for table in tables if isinstance(table, Tensor)), None)
    if table is None:
        return None
    sin, cos = table.chunk(2, dim=-1)
    return cos, sin


def frequency_switch(model: Any, n_positions: int) -> int | None:
    """Return the largest prompt length below `n_positions` beyond which the model uses other rotary frequencies.

    None if the frequencies do not change up to `n_positions` (LongRoPE and dynamic NTK change them).
    """
    switches = []
    for module in model.original_model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            limit = _switch_length(module, kind, layer_type)
            if limit is not None and n_positions > limit:
                switches.append(n_positions - 1 if kind == "dynamic" else limit)  # dynamic NTK: others at every length
    return max(switches, default=None)


def _switch_length(module: Any, kind: str | None, layer_type: str | None) -> int | None:
    """Return the prompt length beyond which a rotary module changes its frequencies; None if it never does.

    kind: "longrope", "dynamic" (these two change), or another kind of rotary scaling. layer_type: None if all layers
    have one type.
    """
    if kind not in ("longrope", "dynamic"):
        return None
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters[layer_type] if layer_type else parameters)["original_max_position_embeddings"])
