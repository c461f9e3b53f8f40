"""A task as it is run on one model: token ids, positions whose logits are needed, and the value of each sequence."""

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
from tlspectral.models.running.partial_runs import IntactRun, Positions, intact_run, logits_at
from tlspectral.models.running.prompts import distinct_rows, equality_notes, read_prompts
from tlspectral.models.running.text import tokens_text
from tlspectral.tasks.metric_value import MetricValue
from tlspectral.tasks.metrics import AnsweredDifference, next_token_loss
from tlspectral.tasks.repeated import RepeatedSegments
from tlspectral.tasks.task import Task, require_metric
from tlspectral.user_functions import not_finite, returned_tensor

_Found = TypeVar("_Found")

_MOST_LOGITS = 2**31  # 8 GiB in float32
_BACKWARD = 4  # what a backward pass needs of all layers stays in memory: so many times fewer rows than without


@dataclass(frozen=True)
class TaskSequences(PackedTokens):
    """The sequences of a task on one model, on the CPU, and the positions `predicted` whose logits the metric gets.

    A metric that is `by_rows` measures each row by itself, so it is called batch by batch. `counterfactual` are the
    pairs of the sequences, of the same lengths; `positions` are named ones, one per sequence. `distinct` numbers the
    sequences so that those which are equal in tokens, pair, predicted positions and answers have one number; None where
    all differ. `given_texts` are prompts that were given as text.
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
        """Hash of the tokens and of what is predicted."""
        return self.hashed(self.predicted if isinstance(self.predicted, slice) else self.predicted.tolist())

    @property
    def n_predicted(self) -> int:
        """Positions of a sequence whose logits are computed."""
        if isinstance(self.predicted, slice):
            return len(range(self.tokens.shape[1])[self.predicted])
        return self.predicted.shape[1]

    def predicted_of(self, sequences: slice) -> Positions:
        """Return the positions predicted in some of the sequences."""
        return self.predicted if isinstance(self.predicted, slice) else self.predicted[sequences]

    def rows_at_once(self, view: AttentionView) -> int:
        """Return the number of sequences in one run, which the device bounds by its tokens, scores and logits."""
        return max(1, min(rows_of_pass(view, self.tokens.shape[1]), self._rows_predicted(view)))

    def recorded(self, view: AttentionView) -> dict[str, Any]:
        """Return what `attrs` of a table say of the sequences: how many, how many in one run, and which."""
        counts = {"n_sequences": len(self.tokens), "batch": self.rows_at_once(view)}
        return {**counts, "tokens_sha256": self.digest, **self.noted}

    def _rows_predicted(self, view: AttentionView) -> int:
        return batch_on(view.device).logits // (self.n_predicted * view.d_vocab)

    def in_batches(
        self, view: AttentionView, run: Callable[[slice], _Found], *, backward: bool = False
    ) -> Iterator[_Found]:
        """Yield what `run` returns for batches of `rows_at_once` sequences, see `batches.in_batches`.

        With `backward`, of a run with a backward pass over all layers, they are smaller.
        """
        rows = self.rows_at_once(view)
        if backward:
            rows = max(1, min(rows // _BACKWARD, rows_of_scores(view, self.tokens.shape[1], backward=True)))
        return in_batches(len(self.tokens), rows, run)

    def measured(
        self, logits: Float[Tensor, "rows predicted d_vocab"], sequences: slice = slice(None)
    ) -> Float64[Tensor, "rows"]:
        """Return the metric of some sequences, of all for a metric that is not `by_rows`.

        A caller's metric gets copies of logits, tokens and mask. Raises ValueError if it returns anything but a tensor
        of one finite number per sequence.
        """
        values = self._values(logits, sequences)
        wrong = not_finite(values)
        if wrong is not None:
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"the metric of {self.name} is {values[row].item()} for sequence {(sequences.start or 0) + row}: a "
                "value is a finite number"
            )
        return values

    def _values(
        self, logits: Float[Tensor, "rows predicted d_vocab"], sequences: slice = slice(None)
    ) -> Float64[Tensor, "rows"]:
        """Return `measured`, of which numbers may not be finite."""
        # Half precision is widened, because effects are means of small differences.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        tokens, mask = (values[sequences].to(logits.device) for values in (self.tokens, self.real))
        given = (wide, tokens, mask) if self.by_rows else (wide.clone(), tokens.clone(), mask.clone())
        said = f"the metric of {self.name} returns a value per sequence"
        return in_float64(returned_tensor(self.metric(*given), (len(tokens),), said))

    def of_each_row(self, logits: Callable[[], Float[Tensor, "sequences predicted d_vocab"]]) -> bool:
        """Return whether the value of a sequence depends on its own logits alone.

        The value of a ready metric does. A caller's metric gets `logits` with every second sequence changed, then of
        the others: the values of those that are left alone must not change.
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
        """Return the gradient in the logits of the sum of `measured`. Raises ValueError for a metric without one."""
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            value = self.measured(leaf, sequences).sum()
        if not value.requires_grad:
            raise ValueError(
                f"screen='gradient' needs a metric with a gradient, and that of {self.name} has none (an argmax, a "
                "comparison or .item() cuts it off): leave the screen out"
            )
        return torch.autograd.grad(value, leaf)[0]


