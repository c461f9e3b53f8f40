"""Corrections of how TransformerLens 3.9 to 4.3 reads Falcon's newer decoder (40B, 180B, Falcon 2).

Its `query_key_value` holds, one key/value head after the other, the queries that read it, its key and its value.
TransformerLens cuts it as if all queries came first, counts one key/value head, and looks for two norms in a model that
shares one (Falcon 2).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def correct_falcon(adapter: Any, config: Any) -> None:
    """Correct TransformerLens' adapter of such a Falcon, before its bridge is built.

    Args:
        adapter: the architecture adapter, changed in place; that of other models is left as it is.
        config: the Hugging Face config.
    """
    if config.model_type != "falcon" or not config.new_decoder_architecture:
        return
    n_heads, n_kv_heads = int(config.num_attention_heads), int(config.num_kv_heads)
    adapter.cfg.n_key_value_heads = n_kv_heads
    for side in ("k", "v"):
        conversion = adapter.weight_processing_conversions[f"blocks.{{i}}.attn.{side}"].tensor_conversion
        conversion.axes_lengths["n"] = n_kv_heads

    def split(attention: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        packed = attention.query_key_value
        weights = _parts(packed.weight, n_heads, n_kv_heads)
        biases = (None, None, None) if packed.bias is None else _parts(packed.bias, n_heads, n_kv_heads)
        query, key, value = (_linear(*both) for both in zip(weights, biases, strict=True))
        return query, key, value

    parts = adapter.component_mapping["blocks"].submodules
    parts["attn"].split_qkv_matrix = split
    if config.num_ln_in_parallel_attn == 1:
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
