"""Positional and symbolic attention: scores per head and frequency, and the binding task they are measured on."""

from tlspectral.positional.agreement import frequency_agreement, score_agreement
from tlspectral.positional.binding import BindingDraw, BindingTask
from tlspectral.positional.exclusion import ExclusionSplit, exclusion_split, exclusion_split_factored
from tlspectral.positional.measure import positional_symbolic
from tlspectral.positional.profile import PositionalSymbolicProfile, positional_symbolic_profile
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.positional.shares import LogitSplit, logit_shares, split_logits
from tlspectral.positional.traces import attention_traces, frequency_norms

__all__ = [
    "BindingDraw",
    "BindingTask",
    "BlockPrompt",
    "ExclusionSplit",
    "LogitSplit",
    "PositionalSymbolicProfile",
    "attention_traces",
    "exclusion_split",
    "exclusion_split_factored",
    "frequency_agreement",
    "frequency_norms",
    "logit_shares",
    "positional_symbolic",
    "positional_symbolic_profile",
    "score_agreement",
    "split_logits",
]
