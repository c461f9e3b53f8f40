"""Which attention scores are asked for: of one prompt, of a list of prompts with positions, or of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, attention_positions, position_of
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.selection import whole_number
from tlspectral.tasks.task import Task
from tlspectral.tasks.task_sequences import task_sequences


@dataclass(frozen=True)
class AskedScore:
    """One score of one prompt."""

    tokens: Int[Tensor, "one pos"]
    query: int
    key: int


@dataclass(frozen=True)
class AskedScores:
    """The scores that are asked for.

    `several`: a list or a task was given, so that numbers are means.
    """

    scores: list[AskedScore]
    several: bool

    @property
    def distinct(self) -> Int[np.ndarray, "scores"]:
        """The number of each score, one for those that are equal in positions and in tokens up to the query."""
        known: dict[str, int] = {}
        keys = [f"{score.tokens[:, : score.query + 1].tolist()} {score.query} {score.key}" for score in self.scores]
        return np.array([known.setdefault(key, len(known)) for key in keys])


def asked_scores(view: AttentionView, prompt: Any, query: Any, key: Any) -> AskedScores:
    """Return the scores that `qk_attribution` is asked for. Raises ValueError and TypeError as it does."""
    if isinstance(prompt, Task):
        return AskedScores(_of_task(view, prompt, query, key), several=True)
    if query is None and key is None:
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(one, list | tuple) and len(one) == 3 and not isinstance(one[0], int) for one in prompt
        ):
            raise TypeError(
                "give query and key, the positions of the two tokens; or a list of (prompt, query, key); or a Task"
            )
        if not prompt:
            raise ValueError("the list of (prompt, query, key) is empty")
        return AskedScores([_one(view, *one) for one in prompt], several=True)
    return AskedScores([_one(view, prompt, query, key)], several=False)


def _one(view: AttentionView, prompt: Any, query: Any, key: Any) -> AskedScore:
    packed = packed_prompts(view, prompt)
    require_one(packed, "one score is")
    return AskedScore(packed.tokens, *_positions(query, key, packed.tokens.shape[1]))


def require_one(prompts: PackedTokens, what: str) -> None:
    """Refuse what is not of one prompt. Raises ValueError."""
    if len(prompts.tokens) != 1:
        raise ValueError(f"{what} of one prompt; found {len(prompts.tokens)} prompts")


def _of_task(view: AttentionView, task: Task, query: Any, key: Any) -> list[AskedScore]:
    sequences = task_sequences(view, task)
    if query is None and key is None:
        pairs = attention_positions(sequences.lengths, task.attention)
        if pairs is None:
            raise ValueError("the task has no attention=: give query and key, names of its positions or numbers")
        queries, keys = pairs.T.tolist()
    else:
        if query is None or key is None:
            raise TypeError("give both query and key, names of the task's positions or numbers; or neither")
        queries, keys = (position_of(sequences, at, what).tolist() for at, what in ((query, "query"), (key, "key")))
    rows = zip(sequences.tokens, sequences.lengths.tolist(), queries, keys, strict=True)
    return [AskedScore(row[None, :n], *_positions(at_query, at_key, n)) for row, n, at_query, at_key in rows]


def _positions(query: Any, key: Any, length: int) -> tuple[int, int]:
    at_query, at_key = (position_in(length, at, name) for at, name in ((query, "query"), (key, "key")))
    if at_key > at_query:
        raise ValueError(f"key {at_key} is behind query {at_query}: a query sees itself and earlier keys")
    return at_query, at_key


def position_in(length: int, given: Any, name: str) -> int:
    """Return a position in a prompt, from 0 on. Raises TypeError for no whole number, ValueError for none in it."""
    position = whole_number(given)
    if position is None:
        raise TypeError(f"{name} is the position of a token, a whole number; found {given!r}")
    if not -length <= position < length:
        raise ValueError(f"{name} {position} is not in the prompt, which has tokens 0 to {length - 1}")
    return position % length
