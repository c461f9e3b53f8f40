"""The query and key positions that attributions are asked about: of one prompt, of several prompts, or of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.containers import plain
from tlspectral.errors import shown
from tlspectral.errors.settings import whole_number
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, attention_positions, position_of
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.tasks.task import Task
from tlspectral.tasks.task_sequences import task_sequences


@dataclass(frozen=True)
class AskedPosition:
    """A prompt and the positions in it that a user asked about.

    Attributes:
        tokens: token ids of the prompt.
        query, key: positions of query and key, counted from 0. `key` is None for all keys of the query.
    """

    tokens: Int[Tensor, "one pos"]
    query: int
    key: int | None


@dataclass(frozen=True)
class AskedPositions:
    """The prompts and positions that a user asked about, one after another.

    Attributes:
        places: prompt and positions of each.
        several: True for several prompts, a list or a task; numbers are then means over the places.
    """

    places: list[AskedPosition]
    several: bool

    def distinct(self, also: Sequence[Any] | None = None) -> Int[np.ndarray, "places"]:
        """Return an integer per place, equal for places with equal positions and equal tokens up to the query.

        The integers count up from 0 in the order in which places occur first. `also`: one more value per place that
        has to be equal, such as its direction. Default: None.
        """
        known: dict[Any, int] = {}
        keys = [
            (tuple(place.tokens[0, : place.query + 1].tolist()), place.key, None if also is None else also[number])
            for number, place in enumerate(self.places)
        ]
        return np.array([known.setdefault(key, len(known)) for key in keys])

    def texts(self, view: AttentionView) -> dict[str, Any]:
        """Return a dict of attrs `query, query_token` and, if keys were asked for, `key, key_token`.

        Positions count from 0; tokens are texts, or ids without a tokenizer. Values are single for one prompt, lists
        for several. `view` is the model with the tokenizer.
        """
        has_texts, attrs = getattr(view.model, "tokenizer", None) is not None, {}
        for name in ("query", "key") if self.places[0].key is not None else ("query",):
            positions = [getattr(place, name) for place in self.places]
            ids = [int(place.tokens[0, at]) for place, at in zip(self.places, positions, strict=True)]
            tokens = [token_text(view, token) if has_texts else token for token in ids]
            attrs[name], attrs[f"{name}_token"] = (positions, tokens) if self.several else (positions[0], tokens[0])
        return attrs


@dataclass(frozen=True)
class DistinctMean:
    """Means over places and their standard errors, from numbers of the distinct places.

    Attributes:
        counts: how often the user asked for each distinct place.
    """

    counts: Int[np.ndarray, "distinct"]

    @property
    def weights(self) -> Float64[np.ndarray, "distinct"]:
        """Weight of each distinct place in the mean; the weights sum to 1."""
        return self.counts / self.counts.sum()

    @property
    def noted(self) -> dict[str, int]:
        """Dict for a table's attrs: `n_prompts` (places asked for) and `n_distinct`."""
        return {"n_prompts": int(self.counts.sum()), "n_distinct": len(self.counts)}

    def mean(self, values: Float64[np.ndarray, "*rows distinct"]) -> Float64[np.ndarray, "*rows"]:
        """Return the mean over all places that the user asked for, from `values` of the distinct places (last axis)."""
        return np.asarray(values @ self.weights)

    def se(self, values: Float64[np.ndarray, "*rows distinct"]) -> Float64[np.ndarray, "*rows"]:
        """Return the standard error of `mean` of the same `values`; equal places count as one observation.

        `values` are numbers of the distinct places (last axis). NaN for one distinct place.
        """
        deviations = (values - self.mean(values)[..., None]) * self.weights * len(self.counts)
        n = len(self.counts)
        return np.asarray(scipy.stats.sem(deviations, axis=-1)) if n > 1 else np.full(values.shape[:-1], np.nan)


