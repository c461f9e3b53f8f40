"""How heads compose with each other and with the embedding: K-, Q- and V-composition, OV copying, self-match."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.composition.paths import k_composition

__all__ = ["k_composition"]

# A head table needs no composition between heads.
__getattr__ = lazy_names(__name__, {"k_composition": "paths"})
