"""Query-key and output-value operators of heads, norm-folded and factored, their self-check, a penalty on a part."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names
from tlspectral.operators.verification import ScoreCheck, check_scores, verify_scores

if TYPE_CHECKING:
    from tlspectral.operators.factored import (
        OVOperator,
        PhaseFactors,
        QKOperator,
        QKOperators,
        ov_operators,
        qk_operators,
    )
    from tlspectral.operators.penalty import qk_penalty

__all__ = [
    "OVOperator",
    "PhaseFactors",
    "QKOperator",
    "QKOperators",
    "ScoreCheck",
    "check_scores",
    "ov_operators",
    "qk_operators",
    "qk_penalty",
    "verify_scores",
]

# The check needs neither the operators nor the penalty, so they are imported when they are asked for.
__getattr__ = lazy_names(__name__, {name: "penalty" if name == "qk_penalty" else "factored" for name in __all__})
