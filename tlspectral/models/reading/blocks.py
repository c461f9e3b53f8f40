"""The layers of a model: one list, or the two of HRM, through which a pass goes several times.

Some have no heads to read, such as the state-space layers of a hybrid.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tlspectral.errors import BadWeights, UnsupportedArchitecture

_ENCODERS = ("BertAttention", "RobertaAttention")  # attention of the encoders that are read
_NO_OPERATOR = "it has no query-key operator"

MIXERS = ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block")
_MLP_PARTS = ("shared_mlp", "moe")  # of Granite, whose sum passes no hook point


class Block(NamedTuple):
    """A layer of a model: its name there, its module, and how often it runs in a pass."""

    name: str
    module: Any
    runs: int


def blocks_of(model: Any) -> list[Block]:
    """Return the layers of a model as they are numbered: of HRM those of the fast stack L, then those of the slow H."""
    runs = {"blocks": 1}
    if hasattr(model, "L_blocks"):
        cycles = model.original_model.config
        runs = {"L_blocks": cycles.H_cycles * cycles.L_cycles, "H_blocks": cycles.H_cycles}
    return [
        Block(f"{stack}.{index}", module, count)
        for stack, count in runs.items()
        for index, module in enumerate(getattr(model, stack, ()))
    ]


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
    if type(wrapped).__name__ not in _ENCODERS and (
        getattr(model.cfg, "attention_dir", "causal") == "bidirectional" or not getattr(attention, "is_causal", True)
    ):
        return False
    return causal is None or bool(causal)


def is_encoder(model: Any) -> bool:
    """Return whether a bridge holds one of the encoders that are read, BERT or RoBERTa."""
    attention = getattr(blocks_of(model)[0].module, "attn", None)
    kind = type(getattr(attention, "original_component", None)).__name__
    return kind in _ENCODERS and not is_causal(model, attention)
