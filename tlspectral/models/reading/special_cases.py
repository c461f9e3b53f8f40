"""Peculiarities of single models' attention, by the class of the wrapped module.

Readers find everything else by an attribute of a module or config. If no attribute tells a new model's peculiarity, add
a row to `SPECIAL_ATTENTION`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class SpecialAttention:
    """Peculiarities of one model's attention; None or False: as in other models.

    Functions take the attention module that the bridge wraps.

    Attributes:
        rotates: whether a layer rotates queries and keys. Default: the module's `use_rope`, if it has one.
        rotation: "negative" if pairs turn by the negative angle; "complex" if complex numbers are rotated, which no
            hook point shows.
        adjacent_pairs: columns (0, 1), (2, 3), ... are the rotary pairs.
        stored_tables: returns cos and sin, [pos, pairs], that the module stores for adjacent pairs.
        score_scale: returns the factor on scores, for a module without an attribute that states it.
        softcap: returns the softcap of scores, 0 for none. Default: `attn_logit_softcapping`.
        masked_score: returns the value of a masked score. Default: the smallest number of the scores' type.
        own_projections: weights are read from the module, because its bridge does not hold them by head.
        encoder: it is the attention of a supported encoder.
        refused_alibi: reason why the model is not supported with ALiBi.
        refused_softcap: reason why it is not supported with a softcap; `{softcap}` stands for the value.
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
    # It divides its scores after adding the mask, which has the type of the weights.
    "CodeGenAttention": SpecialAttention(
        masked_score=lambda module: torch.finfo(module.qkv_proj.weight.dtype).min / float(module.scale_attn)
    ),
    "Cohere2Attention": SpecialAttention(rotates=lambda module: module.sliding_window is not None),
    "DeepseekV2": SpecialAttention(rotation="complex", adjacent_pairs=True),
    "Exaone4Attention": SpecialAttention(rotates=lambda module: module.sliding_window is None or module.is_sliding),
    "FalconAttention": SpecialAttention(
        refused_alibi="Falcon with ALiBi; under eager attention, which shows scores, transformers adds the bias twice, "
        "so its attention differs from the published model's: take a Falcon with rotary positions"
    ),
    "GPTNeoSelfAttention": SpecialAttention(score_scale=lambda module: 1.0),  # it does not divide its scores
    "Gemma3Attention": SpecialAttention(
        refused_softcap="Gemma 3 with attn_logit_softcapping={softcap}, which transformers ignores and the bridge of "
        "TransformerLens applies, so the two compute different attention; set it to null in config.json if the model "
        "was trained without it"
    ),
    "Gemma4": SpecialAttention(own_projections=True),
    "GlmMoeDsa": SpecialAttention(adjacent_pairs=True),
    "Llama4": SpecialAttention(rotation="complex", adjacent_pairs=True),
    "NanoChatAttention": SpecialAttention(rotation="negative"),
    # Models made by `boot_native`. They store each cos and sin twice; a softcap of -1 means none.
    "NativeAttention": SpecialAttention(
        score_scale=lambda module: 1.0 / float(module.scale),
        softcap=lambda module: max(0.0, float(module.attn_scores_soft_cap)),
        stored_tables=lambda module: (module.rotary.cos_cached[:, 0::2], module.rotary.sin_cached[:, 0::2]),
    ),
    "RobertaAttention": SpecialAttention(encoder=True),
}
"""From the beginning of the wrapped module's class name to the peculiarities of its attention."""

NORMS_ON_STREAM = ("OpenAIGPTLMHeadModel",)
"""Architectures whose norms act on the residual stream itself, although their config does not say so."""

NORMS_BEHIND = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose HookedTransformer has `ln1` after the attention and `ln2` after the MLP."""

_ORDINARY = SpecialAttention()


def special_attention(wrapped: Any) -> SpecialAttention:
    """Return the `SpecialAttention` (peculiarities) for the class of `wrapped`, an attention module of transformers.

    Classes that are not in the table have no peculiarities.
    """
    return _row(type(wrapped).__name__)


@cache  # hooks ask at every pass
def _row(name: str) -> SpecialAttention:
    """Return the `SpecialAttention` for the class name of an attention module; default: no peculiarities."""
    return next((case for start, case in SPECIAL_ATTENTION.items() if name.startswith(start)), _ORDINARY)
