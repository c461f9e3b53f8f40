"""`head_history`: every head at every saved step of a training, one checkpoint in memory at a time."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import nn

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.history.columns import HEAD_HISTORY
from tlspectral.history.measure import MeasuredStep, measure_step
from tlspectral.history.population import population_medians
from tlspectral.history.result import Head, HeadHistory
from tlspectral.history.sources import LazyCheckpoint
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.selection import head_pair
from tlspectral.tables import WorkPart, bundled, finished_parts, named, open_parts, stacked, unbundled, workers_kept

_OF_A_STEP = (
    "commit", "control_variate", "file", "identity", "in_context", "revision", "score_check", "tables", "weights",
    "weights_sha256",
)  # fmt: skip


def head_history(
    checkpoints: Iterable[tuple[Any, Any]],
    *,
    pairs: Iterable[tuple[Head, Head]] = (),
    null_draws: int = 100,
    null_dtype: Literal["float32", "float64"] = "float32",
    detectors: bool = True,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
    show_progress: bool = True,
) -> HeadHistory:
    """The head table, the in-context score and K-composition at every checkpoint of a training.

    One checkpoint is in memory at a time, if they are given as functions or come from a generator. No file in a cache
    is deleted, and no checkpoint is changed.

    Args:
        checkpoints: (step, model) with rising steps, where model is a TransformerBridge or HookedTransformer or a
            function that loads one: `hub_checkpoints`, `folder_checkpoints` and `training_checkpoints` make such lists.
        pairs: (source, target) heads, each (layer, head), of which K-composition is followed.
        null_draws: draws of the null per head, fresh ones for every head: shared draws would have one error in common,
            which a median over heads does not average out. See `analyze_heads` for the error of a single z.
        null_dtype: as for `analyze_heads`.
        detectors: run the model on repeated sequences, for detector scores and the in-context score.
        folder: where each step is stored as soon as it is measured. A second call with the same settings reads stored
            steps. A checkpoint is then loaded only if its weights cannot be identified without loading.
        n_jobs: worker processes for the null; the tables do not depend on it.
        seed: of the null, of the sequences and of the simulated medians.
        show_progress: a bar over steps.

    Returns:
        A `HeadHistory` of three DataFrames.

    Raises:
        ValueError: no checkpoints, steps that do not rise, models of different shapes, something that is no model, or
            a pair whose source is not in an earlier layer.
        IncompatibleCheckpoint: the folder was made with other settings, or a step in it from other weights.
        BadHead: a pair of heads that the model does not have.
        ScoreMismatch, UnsupportedArchitecture, BadWeights: as `analyze_heads`.

    Source: "Fingerprint, Not Blueprint" (FP, section 9).

    What it does not establish: what caused what. A history shows an order, as finely as steps were saved, and not the
    order of two changes between the same two steps.
    """
    wanted = _checked_pairs(pairs)
    if isinstance(checkpoints, Sequence):  # all of them, before the first is measured
        _require_rising([step for step, _ in checkpoints])
    settings = {
        "what": "head history, one file a step",
        "pairs": [[list(head) for head in pair] for pair in wanted],
        "null_draws": null_draws,
        "null_dtype": null_dtype,
        "detectors": detectors,
        "seed": seed,
    }
    part_folder = None if folder is None else open_parts(folder, settings)

    measure = partial(
        measure_step,
        pairs=wanted,
        null_draws=null_draws,
        null_dtype=null_dtype,
        detectors=detectors,
        n_jobs=n_jobs,
        seed=seed,
    )
    shapes: dict[int, dict[str, Any]] = {}
    with workers_kept():
        steps = finished_parts(
            _steps(checkpoints, folder, measure, shapes),
            part_folder,
            description="history",
            unit="step",
            total=len(checkpoints) if isinstance(checkpoints, Sequence) else None,
            show_progress=show_progress,
        )
    if not steps:
        raise ValueError("there are no checkpoints to measure")
    return _joined({step: _measured_step(table) for step, table in zip(shapes, steps.values(), strict=True)}, seed)


def _steps(
    checkpoints: Iterable[tuple[Any, Any]],
    folder: str | os.PathLike[str] | None,
    measure: Callable[[AttentionView], MeasuredStep],
    shapes: dict[int, dict[str, Any]],
) -> Iterator[WorkPart]:
    """Yield a part per checkpoint. The shape of each model is added to `shapes`; all have to be the same."""
    earlier: list[Any] = []
    for step, checkpoint in checkpoints:
        earlier.append(step)
        _require_rising(earlier)
        step = int(step)
        yield WorkPart(
            f"step{step}",
            partial(_measured, step, checkpoint, measure, shapes),
            None if folder is None else partial(_require_same_model, folder, step, checkpoint, shapes),
        )
        del checkpoint
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded


def _measured(
    step: int, checkpoint: Any, measure: Callable[[AttentionView], MeasuredStep], shapes: dict[int, dict[str, Any]]
) -> pd.DataFrame:
    """Load and measure a checkpoint."""
    view = _opened(step, checkpoint)
    measured = measure(view)
    identity = checkpoint.identity() if isinstance(checkpoint, LazyCheckpoint) else None
    table = bundled({"heads": measured.heads, "composition": measured.composition})
    table.attrs |= measured.heads.attrs | {"identity": identity, "weights": view.weights_digest()}
    _note_shape(shapes, step, table)
    return table


def _measured_step(table: pd.DataFrame) -> MeasuredStep:
    step = MeasuredStep(**unbundled(table))
    step.heads.attrs = table.attrs
    return step


def _require_same_model(
    folder: str | os.PathLike[str],
    step: int,
    checkpoint: Any,
    shapes: dict[int, dict[str, Any]],
    table: pd.DataFrame,
) -> None:
    """Compare a stored step with its checkpoint, which is loaded only if its weights cannot be identified otherwise.

    Raises:
        IncompatibleCheckpoint: they have other weights.
    """
    identified = isinstance(checkpoint, LazyCheckpoint) and table.attrs["identity"] == checkpoint.identity()
    if not identified and table.attrs["weights"] != _opened(step, checkpoint).weights_digest():
        raise IncompatibleCheckpoint(
            f"{os.fspath(folder)} holds step {step} of another model, or of other weights: choose another folder"
        )
    _note_shape(shapes, step, table)


def _opened(step: int, checkpoint: Any) -> AttentionView:
    model = checkpoint
    if not isinstance(checkpoint, nn.Module):  # a model is callable, too
        if not callable(checkpoint):
            raise ValueError(
                f"step {step}: found {type(checkpoint).__name__}, which is neither a model nor a function that loads "
                "one; hub_checkpoints and folder_checkpoints make such functions of names and paths"
            )
        model = checkpoint()
    try:
        return attention_view(model)
    except TypeError as error:
        raise ValueError(f"step {step}: {error}") from error


def _checked_pairs(pairs: Iterable[tuple[Head, Head]]) -> list[tuple[Head, Head]]:
    checked: list[tuple[Head, Head]] = []
    for source, target in pairs:
        (source_layer, source_head), (target_layer, target_head) = head_pair(source), head_pair(target)
        if not 0 <= source_layer < target_layer:
            raise ValueError(
                f"the pair (({source_layer}, {source_head}), ({target_layer}, {target_head})) cannot compose: its "
                "source has to be in an earlier layer than its target"
            )
        checked.append(((source_layer, source_head), (target_layer, target_head)))
    return checked


def _require_rising(steps: list[Any]) -> None:
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, Integral) or int(step) < 0:
            raise ValueError(f"{step!r} is no training step: give whole numbers from 0 up")
    for before, after in pairwise(steps):
        if after == before:
            raise ValueError(f"step {after} comes twice: give each step once")
        if after < before:
            raise ValueError(f"step {after} comes after step {before}: give checkpoints in the order of training")


def _note_shape(shapes: dict[int, dict[str, Any]], step: int, table: pd.DataFrame) -> None:
    """Add the shape of a step's model to `shapes`; refuse a shape other than that of the first model."""
    shapes[step] = shape = table.attrs["shape"]
    first, expected = next(iter(shapes.items()))
    differing = [name for name in expected if expected[name] != shape[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"step {step} is of another architecture than step {first}: {name} {shape[name]}, there {expected[name]}; "
            "a history is of one model"
        )


def _joined(measured: dict[int, MeasuredStep], seed: int) -> HeadHistory:
    no_scores = dict.fromkeys(("icl_score", "icl_score_se", "first_copy_loss", "second_copy_loss"), np.nan)
    rows = [
        {
            "step": step,
            "n_heads": len(tables.heads),
            **(tables.heads.attrs["in_context"] or no_scores),
            **population_medians(tables.heads, seed=seed),
        }
        for step, tables in measured.items()
    ]
    history = HeadHistory(
        heads=_stacked({step: tables.heads for step, tables in measured.items()}),
        summary=pd.DataFrame(rows),
        composition=_stacked({step: tables.composition for step, tables in measured.items()}),
    )
    last = list(measured.values())[-1].heads.attrs
    common = {name: value for name, value in last.items() if name not in _OF_A_STEP}
    common["checkpoints"] = [
        {"step": step} | {name: tables.heads.attrs.get(name) for name in ("revision", "weights_sha256", "score_check")}
        for step, tables in measured.items()
    ]
    for name, table in HEAD_HISTORY.items():
        frame: pd.DataFrame = getattr(history, name)
        frame.attrs = common
        named(frame, table)
    return history


def _stacked(tables: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the tables of several steps, with the step as first column."""
    copies = {step: table.copy(deep=False) for step, table in tables.items()}
    for step, table in copies.items():
        table.insert(0, "step", step)
    return stacked(copies.values())
