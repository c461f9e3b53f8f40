"""Bridges that TransformerLens builds by itself, one for each feature of their attention."""

import functools

import torch

ROTARY = {"positional_embedding_type": "rotary"}
SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_vocab": 40, "n_ctx": 64, "attn_only": True}


FEATURES = {
    "standard": {"positional_embedding_type": "standard"},
    "rotary": ROTARY,
    "partial rotary": {**ROTARY, "rotary_dim": 4},
    "rotary base": {**ROTARY, "rotary_base": 100},
    "linear scaling": {**ROTARY, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 scaling": {
        **ROTARY,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
    },
    "grouped keys": {**ROTARY, "n_key_value_heads": 2},
    "softcap": {"attn_scores_soft_cap": 5.0},
    "score scale": {"attn_scale": 7.0},
    "LNPre": {"normalization_type": "LNPre"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "no norm": {"normalization_type": None},
    "gated MLP": {"attn_only": False, "gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"},
    "eps": {"eps": 0.3},
}


@functools.cache
def native(feature):
    """A model with norms and biases off 1 and 0 and enlarged queries and keys, so that no check passes vacuously."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig.from_dict({"seed": 0, **SHAPE, **FEATURES[feature]})
    config.rope_scaling = FEATURES[feature].get("rope_scaling")  # a dictionary leaves it out
    model = TransformerBridge.boot_native(config, device="cpu").eval()
    stream = torch.Generator().manual_seed(0)
    # Without a norm the stream is small.
    enlarged = 12.0 if feature == "no norm" else 3.0
    with torch.no_grad():
        for name, parameter in model.original_model.named_parameters():
            if "ln" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream)
            elif ".attn." in name and (".q." in name or ".k." in name):
                parameter *= enlarged
    return model
