"""`head_history`: measure every head at every checkpoint of a training, with one checkpoint in memory at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from typing import Any, Literal

import pandas as pd

from tlspectral.containers import are_columns
from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError, shown, warn_caller
from tlspectral.errors.settings import checked_settings, pairs_in
from tlspectral.heads.detectors.heads import require_max_se
from tlspectral.heads.operator_sketch import same_basis
from tlspectral.history.checkpoint_tables import (
    HEAD_HISTORY,
    HeadHistory,
    LayerHead,
    measure_step,
    medians_by_layer,
    population_medians,
    require_order,
)
from tlspectral.history.sources import Label, called, check_labels, labelled_checkpoints, loader_identity, source_of
from tlspectral.models.loaders import Source
from tlspectral.models.loading.weight_files import file_name
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.heads_as_written import Head, head_pair
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, stacked, unbundled, workers_kept
from tlspectral.tasks import Task
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral.tasks.identity import content_digest, task_identity
from tlspectral.tasks.task import task_of

_OF_A_STEP = ("commit", "file", "revision", "score_check", "sha256", "weights_sha256")
_STORED = ("control_variate", "identity", "numbers", "shape", "tables", "weights", "weights_by_layer")


@checked_settings
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

    Use it to see when heads and their spectra form ("Fingerprint, Not Blueprint", section 9).

    >>> import tlspectral as tls
    >>> models = ["tiny-rope", "tiny-rope-imag"]
    >>> history = tls.head_history(models, null_draws=2, detectors=False)
    >>> history.steps
    ['tiny-rope', 'tiny-rope-imag']

    Args:
        checkpoints: a hub model of the Pythia suite; a folder with sub-folders `step{N}` or `checkpoint-{N}`; a list
            (or generator) of names, folders, models, or pairs (label, checkpoint); or a dict from label to checkpoint.
            A checkpoint may be a function that loads a model. Labels are rising training steps, or names.
        pairs: (sender, receiver) pairs of heads, such as ("L0H3", "L1H0"), whose K-composition is followed: how well
            the sender can feed the receiver's keys.
        null_draws: random matrices per head, 2 or more; each head has its own. null_dtype: "float32" or "float64".
        detectors: True also runs the model on repeated sequences, for detectors and the in-context score (loss on the
            second copy of a segment less that on the first).
        max_se: these runs stop once all standard errors are below it. None: 200 sequences.
        task: a `Task`, "induction" or "language" to score at each checkpoint (`value` in the summary).
        blocks: a `tls.positional.BlockPrompt(prefix, blocks, suffix)` whose blocks are swapped at each checkpoint.
        folder: keeps a file per checkpoint; the same call resumes from it.
        n_jobs: worker processes for the null. seed: of the null, of sequences and of simulated medians.

    Returns:
        A `HeadHistory` of DataFrames with a column `step`: `.heads` (the head tables), `.summary` (a row per step:
        medians over heads, also by layer, in-context score in nats per token, task value), `.composition` (a row per
        pair and step), `.positional` and `.frequencies` (None without `blocks`). `.steps`: the labels;
        `.track("L0H3")`: one head's rows. `heads.attrs["basis"]` (and a warning): neighbours of two bases, moved heads.

    Raises:
        TypeError, ValueError: `checkpoints` or `blocks` of a wrong kind, no checkpoints, labels that fall, that repeat,
            or that mix steps and names, models of different shapes, or a pair whose sender is not in an earlier layer.
        IncompatibleCheckpoint: `folder` was made with other settings, or has a step of other weights.
        BadHead: a head of a pair does not exist.
        ScoreMismatch, UnsupportedArchitecture, BadWeights: a checkpoint cannot be trusted or read.

    Not established: that one change caused another. The order of events is only as fine as the saved steps. More:
    docs/training.md.
    """
    if blocks is not None and not isinstance(blocks, BlockPrompt):
        raise TypeError(
            "blocks= needs one tls.positional.BlockPrompt(prefix, blocks, suffix); found "
            f"{shown(blocks) if isinstance(blocks, str) else type(blocks).__name__}. For tasks and lists of prompts, "
            "call positional_symbolic at each checkpoint"
        )
    wanted = _checked_pairs(pairs)
    labelled = labelled_checkpoints(checkpoints)
    if isinstance(labelled, Sequence):  # checked before the first checkpoint is measured
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
        raise ValueError("checkpoints= is empty: give at least one checkpoint")
    return _joined(dict(zip(labels, tables.values(), strict=True)), seed)


