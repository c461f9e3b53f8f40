"""Tiny configurations of every causal family that TransformerLens has an adapter for, made from the fields of configs.

A field that is named in `TINY` gets the value there. `BY_HAND` has what a family needs besides. Every flag of `FLAGS`
that a family has makes one more form of it, in which the flag is the other way round.
"""

import dataclasses
from typing import Any

from zoo_shapes import HEADS, LAYERS, VOCABULARY, WIDTH, WINDOW

CONTEXT = 64
_MIXED = ["sliding_attention", "full_attention"]
_MIXER, _FULL = ["linear_attention"], ["full_attention"]
_THREE_TO_ONE = 2 * (3 * _MIXER + _FULL)
_LFM2 = 2 * (2 * ["conv"] + _FULL)


def _pattern(layers: list[str], name: str = "layer_types") -> dict[str, Any]:
    return {name: layers, "num_hidden_layers": len(layers)}


# The layers of published hybrids, in their order, as far as the second layer with attention.
_HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18], "num_hidden_layers": 19},
    "granitemoehybrid": _pattern(5 * _MIXER + _FULL + 9 * _MIXER + _FULL),
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 13, "mamba_dt_rank": 4},
    **{family: _pattern(_LFM2) for family in ("lfm2", "lfm2_moe")},
    "nemotron_h": {**_pattern(2 * (4 * [*_MIXER, "mlp"] + _FULL), "layers_block_type"), "n_groups": 2},
    **{
        family: _pattern(_THREE_TO_ONE)
        for family in ("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 6,
                        "lru_width": WIDTH},
    "zamba2": {**_pattern(2 * (5 * _MIXER + ["hybrid"]), "layers_block_type"), "adapter_rank": 4},
}  # fmt: skip

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), HEADS),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,
    **dict.fromkeys(("index_n_heads", "index_topk"), 4),
    "index_head_dim": 16,
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "mamba_ngroups"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 24),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), WINDOW),
    "attention_chunk_size": WINDOW,
    # Numbers that are 1, or none, by default in some family: at 1 a table is right that does not read them.
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "logit_scale", "lm_head_multiplier"), 0.5),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling"), 3.0),
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier"), 0.7),
    **dict.fromkeys(("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.3),
    "attn_logit_softcapping": 6.0,
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), 5.0),
    "query_pre_attn_scalar": 20,
    "rotary_dim": 8,
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.04),
}  # fmt: skip

FLAGS = (
    "attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "bias", "norm_bias", "attention_out_bias", "no_bias",
    "enable_bias", "add_bias_linear", "qk_layernorm", "use_qk_norm", "multi_query", "alibi", "parallel_attn",
    "new_decoder_architecture", "use_parallel_residual", "apply_residual_connection_post_layernorm",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "do_layer_norm_before",
    "layer_norm_elementwise_affine", "_remove_final_layer_norm", "use_sliding_window", "attention_k_eq_v",
    "enable_moe_block", "use_double_wide_mlp", "mup_enabled", "gating", "rope_interleave", "scale_embedding",
    "use_mem_rope", "use_shared_attention_adapter", "attn_temperature_tuning",
)  # fmt: skip

