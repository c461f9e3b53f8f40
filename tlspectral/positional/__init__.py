"""Positional and symbolic attention: scores per head and frequency, exact heads and the tasks they solve."""

from tlspectral.positional.agreement import frequency_agreement, score_agreement
from tlspectral.positional.binding import BindingDraw, BindingTask
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalBatch, CanonicalTask
from tlspectral.studies.positional_symbolic.exact_heads import ExactHead, mixed_head, positional_head, symbolic_head
from tlspectral.positional.exclusion import ExclusionSplit, exclusion_split, exclusion_split_factored
from tlspectral.positional.measure import positional_symbolic
from tlspectral.positional.profile import PositionalSymbolicProfile, positional_symbolic_profile
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.positional.traces import attention_traces, frequency_norms

__all__ = [
    "BindingDraw",
    "BindingTask",
    "BlockPrompt",
    "CanonicalBatch",
    "CanonicalTask",
    "ExactHead",
    "ExclusionSplit",
    "PositionalSymbolicProfile",
    "attention_traces",
    "exclusion_split",
    "exclusion_split_factored",
    "frequency_agreement",
    "frequency_norms",
    "mixed_head",
    "positional_head",
    "positional_symbolic",
    "positional_symbolic_profile",
    "score_agreement",
    "symbolic_head",
]