def _parts(steps: Iterable[_Step], measure: Callable[..., pd.DataFrame], labels: list[Label]) -> Iterator[Job]:
    """Yield a `Job` for each checkpoint in `steps`, and append its label to `labels`.

    A job measures the checkpoint by `measure`, a function from an open model to the checkpoint's table. Raises
    ValueError for labels that do not rise or that repeat.
    """
    for step in steps:
        labels.append(step.label)
        check_labels(labels)
        yield Job(step.part, partial(step.measured, measure), step.require_same_model)
        del step
        gc.collect()  # frees the model before a generator loads the next one


@dataclass(frozen=True)
class _Step:
    """One checkpoint of a history, as a job.

    Attributes:
        label: training step or name.
        load: function that loads the model.
        stream: True reads the checkpoint from its files, where possible, without loading.
        folder: the resume folder, or None.
        shapes: shapes of the models so far, by label; all must be equal.
    """

    label: Label
    load: Callable[[], Any]
    stream: bool
    folder: str | os.PathLike[str] | None
    shapes: dict[Label, dict[str, Any]]

    @property
    def part(self) -> str:
        """The name of the checkpoint's file in the resume folder, such as "step512"."""
        return file_name(self.label, self.label) if isinstance(self.label, str) else f"step{self.label}"

    def _opened(self) -> AttentionView | Source:
        """Load the checkpoint and return its `AttentionView`, or return its `Source` if it is read from files layer by
        layer.
        """
        gc.collect()  # models hold reference cycles: free the last one before the next is loaded
        with _naming(self.label):
            source = source_of(self.load) if self.stream else None
            return attention_view(self.load()) if source is None or not source.streams else source

    def measured(self, measure: Callable[..., pd.DataFrame]) -> pd.DataFrame:
        """Open the checkpoint and return its table, made by `measure` from the open model.

        With a folder, the attrs `identity` and `weights` identify the checkpoint's weights. Raises ValueError for
        another shape than the first checkpoint's.
        """
        opened = self._opened()
        with _naming(self.label):
            table = measure(opened)
        if self.folder is not None:
            table.attrs["identity"] = loader_identity(self.load)
            table.attrs["weights"] = opened.weights_digest() if isinstance(opened, AttentionView) else None
        self._require_same_shape(table)
        return table

    def require_same_model(self, table: pd.DataFrame) -> None:
        """Raise IncompatibleCheckpoint unless the stored `table` was made from this checkpoint's weights and with its
        hooks.

        The checkpoint is loaded only if its weights cannot be identified otherwise. Raises ValueError for another shape
        than the first checkpoint's.
        """
        stored, identity = table.attrs["identity"], loader_identity(self.load)
        if stored is not None and identity is not None:
            same = stored == identity
        else:
            opened = self._opened()
            same = isinstance(opened, AttentionView) and table.attrs["weights"] == opened.weights_digest()
            stored_hooks = table.attrs.get("user_hooks")
            hooks = opened.source.get("user_hooks") if isinstance(opened, AttentionView) else stored_hooks
            if same and stored_hooks != hooks:
                raise IncompatibleCheckpoint(
                    f"{os.fspath(self.folder or '')} has {called(self.label)} with other hooks on the model "
                    f"({stored_hooks or 'none'} there, {hooks or 'none'} now): choose another folder"
                )
        if not same:
            raise IncompatibleCheckpoint(
                f"{os.fspath(self.folder or '')} has {called(self.label)} of another model, or of other weights "
                f"({stored or 'a model in memory'} there, {identity or 'a model in memory'} now): choose another folder"
            )
        self._require_same_shape(table)

    def _require_same_shape(self, table: pd.DataFrame) -> None:
        """Store the model's sizes, from the attrs of `table`, in `shapes`; raise ValueError if they differ from the
        first model's.
        """
        self.shapes[self.label] = shape = table.attrs["shape"]
        first, expected = next(iter(self.shapes.items()))
        # A model read from files has fewer entries in its shape than a loaded model.
        for name in expected:
            if name in shape and expected[name] != shape[name]:
                raise ValueError(
                    f"{called(self.label)} has another architecture than {called(first)}: {name} {shape[name]}, there "
                    f"{expected[name]}; give checkpoints of one model"
                )


@contextmanager
def _naming(label: Label) -> Iterator[None]:
    """Put the checkpoint's label, such as "step 5: ", in front of the message of errors raised inside the `with` block.
    TypeError becomes ValueError.
    """
    try:
        yield
    except TlspectralError as error:
        raise type(error)(f"{called(label)}: {error}") from error
    except TypeError as error:
        raise ValueError(f"{called(label)}: {error}") from error


