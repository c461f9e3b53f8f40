"""Query-key and output-value operators of heads, norm-folded and factored, their self-check, a penalty on a part."""

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


def __getattr__(name: str) -> Any:
    # The check needs neither the operators nor the penalty, so they are imported when they are asked for.
    if name not in __all__:
        raise AttributeError(f"module 'tlspectral.operators' has no attribute {name!r}")
    home = "penalty" if name == "qk_penalty" else "factored"
    return getattr(import_module(f"tlspectral.operators.{home}"), name)
