"""The layers of a model, and the names of their hook points.

Some layers have no readable heads, for example the state-space layers of a hybrid model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.hooking.gated_queries import GatedQueries
from tlspectral.models.reading.special_cases import special_attention

_NO_OPERATOR = "it has no query-key operator"

MIXERS = ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block")
_MLP_PARTS = ("shared_mlp", "moe")  # of Granite, whose sum passes no hook point


_REPEATING = ("H_cycles", "L_cycles", "total_ut_steps", "mean_recurrence")
"""Config fields that say how often one pass repeats the layers (HRM, Ouro and Huginn)."""


class Block(NamedTuple):
    """A layer of a model.

    name: its name in the model, such as "blocks.0".
    module: its torch module.
    """

    name: str
    module: Any


def blocks_of(model: Any) -> list[Block]:
    """Return the layers of a model as a list of `Block`, in the order of their numbers."""
    return [Block(f"blocks.{index}", module) for index, module in enumerate(getattr(model, "blocks", ()))]


def refuse_repeated(name: str, what: str) -> UnsupportedArchitecture:
    """Return the UnsupportedArchitecture error for a model that runs a layer several times in one pass.

    name: the model. what: how this was found, such as a config field with its value; part of the message.
    """
    return UnsupportedArchitecture(
        f"{name} runs its layers several times in one pass ({what}), so a head has several attention patterns and no "
        "single one: use a model that runs each layer once"
    )


def require_no_repeats(config: Any, name: str) -> None:
    """Raise UnsupportedArchitecture if a config says that one pass runs the layers several times.

    config: config of the wrapped model; None passes. name: the model's name for the message.
    """
    if config is None:
        return
    counts = {field: getattr(config, field, None) for field in _REPEATING}
    repeated = {field: count for field, count in counts.items() if isinstance(count, int) and count > 1}
    if repeated:
        kind = getattr(config, "model_type", type(config).__name__)
        settings = ", ".join(f"{field}={count}" for field, count in repeated.items())
        raise refuse_repeated(name, f"model type {kind}, {settings}")


class SkippedLayer(NamedTuple):
    """A layer whose heads cannot be read.

    layer: its index.
    kind: class name of the module that mixes tokens, such as "MambaMixer".
    reason: why it is skipped, as text.
    """

    layer: int
    kind: str
    reason: str


def kind_of(block: Any) -> str:
    """Return the class name of the module with which a layer mixes tokens, such as "MambaMixer".

    block: a layer of a bridge or of a transformers model. Without a known mixer it is the class name of the layer
    itself.
    """
    wrapped = getattr(block, "original_component", None)
    for owner in (block, wrapped):
        for name in ("attn", "self_attn", *MIXERS):
            mixer = getattr(owner, name, None)
            if mixer is not None:
                return type(getattr(mixer, "original_component", None) or mixer).__name__
    return type(wrapped or block).__name__


def writes_more(block: Any) -> bool:
    """Return True if a layer of a bridge has a writer to the residual stream besides heads and an MLP with a hook
    point.

    block: the bridge of the layer. Such writers are mixers (state-space, convolution) and MLPs without a hook point
    (Granite).
    """
    modules = block._modules
    return modules.get("attn") is None or any(modules.get(name) is not None for name in (*MIXERS, *_MLP_PARTS))


def skipped_among(layers: Iterable[int], read: Callable[[int], Any], kind: Callable[[int], str]) -> list[SkippedLayer]:
    """Return a list with a `SkippedLayer` (layer, kind, reason) for each of these layers for which `read(layer)` raises
    UnsupportedArchitecture.

    kind: function from a layer's index to the class name of its mixer.
    """
    skipped = []
    for layer in layers:
        try:
            read(layer)
        except UnsupportedArchitecture as error:
            reason = str(error).removeprefix(f"layer {layer}").lstrip(":, ")
            skipped.append(SkippedLayer(layer, kind(layer), reason))
        except BadWeights:  # raised again where the layer is used
            continue
    return skipped


def unread(kind: str) -> str:
    """Return the reason, as text, why a layer without attention in its bridge is not read.

    kind: class name of the module with which the layer mixes tokens, as `kind_of` returns it.
    """
    if kind.endswith("HybridLayer"):  # of Zamba 2
        return f"a {kind} layer; its attention also reads the embedding, which is not supported: take another layer"
    if kind.endswith("Attention"):
        return f"a {kind} layer; its bridge has no hook points for attention: load it by its name with load_model"
    return f"a {kind} layer; {_NO_OPERATOR}"


def read_layers(n_layers: int, skipped: Sequence[SkippedLayer]) -> list[int]:
    """Return the indices of the layers, from 0 to `n_layers` - 1, that are not in `skipped`, sorted.

    Raises UnsupportedArchitecture if all layers are skipped. The message gives the reason of the first skipped layer
    with attention, or of the first layer if none has attention.
    """
    if len(skipped) == n_layers:
        # The reason of a layer with attention says more than "it has no query-key operator".
        first = min(skipped, key=lambda skip: skip.reason.endswith(_NO_OPERATOR))
        raise UnsupportedArchitecture(f"layer {first.layer}: {first.reason}")
    return sorted({*range(n_layers)} - {skip.layer for skip in skipped})


def is_causal(model: Any, attention: Any) -> bool:
    """Return True if the module `attention` of the bridge `model` masks later keys.

    For BERT and RoBERTa the wrapped module decides, because TransformerLens calls their decoder variants bidirectional
    too.
    """
    wrapped = attention.original_component
    causal = getattr(getattr(wrapped, "self", wrapped), "is_causal", True)
    if not special_attention(wrapped).encoder and (
        getattr(model.cfg, "attention_dir", "causal") == "bidirectional" or not getattr(attention, "is_causal", True)
    ):
        return False
    return causal is None or bool(causal)


def is_encoder(model: Any) -> bool:
    """Return True if the bridge `model` holds one of the two supported encoders, BERT or RoBERTa."""
    attention = getattr(blocks_of(model)[0].module, "attn", None)
    wrapped = getattr(attention, "original_component", None)
    return special_attention(wrapped).encoder and not is_causal(model, attention)


def output_map(block: Any) -> Any:
    """Return the innermost module of the layer `block` that multiplies z (a head's output before W_O) by W_O.

    None in a HookedTransformer, whose layers have no such module.
    """
    module = getattr(getattr(block, "attn", None), "_modules", {}).get("o")
    while (inner := getattr(module, "original_component", None)) is not None:
        module = inner
    return module


# --- layers that delegate their attention to the wrapped module ---


def reweighs(block: Any) -> bool:
    """Return True if a layer leaves attention to the wrapped module, and that module uses an edited pattern.

    block: the bridge of the layer. Native models of TransformerLens 4 do so.
    """
    return bool(getattr(block.attn.original_component, "accepts_pattern_fn", False))


def expect_edited_pattern(block: Any, expected: bool) -> None:
    """Suppress TransformerLens' warning that hooks edit the pattern of a wrapped attention, or show it again.

    block: the bridge of the layer. expected: True suppresses the warning in later passes, False restores it.
    """
    if not expected:
        block.attn.__dict__.pop("_fire_post_hoc_hook", None)
    elif hasattr(block.attn, "_fire_post_hoc_hook"):
        block.attn.__dict__["_fire_post_hoc_hook"] = _fired


def _fired(point: Callable[[Any], Any], activation: Any, hook_label: str) -> Any:
    """Call the hook point `point` of TransformerLens on `activation` and return its result, without a warning.

    `hook_label` would be in the warning and is not used.
    """
    return point(activation)


# --- hook points of a layer ---


def gates_queries(attention: Any) -> bool:
    """Return True if one projection of an attention module makes both its queries and its gate."""
    return bool(getattr(getattr(attention, "config", None), "gated_q_proj", False))


def hook_names(layer: Block) -> dict[str, str]:
    """Return a dict from what passes a hook point of a layer ("residual", "query", "z", ...) to the point's name.

    The picture shows one pass of a model with rotary positions. A bridge has two names for each point:

        key of the result   hook point after "blocks.0."     in a bridge also   shape

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

    Some keys are present only in some layers:
    - `cos`, `sin` (`attn.hook_cos`, `attn.hook_sin`): bridges that have these hook points.
    - `scores`: layers that do not delegate their attention to the wrapped module.
    - all keys of attention: layers that have attention.
    - `middle`: layers with a mixer; the residual stream before the MLP.
    - `gate`: gated attention; the projection from which the gate is made. If one projection makes queries and gate, the
    point shows each head's queries first.
    """
    here, block = layer
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


def is_latent(attention: Any) -> bool:
    """Return True if an attention module of a bridge is latent attention (DeepSeek and others)."""
    return hasattr(attention, "hook_kv_latent")


def latent_points(attention: Any, point: str) -> dict[str, str]:
    """Return a dict from "query", "key", "value" (and "query_up") to hook point names; empty without latent attention.

    point: name of the attention module. "query" and "key" are the outputs of W_D, which projects down to the latent;
    without a latent of queries "query" is the output of W_Q. "query_up" is the output of W_U for queries, and "value"
    of W_U for keys and values. The bridge's own `hook_q` and `hook_k` are not used because they come after the
    rotation.
    """
    if not is_latent(attention):
        return {}
    points = {"query": "q_proj", "key": "kv_a_proj_with_mqa", "value": "kv_b_proj"}
    if attention.original_component.q_lora_rank is not None:
        points |= {"query": "q_a_proj", "query_up": "q_b_proj"}
    return {name: f"{point}.{module}.hook_out" for name, module in points.items()}
