"""What `head_history` accepts as checkpoints, as (label, checkpoint) pairs."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from tlspectral.history.sources import STEP_NAME, folder_checkpoints, hub_checkpoints, named_checkpoint

Label = int | str
"""A training step, or the name of a checkpoint."""


def labelled_checkpoints(
    checkpoints: Any,
    revisions: str | None = None,
    steps: Iterable[int] | None = None,
) -> Iterable[tuple[Any, Any]]:
    """Return (label, checkpoint) pairs; those of a generator are made one by one, and no label is checked.

    Args:
        checkpoints: as of `head_history`.
        revisions, steps: which checkpoints of one hub model or folder.

    Raises:
        TypeError: no name, folder or list of checkpoints.
        ValueError: `revisions` or `steps` for several names, or as `hub_checkpoints` and `folder_checkpoints`.
    """
    if isinstance(checkpoints, str | os.PathLike):
        folder = Path(checkpoints).expanduser()
        if folder.is_dir():
            if revisions is not None:
                raise ValueError(
                    f"{folder} is a folder, whose steps are sub-folders step{{N}} or checkpoint-{{N}}, and has no "
                    "revisions: leave revisions= out"
                )
            return folder_checkpoints(folder, steps)
        return hub_checkpoints(os.fspath(checkpoints), steps, revisions)
    if revisions is not None or steps is not None:
        raise ValueError(
            "revisions= and steps= choose among the checkpoints of one hub model or folder: give its name alone, or "
            "leave them out"
        )
    if isinstance(checkpoints, nn.Module) or not isinstance(checkpoints, Iterable):
        raise TypeError(
            "checkpoints are the hub name of a suite, a folder, or a list of names, folders, models or (label, "
            f"checkpoint) pairs; found {type(checkpoints).__name__}: put one model into a list"
        )
    if isinstance(checkpoints, Sequence):
        return [_labelled(item) for item in checkpoints]
    return map(_labelled, checkpoints)


def check_labels(labels: Sequence[Any]) -> None:
    """Refuse labels that are neither rising training steps nor names that differ.

    Raises:
        ValueError: the message names the first that is wrong.
    """
    named = [isinstance(label, str) and not _is_number(label) for label in labels]
    for label, is_name in zip(labels, named, strict=True):
        if not is_name and (isinstance(label, bool) or not isinstance(label, Integral) or int(label) < 0):
            raise ValueError(f"{label!r} is no training step: give whole numbers from 0 up, or names for all")
    if all(named):
        twice = next((label for label in labels if list(labels).count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} comes twice: give (label, checkpoint) pairs whose labels differ")
    elif any(named):
        raise ValueError(
            f"{labels[named.index(True)]!r} is a name and {labels[named.index(False)]} a training step: give "
            "(label, checkpoint) pairs, with steps for all or names for all"
        )
    else:
        for before, after in pairwise(labels):
            if after == before:
                raise ValueError(f"step {after} comes twice: give each step once")
            if after < before:
                raise ValueError(f"step {after} comes after step {before}: give checkpoints in the order of training")


def called(label: Label) -> str:
    """Return how messages call a checkpoint: `step 5`, or its name in quotes."""
    return repr(label) if isinstance(label, str) else f"step {label}"


def _labelled(item: Any) -> tuple[Any, Any]:
    """Return an item with its label, and a name or path as a checkpoint that is opened when it is needed."""
    if isinstance(item, tuple | list) and len(item) == 2:
        label, checkpoint = item
    elif isinstance(item, str | os.PathLike):
        label, checkpoint = _label(os.fspath(item), Path(item).name), item
    elif isinstance(item, nn.Module):
        label, checkpoint = _label_of_model(item), item
    else:
        raise TypeError(
            f"found {type(item).__name__} among the checkpoints: give names, folders, models, or (label, checkpoint) "
            "pairs"
        )
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = named_checkpoint(checkpoint)
    return label, checkpoint


def _label_of_model(model: nn.Module) -> Label:
    source = getattr(model, "tlspectral_source", None) or {}
    name = str(source.get("model") or getattr(getattr(model, "cfg", None), "model_name", None) or type(model).__name__)
    revision = source.get("revision")
    return _label(name, Path(name).name) if revision is None else _label(f"{name} at {revision}", revision)


def _label(name: str, last_part: str) -> Label:
    match = STEP_NAME.fullmatch(last_part)
    return name if match is None else int(match[1])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
