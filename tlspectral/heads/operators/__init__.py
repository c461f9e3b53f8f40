"""Query-key and output-value operators of heads, norm-folded and factored, their self-check, a penalty on a part."""

from typing import TYPE_CHECKING

from tlspectral.heads.operators.verification import check_scores, verify_scores
from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.heads.operators.factored import (
        OVOperator,
        PhaseFactors,
        QKOperator,
        QKOperators,
        ov_operators,
        qk_operators,
    )

__all__ = [
    "OVOperator",
    "PhaseFactors",
    "QKOperator",
    "QKOperators",
    "check_scores",
    "ov_operators",
    "qk_operators",
    "verify_scores",
]

# The check needs no operators, so they are imported when they are asked for.
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "factored"))
