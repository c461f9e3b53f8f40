"""The layers of a model, and the names of their hook points by what passes there.

Some layers have no heads to read, such as the state-space layers of a hybrid.
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
"""Fields of a config that say how often a pass repeats its layers: of HRM, Ouro and Huginn."""


class Block(NamedTuple):
    """A layer of a model: its name there, and its module."""

    name: str
    module: Any


def blocks_of(model: Any) -> list[Block]:
    """Return the layers of a model as they are numbered."""
    return [Block(f"blocks.{index}", module) for index, module in enumerate(getattr(model, "blocks", ()))]


def refuse_repeated(name: str, what: str) -> UnsupportedArchitecture:
    """Return the error for a model that runs a layer several times in one pass; `what` says how that was found."""
    return UnsupportedArchitecture(
        f"{name} runs its layers several times in one pass ({what}), so a head has several attention patterns and no "
        "single one: use a model that runs each layer once"
    )


def require_no_repeats(config: Any, name: str) -> None:
    """Refuse a model whose config says that its layers run several times. Raises UnsupportedArchitecture."""
    if config is None:
        return
    counts = {field: getattr(config, field, None) for field in _REPEATING}
    repeated = {field: count for field, count in counts.items() if isinstance(count, int) and count > 1}
    if repeated:
        kind = getattr(config, "model_type", type(config).__name__)
        said = ", ".join(f"{field}={count}" for field, count in repeated.items())
        raise refuse_repeated(name, f"model type {kind}, {said}")


class SkippedLayer(NamedTuple):
    """A layer whose heads cannot be read: its index, the class of what it mixes tokens by, and why."""

    layer: int
    kind: str
    reason: str


def kind_of(block: Any) -> str:
    """Return the class of what a layer mixes tokens by, of a bridge or of transformers; its own where none is known."""
    wrapped = getattr(block, "original_component", None)
    for owner in (block, wrapped):
        for name in ("attn", "self_attn", *MIXERS):
            mixer = getattr(owner, name, None)
            if mixer is not None:
                return type(getattr(mixer, "original_component", None) or mixer).__name__
    return type(wrapped or block).__name__


def writes_more(block: Any) -> bool:
    """Return whether a bridge's layer writes more to the stream than its heads and an MLP with a hook point do."""
    modules = block._modules
    return modules.get("attn") is None or any(modules.get(name) is not None for name in (*MIXERS, *_MLP_PARTS))


def skipped_among(layers: Iterable[int], read: Callable[[int], Any], kind: Callable[[int], str]) -> list[SkippedLayer]:
    """Return the layers that `read` refuses as UnsupportedArchitecture."""
    found = []
    for layer in layers:
        try:
            read(layer)
        except UnsupportedArchitecture as error:
            reason = str(error).removeprefix(f"layer {layer}").lstrip(":, ")
            found.append(SkippedLayer(layer, kind(layer), reason))
        except BadWeights:  # raised again where the layer is used
            continue
    return found


def unread(kind: str) -> str:
    """Return why a layer of a kind, which a bridge gives no attention, is not read."""
    if kind.endswith("HybridLayer"):  # of Zamba 2
        return f"a {kind} layer; its attention reads the embedding beside the stream, which is not modelled"
    if kind.endswith("Attention"):
        return f"a {kind} layer; its bridge has no hook points for attention: load it by its name with load_model"
    return f"a {kind} layer; {_NO_OPERATOR}"


def read_layers(n_layers: int, skipped: Sequence[SkippedLayer]) -> list[int]:
    """Return the layers that are not skipped.

    Raises UnsupportedArchitecture if all are, with the reason of the first that has attention, else of the first.
    """
    if len(skipped) == n_layers:
        first = min(skipped, key=lambda one: one.reason.endswith(_NO_OPERATOR))
        raise UnsupportedArchitecture(f"layer {first.layer}: {first.reason}")
    return sorted({*range(n_layers)} - {one.layer for one in skipped})


def is_causal(model: Any, attention: Any) -> bool:
    """Return whether an attention of a bridge masks later keys.

    In BERT and RoBERTa the wrapped module says so: TransformerLens calls those that are decoders bidirectional too.
    """
    wrapped = attention.original_component
    causal = getattr(getattr(wrapped, "self", wrapped), "is_causal", True)
    if not special_attention(wrapped).encoder and (
        getattr(model.cfg, "attention_dir", "causal") == "bidirectional" or not getattr(attention, "is_causal", True)
    ):
        return False
    return causal is None or bool(causal)


def is_encoder(model: Any) -> bool:
    """Return whether a bridge holds one of the encoders that are read, BERT or RoBERTa."""
    attention = getattr(blocks_of(model)[0].module, "attn", None)
    wrapped = getattr(attention, "original_component", None)
    return special_attention(wrapped).encoder and not is_causal(model, attention)


def output_map(block: Any) -> Any:
    """Return the innermost module of a layer that multiplies z by W_O; None where none does (HookedTransformer)."""
    module = getattr(getattr(block, "attn", None), "_modules", {}).get("o")
    while (inner := getattr(module, "original_component", None)) is not None:
        module = inner
    return module


# --- layers that delegate their attention to the wrapped module ---


def reweighs(block: Any) -> bool:
    """Return whether a layer that delegates its attention takes up an edit of its pattern (native, from 4.0 on)."""
    return bool(getattr(block.attn.original_component, "accepts_pattern_fn", False))


def expect_edited_pattern(block: Any, expected: bool) -> None:
    """Let hooks edit the pattern that a wrapped attention hands on next without TransformerLens' warning."""
    if not expected:
        block.attn.__dict__.pop("_fire_post_hoc_hook", None)
    elif hasattr(block.attn, "_fire_post_hoc_hook"):
        block.attn.__dict__["_fire_post_hoc_hook"] = _fired


def _fired(point: Callable[[Any], Any], activation: Any, hook_label: str) -> Any:
    return point(activation)


# --- hook points of a layer ---


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
    """Return whether a bridge's attention is latent attention."""
    return hasattr(attention, "hook_kv_latent")


def latent_points(attention: Any, point: str) -> dict[str, str]:
    """Return the hook points that latent attention has for queries, keys and values; none for other attention.

    They are behind W_D of queries (W_Q without a latent of queries) and keys, behind W_U of queries, and behind W_U of
    keys and values: the bridge's `hook_q` and `hook_k` are behind the rotation.
    """
    if not is_latent(attention):
        return {}
    points = {"query": "q_proj", "key": "kv_a_proj_with_mqa", "value": "kv_b_proj"}
    if attention.original_component.q_lora_rank is not None:
        points |= {"query": "q_a_proj", "query_up": "q_b_proj"}
    return {name: f"{point}.{module}.hook_out" for name, module in points.items()}
