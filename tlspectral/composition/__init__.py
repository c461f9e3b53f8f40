"""How heads compose with each other and with the embedding: K-, Q- and V-composition, OV copying, self-match."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlspectral.composition.copying import copying_scores
    from tlspectral.composition.paths import k_composition

__all__ = ["copying_scores", "k_composition"]


def __getattr__(name: str) -> Any:
    # A head table needs no composition between heads.
    if name not in __all__:
        raise AttributeError(f"module 'tlspectral.composition' has no attribute {name!r}")
    return getattr(import_module(f"tlspectral.composition.{'copying' if name == 'copying_scores' else 'paths'}"), name)
