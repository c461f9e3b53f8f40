"""Positional and symbolic attention: scores per head and frequency, and the block tasks they are measured on."""

from tlspectral.positional.answers import task_answers
from tlspectral.positional.binding import BindingTask
from tlspectral.positional.block_task import BlockDraw, BlockTask, Question
from tlspectral.positional.exclusion import ExclusionSplit, exclusion_split, exclusion_split_factored
from tlspectral.positional.measure import positional_symbolic
from tlspectral.positional.ready_tasks import CopyingTask, KeyValueTask, ListIndexTask, NeedleTask, PromptFile
from tlspectral.positional.scores import score_correlation
from tlspectral.positional.shares import LogitSplit, logit_shares, split_logits
from tlspectral.tasks.block_prompt import BlockPrompt

__all__ = [
    "BindingTask",
    "BlockDraw",
    "BlockPrompt",
    "BlockTask",
    "CopyingTask",
    "ExclusionSplit",
    "KeyValueTask",
    "ListIndexTask",
    "LogitSplit",
    "NeedleTask",
    "PromptFile",
    "Question",
    "exclusion_split",
    "exclusion_split_factored",
    "logit_shares",
    "positional_symbolic",
    "score_correlation",
    "split_logits",
    "task_answers",
]