def asked_positions(view: AttentionView, prompt: Any, query: Any, key: Any, *, every_key: bool) -> AskedPositions:
    """Return the prompts and positions that the arguments `prompt`, `query` and `key` name, as `AskedPositions`.

    Args:
        view: the model, which tokenizes the prompts.
        prompt: one prompt, several prompts, a list of (prompt, query, key), or a `Task`.
        query, key: a position, negative from the end, or one per prompt; the name of a position of the task; or the
            text of a token that occurs once in each prompt. Both None: the list has them, or the task's `attention=`.
        every_key: True if None as key means all keys of the query; the list may then have entries (prompt, query).

    Raises ValueError and TypeError for unusable prompts or positions, or arguments that do not go together.
    """
    query, key = plain(query), plain(key)
    if query is None and key is not None:
        raise TypeError("only one of query= and key= is given: give both query and key, or neither")
    if isinstance(prompt, Task):
        return AskedPositions(_of_task(view, prompt, query, key, every_key=every_key), several=True)
    if query is None:
        entries = _entries(prompt, every_key=every_key)
        return AskedPositions([_only(view, *entry, every_key=every_key) for entry in entries], several=True)
    places = _of_prompts(view, packed_prompts(view, prompt), query, key, every_key=every_key)
    return AskedPositions(places, several=len(places) > 1)


def _entries(prompt: Any, *, every_key: bool) -> list[tuple[Any, Any, Any]]:
    """Return a user's list of (prompt, query, key) as such a list; with `every_key`, (prompt, query) gets the key None.

    Raises TypeError for anything else, which means that the user gave no query, and ValueError for an empty list.
    """
    sizes = (2, 3) if every_key else (3,)
    listed: Any = prompt if isinstance(prompt, list | tuple) else [None]
    if not all(isinstance(one, list | tuple) and len(one) in sizes and not isinstance(one[0], int) for one in listed):
        if every_key:
            raise ValueError(
                "query= must be a whole number, the name of a position or the text of a token; found None: give "
                "query=-1 for the last token, or a list of (prompt, query), or a Task with attention="
            )
        raise TypeError(
            "query= and key= are missing: give query and key, the positions of the two tokens; or a list of "
            "(prompt, query, key); or a Task with attention="
        )
    if not listed:
        raise ValueError("the list of (prompt, query, key) is empty: give one entry or more")
    return [(one[0], one[1], one[2] if len(one) > 2 else None) for one in listed]


def _only(view: AttentionView, prompt: Any, query: Any, key: Any, *, every_key: bool) -> AskedPosition:
    """Return the positions of one entry (prompt, query, key) of a list. Raises ValueError for several prompts in it.

    `view` is the model; `every_key`: None as key means all keys.
    """
    packed = packed_prompts(view, prompt)
    if len(packed.tokens) != 1:
        raise ValueError(
            f"an entry of the list has one prompt; found {len(packed.tokens)} prompts: give an entry for each of them"
        )
    return _of_prompts(view, packed, plain(query), plain(key), every_key=every_key)[0]


def _of_task(view: AttentionView, task: Task, query: Any, key: Any, *, every_key: bool) -> list[AskedPosition]:
    """Return the positions for each prompt of a task.

    `view` is the model. If `query` and `key` are None, the task's `attention` positions are taken; with `every_key`
    only the queries. Raises ValueError for positions that are missing or not in a prompt.
    """
    sequences = task_sequences(view, task)
    if query is None:
        pairs = attention_positions(sequences.lengths, task.attention)
        if pairs is None:
            wanted = "query=, the name of one" if every_key else "query= and key=, names"
            raise ValueError(f"the task has no attention=: give {wanted} of its positions, or numbers")
        query, key = pairs[:, 0].tolist(), None if every_key else pairs[:, 1].tolist()
    return _of_prompts(view, sequences, query, key, every_key=every_key)


