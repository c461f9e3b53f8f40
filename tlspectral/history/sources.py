"""What `head_history` accepts as checkpoints: names, folders, hub models, models, as (label, function) pairs.

A function loads its model when it is called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.weight_files import files_digest
from tlspectral.user_functions import require_call

Label = int | str
"""A training step, or the name of a checkpoint."""

PYTHIA_STEPS = (
    0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 48000, 64000, 96000, 128000, 143000,
)  # fmt: skip
"""The 22 checkpoints of Pythia in FP section 9; a step is 1024 x 2048 tokens."""

_STEP_NAME = re.compile(r"(?:step|checkpoint-)(0|[1-9]\d*)")  # of the folder or revision of a training step
_STEP_LABEL = re.compile(r"(?:step|checkpoint)[-_]?(0|[1-9]\d*)")  # the same, and as other programs write it
_NUMBER_ALONE = re.compile(r"[+-]?[\d.]+")


def suite_checkpoints(
    suite: str | os.PathLike[str], steps: Iterable[int] | None = None
) -> list[tuple[int, Callable[[], Any]]]:
    """List the training steps of a hub model, or of a folder with sub-folders `step{N}` or `checkpoint-{N}`.

    Each is a function that loads its model. Files are fetched into the hub's cache as `load_model` does, and stay
    there: the 22 steps of a model take 22 times its size on disk.

    Args:
        suite: folder, or hub id of a model of the Pythia or stanford-crfm suites.
        steps: training steps, rising. None for all that the folder has, or the 22 of `PYTHIA_STEPS` of a Pythia model.

    Raises:
        FileNotFoundError: a path that leads nowhere, or a step that the folder does not have.
        ValueError: a folder without checkpoints, or a hub model of which it is not known how it names its steps or,
            without `steps`, which there are. The hub reports a step that is missing there when it is loaded.

    What it does not establish: that the hub still has them, unchanged; the table's `attrs` hold the weights' hash and
    the commit.
    """
    name, folder = os.fspath(suite), Path(suite).expanduser()
    if steps is None and folder.is_dir():
        matches = (_STEP_NAME.fullmatch(inner.name) for inner in folder.iterdir() if inner.is_dir())
        steps = sorted(int(match[1]) for match in matches if match)
        if not steps:
            raise ValueError(f"{folder} has no sub-folder step{{N}} or checkpoint-{{N}}")
    elif steps is None:
        find_source(name)
        if not name.lower().split("/")[-1].startswith("pythia"):
            raise ValueError(
                f"it is not known which training steps of {name} there are: give history.suite_checkpoints(name, "
                "steps), or (label, checkpoint) pairs"
            )
        steps = PYTHIA_STEPS
    chosen = [int(step) for step in steps]
    for step in chosen:
        find_source(name, checkpoint=step)
    return [(step, partial(load_model, name, checkpoint=step)) for step in chosen]


def labelled_checkpoints(checkpoints: Any) -> Iterable[tuple[Any, Callable[[], Any]]]:
    """Return (label, function) pairs of what `head_history` is given; of paths to training steps in the order of steps.

    A generator's checkpoints are made one by one, and no label is checked.
    """
    if isinstance(checkpoints, str | os.PathLike):
        return suite_checkpoints(checkpoints)
    if isinstance(checkpoints, nn.Module) or not isinstance(checkpoints, Iterable):
        raise TypeError(
            "checkpoints are the hub name of a suite, a folder, a list of names, folders, models or (label, "
            f"checkpoint) pairs, or checkpoints by step; found {type(checkpoints).__name__}: put one model into a list"
        )
    if isinstance(checkpoints, Mapping):
        checkpoints = list(checkpoints.items())
    labelled = map(_labelled, checkpoints)
    if not isinstance(checkpoints, Sequence):
        return labelled
    listed = list(labelled)
    if all(isinstance(item, str | os.PathLike) for item in checkpoints):
        steps = [label for label, _ in listed if isinstance(label, int)]
        if len(steps) == len(listed):  # of paths as a glob sorts them, step10 before step9
            listed.sort(key=lambda pair: pair[0])
    return listed


def source_of(load: Callable[[], Any]) -> Source | None:
    """Return what `partial(load_model, name)` reads, also at a revision or step; None of other functions."""
    if not isinstance(load, partial) or load.func is not load_model or not load.args:
        return None
    named = isinstance(load.args[0], str | os.PathLike) and load.keywords.keys() <= {"revision", "checkpoint"}
    return find_source(*load.args, **load.keywords) if named else None


def loader_identity(load: Callable[[], Any]) -> str | None:
    """Return what names the weights without loading them; None of a function, and of what this package holds."""
    source = source_of(load)
    if source is None or source.kind == "tiny":
        return None
    if source.kind == "hub":
        return f"{source.location} at commit {pinned(source)[0].revision}"
    return f"files with SHA-256 {files_digest(source)}"


def check_labels(labels: Sequence[Any]) -> None:
    """Refuse labels that are neither rising training steps nor names that differ."""
    named = [isinstance(label, str) and _NUMBER_ALONE.fullmatch(label) is None for label in labels]
    for label, is_name in zip(labels, named, strict=True):
        if not is_name and (isinstance(label, bool) or not isinstance(label, Integral) or int(label) < 0):
            raise ValueError(f"{label!r:.80} is no training step: give whole numbers from 0 up, or names for all")
    if any(named) and not all(named):
        raise ValueError(
            f"{labels[named.index(True)]!r} is a name and {labels[named.index(False)]} a training step: give "
            "(label, checkpoint) pairs, with steps for all or names for all"
        )
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise ValueError(f"{called(label)} comes twice: give (label, checkpoint) pairs whose labels differ")
        if place and not any(named) and label < labels[place - 1]:
            raise ValueError(
                f"step {label} comes after step {labels[place - 1]}: give checkpoints in the order of training"
            )


def called(label: Label) -> str:
    """Return how messages call a checkpoint: `step 5`, or its name in quotes."""
    return repr(label) if isinstance(label, str) else f"step {label}"


def _labelled(item: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the label of an item, and the function that loads its model."""
    if isinstance(item, tuple | list) and len(item) == 2:
        label, checkpoint = item
        label = int(label) if isinstance(label, Integral) and not isinstance(label, bool) else label
    elif isinstance(item, str | os.PathLike):
        label, checkpoint = _label(os.fspath(item), Path(item).name), item
    elif isinstance(item, nn.Module):
        source = getattr(item, "tlspectral_source", None) or {}
        config_name = getattr(getattr(item, "cfg", None), "model_name", None)
        name, revision = str(source.get("model") or config_name or type(item).__name__), source.get("revision")
        whole, last = (name, Path(name).name) if revision is None else (f"{name} at {revision}", revision)
        label, checkpoint = _label(whole, last), item
    else:
        raise TypeError(
            f"found {type(item).__name__} among the checkpoints: give names, folders, models, or (label, checkpoint) "
            "pairs"
        )
    if isinstance(checkpoint, str | os.PathLike):
        return label, partial(load_model, os.fspath(checkpoint))
    if isinstance(checkpoint, nn.Module):  # a model is callable, too
        return label, lambda: checkpoint
    if not callable(checkpoint):
        raise ValueError(
            f"{called(label)}: found {type(checkpoint).__name__}, which is neither a model nor its name nor a function "
            "that loads one"
        )
    require_call(checkpoint, (), f"what loads the checkpoint {label!r}")
    return label, checkpoint


def _label(name: str, last_part: str) -> Label:
    match = _STEP_LABEL.fullmatch(last_part)
    return name if match is None else int(match[1])
