"""A model that is given as an object, or by the name or path of what is loaded or read from files."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.loading.source import Source

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers


@contextmanager
def download_bars(shown: bool) -> Iterator[None]:
    """Switch off huggingface_hub's bars inside the context, unless `shown`."""
    if shown:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    with warnings.catch_warnings():
        # The hub warns if an environment variable has decided about its bars, which then stays in force.
        warnings.simplefilter("ignore", UserWarning)
        were_on = not are_progress_bars_disabled()
        disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                enable_progress_bars()


def open_layers(model: Any, *, load: bool = False, revision: str | None = None) -> "AttentionView | CheckpointLayers":
    """Return the attention layers of a model, or of the model that a name or path means, at a revision on the hub.

    A folder or hub model is read from its files, unless `load`; other names are loaded. A `Source`, which is what
    `find_source` says of a name, a revision and a step, is read from its files. Raises as `load_model`, and ValueError
    for a revision of what has none.
    """
    if isinstance(model, Source):
        from tlspectral.models.checkpoints import CheckpointLayers

        return CheckpointLayers(model)
    if not isinstance(model, str | PathLike):
        if revision is not None:
            raise ValueError(f"this model is loaded, so revision={revision!r} has nothing to choose; give its hub name")
        return attention_view(model)
    if not load:
        from tlspectral.models.checkpoints import CheckpointLayers, streamable_checkpoint

        streamed = streamable_checkpoint(model, revision)
        if streamed is not None:
            return CheckpointLayers(streamed)
    from tlspectral.models.loading import load_model

    return attention_view(load_model(model, revision=revision))
