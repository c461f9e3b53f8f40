"""`open_layers`: open a model, given as an object, a name or a path, to measure its weights."""

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
    """Yield the attention layers of a model: an `AttentionView` of a model that can run, or `WeightFiles`.

    Args:
        model: a TransformerLens model, a model of transformers, `WeightFiles`, a `Source`, or a name or path. Folders
            and hub models become `WeightFiles`, read layer by layer; other names are loaded.
        load: True also loads folders and hub models.
        report_hooks: True warns about hooks that the user left on the model.

    Raises UnsupportedArchitecture, BadWeights, ValueError or FileNotFoundError, as `load_model`.
    """
    if getattr(model, "only_weights", False):
        yield model
        return
    named = isinstance(model, str | os.PathLike)
    if (isinstance(model, Source) or (named and not load)) and (layers := opened_files(model)) is not None:
        yield layers
        return
    held = hasattr(model, "save_pretrained") and not hasattr(model, "run_with_hooks")  # a model of transformers
    with measured(load_model(model) if named or held else model, report_hooks=report_hooks) as view:
        yield view
