"""Reads a TransformerBridge, raw or processed, from the Hugging Face or native modules that it wraps.

The bridge's own config is not trusted for rotary base, score scale or query/key norms: for several architectures it
holds defaults. What is read here is proved by `verify_scores` on the running model.
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

_BEHIND_MLP = "post_feedforward_layernorm"  # OLMo 2 has none in front of it; TransformerLens calls this one ln2


def read_attention(model: Any, layer: int) -> RawAttention:
    """Return the parameters of one layer. Raises UnsupportedArchitecture, and BadWeights for quantised weights."""
    block = blocks_of(model)[layer].module
    attention = getattr(block, "attn", None)
    if attention is None or getattr(attention, "original_component", None) is None:
        raise UnsupportedArchitecture(f"layer {layer}: {unread(kind_of(block))}")
    wrapped = attention.original_component
    if not is_causal(model, attention) and not is_encoder(model):
        raise UnsupportedArchitecture(
            f"layer {layer}: the attention of {type(wrapped).__name__} is not causal; of encoders BERT and "
            "RoBERTa are read"
        )
    # In MPT and DBRX the module has it, in OLMo the config; 0 stands for no limit.
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
        # Falcon-H1 multiplies its keys behind their hook point.
        score_scale=_score_scale(wrapped, d_head) * float(getattr(wrapped, "key_multiplier", 1.0)),
        softcap=_softcap(wrapped, layer),
        alibi=_alibi(model, wrapped, layer, len(projections["w_q"])),
        rotary=_rotary(model, wrapped, layer, d_head),
        even_scale_up_to=_even_scale_up_to(wrapped),
        selected_keys=selected_keys(model, layer),
    )


def _projections(attention: Any, model: Any, wrapped: Any, layer: int) -> dict[str, Any]:
    reason = shared_keys(getattr(wrapped, "config", None), layer)
    if reason is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {reason}")
    try:
        if special_attention(wrapped).own_projections:
            found = _own_projections(wrapped)
        else:
            found = {f"w_{role}": getattr(attention, f"W_{role.upper()}") for role in "qkvo"}
            found |= {f"b_{role}": getattr(attention, f"b_{role.upper()}") for role in "qkv"}
    except (NotImplementedError, AttributeError, ValueError) as error:
        if "quanti" in str(error).lower() or "meta device" in str(error):
            raise BadWeights(f"layer {layer}, W_Q: {error}") from error
        raise UnsupportedArchitecture(
            f"layer {layer}: {type(wrapped).__name__} has no separate query and key weights per head ({error})"
        ) from error
    if found["b_q"] is not None:  # behind a gated attention's bias of the queries stands its gate's bias
        found["b_q"] = found["b_q"][..., : found["w_q"].shape[-1]]
    found |= _gate(attention, wrapped, *found["w_q"].shape[::2])
    for role in "qkv" if "v_norm" in attention._modules else "qk":
        heads, _, d_head = found[f"w_{role}"].shape
        found[f"{role}_norm"] = query_key_norm(attention, f"{role}_norm", model, layer, heads, d_head)
    return found


def _gate(attention: Any, wrapped: Any, n_heads: int, d_head: int) -> dict[str, Any]:
    """Return weight and bias of the gate of an attention: a projection of its own, or rows behind the queries' rows."""
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
    """Return why a layer whose keys are an earlier layer's (Gemma 4) has no operator, else None."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None or modes[layer] != "reuse":
        return None
    types = config.layer_types
    source = next(i for i in range(layer - 1, -1, -1) if types[i] == types[layer] and modes[i] == "store")
    return (
        f"its keys and values are those of layer {source}, so that a score joins the streams that enter two layers; a "
        "table has operators of one"
    )


def _own_projections(wrapped: Any) -> dict[str, Any]:
    # Of Gemma 4, for a layer with keys of its own. Heads that see all tokens have another size, and values may be the
    # keys.
    keys_are_values = wrapped.use_alternative_attention
    modules = {"q": wrapped.q_proj, "k": wrapped.k_proj, "v": wrapped.k_proj if keys_are_values else wrapped.v_proj}
    found: dict[str, Any] = {
        f"w_{role}": rearrange(module.weight, "(head d_head) d_model -> head d_model d_head", d_head=wrapped.head_dim)
        for role, module in modules.items()
    }
    found["w_o"] = rearrange(
        wrapped.o_proj.weight, "d_model (head d_head) -> head d_head d_model", d_head=wrapped.head_dim
    )
    for role in "qk":
        bias = modules[role].bias
        found[f"b_{role}"] = (
            None if bias is None else rearrange(bias, "(head d_head) -> head d_head", d_head=wrapped.head_dim)
        )
    return found | {"keys_are_values": keys_are_values}


def context_length(model: Any) -> int:
    """Return the longest prompt by the wrapped model's config, or by TransformerLens where the config states none.

    For some architectures TransformerLens has a default instead of the model's number (2048 tokens for MPT in 3.9).
    """
    config = getattr(model.original_model, "config", None)
    stated = None if config is None or is_encoder(model) else stated_context(config)  # RoBERTa's has two unused rows
    return int(model.cfg.n_ctx) if stated is None else stated


def stated_context(config: Any) -> int | None:
    """Return the longest prompt that a Hugging Face config states, the shorter of two (MPT); None for none (BLOOM)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min((int(length) for length in lengths if isinstance(length, int) and length > 0), default=None)


