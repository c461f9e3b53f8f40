"""Read a HookedTransformer (TransformerLens 3.x), folded or not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.alibi import Alibi, alibi_slopes
from tlspectral.models.reading.layer import RawAttention, require_readable, require_unclipped
from tlspectral.models.reading.norms import NO_NORM, MlpInput, Normalization, NormalizationKind, QueryKeyNorm
from tlspectral.models.reading.rotation import frequencies_of_stored
from tlspectral.models.reading.special_cases import NORMS_BEHIND

_NORM_KINDS: dict[str, NormalizationKind] = {"LayerNorm": "LN", "RMSNorm": "RMS", "Identity": "none"}


def read_attention(model: Any, layer: int) -> RawAttention:
    """Return the attention parameters of layer `layer` of a HookedTransformer as a `RawAttention`: the model's own
    tensors, not folded.

    Raises UnsupportedArchitecture if the attention is not causal self-attention.
    """
    cfg = model.cfg
    if cfg.attention_dir != "causal":
        raise UnsupportedArchitecture(
            f"layer {layer}: the attention is {cfg.attention_dir}; only causal attention is supported here: load a "
            "causal model, or BERT and RoBERTa with backend='bridge'"
        )
    if cfg.positional_embedding_type == "shortformer":
        raise UnsupportedArchitecture(
            f"layer {layer}: positional_embedding_type='shortformer' is not supported: it adds positions to the input "
            "of queries and keys but not to the residual stream, so a score is bilinear in stream + positions and not "
            "in the stream. Take another model"
        )
    require_unclipped(getattr(cfg, "clip_qkv", None), layer)
    block = model.blocks[layer]
    attention = block.attn
    grouped = hasattr(attention, "_W_K")
    post_norm = cfg.original_architecture in NORMS_BEHIND
    require_readable(attention.W_Q, f"layer {layer}, W_Q")
    return RawAttention(
        w_q=attention.W_Q,
        w_k=attention._W_K if grouped else attention.W_K,
        w_v=attention._W_V if grouped else attention.W_V,
        w_o=attention.W_O,
        b_q=attention.b_Q,
        b_k=attention._b_K if grouped else attention.b_K,
        b_v=attention._b_V if grouped else attention.b_V,
        norm=NO_NORM if post_norm else read_normalization(block.ln1, cfg, f"layer {layer}"),
        q_norm=_query_key_norm(attention.q_norm, cfg),
        k_norm=_query_key_norm(attention.k_norm, cfg),
        score_scale=1.0 / float(attention.attn_scale),
        softcap=float(cfg.attn_scores_soft_cap) if cfg.attn_scores_soft_cap > 0 else None,
        alibi=Alibi(alibi_slopes(cfg.n_heads)) if cfg.positional_embedding_type == "alibi" else None,
        rotary=_rotary(attention, cfg),
    )


def read_output(model: Any, layer: int) -> tuple[Tensor | None, Normalization, float]:
    """Return (b_O, norm after the attention, 1.0) of layer `layer` of a HookedTransformer (`model`).

    b_O: bias after W_O. 1.0 is the factor on what attention and MLP add; only models in a bridge have another factor.
    """
    block, cfg = model.blocks[layer], model.cfg
    norm = block.ln1 if cfg.original_architecture in NORMS_BEHIND else block._modules.get("ln1_post")
    behind = NO_NORM if norm is None else read_normalization(norm, cfg, f"layer {layer}, norm behind the attention")
    return block.attn.b_O, behind, 1.0


def read_mlp_input(model: Any, layer: int) -> MlpInput:
    """Return an `MlpInput` for layer `layer` of a HookedTransformer (`model`): `.point`, the hook point that shows the
    MLP's input, and `.norm`, the norm between the residual stream and that point.

    `ln2.hook_normalized` comes before gain and bias of `ln2`, so the returned norm has neither. Raises
    UnsupportedArchitecture if no hook point shows the input.
    """
    block, cfg, where = model.blocks[layer], model.cfg, f"layer {layer}, norm before the MLP"
    norm = NO_NORM if cfg.original_architecture in NORMS_BEHIND else read_normalization(block.ln2, cfg, where)
    if norm.kind != "none":
        return MlpInput("ln2.hook_normalized", replace(norm, gain=None, bias=None))
    if not cfg.use_hook_mlp_in:
        raise UnsupportedArchitecture(
            f"layer {layer}: the MLP reads the residual stream without a norm, and a HookedTransformer has a hook "
            "point there only after model.set_use_hook_mlp_in(True): call it first"
        )
    return MlpInput("hook_mlp_in", NO_NORM)


def final_normalization(model: Any) -> Normalization:
    """Return the norm before the unembedding of a HookedTransformer (`model`) as a `Normalization`; `NO_NORM` if it has
    none.
    """
    if not hasattr(model, "ln_final"):
        return NO_NORM
    return read_normalization(model.ln_final, model.cfg, "final norm")


def rotary_tables(
    model: Any, layer: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the stored, scaled (cos, sin) of layer `layer` of a HookedTransformer with rotary positions (`model`),
    each [n_positions, rotary_dim].

    `captured` is not used.
    """
    attention = model.blocks[layer].attn
    return attention.rotary_cos[:n_positions], attention.rotary_sin[:n_positions]


