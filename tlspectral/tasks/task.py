"""`Task`: prompts and a metric. The ready tasks `induction`, `language` and `logit_difference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.containers import column_names, columns_of
from tlspectral.errors import kind_of, not_a, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.models.running.batches import TokenMask, positions_by_place
from tlspectral.models.running.given import chosen_prompts, given_prompts, n_prompts_of
from tlspectral.tasks.metrics import LogitDifference, next_token_loss
from tlspectral.tasks.repeated import RepeatedSegments
from tlspectral.tasks.text_rows import TextRows
from tlspectral.user_functions import require_call


@checked_settings
@dataclass(frozen=True, eq=False)
class Task:
    """Prompts and a metric. Give it to `tls.evaluate`, `tls.ablation_sweep` and other functions that measure a model.

    >>> import tlspectral as tls
    >>> def metric(logits, tokens, mask):
    ...     return logits[:, -1, 6] - logits[:, -1, 8]
    >>> task = tls.Task([[1, 5, 6, 7, 5]], metric, predict=-1)
    >>> round(float(tls.evaluate(tls.load_model("tiny-rope"), task)), 1)
    5.3

    Ready tasks: `tls.logit_difference`, and `induction`, `language`, `embedding_change` in `tls.tasks`. With
    `counterfactual=` every prompt has a pair. Circuits, screens and `parts.Output("counterfactual")` need pairs.

    Attributes:
        prompts: one of
            - strings (tokenised as by `model.to_tokens`, BOS included if the model has one),
            - token ids [sequences, pos], or a list of lists or 1-D tensors of ids, of any lengths,
            - a tokenizer's batch with `input_ids` and `attention_mask`.
        metric: function of `logits` [sequences, predicted, d_vocab], `tokens` [sequences, pos] and `mask` [sequences,
            pos] (True for real tokens) that returns a value per sequence [sequences]. It gets all prompts at once.
        predict: positions whose logits the metric gets: a number, a list, a slice, or a tensor [sequences, predicted].
            They count within each prompt; -1 is its last real token. Default: all.
        attention: a query and a key position per sequence [sequences, 2], for functions that measure attention.
        counterfactual: the pair of each prompt with equally many tokens, in a form of `prompts`; or a `Task` with these
            prompts and its own metric, which only `denoising()` uses.
        positions: named positions, one for all prompts or one per prompt: `{"S2": [10, 12], "END": -1}`.
        labels: a DataFrame with a row per sequence, such as its condition.
        higher_is_better: True, False or None (unknown). It decides which direction is harm.
        name: name in tables. Default: the name of the metric.

    Raises:
        TypeError: prompts in none of these forms, a metric that does not take these three arguments, positions that are
            not whole numbers, or labels that are not a DataFrame.
        ValueError, when a model reads the task: pairs, labels, positions or attention do not fit the prompts.

    Not established: that a value measures the ability the task is named after. More: docs/your_question.md.
    """

    prompts: Any
    metric: Any
    _: KW_ONLY
    predict: Any = None
    attention: Any = None
    counterfactual: Any = None
    positions: Mapping[str, Any] | None = None
    labels: pd.DataFrame | None = None
    higher_is_better: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if hasattr(self.metric, "for_model"):
            require_call(self.metric.for_model, ("view", "prompts"), "for_model of a metric")
        else:
            require_metric(self.metric)
        if self.labels is not None and not isinstance(self.labels, pd.DataFrame):
            raise TypeError(
                f"labels are a DataFrame with a row per sequence; found {shown(self.labels)}: for example "
                "pd.DataFrame({'condition': ['a', 'b']})"
            )
        if self.positions is not None and not isinstance(self.positions, Mapping):
            raise TypeError(
                f"positions={shown(self.positions)} is not a dictionary: give names with positions, such as "
                '{"S2": [10, 12], "END": -1}'
            )
        if callable(self.predict):
            require_call(self.predict, ("the width of the prompts",), "predict")
        other = self.counterfactual
        by_place = {
            "prompts": given_prompts(self.prompts),
            "counterfactual": other if other is None or isinstance(other, Task) else given_prompts(other),
            "attention": None
            if self.attention is None
            else positions_by_place(_query_key(self.attention), "attention"),
            "labels": None if self.labels is None else self.labels.reset_index(drop=True).copy(),
        }
        if not (self.predict is None or isinstance(self.predict, slice) or callable(self.predict)):
            by_place["predict"] = positions_by_place(self.predict, "predict")
        if self.positions is not None:
            by_place["positions"] = {
                name: positions_by_place(at, f"positions {name!r}") for name, at in self.positions.items()
            }
        for name, value in by_place.items():
            object.__setattr__(self, name, value)
        n = n_prompts_of(self.prompts)
        if isinstance(self.metric, LogitDifference) and n is not None:
            self.metric.require_answers(n)

    @property
    def label(self) -> str:
        """Name of the task in tables: `name`, or the name of the metric's function or class."""
        return self.name or getattr(self.metric, "__name__", type(self.metric).__name__)

    def denoising(self) -> Task:
        """Return a `Task` with prompts and counterfactual prompts exchanged; the metric stays.

        Use it to see what a head restores: an edge or output is then replaced by its value on the clean prompt.

        >>> import tlspectral as tls
        >>> prompts, pairs = [[1, 5, 6, 7, 5]], [[1, 5, 8, 7, 5]]
        >>> task = tls.logit_difference(prompts, 6, 8, counterfactual=pairs)
        >>> task.denoising().prompts
        [tensor([1, 5, 8, 7, 5])]

        If `counterfactual` is a `Task`, its own metric and `predict` evaluate its prompts. Positions, attention, labels
        and `higher_is_better` that it lacks are taken from this task.

        Raises:
            ValueError: the task has no counterfactual prompts.
        """
        if self.counterfactual is None:
            raise ValueError(
                f"the task {self.label!r} has no counterfactual prompts to exchange: give Task(..., counterfactual=)"
            )
        other, name = self.counterfactual, f"{self.label}, denoising"
        if not isinstance(other, Task):
            return replace(self, prompts=other, counterfactual=self.prompts, name=name)
        shared = ("attention", "positions", "labels", "higher_is_better")
        settings = {field: getattr(self if getattr(other, field) is None else other, field) for field in shared}
        return replace(other, counterfactual=replace(self, counterfactual=None), name=name, **settings)

    def split(self, share: float = 0.5, *, seed: int = 0) -> tuple[Task, Task]:
        """Return two tasks: one with a random share of the prompts, and one with the remaining prompts.

        Use it to choose on one half (such as the edges of a circuit) and evaluate on the other.

        >>> import tlspectral as tls
        >>> task = tls.logit_difference([[1, 2], [1, 3], [1, 4], [1, 5]], 6, 7)
        >>> fit, held_out = task.split(0.5)
        >>> len(fit.prompts), len(held_out.prompts)
        (2, 2)

        Answers, positions, labels and pairs are split with their prompts. Equal prompts, and equal pairs in either
        order, go to the same half, so the first half can be larger than its share.

        Args:
            share: share of the prompts in the first task. Default: half.
            seed: seed of the random choice. Default: 0.

        Raises:
            ValueError: one half would be empty, all prompts are equal, or something given per prompt has another number
                of rows.
            TypeError: the metric is a plain function, which cannot be restricted to some rows; use
                `tls.logit_difference`. Or the prompts are made only when a model reads the task, as in
                `tls.tasks.induction`.
        """
        n, other = n_prompts_of(self.prompts), self.counterfactual
        other = other.prompts if isinstance(other, Task) else other
        unknown = n is None or hasattr(self.prompts, "packed") or hasattr(other, "packed")
        if unknown or not hasattr(self.metric, "of_prompts"):
            raise TypeError(
                f"the task {self.label!r} cannot be split: split needs given prompts and tls.logit_difference, or a "
                "metric with a method of_prompts(rows) that returns the metric of some prompts. Otherwise split "
                "prompts and answers yourself, and make two tasks"
            )
        assert n is not None
        require_call(getattr(self.metric, "of_prompts"), ("rows",), "of_prompts of a metric")  # noqa: B009
        order, first = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist(), round(share * n)
        if not 0 < first < n:
            raise ValueError(
                f"share={share} of {n} prompts leaves one half empty: give a share between 0 and 1, and more prompts"
            )
        sides = [_contents(self.prompts), *([] if other is None else [_contents(other)])]
        equal: dict[frozenset[Any], list[int]] = {}
        for row, contents in enumerate(zip(*sides, strict=False)):
            equal.setdefault(frozenset(contents), []).append(row)
        together = {row: rows for rows in equal.values() for row in rows}
        chosen: set[int] = set()
        for row in order:
            if len(chosen) < first:
                chosen |= set(together.get(row, [row]))
        if len(chosen) == n:
            raise ValueError(
                f"equal prompts go to one half together, which leaves the other half of {n} prompts empty: give a "
                "smaller share=, or more distinct prompts"
            )
        return self._of(sorted(chosen), n), self._of(sorted(set(order) - chosen), n)

    def _of(self, rows: list[int], n: int) -> Task:
        """Return a copy of the task restricted to some prompts, with their answers, pairs, positions and labels. Raises
        ValueError if a field has another number of rows than `n`.

        `rows`: numbers of the prompts to keep. `n`: number of prompts of the task.
        """

        def chosen(values: Any, what: str, per_prompt: bool = True) -> Any:
            """Return the values of the chosen prompts; values for all prompts stay as they are."""
            found = len(values) if per_prompt and values is not None else n
            if found != n:
                raise ValueError(f"{what} has {found} rows, and there are {n} prompts: give one row for each prompt")
            return [values[row] for row in rows] if per_prompt and values is not None else values

        other, labels = self.counterfactual, self.labels
        if labels is not None:
            labels = labels.iloc[chosen(range(len(labels)), "labels")]
        if other is not None:
            prompts = other.prompts if isinstance(other, Task) else other
            chosen(range(n_prompts_of(prompts) or 0), "counterfactual")
            other = other._of(rows, n) if isinstance(other, Task) else chosen_prompts(other, rows)
        return replace(
            self,
            prompts=chosen_prompts(self.prompts, rows),
            metric=getattr(self.metric, "of_prompts")([*rows]),  # noqa: B009
            predict=chosen(self.predict, "predict", _nested(self.predict)),
            attention=chosen(self.attention, "attention", _nested(self.attention)),
            counterfactual=other,
            positions=self.positions
            and {name: chosen(at, f"positions {name!r}", isinstance(at, list)) for name, at in self.positions.items()},
            labels=labels,
        )

    def __repr__(self) -> str:
        n = n_prompts_of(self.prompts)
        return f"Task({self.label}, {repr(self.prompts) if n is None else f'{n} prompts'})"


