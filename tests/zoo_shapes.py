"""The configurations of the zoo: one tiny model per attention shape, with rope scaling and windows that act at once."""

from collections.abc import Callable
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
LLAMA_SHAPE = {
    **_SEQUENCE,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _rope(kind: str = "default", base: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **scaling}


def _llama(**changes: Any) -> PretrainedConfig:
    return transformers.LlamaConfig(**{**LLAMA_SHAPE, **changes})


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(**_SEQUENCE, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT)


def _neox() -> PretrainedConfig:
    shape = {**LLAMA_SHAPE, "num_attention_heads": 3}  # d_head 16: a quarter is two pairs
    del shape["num_key_value_heads"]  # unknown to the class
    return transformers.GPTNeoXConfig(
        **shape, rope_parameters=_rope(partial_rotary_factor=0.25), use_parallel_residual=True
    )


def _llama3() -> PretrainedConfig:
    return _llama(
        rope_parameters=_rope(
            "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        )
    )


def _yarn() -> PretrainedConfig:
    return _llama(rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32))


def _dynamic() -> PretrainedConfig:
    """Dynamic NTK: the frequencies change once a sequence is longer than 32 tokens."""
    return _llama(
        max_position_embeddings=32, rope_parameters=_rope("dynamic", factor=4.0, original_max_position_embeddings=32)
    )


def _phi3_longrope() -> PretrainedConfig:
    """LongRoPE: short factors up to 32 tokens, long factors past that."""
    pairs = WIDTH // HEADS // 2
    return transformers.Phi3Config(
        **LLAMA_SHAPE,
        original_max_position_embeddings=32,
        sliding_window=None,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0 + 0.1 * pair for pair in range(pairs)],
            long_factor=[1.0 + 0.9 * pair for pair in range(pairs)],
            original_max_position_embeddings=32,
        ),
    )


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**LLAMA_SHAPE, sliding_window=WINDOW)


