"""How heads compose with each other and with the embedding: K-, Q- and V-composition, OV copying, self-match."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.composition.copying import copying_scores
    from tlspectral.composition.paths import k_composition

__all__ = ["copying_scores", "k_composition"]

# A head table needs no composition between heads.
__getattr__ = lazy_names(__name__, {"copying_scores": "copying", "k_composition": "paths"})
