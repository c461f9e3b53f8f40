"""The study of "Decoupling Positional and Symbolic Attention Behavior" (PS): canonical tasks, exact heads, theorems.

Of a model of one's own: `attention_traces` and `frequency_norms` (PS, Fig. 1E and 1D), `median_tests` (footnote 2) and
`score_agreement`. Of the theory: the heads of the proofs, and the curves of Theorems 7 and 8 (`positional_peak_weight`,
`symbolic_peak_weight`). `canonical` trains heads on the tasks, `figures` draws.
"""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral_studies.positional_symbolic.agreement import frequency_agreement, score_agreement
    from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalBatch, CanonicalTask
    from tlspectral_studies.positional_symbolic.exact_heads import (
        ExactHead,
        mixed_head,
        positional_head,
        sufficient_logit_scale,
        symbolic_head,
    )
    from tlspectral_studies.positional_symbolic.medians import median_tests
    from tlspectral_studies.positional_symbolic.peak_weights import positional_peak_weight, symbolic_peak_weight
    from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms

__all__ = [
    "CanonicalBatch",
    "CanonicalTask",
    "ExactHead",
    "attention_traces",
    "frequency_agreement",
    "frequency_norms",
    "median_tests",
    "mixed_head",
    "positional_head",
    "positional_peak_weight",
    "score_agreement",
    "sufficient_logit_scale",
    "symbolic_head",
    "symbolic_peak_weight",
]

# The commands of the study stand in this package, and `tlspectral study --help` imports no torch for them.
__getattr__, __dir__ = lazy_names(__name__)
