"""The hook points of a layer by what passes there."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tlspectral.models.reading.blocks import Block, writes_more
from tlspectral.models.reading.latent import latent_points


class GatedQueries(str):
    """Name of a point that hands on each head's queries, then its gate (Qwen3-Next); our hooks see queries alone."""

    d_head: int


class OfQueries:
    """A hook that sees and edits the queries of such a point."""

    def __init__(self, hook: Callable[..., Any], d_head: int):
        self.hook, self.d_head = hook, d_head

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Run the hook on the queries, [batch, pos, heads, d_head]."""
        whole = activation.reshape(*activation.shape[:2], -1, 2, self.d_head)
        edited = self.hook(whole[:, :, :, 0], hook=hook)
        if edited is None:
            return None
        both = whole.clone()
        both[:, :, :, 0] = edited
        return both.reshape(activation.shape)


def gates_queries(attention: Any) -> bool:
    """Return whether the projection of an attention's queries makes its gate too."""
    return bool(getattr(getattr(attention, "config", None), "gated_q_proj", False))


def seen_at(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for a point of `hook_names` as the model is to run it."""
    if isinstance(name, GatedQueries) and not isinstance(hook, OfQueries):
        return OfQueries(hook, name.d_head)
    return hook


def hook_names(layer: Block) -> dict[str, str]:
    """Return the names of the hook points of a layer by what passes there.

    `scores` is missing where the layer delegates its attention, cos and sin where it has no hook points for them, and
    all points of attention where it has none. `middle` is the stream in front of the MLP of a layer with a mixer.
    `gate` is what a gated attention makes its gate of; where queries share its projection they stand in front of it, by
    head.
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