def read_output(model: Any, layer: int) -> tuple[Tensor | None, Normalization, float]:
    """Return b_O, the norm behind the attention, and the factor on what its heads add to the stream."""
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
    """Return where a layer with an MLP shows what the MLP reads. `ln2.hook_out` stands behind gain and bias of `ln2`.

    The norm is the MLP's own, the attention's, which parallel blocks share (GPT-J, Phi, Command R), or none (OLMo 2).
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
    """Return the norm in front of the unembedding."""
    norm = getattr(model, "ln_final", getattr(model, "H_ln_final", None))
    if norm is None:
        return NO_NORM
    return read_normalization(norm.original_component, model, (model.cfg.d_model,), "final norm")


def rotary_tables(
    model: Any, layer: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the scaled (cos, sin) that the layer applied in a run, each [(batch,) pos, columns]; None without tables.

    Raises UnsupportedArchitecture for a layer with rotary geometry whose tables were not applied in the run.
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
            f"layer {layer}: the layer's rotary tables were never applied although its module carries frequencies"
        )
    return tables


def seen_keys(model: Any, layer: int, n_positions: int) -> Tensor:
    """Return which keys a layer by itself lets each query see, [pos, pos]."""
    if is_encoder(model):
        return torch.ones(n_positions, n_positions, dtype=torch.bool)
    wrapped = blocks_of(model)[layer].module.attn.original_component
    stored = getattr(wrapped, "bias", None)
    if isinstance(stored, Tensor) and stored.dtype == torch.bool and stored.ndim == 4:  # GPT-Neo's windowed mask
        return stored[0, 0, :n_positions, :n_positions]
    seen = torch.ones(n_positions, n_positions, dtype=torch.bool).tril()
    if _layer_type(wrapped) == "chunked_attention":  # Llama 4: keys of the query's own chunk
        chunk = torch.arange(n_positions) // int(wrapped.config.attention_chunk_size)
        seen &= chunk[:, None] == chunk
    window = _window(wrapped)
    return seen if window is None else seen.triu(1 - window)


def _window(wrapped: Any) -> int | None:
    """Return how many keys a layer's queries see, their own token among them; None for all earlier ones."""
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
    """Return which of the scores that a layer exposes (or of some of them) are of keys that the query sees."""
    wrapped = blocks_of(model)[layer].module.attn.original_component
    masked_score = special_attention(wrapped).masked_score
    # Some models mask by -inf instead.
    masked = torch.finfo(scores.dtype).min if masked_score is None else masked_score(wrapped)
    return scores > masked / 2


def selected_keys(model: Any, layer: int) -> int | None:
    """Return how many keys an indexer picks for each query of a layer (GLM 5); None without an indexer."""
    wrapped = blocks_of(model)[layer].module.attn.original_component
    return int(wrapped.config.index_topk) if hasattr(wrapped, "indexer") else None


def prefill_cache(model: Any, tokens: Tensor) -> Any:
    """Run the model on `tokens` and return its key/value cache; None where it keeps none (native models)."""
    _, cache = model(tokens, return_type="logits_and_cache", use_cache=True)
    return cache if hasattr(cache, "layers") and hasattr(cache, "reorder_cache") else None


