"""A model that is given as an object, or by the name or path of what is loaded or read from files."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.loading.source import Source

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers


def open_layers(model: Any, *, load: bool = False) -> "AttentionView | CheckpointLayers":
    """Return the attention layers of a model, or of the model that a name or path means.

    A folder or hub model is read from its files, unless `load`; other names are loaded. A `Source`, which is what
    `find_source` says of a name, a revision and a step, is read from its files.
    """
    if isinstance(model, Source):
        from tlspectral.models.checkpoints import CheckpointLayers

        return CheckpointLayers(model)
    if not isinstance(model, str | PathLike):
        return attention_view(model)
    if not load:
        from tlspectral.models.checkpoints import CheckpointLayers, streamable_checkpoint

        streamed = streamable_checkpoint(model)
        if streamed is not None:
            return CheckpointLayers(streamed)
    from tlspectral.models.loading import load_model

    return attention_view(load_model(model))
