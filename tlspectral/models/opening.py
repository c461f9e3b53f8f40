"""A model that is given as an object, or by the name or path of what is loaded or read from files."""

import os
from typing import Any

from tlspectral.models.checkpoints.layers import WeightFiles, opened_files
from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView


def open_layers(model: Any, *, load: bool = False) -> AttentionView | WeightFiles:
    """Return the attention layers of a model, or of the model that a name or path means.

    A folder or hub model is read from its files, unless `load`; other names are loaded. `WeightFiles` are taken as they
    are. A `Source`, which is what `find_source` says of a name, a revision and a step, is read from its files. Raises
    as `load_model`.
    """
    if getattr(model, "only_weights", False):
        return model
    named = isinstance(model, str | os.PathLike)
    if (isinstance(model, Source) or (named and not load)) and (layers := opened_files(model)) is not None:
        return layers
    held = hasattr(model, "save_pretrained") and not hasattr(model, "run_with_hooks")  # of transformers
    return attention_view(load_model(model) if named or held else model)