def _of_prompts(
    view: AttentionView, prompts: PackedTokens, query: Any, key: Any, *, every_key: bool
) -> list[AskedPosition]:
    """Return the positions for each of the tokenized `prompts`.

    `view` is the model; `every_key`: None as key means all keys. Raises ValueError if a key is after its query or a
    position is not in a prompt, TypeError if the key is missing or a position is not usable.
    """
    if key is None and not every_key:
        raise TypeError(
            "only one of query= and key= is given: give both query and key, or neither. One score has one key; "
            "tls.scores(model, prompt, head) has the scores of all keys"
        )
    queries = _positions(view, prompts, query, "query")
    keys = [None] * len(queries) if key is None else _positions(view, prompts, key, "key")
    for number, (at_query, at_key) in enumerate(zip(queries, keys, strict=True)):
        if at_key is not None and at_key > at_query:
            where = f" in prompt {number}" if len(queries) > 1 else ""
            raise ValueError(f"key {at_key} is behind query {at_query}{where}: give a key at or before the query")
    rows = zip(prompts.tokens, prompts.lengths.tolist(), queries, keys, strict=True)
    return [AskedPosition(row[None, :length], at_query, at_key) for row, length, at_query, at_key in rows]


def _positions(view: AttentionView, prompts: PackedTokens, given: Any, name: str) -> list[int]:
    """Return one position for each prompt, counted from 0: read `given`, a user's `query=` or `key=` (its `name`).

    `view` is the model, whose tokenizer gives the texts of tokens. Raises ValueError for a position outside a prompt,
    for a text that is not exactly one token of a prompt, and for a name that is also another token's text; TypeError
    for any other value.
    """
    if isinstance(given, str):
        return _of_text(view, prompts, given, name)
    if len(prompts.tokens) > 1 or isinstance(given, list | tuple):
        return position_of(prompts, given, name).tolist()
    position, length = whole_number(given), int(prompts.lengths[0])
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
    return [position % length]


def _of_text(view: AttentionView, prompts: PackedTokens, given: str, name: str) -> list[int]:
    """Return one position for each prompt: the task's position called `given`, or the token's with this text.

    `view` is the model, `prompts` are tokenized; a task's prompts have named positions. `name`: "query" or "key", for
    messages. Raises ValueError if a prompt has no such token or several, or if both readings exist and differ.
    """
    named = getattr(prompts, "positions", {}).get(given)
    if getattr(view.model, "tokenizer", None) is None:
        if not hasattr(prompts, "positions"):
            raise ValueError(f"{name}={shown(given)}: this model has no tokenizer: give the position, a whole number")
        return position_of(prompts, given, name).tolist()  # raises unless it is a name
    rows = [row[:length] for row, length in zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)]
    texts = {token: token_text(view, token) for row in rows for token in row}
    found = [[at for at, token in enumerate(row) if texts[token] == given] for row in rows]
    if named is not None:
        places = named.tolist()
        differs = [number for number, at in enumerate(places) if found[number] not in ([], [at])]
        if differs:
            raise ValueError(
                f"{name}={shown(given)} has two readings: the task's position of this name ({places[differs[0]]} in "
                f"prompt {differs[0]}), and the token with this text ({found[differs[0]][0]}): give a number, or "
                "rename the position"
            )
        return places
    for number, places in enumerate(found):
        if len(places) == 1:
            continue
        where = f"prompt {number}" if len(found) > 1 else "the prompt"
        if places:
            raise ValueError(
                f"{name}={shown(given)} is {len(places)} tokens of {where}, at positions "
                f"{', '.join(map(str, places[:8]))}: give one of these positions"
            )
        near = [texts[token] for token in rows[number] if texts[token].strip() == given.strip() != ""]
        names = list(getattr(prompts, "positions", {}))
        hint = f"; it has {near[0]!r}" if near else ""
        known = f", or a position that the task names: {', '.join(map(repr, names))}" if names else ""
        raise ValueError(
            f"{name}={shown(given)} is not the text of a token of {where}{hint}: give the text of one token, with its "
            f"leading space, or a position{known}"
        )
    return [places[0] for places in found]
