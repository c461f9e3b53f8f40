"""Loaders that stand on a higher floor than `loading`. The face of the package registers them: this imports nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Loader(NamedTuple):
    """How one kind of model is loaded.

    `claims` says of a folder (a Path) or an object whether it holds such a model. `load` returns the TransformerLens
    model of that object, or of the folder's `Source`, by `backend`, `device`, `dtype` and `tokenizer` of `load_model`.
    """

    claims: Callable[[Any], bool]
    load: Callable[..., Any]


LOADERS: dict[str, Loader] = {}
"""Loaders by the kind that a `Source` has."""


def claimed(given: Any) -> str | None:
    """Return the kind of the loader that claims a folder or an object, None where none does."""
    return next((kind for kind, loader in LOADERS.items() if loader.claims(given)), None)
