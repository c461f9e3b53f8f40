"""Ready tasks: repeated random tokens, text, and the difference of the logits of two answers."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tlspectral.models.attention.padding import TokenMask
from tlspectral.tasks.metrics import LogitDifference, next_token_loss
from tlspectral.tasks.prompts import RepeatedSegments, TextRows
from tlspectral.tasks.task import Task


def induction(
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    seed: int = 0,
) -> Task:
    """Loss on the second copy of repeated random segments, `[BOS, r, r]` as `detect_heads` draws them (FP section 8).

    With a segment of L tokens, positions L+1 .. 2L-1 predict: each has seen the token that follows.

    Args:
        n_sequences: sequences drawn; the standard error is over them.
        segment_length: L, at most (n_ctx - 1) // 2.
        tokens: sequences of your own, [sequences, 1 + 2 L]; None draws them.
        seed: of the draw.
    """
    return Task(
        RepeatedSegments(n_sequences, segment_length, tokens, seed),
        next_token_loss,
        predict=lambda width: slice((width - 1) // 2 + 1, width - 1),
        higher_is_better=False,
        name="induction",
    )


def language(
    tokens_or_text: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> Task:
    """Loss on text, of every position but the last; the arguments are those of `language_loss` (FP section 5)."""
    return Task(
        TextRows(tokens_or_text, attention_mask, n_sequences, sequence_length),
        next_token_loss,
        predict=slice(0, -1),
        higher_is_better=False,
        name="language",
    )


def logit_difference(prompts: Any, correct: Any, wrong: Any, *, name: str = "logit difference") -> Task:
    """Logit of the correct answer less that of the wrong one, after the last real token of each prompt.

        task = tls.logit_difference(["When Mary and John went out, John gave a book to"], " Mary", " John")

    Args:
        prompts: see `Task`.
        correct, wrong: the answer, a token as text or id, for all prompts; or a list with the answer of each prompt, or
            with a list of several, whose logits are averaged.
        name: name in tables.

    Errors, where the task meets a model:
        ValueError: an answer that is no single token, one that is correct and wrong, or lists of another length than
            the prompts.

    What it does not establish: that the model would give the answer. A third token may have the largest logit.
    """
    return Task(prompts, LogitDifference(correct, wrong), predict=-1, higher_is_better=True, name=name)


def task_of(
    task: Any,
    *,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    attention_mask: TokenMask | None = None,
    seed: int = 0,
    n_sequences: int | None = None,
) -> Task:
    """Return the task that is meant by a `Task` or by the name of a ready one, whose arguments the others are.

    Raises:
        ValueError: no such task, or arguments that it does not have.
    """
    if isinstance(task, Task):
        if tokens is not None or attention_mask is not None:
            raise ValueError(
                "tokens and attention_mask are for the tasks 'induction' and 'language': a Task has its own"
            )
        return task
    if attention_mask is not None and (task == "induction" or tokens is None):
        raise ValueError(
            'attention_mask says which of the tokens= of task="language" are padding: give both or neither'
        )
    size = {} if n_sequences is None else {"n_sequences": n_sequences}
    if task == "induction":
        return induction(tokens=tokens, seed=seed, **size)
    if task == "language":
        return language(tokens, attention_mask=attention_mask, **size)
    raise ValueError(f"task must be a tls.Task, 'induction' or 'language', not {task!r}")