def seen_keys(model: Any, layer: int, n_positions: int, first: int = 0) -> Tensor:
    """Return a bool tensor [query, key] for a prompt of `n_positions` tokens: True where the mask of layer `layer` lets
    the query see the key.

    first: the first query; rows of earlier queries are left out.
    """
    seen = torch.ones(n_positions - first, n_positions, dtype=torch.bool).tril(first)
    local = model.blocks[layer].attn.attn_type == "local"
    return seen.triu(1 - model.cfg.window_size + first) if local else seen


def unmasked(model: Any, layer: int, scores: Tensor) -> Tensor:
    """Return a bool tensor of the shape of `scores`: True where the mask of layer `layer` of a HookedTransformer
    (`model`) lets the query see the key.

    scores: some or all scores that the layer's hook point shows. They show the mask by their values.
    """
    return scores > torch.finfo(scores.dtype).min / 2  # masked ones are -inf


def selected_keys(model: Any, layer: int) -> int | None:
    """Return None: no layer of a HookedTransformer has an indexer that picks keys."""
    return None


def frequency_switch(model: Any, n_positions: int) -> int | None:
    """Return the largest prompt length below `n_positions` beyond which the model uses other rotary frequencies.

    None if the frequencies do not change up to `n_positions` (only Qwen 1 changes them).
    """
    limit = _rotary_limit(model.cfg)
    if limit is None or n_positions <= limit:
        return None
    return limit << (((n_positions - 1) // limit).bit_length() - 1)  # Qwen 1's change at each doubling


def prefill_cache(model: Any, tokens: Tensor) -> Any:
    """Run the model on `tokens` [batch, pos] and return its key/value cache, an object of TransformerLens."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(model.cfg, tokens.device, len(tokens))
    # Without a mask TransformerLens makes one, which needs a tokenizer and masks real tokens that equal its padding id.
    model(tokens, past_kv_cache=cache, attention_mask=torch.ones_like(tokens), return_type="logits")
    return cache


def joined_caches(caches: list[Any]) -> Any:
    """Return one key/value cache of TransformerLens with the rows of all caches."""
    entries = [
        replace(of_layer[0], past_keys=torch.cat([entry.past_keys for entry in of_layer]),
                past_values=torch.cat([entry.past_values for entry in of_layer]))
        for of_layer in zip(*(cache.entries for cache in caches), strict=True)
    ]  # fmt: skip
    masks = torch.cat([cache.previous_attention_mask for cache in caches])
    return replace(caches[0], entries=entries, previous_attention_mask=masks)


def cache_bytes(cache: Any) -> int:
    """Return the size in bytes of a cache's keys and values, all rows together."""
    return sum(entry.past_keys.nbytes + entry.past_values.nbytes for entry in cache.entries)


def continued_logits(model: Any, cache: Any, tokens: Tensor, rows: Tensor, alive: Sequence[int]) -> Tensor:
    """Return logits [rows, pos, d_vocab] of `tokens` [rows, pos] that continue cached prompts, from a run of `model`.

    cache: a key/value cache; it is not changed.
    rows: for each row of `tokens`, the row of the cache that it continues.
    alive: for each layer, how many rows it runs, counted from the first. The caller cuts the keys of each layer to
    these rows.
    """
    entries = [
        # The size of the batch is read from the first layer.
        replace(entry, past_keys=entry.past_keys[rows], past_values=entry.past_values[rows])
        if n or index == 0
        else replace(entry)
        for index, (entry, n) in enumerate(zip(cache.entries, alive, strict=True))
    ]
    repeated = replace(cache, entries=entries, previous_attention_mask=cache.previous_attention_mask[rows])
    return model(tokens, past_kv_cache=repeated, attention_mask=torch.ones_like(tokens), return_type="logits")


def read_normalization(norm: Any, cfg: Any, where: str) -> Normalization:
    """Return a norm module of TransformerLens as a `Normalization`.

    cfg: the model's config. where: layer and role, for messages. Raises UnsupportedArchitecture if the norm cannot be
    folded into weights.
    """
    # By class, not by the config, because the final norm may be of another kind than the other norms.
    kind = _NORM_KINDS.get(type(norm).__name__.removesuffix("Pre"))
    if kind is None:
        raise UnsupportedArchitecture(
            f"{where}: {type(norm).__name__} is not a norm that can be folded; LayerNorm and RMSNorm are supported: "
            "take another model"
        )
    return Normalization(kind, getattr(norm, "w", None), getattr(norm, "b", None), float(cfg.eps))


def _query_key_norm(norm: Any, cfg: Any) -> QueryKeyNorm | None:
    """Return the norm of queries or keys as a `QueryKeyNorm`, from its module; None without one.

    cfg: the model's config.
    """
    if norm is None:
        return None
    over_heads = not cfg.use_qk_norm
    gain = rearrange(norm.w, "(head d_head) -> head d_head", d_head=cfg.d_head) if over_heads else norm.w
    return QueryKeyNorm(gain, float(cfg.eps), over_heads)


def _rotary(attention: Any, cfg: Any) -> RotaryGeometry | None:
    """Return the rotary geometry of an attention module, None without rotary positions. cfg: the model's config."""
    if cfg.positional_embedding_type != "rotary":
        return None
    cos, sin, limit = attention.rotary_cos, attention.rotary_sin, _rotary_limit(cfg)
    if limit is not None and attention._ntk_alpha_cached != 1.0:  # tables of a longer run: compute those of a short run
        sin, cos = attention.calculate_sin_cos_rotary(cfg.rotary_dim, limit, attention._rotary_base(), cfg.dtype)
    frequencies = frequencies_of_stored(attention, cos, sin, cfg.rotary_dim // 2)
    real, imag = pair_columns(cfg.rotary_dim, adjacent=bool(cfg.rotary_adjacent_pairs))
    return RotaryGeometry(
        theta=frequencies.theta,
        real_index=real,
        imag_index=imag,
        d_head=int(cfg.d_head),
        attention_scaling=frequencies.scaling,
        valid_up_to=limit,
        mismatch=frequencies.mismatch,
    )


def _rotary_limit(cfg: Any) -> int | None:
    """Return the prompt length up to which the rotary frequencies of a model with the config `cfg` do not change (Qwen
    1); None if they never change.
    """
    return cfg.train_seq_length if getattr(cfg, "use_dynamic_ntk_rope", False) else None