def _qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(**LLAMA_SHAPE)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**LLAMA_SHAPE, head_dim=16)


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(
        **{**LLAMA_SHAPE, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=6.0,
        final_logit_softcapping=30.0,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **{**LLAMA_SHAPE, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={
            "sliding_attention": _rope("default", 100.0),
            "full_attention": _rope("linear", 10000.0, factor=2.0),
        },
    )


def _phi() -> PretrainedConfig:
    return transformers.PhiConfig(
        **{**LLAMA_SHAPE, "num_key_value_heads": HEADS}, rope_parameters=_rope(partial_rotary_factor=0.5)
    )


def _gptj() -> PretrainedConfig:
    return transformers.GPTJConfig(
        **_SEQUENCE,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=CONTEXT,
        n_inner=4 * WIDTH,
        rotary_dim=8,
        tie_word_embeddings=False,
    )


def _opt() -> PretrainedConfig:
    return transformers.OPTConfig(
        **_SEQUENCE,
        hidden_size=WIDTH,
        ffn_dim=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=WIDTH,
    )


def _gptneo() -> PretrainedConfig:
    return transformers.GPTNeoConfig(
        **_SEQUENCE,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=CONTEXT,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    )


def _bloom() -> PretrainedConfig:
    return transformers.BloomConfig(**_SEQUENCE, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS)


def _smollm3() -> PretrainedConfig:
    return transformers.SmolLM3Config(
        **{**LLAMA_SHAPE, "num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0], use_sliding_window=False
    )


def _cohere() -> PretrainedConfig:
    # The bridge of TransformerLens 3.9 pairs the wrong coordinates here: its logits are wrong (by 0.5). Right on 4.x.
    return transformers.CohereConfig(**LLAMA_SHAPE, logit_scale=0.5)


def _olmo2() -> PretrainedConfig:
    """No norm in front of the attention, and one of queries and one of keys over all heads at once."""
    return transformers.Olmo2Config(**LLAMA_SHAPE)


_LATENT = {
    **LLAMA_SHAPE,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _deepseek_v2(**changes: Any) -> PretrainedConfig:
    """Latent attention that rotates complex numbers; V2 Lite has no latent of queries."""
    return transformers.DeepseekV2Config(**{**_LATENT, **_EXPERTS, "n_group": 1, **changes})


def _deepseek_v3(**changes: Any) -> PretrainedConfig:
    """Latent attention with biases, and a score scale that grows with YaRN's factor."""
    rope = _rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7)
    given = {**_LATENT, **_EXPERTS, "attention_bias": True, "rope_parameters": rope}
    return transformers.DeepseekV3Config(**{**given, **changes})


def _glm5(selected: int, second: str = "full") -> PretrainedConfig:
    """Latent attention to the keys that an indexer picks for each query; a "shared" layer takes those of the first."""
    return transformers.GlmMoeDsaConfig(
        **{**_LATENT, **_EXPERTS, "n_group": 1},
        index_n_heads=4,
        index_topk=selected,
        index_head_dim=16,
        indexer_types=["full", second],
    )


def _mamba() -> PretrainedConfig:
    return transformers.MambaConfig(
        **_SEQUENCE, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=4, time_step_rank=4
    )


def _encoder(kind: Callable[..., PretrainedConfig], **form: Any) -> Callable[[], PretrainedConfig]:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        **form,
    }
    return lambda: kind(**shape)


def _falcon(**form: Any) -> Callable[[], PretrainedConfig]:
    shape = {
        **_SEQUENCE,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "new_decoder_architecture": False,
        "bias": False,
    }
    return lambda: transformers.FalconConfig(**{**shape, **form})


def _olmo3() -> PretrainedConfig:
    return transformers.Olmo3Config(
        **LLAMA_SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    )


def _ministral3() -> PretrainedConfig:
    """From token 32 on, queries are scaled by their position."""
    rope = _rope("yarn", factor=4.0, original_max_position_embeddings=32, llama_4_scaling_beta=0.9)
    return transformers.Ministral3Config(**LLAMA_SHAPE, head_dim=16, sliding_window=None, rope_parameters=rope)


def _mpt(**attention: Any) -> PretrainedConfig:
    return transformers.MptConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_heads=HEADS,
        n_layers=LAYERS,
        max_seq_len=CONTEXT,
        attn_config=attention,
    )


def _gemma3_with_softcap() -> PretrainedConfig:
    config = _gemma3()
    config.attn_logit_softcapping = 6.0
    return config


def _gemma3_with_eyes() -> PretrainedConfig:
    """Its text model is nested in the config, and the vision tower has query and key projections too."""
    text = {**LLAMA_SHAPE, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config={**text, "sliding_window": WINDOW}, vision_config={**sizes, "image_size": 28, "patch_size": 14}
    )


def _stablelm(qk_layernorm: bool) -> PretrainedConfig:
    """StableLM; with `qk_layernorm` (2 12B) a LayerNorm without bias for the queries and keys of each head."""
    return transformers.StableLmConfig(**{**LLAMA_SHAPE, "hidden_size": 64}, qk_layernorm=qk_layernorm)


def _codegen() -> PretrainedConfig:
    """Scores are divided by sqrt(d_head) after the mask, so that masked ones are the lowest number over 3.5."""
    return transformers.CodeGenConfig(
        **_SEQUENCE,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=CONTEXT,
        n_ctx=CONTEXT,
        rotary_dim=8,
        tie_word_embeddings=False,
    )


def _gemma4() -> PretrainedConfig:
    """Heads of two sizes, a norm of values, and a full layer whose values are its keys, four pairs of twelve still."""
    return transformers.Gemma4TextConfig(
        **LLAMA_SHAPE,
        head_dim=16,
        global_head_dim=24,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        rope_parameters={
            "sliding_attention": _rope(),
            "full_attention": _rope("proportional", partial_rotary_factor=0.67),
        },
    )


def _llama4() -> PretrainedConfig:
    """The second layer rotates in chunks of 16 tokens, with norms behind; the first does neither and is scaled late."""
    return transformers.Llama4TextConfig(
        **LLAMA_SHAPE,
        head_dim=16,
        intermediate_size_mlp=64,
        no_rope_layers=[0, 1],
        attention_chunk_size=2 * WINDOW,
        num_local_experts=4,
        floor_scale=100,
    )


def _nanochat() -> PretrainedConfig:
    """Rotates by the negative angle, with norms of queries and keys behind."""
    return transformers.NanoChatConfig(**LLAMA_SHAPE)


SHAPES: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "gpt2": (_gpt2, "GPT2LMHeadModel"),
    "neox": (_neox, "GPTNeoXForCausalLM"),
    "llama": (_llama, "LlamaForCausalLM"),
    "llama3": (_llama3, "LlamaForCausalLM"),
    "yarn": (_yarn, "LlamaForCausalLM"),
    "mistral": (_mistral, "MistralForCausalLM"),
    "qwen2": (_qwen2, "Qwen2ForCausalLM"),
    "qwen3": (_qwen3, "Qwen3ForCausalLM"),
    "gemma2": (_gemma2, "Gemma2ForCausalLM"),
    "gemma3": (_gemma3, "Gemma3ForCausalLM"),
    "phi": (_phi, "PhiForCausalLM"),
    "gptj": (_gptj, "GPTJForCausalLM"),
    "opt": (_opt, "OPTForCausalLM"),
    "gptneo": (_gptneo, "GPTNeoForCausalLM"),
    "bloom": (_bloom, "BloomForCausalLM"),
    "smollm3": (_smollm3, "SmolLM3ForCausalLM"),
    "cohere": (_cohere, "CohereForCausalLM"),
    "olmo2": (_olmo2, "Olmo2ForCausalLM"),
    "phi3_longrope": (_phi3_longrope, "Phi3ForCausalLM"),
    "dynamic": (_dynamic, "LlamaForCausalLM"),
    "mamba": (_mamba, "MambaForCausalLM"),
    "bert": (_encoder(transformers.BertConfig), "BertForMaskedLM"),
    # Positions are counted from the padding id on, so that two rows of the table stand for none.
    "roberta": (
        _encoder(transformers.RobertaConfig, pad_token_id=1, max_position_embeddings=CONTEXT + 2),
        "RobertaForMaskedLM",
    ),
}

