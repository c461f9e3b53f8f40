"""One view of a model's attention layers, the only code that reads a model's internals.

`attention_view(model)` serves a raw or processed TransformerBridge and a HookedTransformer, folded or not, alike.
"""

from tlspectral.models.reading.alibi import Alibi
from tlspectral.models.reading.bridge import stated_context
from tlspectral.models.reading.digests import digest_of_named, stored_bytes
from tlspectral.models.reading.latent import HeadInputs, Latent
from tlspectral.models.reading.layer import (
    AttentionLayer,
    LiveFactors,
    OutputFactors,
    RawAttention,
    fold_attention,
    fold_output,
    folded_bias,
    key_value_groups,
    layer_digest,
    projection,
    require_even_scale,
    softcapped,
)
from tlspectral.models.reading.norms import Normalization, QueryKeyNorm
from tlspectral.models.reading.view import AttentionView, attention_view, vocabulary_chunks

__all__ = [
    "Alibi",
    "AttentionLayer",
    "AttentionView",
    "HeadInputs",
    "Latent",
    "LiveFactors",
    "Normalization",
    "OutputFactors",
    "QueryKeyNorm",
    "RawAttention",
    "attention_view",
    "digest_of_named",
    "fold_attention",
    "fold_output",
    "folded_bias",
    "key_value_groups",
    "layer_digest",
    "projection",
    "require_even_scale",
    "softcapped",
    "stated_context",
    "stored_bytes",
    "vocabulary_chunks",
]