def joined_caches(caches: list[Any]) -> Any:
    """Return the cache of all rows of several; None where a layer keeps more than keys and values."""
    if len(caches) == 1:
        return caches[0]
    joined = _copied(caches[0])
    for layer, *others in zip(joined.layers, *(cache.layers for cache in caches[1:]), strict=True):
        if not _plain(layer):
            return None
        for name in ("keys", "values"):
            setattr(layer, name, torch.cat([getattr(one, name) for one in (layer, *others)]))
    return joined


def _plain(layer: Any) -> bool:
    """Return whether a layer of a cache keeps keys and values alone."""
    tensors = {name for name, value in vars(layer).items() if isinstance(value, Tensor) and value.ndim}
    return tensors == {"keys", "values"} and not any(isinstance(value, dict) for value in vars(layer).values())


def cache_bytes(cache: Any) -> int:
    """Return the size of the keys and values of all rows of a cache."""
    return sum(value.nbytes for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor))


def continued_logits(model: Any, cache: Any, tokens: Tensor, rows: Tensor, alive: Sequence[int]) -> Tensor:
    """Return logits of tokens that follow cached ones, of the row of the cache that `rows` names for each of theirs.

    The cache is not changed. `alive` says by layer how many of the rows, the first ones, it runs.
    """
    copied_cache = _copied(cache)  # a pass extends the cache it is given
    for layer, n in zip(copied_cache.layers, alive, strict=False):  # some models have layers without a cache
        if n and _plain(layer) and len(layer.keys) == 1:  # a step copies them anyway
            layer.keys, layer.values = (kept.expand(n, -1, -1, -1) for kept in (layer.keys, layer.values))
        elif n:
            layer.reorder_cache(rows[:n])
    return model(tokens, past_key_values=copied_cache, use_cache=True, return_type="logits")


