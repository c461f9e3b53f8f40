"""The attention scores that `qk_attribution` divides: of one prompt, of a list of prompts, or of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.errors.settings import whole_number
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, attention_positions, position_of
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.tasks.task import Task
from tlspectral.tasks.task_sequences import task_sequences


@dataclass(frozen=True)
class AskedScore:
    """One attention score that a user asked to divide into terms.

    Attributes:
        tokens: token ids of a prompt.
        query, key: positions of query and key, counted from 0.
    """

    tokens: Int[Tensor, "one pos"]
    query: int
    key: int


@dataclass(frozen=True)
class AskedScores:
    """The attention scores that `qk_attribution` divides.

    Attributes:
        scores: prompt and positions of each score.
        several: True for a list or a task; numbers are then means over the scores.
    """

    scores: list[AskedScore]
    several: bool

    @property
    def distinct(self) -> Int[np.ndarray, "scores"]:
        """Array with an integer per score, equal for scores with equal positions and equal tokens up to the query.

        The integers count up from 0 in the order in which scores occur first.
        """
        known: dict[str, int] = {}
        keys = [f"{score.tokens[:, : score.query + 1].tolist()} {score.query} {score.key}" for score in self.scores]
        return np.array([known.setdefault(key, len(known)) for key in keys])


def asked_scores(view: AttentionView, prompt: Any, query: Any, key: Any) -> AskedScores:
    """Return the scores that the arguments `prompt`, `query` and `key` of `qk_attribution` name, as `AskedScores`.

    `view` is the model, which tokenizes the prompts. `prompt` is one prompt, a list of (prompt, query, key), or a
    `Task`. `query` and `key` are positions, for a task also names of positions; None if the list or the task has them.
    Raises ValueError and TypeError for unusable prompts or positions, or arguments that do not go together.
    """
    if isinstance(prompt, Task):
        return AskedScores(_of_task(view, prompt, query, key), several=True)
    if query is None and key is None:
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(entry, list | tuple) and len(entry) == 3 and not isinstance(entry[0], int) for entry in prompt
        ):
            raise TypeError(
                "query= and key= are missing: give query and key, the positions of the two tokens; or a list of "
                "(prompt, query, key); or a Task with attention="
            )
        if not prompt:
            raise ValueError("the list of (prompt, query, key) is empty: give one entry or more")
        return AskedScores([_score(view, *entry) for entry in prompt], several=True)
    return AskedScores([_score(view, prompt, query, key)], several=False)


def _score(view: AttentionView, prompt: Any, query: Any, key: Any) -> AskedScore:
    """Return the score of one prompt as an `AskedScore`, with positions counted from 0.

    `view` is the model. `prompt` is text or token ids, `query` and `key` are whole numbers (negative: from the end).
    Raises ValueError for several prompts or a position outside the prompt, TypeError for a position that is not a
    number.
    """
    packed = packed_prompts(view, prompt)
    require_one(packed, "one score is")
    return AskedScore(packed.tokens, *_positions(query, key, packed.tokens.shape[1]))


def require_one(prompts: PackedTokens, what: str) -> None:
    """Raise ValueError unless there is exactly one prompt.

    `what` is the beginning of the message: "one score is" gives "one score is of one prompt; found 3 prompts".
    """
    if len(prompts.tokens) != 1:
        raise ValueError(f"{what} of one prompt; found {len(prompts.tokens)} prompts: give one of them")


def _of_task(view: AttentionView, task: Task, query: Any, key: Any) -> list[AskedScore]:
    """Return a list with one `AskedScore` for each prompt of a task.

    `view` is the model. `query` and `key` are positions or names of positions. If both are None, the task's `attention`
    positions are taken. Raises ValueError for positions that are missing or not in a prompt, TypeError if only one of
    `query` and `key` is given.
    """
    sequences = task_sequences(view, task)
    if query is None and key is None:
        pairs = attention_positions(sequences.lengths, task.attention)
        if pairs is None:
            raise ValueError("the task has no attention=: give query= and key=, names of its positions or numbers")
        queries, keys = pairs.T.tolist()
    else:
        if query is None or key is None:
            raise TypeError("only one of query= and key= is given: give both query and key, or neither")
        queries, keys = (position_of(sequences, at, what).tolist() for at, what in ((query, "query"), (key, "key")))
    rows = zip(sequences.tokens, sequences.lengths.tolist(), queries, keys, strict=True)
    return [AskedScore(row[None, :n], *_positions(at_query, at_key, n)) for row, n, at_query, at_key in rows]


def _positions(query: Any, key: Any, length: int) -> tuple[int, int]:
    """Return (query, key), counted from 0, in a prompt of `length` tokens.

    `query` and `key` are whole numbers; negative ones count from the end. Raises ValueError if the key is after the
    query or a position is outside the prompt, TypeError if a position is not a whole number.
    """
    at_query, at_key = (position_in(length, at, name) for at, name in ((query, "query"), (key, "key")))
    if at_key > at_query:
        raise ValueError(f"key {at_key} is behind query {at_query}: give a key at or before the query")
    return at_query, at_key


def position_in(length: int, given: Any, name: str) -> int:
    """Return the position `given` in a prompt of `length` tokens, counted from 0. A negative one counts from the end.

    `name` is the name of the user's argument, for messages. Raises TypeError unless `given` is a whole number,
    ValueError if it is outside the prompt.
    """
    position = whole_number(given)
    if position is None:
        raise TypeError(
            f"{name}= must be the position of a token, a whole number; found {shown(given)}: for example {name}=-1, "
            "the last token"
        )
    if not -length <= position < length:
        raise ValueError(
            f"{name} {position} is not in the prompt, which has tokens 0 to {length - 1}: give {name}= one of these, "
            f"or -1 for the last token to -{length} for the first"
        )
    return position % length
