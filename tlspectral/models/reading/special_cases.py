"""What differs in the attention of single models, by the class of the module that a bridge wraps.

Everything else that readers know of a model they ask its module or config by attribute. A new model whose attention
differs in a way that no attribute tells gets a row in `SPECIAL_ATTENTION`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class SpecialAttention:
    """What differs in the attention of one model; None and False where it is as elsewhere.

    Functions take the attention module that the bridge wraps.

    Attributes:
        rotates: whether a layer rotates queries and keys. Elsewhere `use_rope` says so, where a module has it.
        rotation: `"negative"`: pairs turn by the negative angle. `"complex"`: complex numbers are rotated, past any
            hook point.
        adjacent_pairs: columns (0, 1), (2, 3), ... form rotary pairs.
        stored_tables: cos and sin, [pos, pairs], that the module keeps for adjacent pairs.
        score_scale: the factor on scores, of a module without an attribute that states it.
        softcap: the softcap of scores, 0 for none. Elsewhere `attn_logit_softcapping`.
        masked_score: what a masked score is. Elsewhere the smallest number of the scores' type.
        own_projections: weights are read from the module, because its bridge does not hold them by head.
        encoder: the attention of an encoder that is read.
        refused_alibi, refused_softcap: why a model with ALiBi, or with a softcap, is not read. `{softcap}` stands for
            its value.
    """

    rotates: Callable[[Any], bool] | None = None
    rotation: Literal["negative", "complex"] | None = None
    adjacent_pairs: bool = False
    stored_tables: Callable[[Any], tuple[Tensor, Tensor]] | None = None
    score_scale: Callable[[Any], float] | None = None
    softcap: Callable[[Any], float] | None = None
    masked_score: Callable[[Any], float] | None = None
    own_projections: bool = False
    encoder: bool = False
    refused_alibi: str | None = None
    refused_softcap: str | None = None


SPECIAL_ATTENTION: dict[str, SpecialAttention] = {
    "AfmoeAttention": SpecialAttention(rotates=lambda module: module.is_local_attention),
    "BertAttention": SpecialAttention(encoder=True),
    # It divides its scores after the mask, which is of the type of its weights.
    "CodeGenAttention": SpecialAttention(
        masked_score=lambda module: torch.finfo(module.qkv_proj.weight.dtype).min / float(module.scale_attn)
    ),
    "Cohere2Attention": SpecialAttention(rotates=lambda module: module.sliding_window is not None),
    "DeepseekV2": SpecialAttention(rotation="complex", adjacent_pairs=True),
    "Exaone4Attention": SpecialAttention(rotates=lambda module: module.sliding_window is None or module.is_sliding),
    "FalconAttention": SpecialAttention(
        refused_alibi="Falcon with ALiBi; under eager attention, which shows scores, transformers adds the bias twice, "
        "so the attention seen is not that of the published model"
    ),
    "GPTNeoSelfAttention": SpecialAttention(score_scale=lambda module: 1.0),  # it does not divide its scores
    "Gemma3Attention": SpecialAttention(
        refused_softcap="Gemma 3 with attn_logit_softcapping={softcap}, which transformers ignores and the bridge of "
        "TransformerLens applies, so the attention seen is not that of transformers' model; set it to null in "
        "config.json if the model was trained without it"
    ),
    "Gemma4": SpecialAttention(own_projections=True),
    "GlmMoeDsa": SpecialAttention(adjacent_pairs=True),
    "Llama4": SpecialAttention(rotation="complex", adjacent_pairs=True),
    "NanoChatAttention": SpecialAttention(rotation="negative"),
    # Of a model made by `boot_native`. It keeps each cos and sin twice; a softcap of -1 stands for none.
    "NativeAttention": SpecialAttention(
        score_scale=lambda module: 1.0 / float(module.scale),
        softcap=lambda module: max(0.0, float(module.attn_scores_soft_cap)),
        stored_tables=lambda module: (module.rotary.cos_cached[:, 0::2], module.rotary.sin_cached[:, 0::2]),
    ),
    "RobertaAttention": SpecialAttention(encoder=True),
}
"""The models whose attention differs, by the beginning of the class name of the wrapped module."""

NORMS_ON_STREAM = ("OpenAIGPTLMHeadModel",)
"""Architectures with norms that act on the residual stream itself, although their config does not say so."""

NORMS_BEHIND = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose HookedTransformer has the norm behind the attention as `ln1`, and behind the MLP as `ln2`."""

_ORDINARY = SpecialAttention()


def special_attention(wrapped: Any) -> SpecialAttention:
    """Return the row of an attention module, one without differences where the table has none."""
    return _row(type(wrapped).__name__)


@cache  # hooks ask at every pass
def _row(name: str) -> SpecialAttention:
    return next((case for start, case in SPECIAL_ATTENTION.items() if name.startswith(start)), _ORDINARY)
