"""The configurations of the zoo: one tiny model per attention shape, with rope scaling and windows that act at once."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import transformers
from transformers import PretrainedConfig

VOCABULARY = 97
WIDTH = 48
HEADS = 4
LAYERS = 2
CONTEXT = 128
WINDOW = 8  # shorter than the prompt, so that a window that is ignored shows

_SEQUENCE = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_GPT = {**_SEQUENCE, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT}
_WITHOUT_GROUPS = {
    **_SEQUENCE,
    **_SIZES,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
LLAMA_SHAPE = {**_WITHOUT_GROUPS, "num_key_value_heads": 2}
_ENCODER = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY}
_FALCON = {**_SEQUENCE, **_SIZES, "new_decoder_architecture": False, "bias": False}
_MPT = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": CONTEXT, "vocab_size": VOCABULARY}
_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
         "patch_size": 14}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
_WINDOWED = {"head_dim": 16, "layer_types": _MIXED, "sliding_window": WINDOW}
_LATENT = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
}
_EXPERTS = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

Shape = Callable[[], PretrainedConfig]


def _rope(kind: str = "default", base: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **scaling}


def _to_32(kind: str, base: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return _rope(kind, base, original_max_position_embeddings=32, **scaling)


def _of(model: str, shape: dict[str, Any] = LLAMA_SHAPE, **changes: Any) -> Shape:
    """What makes the config of a class of models."""

    def config() -> PretrainedConfig:
        made = getattr(transformers, model).config_class(**deepcopy({**shape, **changes}))
        made.architectures = [model]
        return made

    return config


def _deepseek_v2(**changes: Any) -> Shape:
    """Latent attention that rotates complex numbers; V2 Lite has no latent of queries."""
    return _of("DeepseekV2ForCausalLM", **{**_EXPERTS, "n_group": 1, **changes})


def _deepseek_v3(**changes: Any) -> Shape:
    """Latent attention with biases, and a score scale that grows with YaRN's factor."""
    rope = _to_32("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.7)
    return _of("DeepseekV3ForCausalLM", **_EXPERTS, attention_bias=True, rope_parameters=rope, **changes)


def _glm5(selected: int, second: str = "full") -> Shape:
    """Latent attention to the keys that an indexer picks for each query; a "shared" layer takes those of the first."""
    indexer = {"index_n_heads": 4, "index_topk": selected, "index_head_dim": 16, "indexer_types": ["full", second]}
    return _of("GlmMoeDsaForCausalLM", **{**_EXPERTS, "n_group": 1}, **indexer)


_GEMMA3 = {
    **_WINDOWED,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "layer_types": 2 * _MIXED,
    "rope_parameters": {"sliding_attention": _rope("default", 100.0), "full_attention": _rope("linear", factor=2.0)},
}
_PAIRS = range(WIDTH // HEADS // 2)

SHAPES: dict[str, Shape] = {
    "gpt2": _of("GPT2LMHeadModel", _GPT),
    "neox": _of(
        "GPTNeoXForCausalLM",
        _WITHOUT_GROUPS,
        num_attention_heads=3,  # d_head 16: a quarter is two pairs
        rope_parameters=_rope(partial_rotary_factor=0.25),
        use_parallel_residual=True,
    ),
    "llama": _of("LlamaForCausalLM"),
    "llama3": _of(
        "LlamaForCausalLM",
        rope_parameters=_to_32("llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": _of("LlamaForCausalLM", rope_parameters=_to_32("yarn", factor=4.0)),
    "mistral": _of("MistralForCausalLM", sliding_window=WINDOW),
    "qwen2": _of("Qwen2ForCausalLM"),
    "qwen3": _of("Qwen3ForCausalLM", head_dim=16),
    "gemma2": _of(
        "Gemma2ForCausalLM",
        **{**_WINDOWED, "layer_types": 2 * _MIXED, "num_hidden_layers": 4},
        query_pre_attn_scalar=16,
        attn_logit_softcapping=6.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": _of("Gemma3ForCausalLM", **_GEMMA3),
    "phi": _of("PhiForCausalLM", num_key_value_heads=HEADS, rope_parameters=_rope(partial_rotary_factor=0.5)),
    "gptj": _of("GPTJForCausalLM", _GPT, n_inner=4 * WIDTH, rotary_dim=8, tie_word_embeddings=False),
    "opt": _of(
        "OPTForCausalLM",
        {**_SEQUENCE, **_SIZES},
        ffn_dim=64,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=WIDTH,
    ),
    "gptneo": _of(
        "GPTNeoForCausalLM",
        _SEQUENCE,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=CONTEXT,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    "bloom": _of("BloomForCausalLM", _SEQUENCE, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "smollm3": _of("SmolLM3ForCausalLM", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], use_sliding_window=False),
    # The bridge of TransformerLens 3.9 pairs the wrong coordinates here: its logits are wrong (by 0.5). Right on 4.x.
    "cohere": _of("CohereForCausalLM", logit_scale=0.5),
    # No norm in front of the attention, and one of queries and one of keys over all heads at once.
    "olmo2": _of("Olmo2ForCausalLM"),
    # LongRoPE: short factors up to 32 tokens, long factors past that.
    "phi3_longrope": _of(
        "Phi3ForCausalLM",
        original_max_position_embeddings=32,
        sliding_window=None,
        rope_parameters=_to_32(
            "longrope",
            short_factor=[1.0 + 0.1 * pair for pair in _PAIRS],
            long_factor=[1.0 + 0.9 * pair for pair in _PAIRS],
        ),
    ),
    # Dynamic NTK: the frequencies change once a sequence is longer than 32 tokens.
    "dynamic": _of("LlamaForCausalLM", max_position_embeddings=32, rope_parameters=_to_32("dynamic", factor=4.0)),
    "mamba": _of(
        "MambaForCausalLM", _SEQUENCE, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=4, time_step_rank=4
    ),
    "bert": _of("BertForMaskedLM", _ENCODER),
    # Positions are counted from the padding id on, so that two rows of the table stand for none.
    "roberta": _of("RobertaForMaskedLM", _ENCODER, pad_token_id=1, max_position_embeddings=CONTEXT + 2),
}

FALCONS: dict[str, Shape] = {
    "falcon": _of("FalconForCausalLM", _FALCON, multi_query=True),
    "falcon_grouped": _of("FalconForCausalLM", _FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_with_bias": _of("FalconForCausalLM", _FALCON, new_decoder_architecture=True, num_kv_heads=HEADS, bias=True),
    "falcon_one_norm": _of(
        "FalconForCausalLM", _FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon_alibi": _of("FalconForCausalLM", _FALCON, multi_query=False, alibi=True, bias=True),
}
"""Falcon 7B, 40B, the same with biases, Falcon 2, and Falcon RW: their bridges are made by `load_model` alone."""

LATENTS: dict[str, Shape] = {
    "deepseek_v2": _deepseek_v2(),
    "deepseek_v3": _deepseek_v3(),
    "deepseek_v2_lite": _deepseek_v2(q_lora_rank=None),
    "deepseek_v3_halves": _deepseek_v3(rope_interleave=False),
    "glm4_lite": _of("Glm4MoeLiteForCausalLM", **_EXPERTS),
    "glm5": _glm5(CONTEXT),
    "glm5_selecting": _glm5(8, "shared"),
    "youtu": _of("YoutuForCausalLM", **_LATENT),
}
"""Latent attention. Without a latent of queries (V2 Lite), with pairs (t, t + half) as in MiniCPM3, with an indexer."""

MORE_SHAPES: dict[str, Shape] = {
    **FALCONS,
    **LATENTS,
    "olmo": _of("OlmoForCausalLM"),
    "gemma": _of("GemmaForCausalLM", head_dim=16),
    "phi3": _of("Phi3ForCausalLM"),
    "olmo3": _of("Olmo3ForCausalLM", sliding_window=WINDOW, layer_types=_MIXED),
    "olmoe": _of("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    # From token 32 on, queries are scaled by their position.
    "ministral3": _of(
        "Ministral3ForCausalLM",
        head_dim=16,
        sliding_window=None,
        rope_parameters=_to_32("yarn", factor=4.0, llama_4_scaling_beta=0.9),
    ),
    "mpt": _of("MptForCausalLM", _MPT, attn_config={}),
    "mpt_clipped": _of("MptForCausalLM", _MPT, attn_config={"clip_qkv": 100.0}),
    "gemma3_with_softcap": _of("Gemma3ForCausalLM", **_GEMMA3, attn_logit_softcapping=6.0),
    # Its text model is nested in the config, and the vision tower has query and key projections too.
    "gemma3_with_eyes": _of(
        "Gemma3ForConditionalGeneration", {}, text_config={**LLAMA_SHAPE, **_WINDOWED}, vision_config=_EYES
    ),
    # Scores are divided by sqrt(d_head) after the mask, so that masked ones are the lowest number over 3.5.
    "codegen": _of("CodeGenForCausalLM", _GPT, n_ctx=CONTEXT, rotary_dim=8, tie_word_embeddings=False),
    # Four streams, of which a layer reads one.
    "gemma3n": _of(
        "Gemma3nForCausalLM",
        **_WINDOWED,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.5, 0.0],
        laurel_rank=4,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    # Heads of two sizes, a norm of values, and a full layer whose values are its keys, four pairs of twelve still.
    "gemma4": _of(
        "Gemma4ForCausalLM",
        **_WINDOWED,
        global_head_dim=24,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        rope_parameters={
            "sliding_attention": _rope(),
            "full_attention": _rope("proportional", partial_rotary_factor=0.67),
        },
    ),
    # A layer in each of two stacks, of which a pass runs one four times and the other twice: refused.
    "hrm": _of(
        "HrmTextForCausalLM",
        _WITHOUT_GROUPS,
        num_hidden_layers=1,
        head_dim=16,
        attention_bias=True,
        embedding_scale=1.0,
        H_cycles=2,
        L_cycles=2,
    ),
    # The second layer rotates in chunks of 16 tokens, with norms behind; the first does neither and is scaled late.
    "llama4": _of(
        "Llama4ForCausalLM",
        head_dim=16,
        intermediate_size_mlp=64,
        no_rope_layers=[0, 1],
        attention_chunk_size=2 * WINDOW,
        num_local_experts=4,
        floor_scale=100,
    ),
    # Rotates by the negative angle, with norms of queries and keys behind.
    "nanochat": _of("NanoChatForCausalLM"),
    # With `qk_layernorm` (2 12B) it has a LayerNorm without bias for the queries and keys of each head.
    "stablelm": _of("StableLmForCausalLM", hidden_size=64, qk_layernorm=False),
    "stablelm_norms": _of("StableLmForCausalLM", hidden_size=64, qk_layernorm=True),
}
"""Architectures and forms of them that only some tests ask for, by name."""
