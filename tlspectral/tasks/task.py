"""`Task`: the prompts that a model is run on and the metric that measures it. The ready tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.containers import column_names, columns_of
from tlspectral.models.running.batches import TokenMask, positions_by_place
from tlspectral.models.running.given import chosen_prompts, given_prompts, n_prompts_of
from tlspectral.tasks.metrics import LogitDifference, next_token_loss
from tlspectral.tasks.repeated import RepeatedSegments
from tlspectral.tasks.text_rows import TextRows
from tlspectral.user_functions import require_call


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts and a metric: what `evaluate`, `ablation_sweep` and every other function that evaluates a model takes.

    >>> import tlspectral as tls
    >>> task = tls.Task([[1, 5, 6, 7, 5]], lambda logits, tokens, mask: logits[:, -1, 6] - logits[:, -1, 8], predict=-1)
    >>> round(float(tls.evaluate(tls.load_model("tiny-rope"), task)), 1)
    5.3

    For text `model.to_single_token(" Mary")` is the id of a token.

    With `counterfactual` every prompt has a pair: the same text but for what the metric asks after. Edges, circuits and
    `parts.Output("counterfactual")` put what the model writes on the pair in the place of what it writes on the prompt.

        task = tls.logit_difference(prompts, " Mary", " John", counterfactual=other_prompts)

    Prompts of unequal length are moved to the left and filled at the end; a decoder does not see the filling, and it is
    not evaluated. An encoder would see it, so its prompts have one length. Ready tasks are in `tls.tasks`: `induction`,
    `language`, `logit_difference`, `embedding_change`.

    All that is given per prompt is read by place, never by the labels of a table's index, and copied when the task is
    made: changing it afterwards changes nothing. Lists, arrays, tensors on any device, pandas Series and generators do.
    Warnings, and `prompt_notes` in the `attrs` of tables, say where prompts become what may not be meant: two start
    tokens, an end token in front of text, text that the tokenizer does not know, a space at the end that belongs to the
    answer's token, and rows that are equal in tokens and answers. Equal rows are one observation: a mean is over all
    rows, its standard error and p over the distinct ones, NaN where there is one.

    Attributes:
        prompts: strings (tokenised as by `model.to_tokens`, BOS included where the model has one); token ids
            [sequences, pos]; a list of one-dimensional tensors or lists of ids, of unequal length; or a tokenizer's
            batch with `input_ids` and `attention_mask`, padded on either side.
        metric: function of `logits` [sequences, predicted, d_vocab] in float32 or wider, `tokens` [sequences, pos] and
            `mask` [sequences, pos] (True for real tokens), all of them on the model's device, that returns a value per
            sequence, [sequences]. It gets all prompts at once, in their order, as copies that it may edit.
        predict: positions whose logits the metric needs; the others are never computed. A position, a list of them or a
            slice, all of which count in each prompt by itself, negative ones from its end (-1: its last real token); a
            tensor [sequences, predicted]; None: all. Where a slice takes fewer positions of a prompt than of another,
            its last real token fills the row.
        attention: a query and a key position per sequence, [sequences, 2], for attention measured on the prompts;
            negative from the end of each prompt.
        counterfactual: the pair of each prompt, in a form of `prompts`, with as many tokens; or a `Task` of these
            prompts with a metric of their own, by which `denoising()` evaluates them. Nothing else reads that metric:
            edges, circuits and sweeps of this task are evaluated by its own.
        positions: names of positions, each with a position for all prompts or one per prompt, negative from its end:
            `{"S2": [10, 12], "END": -1}`. A warning says where a pair differs before all of them.
        labels: a DataFrame with a row per sequence, such as the condition it belongs to.
        higher_is_better: whether a higher value is better, None if that is not to be said. It decides what harm is.
        name: name in tables.

    Raises:
        TypeError: prompts of no such form, a metric that does not take logits, tokens and mask, positions that are no
            whole numbers, or labels that are no DataFrame.
        ValueError: a list of answers of another length than the prompts.

    What it does not establish: that a value measures the ability it is named after.
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
            raise TypeError(f"labels are a DataFrame with a row per sequence; found {type(self.labels).__name__}")
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
        """Name in tables: `name`, or the name of the metric."""
        return self.name or getattr(self.metric, "__name__", type(self.metric).__name__)

    def denoising(self) -> Task:
        """Return the task with the two runs exchanged: the counterfactual prompts, and the metric of the clean answer.

        What is then put in its place are writes of the clean run, so an effect says what a part restores. Where
        `counterfactual` is a `Task`, its own metric and `predict` evaluate its prompts, and this task is its
        counterfactual; what that task does not have of positions, attention, labels and direction is this one's.

        Raises:
            ValueError: the task has no counterfactual prompts.
        """
        if self.counterfactual is None:
            raise ValueError(f"{self.label} has no counterfactual prompts to exchange: give counterfactual=")
        other, name = self.counterfactual, f"{self.label}, denoising"
        if not isinstance(other, Task):
            return replace(self, prompts=other, counterfactual=self.prompts, name=name)
        shared = ("attention", "positions", "labels", "higher_is_better")
        of_pair = {one: getattr(self if getattr(other, one) is None else other, one) for one in shared}
        return replace(other, counterfactual=replace(self, counterfactual=None), name=name, **of_pair)

    def split(self, share: float = 0.5, *, seed: int = 0) -> tuple[Task, Task]:
        """Return two tasks: a random share of the prompts, with all that belongs to them, and the rest.

        What is chosen on the first, such as the edges of a circuit, is evaluated on the second. Equal prompts, or equal
        pairs in either order, go to one half together, so that the first may have some more than its share.

        Raises:
            ValueError: a share that leaves one of them empty, prompts that are all equal, or something per prompt that
                has another number of rows.
            TypeError: a metric that is a plain function, of which nothing says which rows are whose, or prompts that
                are made when the model is known.

        >>> import tlspectral as tls
        >>> fit, held_out = tls.logit_difference([[1, 2], [1, 3], [1, 4], [1, 5]], 6, 7).split(0.5)
        >>> len(fit.prompts), len(held_out.prompts)
        (2, 2)
        """
        n, other = n_prompts_of(self.prompts), self.counterfactual
        other = other.prompts if isinstance(other, Task) else other
        unknown = n is None or hasattr(self.prompts, "packed") or hasattr(other, "packed")
        if unknown or not hasattr(self.metric, "of_prompts"):
            raise TypeError(
                "split takes a task of given prompts with logit_difference, or a metric with a method of_prompts(rows) "
                "that returns it for some prompts: split prompts and answers yourself, and make two tasks"
            )
        assert n is not None
        require_call(getattr(self.metric, "of_prompts"), ("rows",), "of_prompts of a metric")  # noqa: B009
        order, first = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist(), round(share * n)
        if not 0 < first < n:
            raise ValueError(f"a share of {share} of {n} prompts leaves one half empty")
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
            raise ValueError(f"equal prompts go to one half together, and that leaves the other empty: {n} prompts")
        return self._of(sorted(chosen), n), self._of(sorted(set(order) - chosen), n)

    def _of(self, rows: list[int], n: int) -> Task:
        def chosen(values: Any, what: str, per_prompt: bool = True) -> Any:
            found = len(values) if per_prompt and values is not None else n
            if found != n:
                raise ValueError(f"{what} has {found} rows and there are {n} prompts: give one for each")
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
    """Raise TypeError for a metric that cannot be called with logits, tokens and mask."""
    if not callable(metric):
        raise TypeError(
            f"{what} is a function of logits, tokens and mask that returns a value per sequence; found {metric!r}"
        )
    require_call(metric, ("logits", "tokens", "mask"), what)


def _query_key(attention: Any) -> Any:
    """Return query and key positions as lists, of a frame by the columns of these names. Raises TypeError for none."""
    names = column_names(attention)
    if names is not None:
        if not {"query", "key"} <= set(names):
            raise TypeError(f"attention as a frame has columns query and key; found {', '.join(names)}")
        attention = [list(row) for row in zip(*columns_of(attention, ("query", "key")), strict=True)]
    return positions_by_place(attention, "attention")


def _contents(prompts: Any) -> list[Any]:
    """Return the text or the real ids of each prompt, by which equal ones are found."""
    if isinstance(prompts, dict):
        ids = prompts["input_ids"]
        mask = prompts.get("attention_mask", torch.ones_like(ids))
        return [tuple(row[real].tolist()) for row, real in zip(ids, mask.bool(), strict=True)]
    return [prompt if isinstance(prompt, str) else tuple(prompt.tolist()) for prompt in prompts]


def _nested(positions: Any) -> bool:
    """Return whether positions are a row per prompt, and not one list for all."""
    return isinstance(positions, list) and any(isinstance(row, list) for row in positions)


def induction(
    prompts: Int[Tensor, "sequences pos"] | None = None,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    seed: int = 0,
) -> Task:
    """Make the task: loss on the second copy of random segments, as `detect_heads` draws `[BOS, r, r]` (FP section 8).

    With a segment of L tokens, positions L+1 .. 2L-1 predict: each has seen the token that follows. The arguments are
    the same as in `induction_loss`.
    """
    return Task(
        RepeatedSegments(None if prompts is None else prompts.clone(), n_sequences, segment_length, seed),
        next_token_loss,
        predict=lambda width: slice((width - 1) // 2 + 1, width - 1),
        higher_is_better=False,
        name="induction",
    )


def language(
    prompts: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> Task:
    """Make the task: loss on text, of every position but the last; arguments as in `language_loss` (FP section 5)."""
    return Task(
        TextRows(_own(prompts), _own(attention_mask), n_sequences, sequence_length),
        next_token_loss,
        predict=slice(0, -1),
        higher_is_better=False,
        name="language",
    )


def _own(given: Any) -> Any:
    """Return a copy of a tensor or a list; text stays as it is."""
    if isinstance(given, Tensor):
        return given.clone()
    return given if given is None or isinstance(given, str | Mapping) else list(given)


def logit_difference(
    prompts: Any,
    correct: Any,
    wrong: Any,
    *,
    counterfactual: Any = None,
    positions: Mapping[str, Any] | None = None,
    name: str = "logit difference",
) -> Task:
    """Make the task: the correct answer's logit less the wrong one's, after the last real token of each prompt.

    >>> import tlspectral as tls
    >>> tls.logit_difference(["When Mary and John went out, John gave a book to"], " Mary", " John")
    Task(logit difference, 1 prompts)
    >>> round(float(tls.evaluate(tls.load_model("tiny-rope"), tls.logit_difference([[1, 5, 6, 7, 5]], 6, 8))), 1)
    5.3

    Args:
        prompts: see `Task`.
        correct, wrong: the answer, a token as text or id, for all prompts; or a list with the answer of each prompt, or
            with a list of several, whose logits are averaged. An array or a column of a table is read by place.
        counterfactual, positions: see `Task`.
        name: name in tables.

    Raises:
        TypeError: prompts in no form of `Task`, or an answer that is neither text nor a whole number, such as 15.7,
            True or None.
        ValueError: lists of another length than the prompts.

    Errors, where the task meets a model:
        ValueError: an answer that is no single token, that the tokenizer does not know or the model cannot predict, or
            one that is correct and wrong.
        UnsupportedArchitecture: an encoder.

    What it does not establish: that the model would give the answer. A third token may have the largest logit.
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
    """Return the task that is meant by a `Task` or by the name of a ready one, which has so many sequences.

    Raises ValueError for no such task.
    """
    if isinstance(task, Task):
        return task
    size: Any = {} if n_sequences is None else {"n_sequences": n_sequences}
    if task == "induction":
        return induction(seed=seed, **size)
    if task == "language":
        return language(**size)
    raise ValueError(f"task must be a tls.Task, 'induction' or 'language', not {task!r}")
