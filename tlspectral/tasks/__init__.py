"""What a model is scored on: prompts, a metric, ready tasks, and scores with standard errors."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.models.running.text import packaged_text
    from tlspectral.tasks.embedding import embedding_change
    from tlspectral.tasks.evaluation import evaluate, induction_loss, language_loss
    from tlspectral.tasks.metrics import next_token_loss
    from tlspectral.tasks.repeated import repeated_sequences
    from tlspectral.tasks.score import Effect, Score, control_test, paired_effect, sign_flip_p, standard_error
    from tlspectral.tasks.scoring import ScoredSequences, intact_values, replayed_values, score_of, scored_sequences
    from tlspectral.tasks.task import Task, induction, language, logit_difference, task_of

__all__ = [
    "Effect",
    "Score",
    "ScoredSequences",
    "Task",
    "control_test",
    "embedding_change",
    "evaluate",
    "induction",
    "induction_loss",
    "intact_values",
    "language",
    "language_loss",
    "logit_difference",
    "next_token_loss",
    "packaged_text",
    "paired_effect",
    "repeated_sequences",
    "replayed_values",
    "score_of",
    "scored_sequences",
    "sign_flip_p",
    "standard_error",
    "task_of",
]

# Sequences of detectors need no task.
__getattr__, __dir__ = lazy_names(__name__)
