"""Tasks: prompts with a metric, ready tasks, and the value of a model on a task with its standard error."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.tasks.embedding import embedding_change
    from tlspectral.tasks.evaluation import evaluate, induction_loss, language_loss
    from tlspectral.tasks.metric_value import Effect, MetricValue, paired_effect
    from tlspectral.tasks.needle_prompts import needle
    from tlspectral.tasks.repeated import repeated_sequences
    from tlspectral.tasks.task import Task, induction, language, logit_difference

__all__ = [
    "Effect",
    "MetricValue",
    "Task",
    "embedding_change",
    "evaluate",
    "induction",
    "induction_loss",
    "language",
    "language_loss",
    "logit_difference",
    "needle",
    "paired_effect",
    "repeated_sequences",
]

# Sequences of detectors need no task.
__getattr__, __dir__ = lazy_names(__name__)
