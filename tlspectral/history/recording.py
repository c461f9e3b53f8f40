"""`head_history`: every head at every saved step of a training, one checkpoint in memory at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, Literal

import pandas as pd

from tlspectral.containers import are_columns
from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError
from tlspectral.heads.detectors.heads import require_max_se
from tlspectral.history.checkpoint_tables import (
    HEAD_HISTORY,
    HeadHistory,
    LayerHead,
    measure_step,
    population_medians,
    require_order,
)
from tlspectral.history.sources import Label, called, check_labels, labelled_checkpoints, loader_identity, source_of
from tlspectral.models.loaders import Source
from tlspectral.models.loading.weight_files import file_name
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection import Head, head_pair
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, stacked, unbundled, workers_kept
from tlspectral.tasks import Task
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral.tasks.identity import content_digest, task_identity
from tlspectral.tasks.task import task_of

_OF_A_STEP = ("commit", "file", "revision", "score_check", "sha256", "weights_sha256")
_STORED = ("control_variate", "identity", "numbers", "shape", "tables", "weights", "weights_by_layer")


def head_history(
    checkpoints: Any,
    *,
    pairs: Iterable[tuple[Head, Head]] = (),
    null_draws: int = 100,
    null_dtype: Literal["float32", "float64"] = "float32",
    detectors: bool = True,
    max_se: float | None = 0.02,
    task: Task | str | None = None,
    blocks: BlockPrompt | None = None,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> HeadHistory:
    """Measure the head table, the in-context score and K-composition at every checkpoint of a training.

    >>> import tlspectral as tls
    >>> models = ["tiny-rope-sym", "tiny-rope"]
    >>> history = tls.head_history(models, null_draws=2, detectors=False)
    >>> history.steps
    ['tiny-rope-sym', 'tiny-rope']

    One checkpoint is in memory at a time, if they are given by name or as functions, or come from a generator. With
    `detectors=False`, no task and no blocks, folders of safetensors and hub models are read from their files, layer by
    layer, and never loaded (see `analyze_heads`, also for the columns that are then NaN). No file in a cache is
    deleted, and no checkpoint is changed.

    Args:
        checkpoints: what `history.suite_checkpoints` takes, a folder with sub-folders `step{N}` or `checkpoint-{N}`
            or a hub model of the Pythia suite; or checkpoints, each a name or path for `load_model`, a
            TransformerBridge or HookedTransformer, or a pair (label, checkpoint), in which the checkpoint may also be a
            function that loads a model; or a mapping from labels to these. Labels are training steps, which have to
            rise, or names. A name that ends in `step{N}` or `checkpoint-{N}`, with a hyphen or `_` or without, is step
            N, and a list of such names is taken in the order of steps; others are labels as they are.
            `functools.partial(load_model, name, revision=...)` is read from its files and known by them, as a name is.
        pairs: (sender, receiver), each (layer, head) or another form of one head, whose K-composition is followed.
        null_draws: draws of the null per head, fresh ones for every head: shared draws would have one error in common,
            which a median over heads does not average out. See `analyze_heads` for the error of a single z.
        null_dtype: as for `analyze_heads`.
        detectors: run the model on repeated sequences, for detector scores and the in-context score.
        max_se: as for `analyze_heads`. Steps may need unequal numbers of sequences; the in-context score is of 200 at
            every step.
        task: also score every checkpoint on a `Task`, or on `"induction"` or `"language"`: `value, value_se` of the
            summary.
        blocks: a prompt whose blocks swap by their keys at every checkpoint, with the defaults of
            `positional_symbolic(mode="key")`: `positional` and, by rotary frequency, `frequencies` of the result. A
            head without positions has the exclusion index 0 here.
        folder: where each step is stored as soon as it is measured. A second call with the same settings reads stored
            steps, if they were measured from the same commit on the hub or the same files. A checkpoint is then loaded
            only if its weights cannot be identified without loading.
        n_jobs: worker processes for the null; the tables do not depend on it.
        seed: of the null, of the sequences and of the simulated medians.

    Returns:
        A `HeadHistory` of DataFrames. Their column `step` holds the labels: whole numbers, or names.

    Raises:
        TypeError: checkpoints or blocks of another kind.
        ValueError: a `max_se` that is not above 0, no checkpoints, steps that do not rise, labels that come twice,
            steps mixed with names, models of different shapes, something that is no model, steps of which nothing is
            known, or a pair whose sender is not in an earlier layer.
        IncompatibleCheckpoint: the folder was made with other settings, or a step in it from other weights.
        BadHead: a pair of heads that the model does not have.
        ScoreMismatch, UnsupportedArchitecture, BadWeights: a checkpoint cannot be trusted or read; the message says
            where.

    Source: "Fingerprint, Not Blueprint" (FP, section 9).

    What it does not establish: what caused what. A history shows an order, as finely as steps were saved, and not the
    order of two changes between the same two steps. Names have no order: figures and questions of formation need steps.
    The in-context score says nothing of copying alone: it falls as well when the first copy gets worse, and late in
    training it does, as a model that has learned text finds random tokens ever less likely. Read `second_copy_loss`.
    """
    if blocks is not None and not isinstance(blocks, BlockPrompt):
        raise TypeError(
            "blocks is one tls.positional.BlockPrompt(prefix, blocks, suffix); found "
            f"{repr(blocks) if isinstance(blocks, str) else type(blocks).__name__}: call positional_symbolic at each "
            "checkpoint for tasks and lists of prompts"
        )
    wanted = _checked_pairs(pairs)
    labelled = labelled_checkpoints(checkpoints)
    if isinstance(labelled, Sequence):  # all of them, before the first is measured
        check_labels([label for label, _ in labelled])
    require_max_se(max_se)
    options: dict[str, Any] = {"null_draws": null_draws, "null_dtype": null_dtype, "seed": seed}
    options |= {"detectors": detectors, "max_se": max_se}
    settings: dict[str, Any] = {"pairs": [[list(head) for head in pair] for pair in wanted], **options}
    scored = None if task is None else task_of(task)
    if scored is not None:
        settings |= {"task": scored.label, **task_identity(scored)}
    if blocks is not None:
        settings["blocks"] = content_digest(blocks.pieces)
    labels: list[Label] = []
    measure = partial(measure_step, pairs=wanted, task=scored, blocks=blocks, n_jobs=n_jobs, **options)
    stream = not detectors and scored is None and blocks is None
    to_measure = starmap(partial(_Step, stream=stream, folder=folder, shapes={}), labelled)
    parts = _parts(to_measure, measure, labels)
    with workers_kept():
        tables = Measurement(HEAD_HISTORY["heads"], {}, identity=settings, folder=folder).made(
            list(parts) if isinstance(labelled, Sequence) else parts, description="history", unit="step"
        )
    if not tables:
        raise ValueError("there are no checkpoints to measure")
    return _joined(dict(zip(labels, tables.values(), strict=True)), seed)


def _parts(steps: Iterable[_Step], measure: Callable[..., pd.DataFrame], labels: list[Label]) -> Iterator[Job]:
    """Yield a part per checkpoint, and add its label to `labels`."""
    for step in steps:
        labels.append(step.label)
        check_labels(labels)
        yield Job(step.part, partial(step.measured, measure), step.require_same_model)
        del step
        gc.collect()  # a generator loads the next one


@dataclass(frozen=True)
class _Step:
    """A checkpoint of a history.

    Attributes:
        stream: whether a checkpoint that can be read from its files is not loaded.
        shapes: the shape of each earlier model, by label; all have to be the same.
    """

    label: Label
    load: Callable[[], Any]
    stream: bool
    folder: str | os.PathLike[str] | None
    shapes: dict[Label, dict[str, Any]]

    @property
    def part(self) -> str:
        """The name of its file."""
        return file_name(self.label, self.label) if isinstance(self.label, str) else f"step{self.label}"

    def _opened(self) -> AttentionView | Source:
        """Return the view of its model, or the source that is read from its files."""
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded
        with _naming(self.label):
            source = source_of(self.load) if self.stream else None
            return attention_view(self.load()) if source is None or not source.streams else source

    def measured(self, measure: Callable[..., pd.DataFrame]) -> pd.DataFrame:
        """Open and measure it."""
        opened = self._opened()
        with _naming(self.label):
            table = measure(opened)
        if self.folder is not None:
            table.attrs["identity"] = loader_identity(self.load)
            table.attrs["weights"] = opened.weights_digest() if isinstance(opened, AttentionView) else None
        self._require_same_shape(table)
        return table

    def require_same_model(self, table: pd.DataFrame) -> None:
        """Compare a stored table with the checkpoint, which is loaded only if its weights cannot be told otherwise."""
        stored, identity = table.attrs["identity"], loader_identity(self.load)
        if stored is not None and identity is not None:
            same = stored == identity
        else:
            opened = self._opened()
            same = isinstance(opened, AttentionView) and table.attrs["weights"] == opened.weights_digest()
            then = table.attrs.get("user_hooks")
            now = opened.source.get("user_hooks") if isinstance(opened, AttentionView) else then
            if same and then != now:
                raise IncompatibleCheckpoint(
                    f"{os.fspath(self.folder or '')} holds {called(self.label)} with other hooks on the model "
                    f"({then or 'none'} there, {now or 'none'} now): choose another folder"
                )
        if not same:
            raise IncompatibleCheckpoint(
                f"{os.fspath(self.folder or '')} holds {called(self.label)} of another model, or of other weights "
                f"({stored or 'a model in memory'} there, {identity or 'a model in memory'} now): choose another folder"
            )
        self._require_same_shape(table)

    def _require_same_shape(self, table: pd.DataFrame) -> None:
        """Add the shape of the model to `shapes`; refuse a shape other than the first model's."""
        self.shapes[self.label] = shape = table.attrs["shape"]
        first, expected = next(iter(self.shapes.items()))
        # The shape of a model that is read from files lacks what only a loaded one shows.
        for name in expected:
            if name in shape and expected[name] != shape[name]:
                raise ValueError(
                    f"{called(self.label)} is of another architecture than {called(first)}: {name} {shape[name]}, "
                    f"there {expected[name]}; a history is of one model"
                )