@dataclass
class MetricValues:
    """Values of several stacked copies of all sequences, whose logits come batch by batch."""

    sequences: TaskSequences
    copies: int
    _batches: list[Tensor] = field(default_factory=list)

    def add(self, batch: slice, logits: Float[Tensor, "rows predicted d_vocab"]) -> None:
        """Take the logits of a batch: copy after copy of the same sequences."""
        self.keep(self.read(batch, logits.unflatten(0, (self.copies, -1))))

    def read(self, batch: slice, logits: Float[Tensor, "copies rows predicted d_vocab"]) -> Tensor:
        """Return the values of some copies of a batch, or the logits where a metric has to see all sequences."""
        if not self.sequences.by_rows and batch.stop - batch.start < len(self.sequences.tokens):
            return logits
        return torch.stack([self.sequences.measured(copy, batch) for copy in logits]).cpu()

    def keep(self, of_batch: Tensor) -> None:
        """Take what `read` returned of all copies of the next batch."""
        self._batches.append(of_batch)

    def result(self) -> Float64[Tensor, "copies sequences"]:
        """Return the value of each sequence in each copy. Raises as `TaskSequences.measured`."""
        values = torch.cat(self._batches, dim=1)
        if values.ndim > 2:  # logits
            values = torch.stack([self.sequences.measured(copy) for copy in values]).cpu()
        return values


def task_sequences(view: AttentionView, task: Task) -> TaskSequences:
    """Return the sequences of a task on one model.

    Raises:
        UnsupportedArchitecture: an encoder, and a metric of the next token.
        ValueError, TypeError: see `Task` and `packed_prompts`; positions, labels or attention that do not fit the
            prompts; positions that `next_token_loss` has no targets for; or logits of more than 8 GiB for a metric that
            gets all of them at once.
    """
    packed = read_prompts(view, task.prompts)
    metric = task.metric
    if hasattr(metric, "for_model"):  # it needs the model's tokenizer, such as the token of an answer
        metric = metric.for_model(view, replace(packed, tokens=packed.tokens.clone(), lengths=packed.lengths.clone()))
        require_metric(metric, f"the metric that for_model of {task.label} returns")
    pairs = _pairs(view, packed, task)
    # Random segments are independent draws, also where two are equal.
    drawn = isinstance(task.prompts, RepeatedSegments) and task.prompts.given is None
    n = len(packed.tokens)
    predicted = predicted_positions(packed.lengths, packed.tokens.shape[1], task.predict)
    answered = metric if isinstance(metric, AnsweredDifference) else None  # what is known of its answers
    asked = [()] * n if isinstance(predicted, slice) else predicted.tolist()
    answers = [()] * n if answered is None else answered.answers
    sides = [packed] if pairs is None else [packed, pairs]
    distinct = distinct_rows(sides, zip(asked, answers, strict=True))
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
        require_causal(view, "it sees the next token, so a loss on it says nothing; give a Task with another metric")
        _require_targets(sequences)
    if task.labels is not None and len(task.labels) != n:
        raise ValueError(f"labels have {len(task.labels)} rows and there are {n} sequences: give a row each")
    attention_positions(packed.lengths, task.attention)  # raises where they do not fit
    if not sequences.by_rows and n * sequences.n_predicted * view.d_vocab > _MOST_LOGITS:
        size = 4 * n * sequences.n_predicted * view.d_vocab / 2**30
        raise ValueError(
            f"the metric of {task.label} gets the logits of all {n} prompts at once, {size:.0f} GiB: say with predict= "
            "which positions it needs, or give fewer prompts"
        )
    return sequences


