"""Positional and symbolic attention: scores of heads and frequencies, and the block tasks for measuring them."""

from tlspectral.positional.answers import task_answers
from tlspectral.positional.binding import BindingTask
from tlspectral.positional.block_task import BlockDraw, BlockTask, Question
from tlspectral.positional.exclusion import exclusion_split
from tlspectral.positional.ready_tasks import CopyingTask, KeyValueTask, ListIndexTask, NeedleTask, PromptFile
from tlspectral.positional.shares import logit_shares
from tlspectral.positional.swapped_prompts import positional_symbolic
from tlspectral.tasks.block_prompt import BlockPrompt

__all__ = [
    "BindingTask",
    "BlockDraw",
    "BlockPrompt",
    "BlockTask",
    "CopyingTask",
    "KeyValueTask",
    "ListIndexTask",
    "NeedleTask",
    "PromptFile",
    "Question",
    "exclusion_split",
    "logit_shares",
    "positional_symbolic",
    "task_answers",
]
