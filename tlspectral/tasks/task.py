"""`Task`: the prompts that a model is run on and the metric that scores it. The ready tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.attention.padding import TokenMask
from tlspectral.tasks.metrics import LogitDifference, next_token_loss
from tlspectral.tasks.prompts import RepeatedSegments, TextRows

Predict = None | int | slice | Sequence[int] | Tensor | Callable[[int], slice]


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts and a metric: what `evaluate`, `ablation_sweep` and every other function that scores a model takes.

        first = model.to_single_token(" Mary")
        second = model.to_single_token(" John")
        task = tls.Task(prompts, lambda logits, tokens, mask: logits[:, -1, first] - logits[:, -1, second], predict=-1)

    With `counterfactual` every prompt has a pair: the same text but for what the metric asks after. Edges, circuits and
    `parts.Output("counterfactual")` put what the model writes on the pair in the place of what it writes on the prompt.

        task = tls.logit_difference(prompts, " Mary", " John", counterfactual=other_prompts)

    Prompts of unequal length are moved to the left and filled at the end; a decoder does not see the filling, and it is
    not scored. An encoder would see it, so its prompts have one length. Ready tasks are in `tls.tasks`: `induction`,
    `language`, `logit_difference`, `embedding_change`.

    Attributes:
        prompts: strings (tokenised as by `model.to_tokens`, BOS included where the model has one); token ids
            [sequences, pos]; a list of one-dimensional tensors or lists of ids, of unequal length; or a tokenizer's
            batch with `input_ids` and `attention_mask`, padded on either side.
        metric: function of `logits` [sequences, predicted, d_vocab] in float32 or wider, `tokens` [sequences, pos] and
            `mask` [sequences, pos] (True for real tokens), all of them on the model's device, that returns a score per
            sequence, [sequences]. It gets all prompts at once, in their order.
        predict: positions whose logits the metric needs; the others are never computed. A position, a list of them or a
            slice, all of which count in each prompt by itself, negative ones from its end (-1: its last real token); a
            tensor [sequences, predicted]; None: all. Where a slice takes fewer positions of a prompt than of another,
            its last real token fills the row.
        attention: a query and a key position per sequence, [sequences, 2], for attention measured on the prompts;
            negative from the end of each prompt.
        counterfactual: the pair of each prompt, in a form of `prompts`, with as many tokens; or a `Task` of these
            prompts with a metric of their own.
        positions: names of positions, each with a position for all prompts or one per prompt, negative from its end:
            `{"S2": [10, 12], "END": -1}`. A warning says where a pair differs before all of them.
        labels: a DataFrame with a row per sequence, such as the condition it belongs to.
        higher_is_better: whether a higher score is better, None if that is not to be said. It decides what harm is.
        name: name in tables.

    What it does not establish: that a score measures the ability it is named after.
    """

    prompts: Any
    metric: Any
    _: KW_ONLY
    predict: Predict = None
    attention: Any = None
    counterfactual: Any = None
    positions: Mapping[str, Any] | None = None
    labels: pd.DataFrame | None = None
    higher_is_better: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.metric) and not hasattr(self.metric, "for_model"):
            raise TypeError(
                "metric is a function of logits, tokens and mask that returns a score per sequence; found "
                f"{self.metric!r}"
            )
        if self.labels is not None and not isinstance(self.labels, pd.DataFrame):
            raise TypeError(f"labels are a DataFrame with a row per sequence; found {type(self.labels).__name__}")

    @property
    def label(self) -> str:
        """Name in tables: `name`, or that of the metric."""
        return self.name or getattr(self.metric, "__name__", type(self.metric).__name__)

    def denoising(self) -> "Task":
        """Return the task with the two runs exchanged: the counterfactual prompts, and the metric of the clean answer.

        What is then put in its place are writes of the clean run, so an effect says what a part restores.

        Raises:
            ValueError: the task has no counterfactual prompts.
        """
        if self.counterfactual is None:
            raise ValueError(f"{self.label} has no counterfactual prompts to exchange: give counterfactual=")
        other = self.counterfactual.prompts if isinstance(self.counterfactual, Task) else self.counterfactual
        return replace(self, prompts=other, counterfactual=self.prompts, name=f"{self.label}, denoising")

    def split(self, share: float = 0.5, *, seed: int = 0) -> "tuple[Task, Task]":
        """Return two tasks: a random share of the prompts, with all that belongs to them, and the rest.

        What is chosen on the first, such as the edges of a circuit, is scored on the second.

        Raises:
            ValueError: a share that leaves one of them empty.
            TypeError: a metric that is a plain function, of which nothing says which rows are whose, or prompts that
                are made when the model is known.

        >>> import tlspectral as tls
        >>> fit, held_out = tls.logit_difference([[1, 2], [1, 3], [1, 4], [1, 5]], 6, 7).split(0.5)
        >>> len(fit.prompts), len(held_out.prompts)
        (2, 2)
        """
        if hasattr(self.prompts, "packed") or not hasattr(self.metric, "of_prompts"):
            raise TypeError(
                "split takes a task of given prompts with logit_difference, or a metric with a method of_prompts(rows) "
                "that returns it for some prompts: split prompts and answers yourself, and make two tasks"
            )
        prompts = self.prompts["input_ids"] if isinstance(self.prompts, Mapping) else self.prompts
        order, n = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist(), len(prompts)
        first = round(share * n)
        if not 0 < first < n:
            raise ValueError(f"a share of {share} of {n} prompts leaves one half empty")
        return self._of(sorted(order[:first])), self._of(sorted(order[first:]))

    def _of(self, rows: list[int]) -> "Task":
        other, metric = self.counterfactual, getattr(self.metric, "of_prompts")(rows)  # noqa: B009
        return replace(
            self,
            prompts=_chosen(self.prompts, rows),
            metric=metric,
            predict=_rows(self.predict, rows),
            attention=_rows(self.attention, rows),
            counterfactual=other._of(rows) if isinstance(other, Task) else _chosen(other, rows),
            positions=self.positions
            and {name: at if isinstance(at, int) else _chosen(at, rows) for name, at in self.positions.items()},
            labels=None if self.labels is None else self.labels.iloc[rows],
        )

    def __repr__(self) -> str:
        prompts = self.prompts["input_ids"] if isinstance(self.prompts, Mapping) else self.prompts
        size = f"{len(prompts)} prompts" if hasattr(prompts, "__len__") else repr(prompts)
        return f"Task({self.label}, {size})"


