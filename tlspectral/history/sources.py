"""Checkpoints for `head_history`: each is a label and a function that loads the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, require_path, whole_number
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
"""The 22 Pythia checkpoints in section 9 of "Fingerprint, Not Blueprint"; a step is 1024 x 2048 tokens."""

_STEP_NAME = re.compile(r"(?:step|checkpoint-)(0|[1-9]\d*)")  # folder or revision of a training step
_STEP_LABEL = re.compile(r"(?:step|checkpoint)[-_]?(0|[1-9]\d*)")  # also as other programs write it
_NUMBER_ALONE = re.compile(r"[+-]?[\d.]+")


@checked_settings
def suite_checkpoints(
    suite: str | os.PathLike[str], steps: Iterable[int] | None = None
) -> list[tuple[int, Callable[[], Any]]]:
    """List the training steps of a hub model or folder, as pairs (step, function that loads the model).

    Use it to choose steps for `head_history`. Nothing is loaded until a function is called.

        steps = tls.history.suite_checkpoints("EleutherAI/pythia-70m", [0, 512, 143000])
        history = tls.head_history(steps, detectors=False, folder="pythia")

    Files are downloaded to the hub's cache and stay there: the 22 steps of a model take 22 times its size on disk.

    Args:
        suite: a folder with sub-folders `step{N}` or `checkpoint-{N}`, or the hub id of a Pythia or stanford-crfm
            model.
        steps: training steps, rising. Default: all steps in the folder, or the 22 of the paper for a Pythia model (0,
            1, 2, 4, ..., 512, 1000, ..., 143000).

    Returns:
        A list of (step, load): the training step as an int, and a function without arguments that returns the
        TransformerBridge of that step.

    Raises:
        FileNotFoundError: the path, or a step in the folder, does not exist.
        ValueError: the folder has no checkpoints, or the steps of the hub model are not known. A step that is missing
            on the hub raises an error when it is loaded.

    Not established: that the hub still has these files, unchanged. The `attrs` of tables hold the hash of the weights
    and the commit.
    """
    name, folder = os.fspath(suite), Path(suite).expanduser()
    if steps is None and folder.is_dir():
        matches = (_STEP_NAME.fullmatch(inner.name) for inner in folder.iterdir() if inner.is_dir())
        steps = sorted(int(match[1]) for match in matches if match)
        if not steps:
            raise ValueError(
                f"{folder} has no sub-folder step{{N}} or checkpoint-{{N}}: give the folder above the checkpoints"
            )
    elif steps is None:
        find_source(name)
        if not name.lower().split("/")[-1].startswith("pythia"):
            raise ValueError(
                f"the training steps of {name} are not known: give history.suite_checkpoints({name!r}, steps), or "
                "(label, checkpoint) pairs"
            )
        steps = PYTHIA_STEPS
    steps = list(steps)
    chosen = [number for step in steps if (number := whole_number(step)) is not None]
    if len(chosen) < len(steps):
        raise ValueError(f"steps= must be a list of training steps, whole numbers; found {shown(steps)}")
    for step in chosen:
        find_source(name, checkpoint=step)
    return [(step, partial(load_model, name, checkpoint=step)) for step in chosen]


def labelled_checkpoints(checkpoints: Any) -> Iterable[tuple[Any, Callable[[], Any]]]:
    """Return (label, function that loads the model) pairs from the user's `checkpoints`: a name, a folder, a dict or a
    list.

    Paths to training steps are sorted by step. A generator's checkpoints are made one by one. Labels are not checked.
    Raises TypeError for another type.
    """
    if isinstance(checkpoints, str | os.PathLike):
        require_path("checkpoints", checkpoints)
        return suite_checkpoints(checkpoints)
    if (
        isinstance(checkpoints, nn.Module)
        or not isinstance(checkpoints, Iterable)
        or getattr(checkpoints, "shape", None) == ()
    ):
        raise TypeError(
            "checkpoints= needs the hub name of a suite, a folder, a dict by step, or a list of names, folders, models "
            f"or (label, checkpoint) pairs; found {type(checkpoints).__name__}: put a single model into a list"
        )
    if isinstance(checkpoints, Mapping):
        checkpoints = list(checkpoints.items())
    labelled = map(_labelled, checkpoints)
    if not isinstance(checkpoints, Sequence):
        return labelled
    listed = list(labelled)
    if all(isinstance(item, str | os.PathLike) for item in checkpoints):
        steps = [label for label, _ in listed if isinstance(label, int)]
        if len(steps) == len(listed):  # a glob sorts step10 before step9
            listed.sort(key=lambda pair: pair[0])
    return listed


def source_of(load: Callable[[], Any]) -> Source | None:
    """Return the source (name, revision and files) that `partial(load_model, name, ...)` reads; None for other
    functions.
    """
    if not isinstance(load, partial) or load.func is not load_model or not load.args:
        return None
    named = isinstance(load.args[0], str | os.PathLike) and load.keywords.keys() <= {"revision", "checkpoint"}
    return find_source(*load.args, **load.keywords) if named else None


def loader_identity(load: Callable[[], Any]) -> str | None:
    """Return a text that identifies the weights that `load` would load, without loading them.

    It has the commit of a hub model or the hash of local files. None for functions of other kinds and packaged models.
    """
    source = source_of(load)
    if source is None or source.kind == "tiny":
        return None
    if source.kind == "hub":
        return f"{source.location} at commit {pinned(source)[0].revision}"
    return f"files with SHA-256 {files_digest(source)}"


def check_labels(labels: Sequence[Any]) -> None:
    """Raise ValueError unless all labels of checkpoints are rising training steps (whole numbers), or all are different
    names.
    """
    named = [isinstance(label, str) and _NUMBER_ALONE.fullmatch(label) is None for label in labels]
    for label, is_name in zip(labels, named, strict=True):
        if not is_name and (isinstance(label, bool) or not isinstance(label, Integral) or int(label) < 0):
            raise ValueError(
                f"{label!r:.80} is not a training step: give whole numbers from 0 up, or a name for each checkpoint"
            )
    if any(named) and not all(named):
        raise ValueError(
            f"{labels[named.index(True)]!r} is a name, but {labels[named.index(False)]} is a training step: give "
            "(label, checkpoint) pairs, all with steps or all with names"
        )
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise ValueError(f"{called(label)} comes twice: give (label, checkpoint) pairs whose labels differ")
        if place and not any(named) and label < labels[place - 1]:
            raise ValueError(
                f"step {label} comes after step {labels[place - 1]}: give checkpoints in the order of training"
            )


def called(label: Label) -> str:
    """Return the name of a checkpoint for messages: "step 5", or the label itself in quotes."""
    return repr(label) if isinstance(label, str) else f"step {label}"


def _labelled(item: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the label and the loader of an entry of `checkpoints`: a name, folder, model, or pair (label, checkpoint).

    The loader is a function without arguments that returns the model. Raises TypeError or ValueError for another entry.
    """
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
            f"checkpoints= has an object of type {type(item).__name__}: give names, folders, models, or (label, "
            "checkpoint) pairs"
        )
    if isinstance(checkpoint, str | os.PathLike):
        return label, partial(load_model, os.fspath(checkpoint))
    if isinstance(checkpoint, nn.Module):  # before `callable`: a model is callable, too
        return label, lambda: checkpoint
    if not callable(checkpoint):
        raise ValueError(
            f"{called(label)}: found {type(checkpoint).__name__}; give a model, its name, or a function that loads it"
        )
    require_call(checkpoint, (), f"what loads the checkpoint {label!r}")
    return label, checkpoint


def _label(name: str, last_part: str) -> Label:
    """Return the training step in `last_part`, such as 512 for "step512"; else the whole `name`."""
    match = _STEP_LABEL.fullmatch(last_part)
    return name if match is None else int(match[1])
