"""The hook points of a layer by what passes there."""

from typing import Any

from tlspectral.models.hooking.hooks_on_model import GatedQueries
from tlspectral.models.reading.blocks import Block, writes_more
from tlspectral.models.reading.latent import latent_points


def gates_queries(attention: Any) -> bool:
    """Return whether the projection of an attention's queries makes its gate too."""
    return bool(getattr(getattr(attention, "config", None), "gated_q_proj", False))


def hook_names(layer: Block) -> dict[str, str]:
    """Return the names of the hook points of a layer by what passes there.

    In the order of a pass, on a model with rotary positions; a bridge knows each point by two names:

        key of the result   hook point behind "blocks.0."    in a bridge also   shape

        residual          | hook_resid_pre                   hook_in            batch, pos, d_model
                          |-> ln1
                          |   |
        query             |   |-> attn.hook_q                attn.q.hook_out    batch, pos, heads, d_head
        key               |   |-> attn.hook_k                attn.k.hook_out    batch, pos, key heads, d_head
        value             |   |-> attn.hook_v                attn.v.hook_out    batch, pos, key heads, d_head
        cos, sin          |   |   (rotated: attn.hook_rot_q, attn.hook_rot_k)
        scores            |   |   attn.hook_attn_scores                         batch, heads, query, key
                          |   |   softmax
        pattern           |   |   attn.hook_pattern                             batch, heads, query, key
                          |   |   pattern v, the output of each head
        z                 |   |   attn.hook_z                attn.o.hook_in     batch, pos, heads, d_head
                          |   |   o_proj, which sums over heads
        attention_out     |<- hook_attn_out                  attn.hook_out      batch, pos, d_model
                          | hook_resid_mid                   ln2.hook_in        batch, pos, d_model
                          |-> ln2, mlp
        mlp_out           |<- hook_mlp_out                   mlp.hook_out       batch, pos, d_model
        residual_after    | hook_resid_post                  hook_out           batch, pos, d_model

    `cos` and `sin` are `attn.hook_cos` and `attn.hook_sin`, of bridges alone.

    `scores` is missing where the layer delegates its attention, cos and sin where it has no hook points for them, and
    all points of attention where it has none. `middle` is the stream in front of the MLP of a layer with a mixer.
    `gate` is what a gated attention makes its gate of; where queries share its projection they stand in front, by head.
    """
    here, block, _ = layer
    attention, inside = getattr(block, "attn", None), f"{here}.attn"
    names = {
        "residual": f"{here}.hook_resid_pre",
        "residual_after": f"{here}.hook_resid_post",
        "mlp_out": f"{here}.hook_mlp_out",
    }
    if "altup" in block._modules:  # Gemma 3n: a layer reads one stream, predicted from all of them
        names["residual"] = f"{here}.ln1.hook_in"
    if writes_more(block):
        names["middle"] = f"{here}.ln2.hook_in"
    if attention is None:
        return names
    query = f"{inside}.hook_q"
    if gates_queries(attention):
        names["gate"] = query
        query = GatedQueries(query)
        query.d_head = attention.original_component.head_dim
    elif "gate" in attention._modules:
        names["gate"] = f"{inside}.gate.hook_out"
    names |= {
        "attention_out": f"{here}.hook_attn_out",
        "query": query,
        "key": f"{inside}.hook_k",
        "value": f"{inside}.hook_v",
        "z": f"{inside}.hook_z",
        "pattern": f"{inside}.hook_pattern",
    }
    wrapped = getattr(attention, "original_component", None)  # none in a HookedTransformer
    if getattr(wrapped, "use_alternative_attention", False):  # Gemma 4: values are the raw keys
        names["value"] = names["key"]
    names |= latent_points(attention, inside)
    # A bridge that leaves attention to the wrapped module exposes no scores, and edits of them are discarded.
    if type(attention).forward.__qualname__ != "AttentionBridge.forward":
        names["scores"] = f"{inside}.hook_attn_scores"
    if hasattr(attention, "hook_cos"):
        names |= {"cos": f"{inside}.hook_cos", "sin": f"{inside}.hook_sin"}
    return names