def _chosen(prompts: Any, rows: list[int]) -> Any:
    """Return some of the prompts, in the form in which they are given."""
    if prompts is None:
        return None
    if isinstance(prompts, Mapping):
        return {name: values[rows] for name, values in prompts.items()}
    return [prompts[row] for row in rows] if isinstance(prompts, list | tuple) else prompts[rows]


def _rows(positions: Any, rows: list[int]) -> Any:
    """Return the rows of positions that have one per prompt; others as they are."""
    listed = isinstance(positions, list | tuple | torch.Tensor)
    per_prompt = listed and torch.as_tensor(positions).ndim == 2
    return torch.as_tensor(positions)[rows] if per_prompt else positions


def induction(
    prompts: Int[Tensor, "sequences pos"] | None = None,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    seed: int = 0,
) -> Task:
    """Loss on the second copy of repeated random segments, `[BOS, r, r]` as `detect_heads` draws them (FP section 8).

    With a segment of L tokens, positions L+1 .. 2L-1 predict: each has seen the token that follows. The arguments are
    those of `induction_loss`.
    """
    return Task(
        RepeatedSegments(prompts, n_sequences, segment_length, seed),
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
    """Loss on text, of every position but the last; the arguments are those of `language_loss` (FP section 5)."""
    return Task(
        TextRows(prompts, attention_mask, n_sequences, sequence_length),
        next_token_loss,
        predict=slice(0, -1),
        higher_is_better=False,
        name="language",
    )


def logit_difference(
    prompts: Any,
    correct: Any,
    wrong: Any,
    *,
    counterfactual: Any = None,
    positions: Mapping[str, Any] | None = None,
    name: str = "logit difference",
) -> Task:
    """Logit of the correct answer less that of the wrong one, after the last real token of each prompt.

        task = tls.logit_difference(["When Mary and John went out, John gave a book to"], " Mary", " John")

    Args:
        prompts: see `Task`.
        correct, wrong: the answer, a token as text or id, for all prompts; or a list with the answer of each prompt, or
            with a list of several, whose logits are averaged.
        counterfactual, positions: see `Task`.
        name: name in tables.

    Errors, where the task meets a model:
        ValueError: an answer that is no single token, one that is correct and wrong, or lists of another length than
            the prompts.
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
