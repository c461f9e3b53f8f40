"""Evaluation mode of a model, for a while."""

from collections.abc import Iterable, Iterator
from typing import Any

from tlspectral.models.attention.interrupts import undoing, uninterrupted
from tlspectral.models.attention.threads import exclusive


@uninterrupted
def evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode until the context ends, for this thread alone."""
    # A bridge does not hold all of the model that it wraps: embedding dropout is outside of it.
    roots = (model, getattr(model, "original_model", model))
    with exclusive(model):
        training = [module for root in roots for module in root.modules() if module.training]
        with undoing(_set_training, training, True):
            _set_training(training, False)
            yield


def _set_training(modules: Iterable[Any], training: bool) -> None:
    for module in modules:
        module.training = training
