"""Corrections of how TransformerLens 3.9 to 4.3 cuts queries, keys and values out of one packed projection.

In Falcon's newer decoder (40B, 180B, Falcon 2), GPT-NeoX without biases and GPTBigCode without multi-query attention it
holds, one key/value head after the other, the queries that read it, its key and its value. TransformerLens cuts that of
Falcon as if all queries came first, asserts that the second has biases and that the third has one key/value head.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def correct_packed(adapter: Any, config: Any) -> None:
    """Correct TransformerLens' adapter of such a model, before its bridge is built.

    Args:
        adapter: the architecture adapter, changed in place; that of other models is left as it is.
        config: the Hugging Face config.
    """
    newer_falcon = config.model_type == "falcon" and config.new_decoder_architecture
    without_bias = config.model_type == "gpt_neox" and not config.attention_bias
    key_for_each = config.model_type == "gpt_bigcode" and not config.multi_query
    if not (newer_falcon or without_bias or key_for_each):
        return
    n_heads = int(config.num_attention_heads)
    n_kv_heads = int(config.num_kv_heads) if newer_falcon else n_heads
    if not without_bias:
        adapter.cfg.n_key_value_heads = n_kv_heads
        for side in ("k", "v"):
            name = f"blocks.{{i}}.attn.{side}"
            for key in (name, f"{name}.weight"):
                conversion = adapter.weight_processing_conversions.get(key)
                if conversion is not None:
                    conversion.tensor_conversion.axes_lengths["n"] = n_kv_heads

    def split(attention: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        packed = attention.c_attn if key_for_each else attention.query_key_value
        weights = _parts(packed.weight, n_heads, n_kv_heads)
        biases = (None, None, None) if packed.bias is None else _parts(packed.bias, n_heads, n_kv_heads)
        query, key, value = (_linear(*both) for both in zip(weights, biases, strict=True))
        return query, key, value

    parts = adapter.component_mapping["blocks"].submodules
    parts["attn"].split_qkv_matrix = split
    if newer_falcon and config.num_ln_in_parallel_attn == 1:
        parts["ln1"].name = "input_layernorm"


def _parts(
    packed: Float[Tensor, "features *d_model"], n_heads: int, n_kv_heads: int
) -> tuple[
    Float[Tensor, "query_features *d_model"],
    Float[Tensor, "key_features *d_model"],
    Float[Tensor, "key_features *d_model"],
]:
    readers = n_heads // n_kv_heads
    by_group = packed.detach().unflatten(0, (n_kv_heads, readers + 2, -1))
    query, key, value = (
        by_group[:, part].reshape(-1, *packed.shape[1:]).clone() for part in (slice(readers), readers, readers + 1)
    )
    return query, key, value


def _linear(weight: Float[Tensor, "out d_model"], bias: Float[Tensor, "out"] | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
