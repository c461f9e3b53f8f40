"""Layers of Gemma 4: heads of two sizes, values that are keys, and layers that use the keys of an earlier one."""

from typing import Any


def shared_keys(config: Any, layer: int) -> str | None:
    """Return why a layer whose keys are those of an earlier one has no operator, None for one with keys of its own."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None or modes[layer] != "reuse":
        return None
    types = config.layer_types
    source = next(i for i in range(layer - 1, -1, -1) if types[i] == types[layer] and modes[i] == "store")
    return (
        f"its keys and values are those of layer {source}, so that a score joins the streams that enter two layers; a "
        "table has operators of one"
    )


def gemma4_projections(wrapped: Any) -> dict[str, Any]:
    """Return weights and biases of a layer with keys of its own, whose heads have another size where they see all."""
    keys_are_values = wrapped.use_alternative_attention
    modules = {"q": wrapped.q_proj, "k": wrapped.k_proj, "v": wrapped.k_proj if keys_are_values else wrapped.v_proj}
    found: dict[str, Any] = {
        f"w_{role}": module.weight.unflatten(0, (-1, wrapped.head_dim)).mT for role, module in modules.items()
    }
    found["w_o"] = wrapped.o_proj.weight.mT.unflatten(0, (-1, wrapped.head_dim))
    for role in "qk":
        bias = modules[role].bias
        found[f"b_{role}"] = None if bias is None else bias.unflatten(0, (-1, wrapped.head_dim))
    return found | {"keys_are_values": keys_are_values}