def _pairs(view: AttentionView, packed: PackedTokens, task: Task) -> PackedTokens | None:
    """Return the counterfactual prompts. Raises ValueError for a pair of unequal length."""
    if task.counterfactual is None:
        return None
    other = task.counterfactual
    pairs = read_prompts(view, other.prompts if isinstance(other, Task) else other)
    if len(pairs.tokens) != len(packed.tokens):
        raise ValueError(
            f"counterfactual has {len(pairs.tokens)} prompts, and there are {len(packed.tokens)}: give a pair of each"
        )
    unequal = (pairs.lengths != packed.lengths).nonzero().flatten().tolist()
    if unequal:
        row = unequal[0]
        raise ValueError(
            f"prompt {row} has {int(packed.lengths[row])} tokens and its counterfactual {int(pairs.lengths[row])}: a "
            "pair has the same number, so that what stands at a position can be exchanged"
        )
    return pairs


def _warn_of_early_differences(sequences: TaskSequences) -> None:
    """Warn where a pair does not differ, or differs before every named position other than the last token.

    Pairs that can be scored differ before their last token, so a name for that token says nothing about the exchange.
    """
    assert sequences.counterfactual is not None
    differs = sequences.tokens != sequences.counterfactual.tokens
    same = (~differs.any(1)).nonzero().flatten().tolist()
    if same:
        warn_caller(
            f"{len(same)} of {len(differs)} pairs are equal, such as that of prompt {same[0]}: what is cut to a pair "
            "has an effect of 0 there, which counts in every mean"
        )
    if sequences.positions:
        places, width = torch.stack([*sequences.positions.values()]), differs.shape[1]
        first, named = differs.float().argmax(1), places.masked_fill(places == sequences.lengths - 1, width).amin(0)
        early = (differs.any(1) & (first < named) & (named < width)).nonzero().flatten().tolist()
        if early:
            row = early[0]
            warn_caller(
                f"{len(early)} of {len(differs)} pairs differ before every named position, such as that of prompt "
                f"{row} at {int(first[row])}: is the counterfactual the same text up to what is exchanged?"
            )


def _require_targets(sequences: TaskSequences) -> None:
    """Refuse positions other than those whose next tokens `next_token_loss` takes as targets. Raises ValueError."""
    n, width = sequences.n_predicted, sequences.tokens.shape[1]
    columns = torch.arange(width - 1 - n, width - 1)
    predicted = sequences.predicted
    found = torch.arange(width)[predicted][None] if isinstance(predicted, slice) else predicted
    if bool(((found != columns) & sequences.real[:, width - n :]).any()):
        raise ValueError(
            "next_token_loss takes the positions from one on to the last but one: give predict=slice(start, -1) with "
            "start of 0 or more"
        )