FALCONS: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "falcon": (_falcon(multi_query=True), "FalconForCausalLM"),
    "falcon_grouped": (_falcon(new_decoder_architecture=True, num_kv_heads=2), "FalconForCausalLM"),
    "falcon_with_bias": (_falcon(new_decoder_architecture=True, num_kv_heads=HEADS, bias=True), "FalconForCausalLM"),
    "falcon_one_norm": (
        _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
        "FalconForCausalLM",
    ),
    "falcon_alibi": (_falcon(multi_query=False, alibi=True, bias=True), "FalconForCausalLM"),
}
"""Falcon 7B, 40B, the same with biases, Falcon 2, and Falcon RW: their bridges are made by `load_model` alone."""

LATENTS: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "deepseek_v2": (_deepseek_v2, "DeepseekV2ForCausalLM"),
    "deepseek_v3": (_deepseek_v3, "DeepseekV3ForCausalLM"),
    "deepseek_v2_lite": (lambda: _deepseek_v2(q_lora_rank=None), "DeepseekV2ForCausalLM"),
    "deepseek_v3_halves": (lambda: _deepseek_v3(rope_interleave=False), "DeepseekV3ForCausalLM"),
    "glm4_lite": (lambda: transformers.Glm4MoeLiteConfig(**{**_LATENT, **_EXPERTS}), "Glm4MoeLiteForCausalLM"),
    "glm5": (lambda: _glm5(CONTEXT), "GlmMoeDsaForCausalLM"),
    "glm5_selecting": (lambda: _glm5(8, "shared"), "GlmMoeDsaForCausalLM"),
    "youtu": (lambda: transformers.YoutuConfig(**_LATENT), "YoutuForCausalLM"),
}
"""Latent attention. Without a latent of queries (V2 Lite), with pairs (t, t + half) as in MiniCPM3, with an indexer."""

MORE_SHAPES: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    **FALCONS,
    **LATENTS,
    "olmo": (lambda: transformers.OlmoConfig(**LLAMA_SHAPE), "OlmoForCausalLM"),
    "gemma": (lambda: transformers.GemmaConfig(**LLAMA_SHAPE, head_dim=16), "GemmaForCausalLM"),
    "phi3": (lambda: transformers.Phi3Config(**LLAMA_SHAPE), "Phi3ForCausalLM"),
    "olmo3": (_olmo3, "Olmo3ForCausalLM"),
    "olmoe": (
        lambda: transformers.OlmoeConfig(**LLAMA_SHAPE, num_experts=4, num_experts_per_tok=2),
        "OlmoeForCausalLM",
    ),
    "ministral3": (_ministral3, "Ministral3ForCausalLM"),
    "mpt": (_mpt, "MptForCausalLM"),
    "mpt_clipped": (lambda: _mpt(clip_qkv=100.0), "MptForCausalLM"),
    "gemma3_with_softcap": (_gemma3_with_softcap, "Gemma3ForCausalLM"),
    "gemma3_with_eyes": (_gemma3_with_eyes, "Gemma3ForConditionalGeneration"),
    "codegen": (_codegen, "CodeGenForCausalLM"),
    "gemma3n": (  # four streams, of which a layer reads one
        lambda: transformers.Gemma3nTextConfig(
            **LLAMA_SHAPE,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=WINDOW,
            num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.5, 0.0],
            laurel_rank=4,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
        ),
        "Gemma3nForCausalLM",
    ),
    "gemma4": (_gemma4, "Gemma4ForCausalLM"),
    "hrm": (  # a layer in each of two stacks, of which a pass runs one four times and the other twice
        lambda: transformers.HrmTextConfig(
            **{**LLAMA_SHAPE, "num_hidden_layers": 1, "num_key_value_heads": HEADS},
            head_dim=16,
            attention_bias=True,
            embedding_scale=1.0,
            H_cycles=2,
            L_cycles=2,
        ),
        "HrmTextForCausalLM",
    ),
    "llama4": (_llama4, "Llama4ForCausalLM"),
    "nanochat": (_nanochat, "NanoChatForCausalLM"),
    "stablelm": (lambda: _stablelm(qk_layernorm=False), "StableLmForCausalLM"),
    "stablelm_norms": (lambda: _stablelm(qk_layernorm=True), "StableLmForCausalLM"),
}
"""Architectures and forms of them that only some tests ask for, by name."""