_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
BY_HAND: dict[str, dict[str, Any]] = {
    **_HYBRIDS,
    "afmoe": {"layer_types": _MIXED, "num_dense_layers": 1},
    "cohere2": {"layer_types": _MIXED},
    "deepseek_v2": {"num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"num_key_value_heads": HEADS, "n_group": 2, "topk_group": 1},
    "exaone4": {"layer_types": _MIXED},
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 96,
        "mlp_multipliers": [0.8, 1.2],
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    },
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "gemma2": {"layer_types": _MIXED},
    "gemma3_text": {"layer_types": _MIXED, "attn_logit_softcapping": None},
    "gemma3": {"vision_config": _VISION},
    "gemma4_text": {
        "layer_types": _MIXED,
        "global_head_dim": 24,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {"layer_types": _MIXED, "global_head_dim": 24},  # 512 by default: scores of 208
    **{family: {"num_key_value_heads": HEADS} for family in ("glm4_moe_lite", "glm_moe_dsa", "youtu")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {"num_attention_heads": 3},  # d_head 16: a quarter is two pairs
    "gemma3n_text": {
        **_pattern(2 * _MIXED),
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "gpt_oss": {"layer_types": _MIXED},
    "jetmoe": {"kv_channels": 16, "num_attention_heads": HEADS},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 8},
    "modernbert-decoder": {"layer_types": _MIXED},
    "olmo3": {"layer_types": _MIXED},
    "qwen2": {"layer_types": _MIXED, "use_sliding_window": True},
    "qwen3": {"layer_types": _MIXED, "use_sliding_window": True},
    "qwen3_5": {"vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": WIDTH}},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"hidden_size": 64},  # d_head 16: a quarter is two pairs
    "vaultgemma": {"layer_types": _MIXED},
}


NOT_BUILT: dict[tuple[str, str], str] = {
    ("recurrent_gemma", "scaled rope"): "transformers allows no scaling",
    ("zamba2", "use_shared_attention_adapter=True"): "its adapter does not fit attention as wide as two streams",
    ("phi3", "scaled rope"): "transformers allows no scaling but LongRoPE",
    ("internlm3", "attention_bias=True"): "transformers refuses a bias of queries, keys and values alone",
}
"""Forms that are not built, with the reason. A form that is not here and cannot be built fails the test."""

_ATTENTION = _pattern(LAYERS * _FULL)
MORE_FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4_text": {"keys of earlier layers": {**_pattern(2 * _MIXED), "num_kv_shared_layers": 2}},
    "bert": {"decoder": {"is_decoder": True}},
    "falcon": {"grouped": {"new_decoder_architecture": True, "num_kv_heads": 2}},
    "gpt_neox": {
        "rotary everywhere": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
        }
    },
    "granitemoehybrid": {
        "attention with rope": {**_ATTENTION, "position_embedding_type": "rope"},
        "attention without positions": _ATTENTION,
    },
    "mpt": {
        "its own scale": {"attn_config": {"softmax_scale": 0.1}},
        "other slopes": {"attn_config": {"alibi_bias_max": 4}},
        "clipped": {"attn_config": {"clip_qkv": 100.0}},
        "without ALiBi": {"attn_config": {"alibi": False}},
        "norms of queries and keys": {"attn_config": {"qk_ln": True}},
    },
    "olmo": {"clipped": {"clip_qkv": 100.0}},
    "olmoe": {"clipped": {"clip_qkv": 100.0}},
    "opt": {
        "projected embedding": {"word_embed_proj_dim": 32},
        "350M": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    },
}


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def families() -> dict[str, str]:
    """Class name by model type, of the causal models of transformers that TransformerLens has an adapter for."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {
        kind: (names,) if isinstance(names, str) else names for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    return {kind: name for kind, names in sorted(classes.items()) for name in names if name in SUPPORTED_ARCHITECTURES}


def fields(model_type: str) -> dict[str, Any]:
    """Fields of a config class with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(config_class(model_type))}


def tiny_config(model_type: str, **form: Any) -> Any:
    known = fields(model_type)
    values = {name: value for name, value in TINY.items() if name in known}
    if "text_config" in known:
        values["text_config"] = tiny_config(config_class(model_type).sub_configs["text_config"].model_type).to_dict()
    return config_class(model_type)(**{**values, **BY_HAND.get(model_type, {}), **form})


def forms(model_type: str) -> dict[str, dict[str, Any]]:
    """The forms of a family by name: as it is, and with one flag changed."""
    known = fields(model_type)
    flags = [name for name in FLAGS if isinstance(known.get(name), bool)]
    found = {"": {}} | {f"{name}={not known[name]}": {name: not known[name]} for name in flags}
    rope = getattr(tiny_config(model_type), "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        found["scaled rope"] = {"rope_parameters": {**rope, "rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}
    return found | MORE_FORMS.get(model_type, {})
