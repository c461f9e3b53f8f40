"""`head_history`: every head at every saved step of a training, one checkpoint in memory at a time."""

import gc
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import joblib
import pandas as pd
from torch import nn

from tlspectral.errors import IncompatibleCheckpoint, TlspectralError
from tlspectral.history.columns import HEAD_HISTORY
from tlspectral.history.measure import measure_step, population_medians
from tlspectral.history.result import Head, HeadHistory
from tlspectral.history.sources import Label, LazyCheckpoint, called, check_labels, labelled_checkpoints
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.loading.source import Source
from tlspectral.positional import BlockPrompt
from tlspectral.selection import head_pair
from tlspectral.tables import WorkPart, finished_parts, named, open_parts, stacked, unbundled, workers_kept
from tlspectral.tasks import Task, task_of

_OF_A_STEP = ("commit", "file", "revision", "score_check", "sha256", "weights_sha256")
_STORED = ("control_variate", "identity", "in_context", "score", "shape", "tables", "weights", "weights_by_layer")


def head_history(
    checkpoints: Any,
    *,
    revisions: str | None = None,
    steps: Iterable[int] | None = None,
    pairs: Iterable[tuple[Head, Head]] = (),
    null_draws: int = 100,
    null_dtype: Literal["float32", "float64"] = "float32",
    detectors: bool = True,
    task: Task | str | None = None,
    blocks: BlockPrompt | None = None,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> HeadHistory:
    """The head table, the in-context score and K-composition at every checkpoint of a training.

    One checkpoint is in memory at a time, if they are given by name or as functions, or come from a generator. With
    `detectors=False`, no task and no blocks, folders of safetensors and hub models are read from their files, layer by
    layer, and never loaded (see `analyze_heads`, also for the columns that are then NaN). No file in a cache is
    deleted, and no checkpoint is changed.

    Args:
        checkpoints: a hub model or a folder that holds the steps of a training, chosen by `revisions` and `steps`; or
            checkpoints, each a name or path for `load_model`, a TransformerBridge or HookedTransformer, or a pair
            (label, checkpoint), in which the checkpoint may also be a function that loads a model. Labels are training
            steps, which have to rise, or names. A name that ends in `step{N}` or `checkpoint-{N}` is step N; others
            are labels as they are. `hub_checkpoints` and `folder_checkpoints` make such pairs.
        revisions: of one hub model: how its branches or tags are named, with `{step}` where the training step stands,
            such as `"step{step}"` (Pythia), `"step{step}-tokens{tokens}B"` or `"stage1-step{step}-tokens{tokens}B"`
            (OLMo). See `hub_checkpoints`.
        steps: of one hub model or folder: which training steps, rising. None for all; without `revisions`, the 22 of
            `PYTHIA_STEPS` for a Pythia model.
        pairs: (sender, receiver) heads, each (layer, head), of which K-composition is followed.
        null_draws: draws of the null per head, fresh ones for every head: shared draws would have one error in common,
            which a median over heads does not average out. See `analyze_heads` for the error of a single z.
        null_dtype: as for `analyze_heads`.
        detectors: run the model on repeated sequences, for detector scores and the in-context score.
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
        ValueError: no checkpoints, steps that do not rise, labels that come twice, steps mixed with names, models of
            different shapes, something that is no model, revisions or steps that are not there, or a pair whose sender
            is not in an earlier layer.
        IncompatibleCheckpoint: the folder was made with other settings, or a step in it from other weights.
        BadHead: a pair of heads that the model does not have.
        ScoreMismatch, UnsupportedArchitecture, BadWeights: as `analyze_heads`.

    Source: "Fingerprint, Not Blueprint" (FP, section 9).

    What it does not establish: what caused what. A history shows an order, as finely as steps were saved, and not the
    order of two changes between the same two steps. Names have no order: figures and questions of formation need steps.

    Example:
        >>> import tlspectral as tls
        >>> models = ["tiny-rope-sym", "tiny-rope"]
        >>> history = tls.head_history(models, null_draws=2, detectors=False)
        >>> history.steps
        ['tiny-rope-sym', 'tiny-rope']
    """
    wanted = _checked_pairs(pairs)
    labelled = labelled_checkpoints(checkpoints, revisions, steps)
    if isinstance(labelled, Sequence):  # all of them, before the first is measured
        check_labels([label for label, _ in labelled])
    settings = {
        "what": "head history, one file a step, senders and receivers",
        "pairs": [[list(head) for head in pair] for pair in wanted],
        "null_draws": null_draws,
        "null_dtype": null_dtype,
        "detectors": detectors,
        "seed": seed,
    }
    scored = None if task is None else task_of(task)
    if scored is not None:
        settings["task"] = [scored.label, joblib.hash(scored.prompts)]
    if blocks is not None:
        settings["blocks"] = joblib.hash(blocks.pieces)
    part_folder = None if folder is None else open_parts(folder, settings)

    measure = partial(
        measure_step,
        pairs=wanted,
        null_draws=null_draws,
        null_dtype=null_dtype,
        detectors=detectors,
        task=scored,
        blocks=blocks,
        n_jobs=n_jobs,
        seed=seed,
    )
    plan = _Plan(folder, measure, stream=not detectors and scored is None and blocks is None)
    with workers_kept():
        tables = finished_parts(
            _parts(labelled, plan),
            part_folder,
            description="history",
            unit="step",
            total=len(labelled) if isinstance(labelled, Sequence) else None,
        )
    if not tables:
        raise ValueError("there are no checkpoints to measure")
    return _joined(dict(zip(plan.shapes, tables.values(), strict=True)), seed)


@dataclass(frozen=True)
class _Plan:
    """What all steps share.

    Attributes:
        stream: whether a checkpoint that can be read from its files is not loaded.
        shapes: the shape of each model, by label; all have to be the same.
    """

    folder: str | os.PathLike[str] | None
    measure: Callable[[AttentionView | Source], pd.DataFrame]
    stream: bool
    shapes: dict[Label, dict[str, Any]] = field(default_factory=dict)


def _parts(checkpoints: Iterable[tuple[Any, Any]], plan: _Plan) -> Iterator[WorkPart]:
    """Yield a part per checkpoint."""
    earlier: list[Any] = []
    for label, checkpoint in checkpoints:
        earlier.append(label)
        check_labels(earlier)
        label = label if isinstance(label, str) else int(label)
        check = None if plan.folder is None else partial(_require_same_model, plan, label, checkpoint)
        yield WorkPart(_part_name(label), partial(_measured, plan, label, checkpoint), check)
        del checkpoint, check
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded


def _part_name(label: Label) -> str:
    if not isinstance(label, str):
        return f"step{label}"
    # A label can be a path of any length; the hash tells those apart that are written alike.
    return f"{re.sub(r'[^A-Za-z0-9-]+', '-', label)[-60:]}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def _measured(plan: _Plan, label: Label, checkpoint: Any) -> pd.DataFrame:
    """Open and measure a checkpoint."""
    opened = _opened(label, checkpoint, plan.stream)
    with _naming(label):
        table = plan.measure(opened)
    if plan.folder is not None:
        table.attrs["identity"] = checkpoint.identity() if isinstance(checkpoint, LazyCheckpoint) else None
        table.attrs["weights"] = opened.weights_digest() if isinstance(opened, AttentionView) else None
    _note_shape(plan.shapes, label, table)
    return table


def _require_same_model(plan: _Plan, label: Label, checkpoint: Any, table: pd.DataFrame) -> None:
    """Compare a stored step with its checkpoint, which is loaded only if its weights cannot be identified otherwise."""
    stored = table.attrs["identity"]
    identity = checkpoint.identity() if isinstance(checkpoint, LazyCheckpoint) else None
    if stored is not None and identity is not None:
        same = stored == identity
    else:
        opened = _opened(label, checkpoint, plan.stream)
        same = isinstance(opened, AttentionView) and table.attrs["weights"] == opened.weights_digest()
    if not same:
        raise IncompatibleCheckpoint(
            f"{os.fspath(plan.folder or '')} holds {called(label)} of another model, or of other weights "
            f"({stored or 'a model in memory'} there, {identity or 'a model in memory'} now): choose another folder"
        )
    _note_shape(plan.shapes, label, table)


def _opened(label: Label, checkpoint: Any, stream: bool) -> AttentionView | Source:
    """Return the view of a checkpoint's model, or the source that is read from its files."""
    with _naming(label):
        if stream and isinstance(checkpoint, LazyCheckpoint) and (source := checkpoint.files()) is not None:
            return source
        model = checkpoint
        if not isinstance(checkpoint, nn.Module):  # a model is callable, too
            if not callable(checkpoint):
                raise TypeError(
                    f"found {type(checkpoint).__name__}, which is neither a model nor its name nor a function that "
                    "loads one"
                )
            model = checkpoint()
        return attention_view(model)


@contextmanager
def _naming(label: Label) -> Iterator[None]:
    """Say in errors which checkpoint they are about."""
    try:
        yield
    except TlspectralError as error:
        raise type(error)(f"{called(label)}: {error}") from error
    except TypeError as error:
        raise ValueError(f"{called(label)}: {error}") from error


def _checked_pairs(pairs: Iterable[tuple[Head, Head]]) -> list[tuple[Head, Head]]:
    checked = [(head_pair(sender), head_pair(receiver)) for sender, receiver in pairs]
    for pair in checked:
        if not 0 <= pair[0][0] < pair[1][0]:
            raise ValueError(
                f"the pair {pair} cannot compose: its sender has to be in an earlier layer than its receiver"
            )
    return checked


def _note_shape(shapes: dict[Label, dict[str, Any]], label: Label, table: pd.DataFrame) -> None:
    """Add the shape of a step's model to `shapes`; refuse a shape other than that of the first model."""
    shapes[label] = shape = table.attrs["shape"]
    first, expected = next(iter(shapes.items()))
    # The shape of a model that is read from files lacks what only a loaded one shows.
    differing = [name for name in expected if name in shape and expected[name] != shape[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{called(label)} is of another architecture than {called(first)}: {name} {shape[name]}, there "
            f"{expected[name]}; a history is of one model"
        )


def _joined(measured: dict[Label, pd.DataFrame], seed: int) -> HeadHistory:
    tables = {label: unbundled(table) for label, table in measured.items()}
    rows = [
        {"step": label, "n_heads": len(tables[label]["heads"])}
        | (table.attrs["in_context"] or {})
        | (table.attrs["score"] or {})
        | population_medians(tables[label]["heads"], seed=seed)
        for label, table in measured.items()
    ]
    summary = pd.DataFrame(rows, columns=[column.name for column in HEAD_HISTORY["summary"].columns])
    names = [name for name in HEAD_HISTORY if all(name in of_step for of_step in tables.values())]
    history = HeadHistory(summary=summary, **{name: _stacked(tables, name) for name in names})
    common = _provenance({label: table.attrs for label, table in measured.items()})
    for name, table in HEAD_HISTORY.items():
        frame: pd.DataFrame | None = getattr(history, name)
        if frame is not None:
            frame.attrs = common
            named(frame, table)
    return history


def _provenance(steps: dict[Label, dict[Any, Any]]) -> dict[Any, Any]:
    """Return the facts that are the same at all steps, and in `checkpoints` the others of each step."""
    first, *others = steps.values()
    common: dict[Any, Any] = {
        name: value
        for name, value in first.items()
        if name not in (*_OF_A_STEP, *_STORED) and all(name in attrs and attrs[name] == value for attrs in others)
    }
    common["checkpoints"] = [
        {"step": label} | {name: value for name, value in attrs.items() if name not in common and name not in _STORED}
        for label, attrs in steps.items()
    ]
    return common


def _stacked(tables: dict[Label, dict[str, pd.DataFrame]], name: str) -> pd.DataFrame:
    """Concatenate one table of all steps, with the step as first column."""
    for label, of_step in tables.items():
        of_step[name].insert(0, "step", label)
    return stacked(of_step[name] for of_step in tables.values())
