"""A model that is given as an object, or by the name or path of what is loaded or read from files."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.loading.source import Source
from tlspectral.tables.progress import hidden

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers


def open_layers(model: Any, *, load: bool = False) -> "AttentionView | CheckpointLayers":
    """Return the attention layers of a model, or of the model that a name or path means.

    A folder or hub model is read from its files, unless `load`; other names are loaded. A `Source`, which is what
    `find_source` says of a name, a revision and a step, is read from its files. Raises as `load_model`.
    """
    if not isinstance(model, Source | str | PathLike):
        return attention_view(model)
    if isinstance(model, Source) or not load:
        from tlspectral.models.checkpoints import CheckpointLayers, streamable_checkpoint
        from tlspectral.models.loading.bars import download_bars

        with download_bars(not hidden()):
            source = model if isinstance(model, Source) else streamable_checkpoint(model)
            if source is not None:
                return CheckpointLayers(source)
    from tlspectral.models.loading import load_model  # which hides bars of downloads itself

    return attention_view(load_model(model))
