"""Tables about heads: spectrum, directions, frequencies, copying, comparison, and a card.

`qk_penalty` is a part's share in their operators, for a loss.

A function is imported when it is first used, so that `analyze_heads` does not load the others.
"""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.composition.copying import copying_scores
    from tlspectral.heads.analysis import analyze_heads
    from tlspectral.heads.card import HeadCard, head_card
    from tlspectral.heads.comparison import compare_heads
    from tlspectral.heads.directions import head_directions
    from tlspectral.heads.frequencies import frequency_table
    from tlspectral.heads.many_models import analyze_models
    from tlspectral.operators.penalty import qk_penalty

_HOMES = {
    "HeadCard": "card",
    "analyze_heads": "analysis",
    "analyze_models": "many_models",
    "compare_heads": "comparison",
    "copying_scores": ".composition.copying",
    "frequency_table": "frequencies",
    "head_card": "card",
    "head_directions": "directions",
    "qk_penalty": ".operators.penalty",
}

__all__ = [
    "HeadCard",
    "analyze_heads",
    "analyze_models",
    "compare_heads",
    "copying_scores",
    "frequency_table",
    "head_card",
    "head_directions",
    "qk_penalty",
]

__getattr__ = lazy_names(__name__, _HOMES)