def predicted_positions(lengths: Int[Tensor, "sequences"], width: int, predict: Any) -> Positions:
    """Return the positions that `Task.predict` means: a slice if all prompts have one length and it is one.

    A slice counts in each prompt by itself. Where it chooses fewer positions of a prompt than of another, the last real
    token fills the row. Raises ValueError for a position that a prompt does not have, or none at all; TypeError for no
    form of `Task`.
    """
    if callable(predict):
        predict = predict(width)  # `positions_in` copies what it returns
    predict = slice(None) if predict is None else predict
    if isinstance(predict, slice):
        chosen = [range(length)[predict] for length in lengths.tolist()]
        most = max(map(len, chosen))
        if not most:
            raise ValueError(f"predict={predict} chooses no position of prompts of {width} tokens")
        if bool((lengths == width).all()) and chosen[0].step == 1:
            return slice(chosen[0].start, chosen[0].stop)
        filled = zip(chosen, (lengths - 1).tolist(), strict=True)
        return torch.tensor([[*columns, *[last] * (most - len(columns))] for columns, last in filled])
    return positions_in(lengths, predict, "predict")


def metric_value_of(view: AttentionView, sequences: TaskSequences) -> MetricValue:
    """Evaluate the model as it is now, batch by batch, without gradients."""
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
    """Return the mean of values of sequences, with what is known of these."""
    texts = sequences.given_texts
    if texts is None:
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        texts = tuple(tokens_text(view, row[:length]) for row, length in rows)
    return MetricValue(values, sequences.labels, sequences.digest, sequences.distinct, texts)


def intact_values(
    view: AttentionView, sequences: TaskSequences, layers: Iterable[int]
) -> tuple[IntactRun, Float64[np.ndarray, "sequences"]]:
    """Run the model without ablation. Return the run, to replay from the given layers, and each sequence's value."""
    values = MetricValues(sequences, 1)
    rows = sequences.rows_at_once(view)
    intact = intact_run(view, sequences.tokens, sequences.predicted, layers, batch=rows, reduce=values.add)
    return intact, values.result()[0].numpy()


@dataclass(frozen=True)
class Replays:
    """Replays of a model from one layer on.

    Attributes:
        layer: the first layer in which one of them differs from the intact run.
        n: how many there are.
        hooks_of: returns the hooks of some of them on some sequences, to which a batch is whole copies of these
            sequences, one for each of the replays and one after the other.
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
    """Evaluate every replay on all sequences, the blocks from its layer on run again under its hooks.

    The values are in the order of `replays`. As many replays as memory allows are stacked on the batch axis, in the
    order of their layers, one copy of the sequences after the other: that changes numbers by rounding only. All in a
    batch are one pass, in which the copies of a replay join at its layer. `seen` is called with the logits of each
    pass, behind the places of its replays in the values and the sequences; a second time where memory ran out.
    """
    view, n = intact.view, len(sequences.tokens)
    rows = max(1, min(rows_at_once(intact), sequences._rows_predicted(view)))
    ends = np.cumsum([some.n for some in replays])
    order = sorted(range(len(replays)), key=lambda place: replays[place].layer)
    queue = [(place, index) for place in order for index in range(replays[place].n)]

    def of_replays(chunk: slice) -> Tensor:
        taken = queue[chunk]
        places = [int(ends[place]) - replays[place].n + index for place, index in taken]
        groups = [(place, [*some]) for place, some in groupby(taken, key=itemgetter(0))]
        values = MetricValues(sequences, len(taken))

        def add(batch: slice) -> None:
            hooks, first = [], 0
            for place, some in groups:
                own = slice(some[0][1], some[-1][1] + 1)
                hooks.append((slice(first, first + len(some)), replays[place].hooks_of(own, batch)))
                first += len(some)
            logits = intact.replay([replays[place].layer for place, _ in taken], batch, hooks)
            if seen is not None:
                seen(places, batch, logits.unflatten(0, (len(taken), -1)))
            values.add(batch, logits)

        for _ in in_batches(n, max(1, rows // values.copies), add):
            pass
        return values.result()

    with evaluating(view.model), torch.no_grad():
        found = torch.cat([*in_batches(len(queue), max(1, rows // n), of_replays)])
    ordered = torch.empty_like(found)
    ordered[[int(ends[place]) - replays[place].n + index for place, index in queue]] = found
    return ordered