def _checked_pairs(pairs: Iterable[tuple[Head, Head]]) -> list[tuple[LayerHead, LayerHead]]:
    """Return (sender, receiver) pairs of heads as ((layer, head), (layer, head)).

    Raises BadHead for something that is not a pair of heads, ValueError for a sender that is not in an earlier layer.
    """
    if are_columns(pairs):
        raise BadHead(
            f"pairs=, a {type(pairs).__name__} of two lists or arrays, has two readings: (senders, receivers), or two "
            "pairs. Write list(zip(senders, receivers)) for the first, a list of tuples for the second"
        )
    checked = [
        (head_pair(sender), head_pair(receiver)) for sender, receiver in pairs_in("pairs", pairs, "(sender, receiver)")
    ]
    # Negative layers count from the end: their order is checked once a model is open.
    require_order(pair for pair in checked if (pair[0][0] < 0) == (pair[1][0] < 0))
    return checked


def _joined(steps: dict[Label, pd.DataFrame], seed: int) -> HeadHistory:
    """Join the tables of all checkpoints into a new `HeadHistory` (`.heads`, `.summary`, `.composition`, `.positional`,
    `.frequencies`).

    `steps` has, by label, one table with all tables of the checkpoint. Attrs that are equal at all steps are kept once,
    other attrs by step in `attrs["checkpoints"]`. `seed` is the seed of the simulated medians.
    """
    tables = {label: unbundled(table) for label, table in steps.items()}
    facts = {
        label: {name: value for name, value in table.attrs.items() if name not in _STORED}
        for label, table in steps.items()
    }
    first, *later = facts.values()
    common = {
        name: value
        for name, value in first.items()
        if name not in _OF_A_STEP and all(name in of_step and of_step[name] == value for of_step in later)
    }
    common["checkpoints"] = [
        {"step": label} | {name: value for name, value in of_step.items() if name not in common}
        for label, of_step in facts.items()
    ]
    rows = [
        {"step": label, "n_heads": len(tables[label]["heads"])}
        | table.attrs["numbers"]
        | population_medians(tables[label]["heads"], seed=seed)
        | medians_by_layer(tables[label]["heads"], seed=seed)
        for label, table in steps.items()
    ]
    common["basis"] = _bases({label: of_step.get("sketch") for label, of_step in tables.items()})
    frames = {"summary": pd.DataFrame(rows, columns=[column.name for column in HEAD_HISTORY["summary"].columns])}
    for name in HEAD_HISTORY:
        if all(name in of_step for of_step in tables.values()):
            frames[name] = stacked(of_step[name].assign(step=label) for label, of_step in tables.items())
    return HeadHistory(**{name: HEAD_HISTORY[name].frame(frame, common) for name, frame in frames.items()})


def _bases(sketches: dict[Label, pd.DataFrame | None]) -> list[dict[str, Any]]:
    """Compare the operators of each checkpoint with the next: return a dict for each (`from`, `to`, `shared`, `moved`).

    `sketches` has the table of `operator_sketch` by label, None for a step that an earlier version stored. `shared`
    tells whether both have one basis, None if unknown; `moved` has the names of heads that stand at another index.
    Warns (UserWarning) of checkpoints without a common basis, and of heads that moved.
    """
    bases, apart, moved_at = [], [], []
    for (label, sketch), (after, next_sketch) in pairwise(sketches.items()):
        shared, moved = (None, {}) if sketch is None or next_sketch is None else same_basis(sketch, next_sketch)
        bases.append({"from": label, "to": after, "shared": shared, "moved": moved})
        apart += [f"{called(label)} and {called(after)}"] if shared is False else []
        moved_at += [f"{name} of {called(label)} is {now} of {called(after)}" for name, now in moved.items()]
    if apart:
        warn_caller(
            f"{apart[0]}{f' (and {len(apart) - 1} more)' if len(apart) > 1 else ''} share no common basis: no head is "
            "like the head of its index, as in two trainings from different seeds. A head followed over these "
            "checkpoints is not one head; heads.side_by_side sets their detectors beside each other"
        )
    if moved_at:
        warn_caller(
            f"{len(moved_at)} heads stand at another index in the next checkpoint ({'; '.join(moved_at[:3])}): "
            "follow them by hand; all are in heads.attrs['basis']"
        )
    return bases
