"""Whether a query sees later tokens: in an encoder it does, in a decoder it does not."""

from typing import TYPE_CHECKING, Any

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.blocks import blocks_of

if TYPE_CHECKING:
    from tlspectral.models.reading.view import AttentionView

_READ = ("BertAttention", "RobertaAttention")


def is_causal(model: Any, attention: Any) -> bool:
    """Return whether an attention of a bridge masks later keys.

    In BERT and RoBERTa the wrapped module says so: TransformerLens calls those that are decoders bidirectional too.
    """
    wrapped = attention.original_component
    causal = getattr(getattr(wrapped, "self", wrapped), "is_causal", True)
    if type(wrapped).__name__ not in _READ and (
        getattr(model.cfg, "attention_dir", "causal") == "bidirectional" or not getattr(attention, "is_causal", True)
    ):
        return False
    return causal is None or bool(causal)


def is_encoder(model: Any) -> bool:
    """Return whether a bridge holds one of the encoders that are read, BERT or RoBERTa."""
    attention = getattr(blocks_of(model)[0].module, "attn", None)
    kind = type(getattr(attention, "original_component", None)).__name__
    return kind in _READ and not is_causal(model, attention)


def require_causal(view: "AttentionView", why: str) -> None:
    """Refuse an encoder where only a decoder has an answer, with the reason. Raises UnsupportedArchitecture."""
    if not view.causal:
        raise UnsupportedArchitecture(f"{view.source['model']} is an encoder, whose tokens see later ones too: {why}")


def require_one_run(view: "AttentionView", why: str) -> None:
    """Refuse a model whose layers run several times in a pass, with the reason. Raises UnsupportedArchitecture."""
    if view.two_stacks:
        name, _, runs = view.blocks[0]
        raise UnsupportedArchitecture(
            f"{view.source['model']}, layer 0 ({name}) runs {runs} times in a pass, each time on another stream: {why}"
        )


def require_stream(view: "AttentionView") -> None:
    """Refuse a model in which writes to the residual stream are not told apart. Raises UnsupportedArchitecture."""
    require_causal(view, "its norms act on the residual stream, which is no sum of what heads and MLPs write")
    require_one_run(view, "what a head writes goes through norms between the runs, so no later layer reads a sum of it")