def _copied(cache: Any) -> Any:
    """Return a cache with layers of its own, which share their tensors with the given cache's layers."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in copied.layers:  # dictionaries of states
        vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return copied


def _score_scale(wrapped: Any, d_head: int) -> float:
    for name in ("scaling", "softmax_scale", "inv_norm_factor"):
        if isinstance(getattr(wrapped, name, None), float):
            return getattr(wrapped, name)
    if getattr(wrapped, "scale_attn", None) is not None:
        return 1.0 / float(wrapped.scale_attn)
    stated = special_attention(wrapped).score_scale
    return d_head**-0.5 if stated is None else stated(wrapped)


def _alibi(model: Any, wrapped: Any, layer: int, n_heads: int) -> Alibi | None:
    if model.cfg.positional_embedding_type != "alibi":
        return None
    refused = special_attention(wrapped).refused_alibi
    if refused is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {refused}")
    return Alibi(alibi_slopes(n_heads))


def _even_scale_up_to(wrapped: Any) -> int | None:
    """Return the number of tokens up to which no query is scaled by its position (Ministral 3, Llama 4)."""
    if getattr(wrapped, "attn_temperature_tuning", False) and not wrapped.use_rope:
        return int(wrapped.floor_scale) - 1
    rope = getattr(getattr(wrapped, "config", None), "rope_parameters", None)
    if not isinstance(rope, dict) or not rope.get("llama_4_scaling_beta"):
        return None
    return int(rope["original_max_position_embeddings"])


def _softcap(wrapped: Any, layer: int) -> float | None:
    special, softcap = special_attention(wrapped), getattr(wrapped, "attn_logit_softcapping", None)
    if softcap and special.refused_softcap is not None:
        raise UnsupportedArchitecture(f"layer {layer}: {special.refused_softcap.format(softcap=softcap)}")
    if special.softcap is not None:
        softcap = special.softcap(wrapped)
    return float(softcap) if softcap else None


def _rotary(model: Any, wrapped: Any, layer: int, d_head: int) -> RotaryGeometry | None:
    if model.cfg.positional_embedding_type != "rotary" or not _is_rotated(wrapped):
        return None
    if (stored := _stored_tables(model, wrapped)) is not None:
        cos, sin = (table[1].detach().cpu().double() for table in stored)
        known = Frequencies(torch.atan2(sin, cos), 1.0)
        found = frequencies_of_stored(wrapped, *stored, len(cos), known)
        real, imag = pair_columns(2 * len(cos), adjacent=True)
        return RotaryGeometry(found.theta, real, imag, d_head, found.scaling, mismatch=found.mismatch)
    module = _rotary_module(model, wrapped)
    layer_type = _layer_type(wrapped)
    if module is None or not any(hasattr(module, f"{prefix}inv_freq") for prefix in ("", f"{layer_type}_")):
        raise UnsupportedArchitecture(f"layer {layer}: rotary positions, but no rotary module that carries frequencies")
    prefix = f"{layer_type}_" if hasattr(module, f"{layer_type}_inv_freq") else ""
    kind = module.rope_type[layer_type] if prefix else getattr(module, "rope_type", "default")
    inv_freq, limit = getattr(module, f"{prefix}inv_freq"), _switch_length(module, kind, layer_type if prefix else None)
    # Length-dependent kinds overwrite inv_freq as they meet longer prompts, and take the original for short ones:
    # LongRoPE in each run, dynamic NTK once it has met a longer one.
    if kind == "longrope" or (kind == "dynamic" and _longest_met(module, prefix) > module.original_max_seq_len):
        inv_freq = getattr(module, f"{prefix}original_inv_freq", inv_freq)
    known = Frequencies(inv_freq.detach().cpu().double(), float(getattr(module, f"{prefix}attention_scaling", 1.0)))
    n_positions = int(model.cfg.n_ctx) if limit is None else limit - 1  # dynamic NTK switches back below its limit
    found = frequencies_of_module(module, layer_type if prefix else None, known, n_positions, d_head)
    theta = found.theta
    names = ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
    adjacent = any(getattr(model.cfg, name, False) for name in names) or adjacent_pairs(wrapped)
    rotating = theta.nonzero().flatten()  # most pairs of a full layer of Gemma 4 stand still
    real, imag = (columns[rotating] for columns in pair_columns(2 * len(theta), adjacent=adjacent))
    if special_attention(wrapped).rotation == "negative":
        real, imag = imag, real
    first = getattr(wrapped, "qk_nope_head_dim", 0)  # columns of a latent come before those that rotate
    return RotaryGeometry(
        theta=theta[rotating],
        real_index=real + first,
        imag_index=imag + first,
        d_head=d_head,
        attention_scaling=found.scaling,
        valid_up_to=limit,
        mismatch=found.mismatch,
    )


def _longest_met(module: Any, prefix: str) -> int:
    """Return the longest prompt that a rotary module with dynamic NTK has its frequencies for."""
    return int(getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached))


def _rotary_module(model: Any, wrapped: Any) -> Any:
    """Return the module that carries a layer's rotary frequencies, of the bridge or of what it wraps; None without."""
    found: Any = getattr(model, "rotary_emb", None)
    with suppress(AttributeError):  # what stands in the bridge's place in the wrapped model is what runs
        found = model.original_model.get_submodule(found.name)
    found = getattr(found, "original_component", found)
    found = getattr(wrapped, "rotary_emb", None) if found is None else found
    if found is None:  # the bridge may not hold it
        inner = (module for name, module in model.original_model.named_modules() if name.endswith("rotary_emb"))
        found = next(inner, None)
    return found


def _is_rotated(wrapped: Any) -> bool:
    """Return whether a layer of a rotary model rotates: in some models only layers with a window do."""
    rotates = special_attention(wrapped).rotates
    return bool(getattr(wrapped, "use_rope", True)) if rotates is None else rotates(wrapped)


def _layer_type(wrapped: Any) -> str | None:
    for name in ("layer_type", "attention_type"):
        if getattr(wrapped, name, None) is not None:
            return getattr(wrapped, name)
    types = getattr(getattr(wrapped, "config", None), "layer_types", None)
    return types[wrapped.layer_idx] if types and getattr(wrapped, "layer_idx", None) is not None else None


def _stored_tables(model: Any, wrapped: Any) -> tuple[Tensor, Tensor] | None:
    """Return stored cos and sin, [pos, pairs], by which an attention rotates adjacent pairs; None for no such one.

    GPT-J has them in one table, in each attention or, from transformers 5.24 on, in the model's rotary module.
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
    """Return the largest length below `n_positions` past which a run has other rotary frequencies; None without."""
    found = []
    for module in model.original_model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            limit = _switch_length(module, kind, layer_type)
            if limit is not None and n_positions > limit:
                found.append(n_positions - 1 if kind == "dynamic" else limit)  # dynamic NTK: others at every length
    return max(found, default=None)


def _switch_length(module: Any, kind: str | None, layer_type: str | None) -> int | None:
    if kind not in ("longrope", "dynamic"):
        return None
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters[layer_type] if layer_type else parameters)["original_max_position_embeddings"])