@contextmanager
def _naming(label: Label) -> Iterator[None]:
    """Say in errors which checkpoint they are about."""
    try:
        yield
    except TlspectralError as error:
        raise type(error)(f"{called(label)}: {error}") from error
    except TypeError as error:
        raise ValueError(f"{called(label)}: {error}") from error


def _checked_pairs(pairs: Iterable[tuple[Head, Head]]) -> list[tuple[LayerHead, LayerHead]]:
    if are_columns(pairs):
        raise BadHead(
            f"pairs, a {type(pairs).__name__} of two lists or arrays, has two readings: senders beside their "
            "receivers, or two pairs. Write list(zip(senders, receivers)) for the first, a list of tuples for the other"
        )
    checked = [(head_pair(sender), head_pair(receiver)) for sender, receiver in pairs]
    # What counts from the end is compared once a model says how many layers it has.
    require_order(pair for pair in checked if (pair[0][0] < 0) == (pair[1][0] < 0))
    return checked


def _joined(steps: dict[Label, pd.DataFrame], seed: int) -> HeadHistory:
    """Return the tables of all steps, with the facts that are the same at all of them."""
    tables = {label: unbundled(table) for label, table in steps.items()}
    facts = {
        label: {name: value for name, value in table.attrs.items() if name not in _STORED}
        for label, table in steps.items()
    }
    first, *others = facts.values()
    common = {
        name: value
        for name, value in first.items()
        if name not in _OF_A_STEP and all(name in of_step and of_step[name] == value for of_step in others)
    }
    common["checkpoints"] = [
        {"step": label} | {name: value for name, value in of_step.items() if name not in common}
        for label, of_step in facts.items()
    ]
    rows = [
        {"step": label, "n_heads": len(tables[label]["heads"])}
        | table.attrs["numbers"]
        | population_medians(tables[label]["heads"], seed=seed)
        for label, table in steps.items()
    ]
    frames = {"summary": pd.DataFrame(rows, columns=[column.name for column in HEAD_HISTORY["summary"].columns])}
    for name in HEAD_HISTORY:
        if all(name in of_step for of_step in tables.values()):
            frames[name] = stacked(of_step[name].assign(step=label) for label, of_step in tables.items())
    return HeadHistory(**{name: HEAD_HISTORY[name].frame(frame, common) for name, frame in frames.items()})
