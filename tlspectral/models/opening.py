"""Open a model for a measurement of its weights: given as an object, or by the name or path of what is read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tlspectral.models.checkpoints.layers import WeightFiles, opened_files
from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView


@contextmanager
def open_layers(model: Any, *, load: bool = False, report_hooks: bool = False) -> Iterator[AttentionView | WeightFiles]:
    """Yield the attention layers of a model, or of the model that a name or path means; as `measured` for a model.

    A folder or hub model is read from its files, unless `load`; other names are loaded. `WeightFiles` are taken as they
    are. A `Source`, which is what `find_source` says of a name, a revision and a step, is read from its files. Raises
    as `load_model`.
    """
    if getattr(model, "only_weights", False):
        yield model
        return
    named = isinstance(model, str | os.PathLike)
    if (isinstance(model, Source) or (named and not load)) and (layers := opened_files(model)) is not None:
        yield layers
        return
    held = hasattr(model, "save_pretrained") and not hasattr(model, "run_with_hooks")  # of transformers
    with measured(load_model(model) if named or held else model, report_hooks=report_hooks) as view:
        yield view