def require_metric(metric: Any, what: str = "metric") -> None:
    """Raise TypeError unless `metric` is a function that can be called with logits, tokens and mask.

    `what`: name of the metric in the message.
    """
    if not callable(metric):
        wrong = not_a(metric, "a metric") if what == "metric" else f"{what} is {shown(metric)}"
        raise TypeError(
            f"{wrong}: give a function of logits, tokens and mask that returns a value per sequence, a tensor of shape "
            "[sequences]"
        )
    require_call(metric, ("logits", "tokens", "mask"), what)


def _query_key(attention: Any) -> Any:
    """Return query and key positions as a list with one [query, key] per sequence.

    `attention`: such a list, a tensor, or a frame with columns `query` and `key`. Raises TypeError for another frame.
    """
    names = column_names(attention)
    if names is not None:
        if not {"query", "key"} <= set(names):
            raise TypeError(
                f"attention= is a frame with the columns {shown(names)}: give one with columns query and key, or a "
                "list of (query, key)"
            )
        attention = [list(row) for row in zip(*columns_of(attention, ("query", "key")), strict=True)]
    return positions_by_place(attention, "attention")


def _contents(prompts: Any) -> list[Any]:
    """Return a list with the text of each prompt, or its real token ids as a tuple, so that equal prompts compare
    equal.

    `prompts`: texts, tensors of ids, or a tokenizer's batch.
    """
    if isinstance(prompts, dict):
        ids = prompts["input_ids"]
        mask = prompts.get("attention_mask", torch.ones_like(ids))
        return [tuple(row[real].tolist()) for row, real in zip(ids, mask.bool(), strict=True)]
    return [prompt if isinstance(prompt, str) else tuple(prompt.tolist()) for prompt in prompts]


