"""Query-key and output-value operators of heads, norm-folded and factored, their self-check, a penalty on a part."""

from tlspectral.operators.output_value import OVOperator, ov_operators
from tlspectral.operators.penalty import qk_penalty
from tlspectral.operators.query_key import PhaseFactors, QKOperator, QKOperators, qk_operators
from tlspectral.operators.verification import ScoreCheck, check_scores, verify_scores

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
