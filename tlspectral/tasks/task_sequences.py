"""`TaskSequences`: a task on one model, with token ids and predicted positions. Runs that evaluate its sequences."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import warn_caller
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import (
    Note,
    PackedTokens,
    attention_positions,
    batch_on,
    in_batches,
    position_of,
    positions_in,
    rows_of_pass,
    rows_of_scores,
)
from tlspectral.models.running.continued_runs import ContinuedRun, rows_at_once
from tlspectral.models.running.long_prompts import run_noted
from tlspectral.models.running.partial_runs import IntactRun, Positions, intact_run, logits_at
from tlspectral.models.running.prompts import distinct_rows, equality_notes, read_prompts
from tlspectral.models.running.text import tokens_text
from tlspectral.tasks.metric_value import MetricValue
from tlspectral.tasks.metrics import AnsweredDifference, LogitDifference, next_token_loss
from tlspectral.tasks.repeated import RepeatedSegments
from tlspectral.tasks.task import Task, require_metric, task_of
from tlspectral.user_functions import call_users, function_name, not_finite, returned_tensor

_Result = TypeVar("_Result")

_MOST_LOGITS = 2**31  # 8 GiB in float32
_BACKWARD = 4  # a backward pass keeps activations of all layers, so it gets so many times fewer rows


@dataclass(frozen=True)
class TaskSequences(PackedTokens):
    """The sequences of a task on one model: token ids on the CPU, with the task's metric, positions and pairs.

    Attributes:
        predicted: positions whose logits the metric gets, a slice or a tensor [sequences, predicted].
        metric: function of logits, tokens and mask that returns a value per sequence.
        by_rows: True if the metric measures each sequence by itself, so that it can be called batch by batch.
        name: name of the task.
        labels: DataFrame with a row per sequence, or None.
        higher_is_better: True, False, or None if unknown.
        counterfactual: the pair of each sequence, with equal lengths; None without pairs.
        positions: for each name, a position per sequence.
        distinct: an integer per sequence. Sequences with equal tokens, pair, predicted positions and answers have the
            same integer. None if all differ.
        given_texts: the prompts, if they were given as text.
    """

    predicted: Positions
    metric: Callable[..., Tensor]
    by_rows: bool
    name: str
    labels: pd.DataFrame | None = None
    higher_is_better: bool | None = None
    counterfactual: PackedTokens | None = None
    positions: Mapping[str, Int[Tensor, "sequences"]] = field(default_factory=dict)
    distinct: Int[np.ndarray, "sequences"] | None = None
    given_texts: tuple[str, ...] | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and the predicted positions, as hex text."""
        return self.hashed(self.predicted if isinstance(self.predicted, slice) else self.predicted.tolist())

    @property
    def n_predicted(self) -> int:
        """Number of positions per sequence whose logits are computed."""
        if isinstance(self.predicted, slice):
            return len(range(self.tokens.shape[1])[self.predicted])
        return self.predicted.shape[1]

    def predicted_of(self, sequences: slice) -> Positions:
        """Return the predicted positions of the sequences in the slice `sequences`: a slice of positions, or a tensor
        [sequences, predicted].
        """
        return self.predicted if isinstance(self.predicted, slice) else self.predicted[sequences]

    def rows_at_once(self, view: AttentionView) -> int:
        """Return how many sequences fit into one run on the model's device, by tokens, scores and logits."""
        return max(1, min(rows_of_pass(view, self.tokens.shape[1]), self._rows_predicted(view)))

    def recorded(self, view: AttentionView) -> dict[str, Any]:
        """Return a dict for the attrs of a table: n_sequences, batch (sequences per run), strip (queries at a time, of
        long prompts), tokens_sha256, and notes about the prompts.
        """
        counts = {"n_sequences": len(self.tokens), "batch": self.rows_at_once(view)}
        return {**counts, **run_noted(view, self.tokens.shape[1]), "tokens_sha256": self.digest, **self.noted}

    def _rows_predicted(self, view: AttentionView) -> int:
        """Return how many sequences one run on the model's device may have, by the memory of their predicted logits."""
        return batch_on(view.device).logits // (self.n_predicted * view.d_vocab)

    def in_batches(
        self, view: AttentionView, run: Callable[[slice], _Result], *, backward: bool = False
    ) -> Iterator[_Result]:
        """Call `run` with the slice of each batch of sequences, and yield its results.

        `view`: the model, for the memory of its device. A batch has `rows_at_once` sequences. `backward`: True if the
        run has a backward pass over all layers, which makes batches smaller.
        """
        rows = self.rows_at_once(view)
        if backward:
            rows = max(1, min(rows // _BACKWARD, rows_of_scores(view, self.tokens.shape[1], backward=True)))
        return in_batches(len(self.tokens), rows, run)

    def measured(
        self, logits: Float[Tensor, "rows predicted d_vocab"], sequences: slice = slice(None)
    ) -> Float64[Tensor, "rows"]:
        """Return the metric's value for each sequence of the slice `sequences`, from the logits of these sequences.

        A metric that is not `by_rows` needs all sequences (the default slice). The user's metric gets copies of logits,
        tokens and mask. Raises ValueError unless it returns a tensor with one finite number per sequence.
        """
        values = self._values(logits, sequences)
        wrong = not_finite(values)
        if wrong is not None:
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{self._metric_name} returned {values[row].item()} for sequence {(sequences.start or 0) + row}: "
                "return a finite number for each sequence"
            )
        return values

    def _values(
        self, logits: Float[Tensor, "rows predicted d_vocab"], sequences: slice = slice(None)
    ) -> Float64[Tensor, "rows"]:
        """Return the metric's value for each sequence of the slice `sequences`, from the logits of these sequences.

        Unlike `measured`, allow NaN and infinity. Raises ValueError unless the metric returns a tensor with one number
        per sequence.
        """
        # Half precision is widened, because effects are means of small differences.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        tokens, mask = (values[sequences].to(logits.device) for values in (self.tokens, self.real))
        given = (wide, tokens, mask) if self.by_rows else (wide.clone(), tokens.clone(), mask.clone())
        returns = f"a tensor of real numbers of shape ({len(tokens)},)"
        arguments: dict[str, Any] = dict(zip(("logits", "tokens", "mask"), given, strict=True))
        values = call_users(self.metric, arguments, self._metric_name, returns)
        said = f"{self._metric_name} returns a value per sequence"
        return in_float64(returned_tensor(values, (len(tokens),), said))

    @property
    def _metric_name(self) -> str:
        """The metric as messages call it: "the metric NAME of the task TASK"."""
        name = function_name(self.metric)
        return f"the metric {name}" + f" of the task {self.name!r}" * (name != self.name)

    def of_each_row(self, logits: Callable[[], Float[Tensor, "sequences predicted d_vocab"]]) -> bool:
        """Return True if the value of a sequence depends only on its own logits.

        This holds for ready metrics. A user's metric is tried out: the logits of even sequences are changed, then the
        logits of odd ones, and the values of unchanged sequences must stay equal. `logits`: function that returns the
        logits of all sequences.
        """
        if self.by_rows or isinstance(self.metric, AnsweredDifference):
            return True
        plain = logits()
        values = self._values(plain)
        changed = plain + torch.linspace(-1, 1, plain.shape[-1], device=plain.device, dtype=plain.dtype)
        for first in (0, 1):
            mixed = plain.clone()
            mixed[first::2] = changed[first::2]
            if not torch.equal(self._values(mixed)[1 - first :: 2], values[1 - first :: 2]):
                return False
        return True

    def gradients(
        self, logits: Float[Tensor, "rows predicted d_vocab"], sequences: slice = slice(None)
    ) -> Float[Tensor, "rows predicted d_vocab"]:
        """Return the gradient of the sum of the metric over sequences with respect to the logits, in the shape of
        `logits`, which is not changed.

        `logits`: of the sequences in the slice `sequences`. Raises ValueError if the metric has no gradient.
        """
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            value = self.measured(leaf, sequences).sum()
        if not value.requires_grad:
            raise ValueError(
                f"screen='gradient' needs a metric with a gradient, and the metric of {self.name} has none (an argmax, "
                "a comparison or .item() cuts it off): leave screen= out, or write the metric without these"
            )
        return torch.autograd.grad(value, leaf)[0]


@dataclass
class MetricValues:
    """Collects the metric's values of all sequences while logits come batch by batch, for several copies of the model.

    `sequences`: the task's sequences, with its metric. `copies`: number of copies that one run stacks on the batch
    axis, such as a model ablated in different ways.
    """

    sequences: TaskSequences
    copies: int
    _batches: list[Tensor] = field(default_factory=list)

    def add(self, batch: slice, logits: Float[Tensor, "rows predicted d_vocab"]) -> None:
        """Compute and store the values of a batch.

        Its logits have all sequences for copy 0, then for copy 1, and so on. `batch`: the slice of sequences.
        """
        self.keep(self.read(batch, logits.unflatten(0, (self.copies, -1))))

    def read(self, batch: slice, logits: Float[Tensor, "copies rows predicted d_vocab"]) -> Tensor:
        """Return the metric's values [copies, rows] of the sequences in the slice `batch`, on the CPU; nothing is
        stored.

        If the metric must see all sequences at once, and the batch has only some, return the logits.
        """
        if not self.sequences.by_rows and batch.stop - batch.start < len(self.sequences.tokens):
            return logits
        return torch.stack([self.sequences.measured(copy, batch) for copy in logits]).cpu()

    def keep(self, of_batch: Tensor) -> None:
        """Store `of_batch`, the result of `read` for a batch: its values [copies, rows], or its logits. Batches come in
        order.
        """
        self._batches.append(of_batch)

    def result(self) -> Float64[Tensor, "copies sequences"]:
        """Return the values of all stored batches, [copies, sequences].

        Raises ValueError unless the metric returns one finite number per sequence.
        """
        values = torch.cat(self._batches, dim=1)
        if values.ndim > 2:  # logits
            values = torch.stack([self.sequences.measured(copy) for copy in values]).cpu()
        return values


def task_sequences(view: AttentionView, task: Task) -> TaskSequences:
    """Tokenise a task for a model. Return a `TaskSequences`: token ids, counterfactual pairs, positions, labels and
    metric, checked to fit together.

    Raises:
        UnsupportedArchitecture: an encoder with a metric of the next token.
        ValueError, TypeError: prompts that the model cannot read; pairs of unequal length; positions, labels or
            attention that do not fit the prompts; positions without a next token for `next_token_loss`; or more than 8
            GiB of logits for a metric that gets all sequences at once.
    """
    task = task_of(task)
    packed = read_prompts(view, task.prompts)
    metric = task.metric
    if hasattr(metric, "for_model"):  # it needs the model's tokenizer, such as the token of an answer
        own = replace(packed, tokens=packed.tokens.clone(), lengths=packed.lengths.clone())
        if isinstance(metric, LogitDifference):
            metric = metric.for_model(view, own)
        else:
            what, returns = f"for_model of the metric {type(metric).__name__}", "a function of logits, tokens and mask"
            metric = call_users(metric.for_model, {"view": view, "prompts": own}, what, returns)
            require_metric(metric, f"the result of {what}")
    pairs = _pairs(view, packed, task)
    # Random segments are independent draws, even if two happen to be equal.
    drawn = isinstance(task.prompts, RepeatedSegments) and task.prompts.given is None
    n = len(packed.tokens)
    predicted = predicted_positions(packed.lengths, packed.tokens.shape[1], task.predict)
    answered = metric if isinstance(metric, AnsweredDifference) else None
    columns = [()] * n if isinstance(predicted, slice) else predicted.tolist()
    answers = [()] * n if answered is None else answered.answers
    sides = [packed] if pairs is None else [packed, pairs]
    distinct = distinct_rows(sides, zip(columns, answers, strict=True))
    equal = () if drawn else equality_notes(distinct)
    noted = {note.name for note in packed.notes}
    of_pairs = () if pairs is None else (note for note in pairs.notes if note.name not in noted)
    sequences = TaskSequences(
        packed.tokens,
        packed.lengths,
        predicted,
        metric,
        metric is next_token_loss,
        task.label,
        None if task.labels is None else task.labels.copy(),
        task.higher_is_better,
        pairs,
        {name: position_of(packed, given, f"positions {name!r}") for name, given in (task.positions or {}).items()},
        distinct if equal else None,
        tuple(task.prompts) if isinstance(task.prompts, list) and isinstance(task.prompts[0], str) else None,
        notes=(
            *packed.notes,
            *(Note(f"counterfactual_{note.name}", note.value, f"counterfactual: {note.message}") for note in of_pairs),
            *(() if answered is None else answered.notes),
            *equal,
        ),
    )
    for note in sequences.notes:
        warn_caller(note.message)
    if sequences.counterfactual is not None:
        _warn_of_early_differences(sequences)
    if sequences.by_rows:
        require_causal(view, "it sees the next token, so it cannot predict it; give a tls.Task with another metric")
        _require_targets(sequences)
    if task.labels is not None and len(task.labels) != n:
        raise ValueError(f"labels= has {len(task.labels)} rows, and there are {n} sequences: give a row for each")
    attention_positions(packed.lengths, task.attention)  # raises where they do not fit
    if not sequences.by_rows and n * sequences.n_predicted * view.d_vocab > _MOST_LOGITS:
        size = 4 * n * sequences.n_predicted * view.d_vocab / 2**30
        raise ValueError(
            f"the metric of {task.label} gets the logits of all {n} prompts at once, {size:.0f} GiB: say with predict= "
            "which positions it needs (predict=-1: the last), or give fewer prompts"
        )
    return sequences


def _pairs(view: AttentionView, packed: PackedTokens, task: Task) -> PackedTokens | None:
    """Return the counterfactual prompts of a task as a `PackedTokens` batch (ids and lengths); None if it has none.

    `view`: the model. `packed`: the task's own prompts. Raises ValueError if there are more or fewer pairs, or a pair
    has another number of tokens.
    """
    if task.counterfactual is None:
        return None
    other = task.counterfactual
    pairs = read_prompts(view, other.prompts if isinstance(other, Task) else other)
    if len(pairs.tokens) != len(packed.tokens):
        raise ValueError(
            f"counterfactual= has {len(pairs.tokens)} prompts, and prompts= has {len(packed.tokens)}: give one pair "
            "for each prompt"
        )
    unequal = (pairs.lengths != packed.lengths).nonzero().flatten().tolist()
    if unequal:
        row = unequal[0]
        raise ValueError(
            f"prompt {row} has {int(packed.lengths[row])} tokens and its counterfactual {int(pairs.lengths[row])}: "
            "give a counterfactual with equally many tokens, because activations are exchanged position by position"
        )
    return pairs


def _warn_of_early_differences(sequences: TaskSequences) -> None:
    """Warn about pairs of prompt and counterfactual that are equal, and about pairs that differ before every position
    that the task names. Nothing is returned; `sequences` must have pairs.

    A name for the last token is left out, because every useful pair differs before its last token.
    """
    assert sequences.counterfactual is not None
    differs = sequences.tokens != sequences.counterfactual.tokens
    same = (~differs.any(1)).nonzero().flatten().tolist()
    if same:
        warn_caller(
            f"{len(same)} of {len(differs)} pairs are equal, such as the pair of prompt {same[0]}: every effect is 0 "
            "there and lowers the means. Leave these prompts out, or change their counterfactual"
        )
    if sequences.positions:
        places, width = torch.stack([*sequences.positions.values()]), differs.shape[1]
        first, named = differs.float().argmax(1), places.masked_fill(places == sequences.lengths - 1, width).amin(0)
        early = (differs.any(1) & (first < named) & (named < width)).nonzero().flatten().tolist()
        if early:
            row = early[0]
            warn_caller(
                f"{len(early)} of {len(differs)} pairs differ before every named position, such as the pair of prompt "
                f"{row} at position {int(first[row])}: check that a counterfactual has the same text up to the exchange"
            )


def _require_targets(sequences: TaskSequences) -> None:
    """Raise ValueError unless the predicted positions of `sequences` are consecutive and end with the last position but
    one.

    `next_token_loss` takes the tokens after these positions as targets.
    """
    n, width = sequences.n_predicted, sequences.tokens.shape[1]
    columns = torch.arange(width - 1 - n, width - 1)
    predicted = sequences.predicted
    positions = torch.arange(width)[predicted][None] if isinstance(predicted, slice) else predicted
    if bool(((positions != columns) & sequences.real[:, width - n :]).any()):
        raise ValueError(
            "next_token_loss needs consecutive positions that end with the last but one: give predict=slice(start, -1) "
            "with start of 0 or more"
        )


def predicted_positions(lengths: Int[Tensor, "sequences"], width: int, predict: Any) -> Positions:
    """Return the positions that `predict` selects in each prompt: a slice if possible, otherwise a tensor [sequences,
    predicted].

    `lengths`: tokens of each prompt. `width`: the most tokens of a prompt. `predict`: a number, a list, a slice or a
    tensor, counted within each prompt; a function of `width` that returns one of these; or None for all positions. If a
    slice selects fewer positions in one prompt than in another, the last real token fills the row.

    Raises ValueError for a position that a prompt does not have, or no position at all; TypeError for another form.
    """
    if callable(predict):
        what, returns = f"predict {function_name(predict)}", "positions: a number, a list, a slice or a tensor"
        predict = call_users(predict, {"width": width}, what, returns)  # `positions_in` copies the result
    predict = slice(None) if predict is None else predict
    if isinstance(predict, slice):
        chosen = [range(length)[predict] for length in lengths.tolist()]
        most = max(map(len, chosen))
        if not most:
            raise ValueError(
                f"predict={predict} selects no position of prompts with {width} tokens: give a position such as -1, or "
                "a slice within the prompt"
            )
        if bool((lengths == width).all()) and chosen[0].step == 1:
            return slice(chosen[0].start, chosen[0].stop)
        filled = zip(chosen, (lengths - 1).tolist(), strict=True)
        return torch.tensor([[*columns, *[last] * (most - len(columns))] for columns, last in filled])
    return positions_in(lengths, predict, "predict")


def metric_value_of(view: AttentionView, sequences: TaskSequences) -> MetricValue:
    """Run the model with its current hooks on all sequences, without gradients; return the `MetricValue` (mean and
    value per sequence, in the metric's unit). The model's training mode is restored.
    """
    values = MetricValues(sequences, 1)

    def add(batch: slice) -> None:
        values.add(batch, logits_at(view, sequences.tokens[batch], sequences.predicted_of(batch)))

    with evaluating(view.model), torch.no_grad():
        for _ in sequences.in_batches(view, add):
            pass
    return metric_value_from(view, sequences, values.result()[0].numpy())


def metric_value_from(
    view: AttentionView, sequences: TaskSequences, values: Float64[np.ndarray, "sequences"]
) -> MetricValue:
    """Return a `MetricValue` of `values`, one per sequence, with the labels, hash and texts of the sequences. `view`
    decodes token ids to text.
    """
    texts = sequences.given_texts
    if texts is None:
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        texts = tuple(tokens_text(view, row[:length]) for row, length in rows)
    return MetricValue(values, sequences.labels, sequences.digest, sequences.distinct, texts)


def intact_values(
    view: AttentionView, sequences: TaskSequences, layers: Iterable[int]
) -> tuple[IntactRun, Float64[np.ndarray, "sequences"]]:
    """Run the model on all sequences without ablation. Return the run (an `IntactRun`, which keeps activations for
    replays) and the metric's value of each sequence.

    `layers`: the layers from which the run can be replayed later with other hooks.
    """
    values = MetricValues(sequences, 1)
    rows = sequences.rows_at_once(view)
    intact = intact_run(view, sequences.tokens, sequences.predicted, layers, batch=rows, reduce=values.add)
    return intact, values.result()[0].numpy()


@dataclass(frozen=True)
class Replays:
    """A group of ablated runs that all equal the intact run up to one layer.

    Attributes:
        layer: the first layer in which these runs differ from the intact run.
        n: number of runs (replays).
        hooks_of: function of (slice of replays, slice of sequences) that returns hooks as (hook name, function). The
            batch that these hooks see has a copy of the sequences for each replay, one copy after another.
    """

    layer: int
    n: int
    hooks_of: Callable[[slice, slice], list[Hook]]


def replayed_values(
    intact: IntactRun | ContinuedRun,
    sequences: TaskSequences,
    replays: Sequence[Replays],
    seen: Callable[[list[int], slice, Float[Tensor, "copies rows predicted d_vocab"]], None] | None = None,
) -> Float64[Tensor, "replays sequences"]:
    """Run every replay (an ablated run) on all sequences from its first changed layer on. Return the metric's values.

    As many replays as memory allows are stacked on the batch axis, in the order of their layers, and run in one pass; a
    replay joins the pass at its layer. Stacking changes numbers by rounding only.

    Args:
        intact: the run without hooks.
        sequences: the sequences of a task.
        replays: groups of replays.
        seen: function called for each pass with (rows of the result, slice of sequences, logits); twice if a pass ran
            out of memory and is repeated. None for no calls.

    Returns:
        Value of each replay, in the given order, on each sequence.
    """
    view, n = intact.view, len(sequences.tokens)
    rows = max(1, min(rows_at_once(intact), sequences._rows_predicted(view)))
    ends = np.cumsum([group.n for group in replays])
    order = sorted(range(len(replays)), key=lambda place: replays[place].layer)
    queue = [(place, index) for place in order for index in range(replays[place].n)]

    def of_replays(chunk: slice) -> Tensor:
        taken = queue[chunk]
        places = [int(ends[place]) - replays[place].n + index for place, index in taken]
        groups = [(place, [*members]) for place, members in groupby(taken, key=itemgetter(0))]
        values = MetricValues(sequences, len(taken))

        def add(batch: slice) -> None:
            hooks, first = [], 0
            for place, members in groups:
                own = slice(members[0][1], members[-1][1] + 1)
                hooks.append((slice(first, first + len(members)), replays[place].hooks_of(own, batch)))
                first += len(members)
            logits = intact.replay([replays[place].layer for place, _ in taken], batch, hooks)
            if seen is not None:
                seen(places, batch, logits.unflatten(0, (len(taken), -1)))
            values.add(batch, logits)

        for _ in in_batches(n, max(1, rows // values.copies), add):
            pass
        return values.result()

    with evaluating(view.model), torch.no_grad():
        queued = torch.cat([*in_batches(len(queue), max(1, rows // n), of_replays)])
    ordered = torch.empty_like(queued)
    ordered[[int(ends[place]) - replays[place].n + index for place, index in queue]] = queued
    return ordered
