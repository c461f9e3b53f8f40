"""A model as it is read: loaded whole, or layer by layer from its files, with one view of its attention for both.

`loading` makes TransformerLens models of names and paths, `attention` reads the layers of a model, and `checkpoints`
reads them from files of weights. Names are imported when first used, so that reading a file's header or a layer does
not load the rest.
"""

from tlspectral.lazy import lazy_names

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

__getattr__ = lazy_names(__name__, _HOMES)
