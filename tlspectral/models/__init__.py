"""A model as it is read: loaded whole, or layer by layer from its files, with one view of its attention for both.

`loading` makes TransformerLens models of names and paths, `attention` reads the layers of a model, and `checkpoints`
reads them from files of weights. Names are imported when first used, so that reading a file's header or a layer does
not load the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlspectral.models.attention import AttentionLayer, AttentionView, RawAttention, attention_view
    from tlspectral.models.attention.selection import heads_by_layer
    from tlspectral.models.checkpoints import CheckpointLayers
    from tlspectral.models.loading import load_model
    from tlspectral.models.opening import open_layers

_HOMES = {
    "AttentionLayer": "attention",
    "AttentionView": "attention",
    "CheckpointLayers": "checkpoints",
    "RawAttention": "attention",
    "attention_view": "attention",
    "heads_by_layer": "attention.selection",
    "load_model": "loading",
    "open_layers": "opening",
}

__all__ = [
    "AttentionLayer",
    "AttentionView",
    "CheckpointLayers",
    "RawAttention",
    "attention_view",
    "heads_by_layer",
    "load_model",
    "open_layers",
]


def __getattr__(name: str) -> Any:
    """Import a name of this room when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tlspectral.models' has no attribute {name!r}")
    value = getattr(import_module(f"tlspectral.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
