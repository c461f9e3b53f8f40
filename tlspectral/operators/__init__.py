"""Query-key and output-value operators of heads, norm-folded and factored, and the check that they are the model's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__all__ = [
    "OVOperator",
    "PhaseFactors",
    "QKOperator",
    "QKOperators",
    "ScoreCheck",
    "check_scores",
    "ov_operators",
    "qk_operators",
    "verify_scores",
]


def __getattr__(name: str) -> Any:
    # The check does not need the operators, so they are imported when they are asked for.
    if name not in __all__:
        raise AttributeError(f"module 'tlspectral.operators' has no attribute {name!r}")
    return getattr(import_module("tlspectral.operators.factored"), name)
