"""A checkpoint's attention layers read straight from its files, one at a time, so that its size does not matter.

Only safetensors are opened. Each layer is put into a one-layer model of the checkpoint's own architecture, so it is
read by the same code as a loaded one and its scores are checked the same way; of its weights only those asked for are
real.
"""

from tlspectral.models.checkpoints.files import CheckpointFiles
from tlspectral.models.checkpoints.layers import (
    STREAMED_MODEL_TYPES,
    CheckpointLayers,
    Side,
    layer_named,
    open_layers,
    streamable_checkpoint,
)

__all__ = [
    "STREAMED_MODEL_TYPES",
    "CheckpointFiles",
    "CheckpointLayers",
    "Side",
    "layer_named",
    "open_layers",
    "streamable_checkpoint",
]