def _nested(positions: Any) -> bool:
    """Return True if positions are given per prompt (a list of lists), False for one list for all prompts."""
    return isinstance(positions, list) and any(isinstance(row, list) for row in positions)


@checked_settings
def induction(
    prompts: Int[Tensor, "sequences pos"] | None = None,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    seed: int = 0,
) -> Task:
    """Make the task "induction": the loss on the second copy of a repeated random segment, in nats per token.

    >>> import tlspectral as tls
    >>> task = tls.tasks.induction(n_sequences=8)
    >>> print(tls.evaluate(tls.load_model("tiny-rope"), task))
    0.1095 ± 0.0019

    Use it to measure how well a model copies from its context ("Fingerprint, Not Blueprint", section 8). A sequence is
    `[BOS, r, r]`: a start token, then a segment r of L tokens twice. Positions L+1 to 2L-1 predict the next token,
    because the first copy has shown which token follows. Lower is better.

    Args:
        prompts: your own sequences of this form, token ids [sequences, 1 + 2 L]. Default: draw random ones when a model
            reads the task.
        n_sequences: number of sequences to draw, two or more. Default: 200.
        segment_length: L, at most (context - 1) // 2; a larger L is cut to that. Default: 64.
        seed: seed of the draw. Default: 0.

    Returns:
        A `Task` for `tls.evaluate`, `tls.ablation_sweep` and others. Its metric is the mean loss of each sequence in
            nats per token.

    Raises:
        ValueError: when a model reads the task: `prompts` are not repeated sequences or have ids that the model lacks,
            fewer than two sequences are to be drawn, or the context has no room for a segment of two tokens.
        UnsupportedArchitecture: when an encoder reads the task, because it sees the token to predict.

    Not established: that a head with an effect here is an induction head. Heads that feed induction have an effect too,
    and so do heads whose removal damages the model in general.
    """
    if not (prompts is None or isinstance(prompts, Tensor)):
        form = "give a tensor of token ids [sequences, 1 + 2 L], or None"
        raise TypeError(f"{not_a(prompts, 'repeated sequences')}: {form}")
    return Task(
        RepeatedSegments(None if prompts is None else prompts.clone(), n_sequences, segment_length, seed),
        next_token_loss,
        predict=lambda width: slice((width - 1) // 2 + 1, width - 1),
        higher_is_better=False,
        name="induction",
    )


@checked_settings
def language(
    prompts: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> Task:
    """Make the task "language": the next-token loss on text, in nats per token.

    >>> import torch
    >>> import tlspectral as tls
    >>> task = tls.tasks.language(torch.tensor([[1, 5, 6, 7, 5], [2, 3, 4, 3, 4]]))
    >>> print(tls.evaluate(tls.load_model("tiny-rope"), task))
    3.3725 ± 0.6056

    Use it to see whether an ablation hurts the model on ordinary text ("Fingerprint, Not Blueprint", section 5). All
    positions but the last predict. Lower is better.

    Args:
        prompts: token ids [sequences, pos]; one or several documents as text (the model needs a tokenizer); or the name
            of a data set (a string of one word), whose column `text` is streamed. Default: the public-domain book in
            this package.
        attention_mask: for padded token ids, 1 for real tokens and 0 for padding. The model does not see padding.
        n_sequences: number of rows to cut from text, from its beginning. Default: 64. If you give token ids, all rows
            are used.
        sequence_length: tokens in such a row, BOS included. Default: 128, at most the context.

    Returns:
        A `Task` for `tls.evaluate`, `tls.ablation_sweep` and others. Its metric is the mean loss of each sequence in
            nats per token.

    Raises:
        ValueError: when a model reads the task: text without a tokenizer, ids that the model does not have, ids that
            look padded without a mask, or a mask that does not fit.
        UnsupportedArchitecture: when an encoder reads the task, because it sees the token to predict.

    Not established: a held-out loss. Most models were trained on the packaged book: compare a model with itself.
    """
    return Task(
        TextRows(_own(prompts), _own(attention_mask), n_sequences, sequence_length),
        next_token_loss,
        predict=slice(0, -1),
        higher_is_better=False,
        name="language",
    )


def _own(given: Any) -> Any:
    """Return a copy of prompts or masks that a user gave as a tensor or an iterable (as a list); return text, a mapping
    and None as they are.

    Raises TypeError for other values, such as a model or a table.
    """
    if isinstance(given, Tensor):
        return given.clone()
    if given is None or isinstance(given, str | Mapping):
        return given
    if isinstance(given, Iterable) and kind_of(given) not in ("a model", "a task", "a part", "a table"):
        return list(given)
    raise TypeError(f"{not_a(given, 'prompts')}: give token ids [sequences, pos], a text or a list of texts, or None")


@checked_settings
def logit_difference(
    prompts: Any,
    correct: Any,
    wrong: Any,
    *,
    counterfactual: Any = None,
    positions: Mapping[str, Any] | None = None,
    name: str = "logit difference",
) -> Task:
    """Make a task: the logit of the correct answer minus the logit of the wrong answer, after the end of each prompt.

    >>> import tlspectral as tls
    >>> prompt = "When Mary and John went out, John gave a book to"
    >>> tls.logit_difference([prompt], " Mary", " John")
    Task(logit difference, 1 prompts)
    >>> task = tls.logit_difference([[1, 5, 6, 7, 5]], 6, 8)
    >>> round(float(tls.evaluate(tls.load_model("tiny-rope"), task)), 1)
    5.3

    Use it when a prompt has a right and a wrong next token. Higher is better.

    Args:
        prompts: a list of strings; token ids [sequences, pos], or a list of lists of ids; or a tokenizer's batch with
            `input_ids` and `attention_mask`.
        correct, wrong: the answer, as token text or id, for all prompts; or a list with one answer per prompt, or with
            a list of answers per prompt, whose logits are averaged. A column of a table is read in row order; its index
            is ignored.
        counterfactual: the pair of each prompt, with equally many tokens, in a form of `prompts`. Default: no pairs.
        positions: named positions, for all prompts or one per prompt: `{"S2": [10, 12], "END": -1}`. Default: none.
        name: name in tables. Default: "logit difference".

    Returns:
        A `Task` that predicts at the last real token of each prompt. Its metric is a value per prompt, in logits.

    Raises:
        TypeError: prompts in another form, or an answer that is neither text nor a whole number.
        ValueError: a list of answers has another length than the prompts. When a model reads the task: an answer that
            is not one token the model can predict, or that is both correct and wrong.
        UnsupportedArchitecture: when an encoder reads the task.

    Not established: that the model would give the answer. A third token may have the largest logit.
    """
    return Task(
        prompts,
        LogitDifference(correct, wrong),
        predict=-1,
        counterfactual=counterfactual,
        positions=positions,
        higher_is_better=True,
        name=name,
    )


def task_of(task: Any, *, seed: int = 0, n_sequences: int | None = None) -> Task:
    """Return the given `Task`, or the ready task that a text names: "induction" or "language" with defaults.

    `seed`: seed of the sequences of "induction". `n_sequences`: number of sequences of the ready task; None for its
    default. Raises ValueError for anything else.
    """
    if isinstance(task, Task):
        return task
    size: Any = {} if n_sequences is None else {"n_sequences": n_sequences}
    if isinstance(task, str) and task == "induction":
        return induction(seed=seed, **size)
    if isinstance(task, str) and task == "language":
        return language(**size)
    wrong = not_a(task, "a task")
    raise ValueError(f"{wrong}: task must be a tls.Task, such as tls.logit_difference(...), 'induction' or 'language'")
