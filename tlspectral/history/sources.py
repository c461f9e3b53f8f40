"""What `head_history` accepts as checkpoints: names, folders, hub models, models, as (label, checkpoint) pairs.

Those of a name or path are opened when they are needed.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from tlspectral.models.loading import load_model
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import hub_revisions, pinned
from tlspectral.models.loading.model_files import files_digest
from tlspectral.models.loading.source import Source

Label = int | str
"""A training step, or the name of a checkpoint."""

PYTHIA_STEPS = (
    0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 48000, 64000, 96000, 128000, 143000,
)  # fmt: skip
"""The 22 checkpoints of Pythia in FP section 9; a step is 1024 x 2048 tokens."""

STEP_NAME = re.compile(r"(?:step|checkpoint-)(0|[1-9]\d*)")
"""Name of the folder or revision of a training step."""

_PUBLIC_PYTHIA_STEPS = frozenset([0, *(2**i for i in range(10)), *range(1000, 143_001, 1000)])
_FIELD = re.compile(r"\{(\w+)\}")  # of a pattern of revisions
# A digit beside a field would belong to its number.
_STEP, _NUMBER = r"(?<!\d)(\d+)(?!\d)", r"(?<!\d)\d+(?:\.\d+)?(?!\d)"
_NUMBER_ALONE = re.compile(r"[+-]?[\d.]+")


@dataclass(frozen=True)
class LazyCheckpoint:
    """A checkpoint that is loaded when it is called.

    Attributes:
        load: returns the model.
        identity: returns what names the weights, without loading the model; a resumed history compares it. None says
            nothing, and the weights are compared instead.
        files: returns the folder or hub model whose layers can be read from its files; None where it has to be loaded.
    """

    load: Callable[[], Any] = field(repr=False)
    identity: Callable[[], str | None] = field(repr=False, default=lambda: None)
    files: Callable[[], Source | None] = field(repr=False, default=lambda: None)

    def __call__(self) -> Any:
        """The model, loaded anew."""
        return self.load()


def named_checkpoint(name: str | os.PathLike[str], **choice: Any) -> LazyCheckpoint:
    """Return the checkpoint of a name or path for `load_model`; `choice` is its `revision` or `checkpoint`."""

    def identity() -> str | None:
        source = find_source(name, **choice)
        if source.kind == "hub":
            return f"{source.location} at commit {pinned(source)[0].revision}"
        return None if source.kind == "tiny" else f"files with SHA-256 {files_digest(source)}"

    def files() -> Source | None:
        source = find_source(name, **choice)
        return source if source.streams else None

    return LazyCheckpoint(partial(load_model, name, **choice), identity, files)


def suite_checkpoints(
    suite: str | os.PathLike[str], steps: Iterable[int] | None = None, revisions: str | None = None
) -> list[tuple[int, LazyCheckpoint]]:
    """List the training steps of a hub model, or of a folder with sub-folders `step{N}` or `checkpoint-{N}`.

    They are opened one by one. Files are fetched into the hub's cache as `load_model` does, and stay there: nothing is
    ever deleted. The 22 steps of a model take 22 times its size on disk.

    Args:
        suite: hub id or folder.
        steps: training steps, rising. None for all that the folder has or that fit `revisions`, or the 22 of
            `PYTHIA_STEPS` of a Pythia model.
        revisions: how a hub model names its branches or tags, with `{step}` where the training step stands and other
            names in braces for other numbers: `"step{step}"` (Pythia), `"step{step}-tokens{tokens}B"` or
            `"stage1-step{step}-tokens{tokens}B"` (OLMo). The hub is asked which there are; where it cannot be reached,
            those in its cache are used. None: as Pythia and stanford-crfm name them, without asking.

    Raises:
        FileNotFoundError: a path that leads nowhere.
        ValueError: a folder without checkpoints; two of one step; steps that the suite does not have; `revisions`
            without `{step}`, or that fits none; of a hub model without `revisions` a step that Pythia did not publish,
            or no steps of another suite, of which the hub reports a missing step when it is loaded.

    What it does not establish: that the hub still has them, unchanged; the table's `attrs` hold the weights' hash and
    the commit.
    """
    name, folder = os.fspath(suite), Path(suite).expanduser()
    if folder.is_dir():
        if revisions is not None:
            raise ValueError(
                f"{folder} is a folder, whose steps are sub-folders step{{N}} or checkpoint-{{N}}, and has no "
                "revisions: leave revisions= out"
            )
        names = sorted(subfolder.name for subfolder in folder.iterdir() if subfolder.is_dir())
        what = "sub-folder step{N} or checkpoint-{N}"
        by_step = _by_step(names, STEP_NAME, steps, f"{folder} has", what, "remove one")
        return [(step, named_checkpoint(folder, checkpoint=step)) for step in by_step]
    source = find_source(name)
    if revisions is not None:
        by_step = _revisions_by_step(source, revisions, steps)
        return [(step, named_checkpoint(name, revision=revision)) for step, revision in by_step.items()]
    is_pythia = name.lower().split("/")[-1].startswith("pythia")
    if steps is None and not is_pythia:
        raise ValueError(
            f"it is not known which training steps of {name} there are: give revisions=, such as 'step{{step}}' or "
            "'step{step}-tokens{tokens}B', or steps=; of single checkpoints, give a list"
        )
    chosen = [int(step) for step in (PYTHIA_STEPS if steps is None else steps)]
    missing = [step for step in chosen if step not in _PUBLIC_PYTHIA_STEPS]
    if missing and is_pythia:
        raise ValueError(
            f"{name} has no public checkpoint of steps {missing}: there are step 0, the powers of two from 1 to 512, "
            "and every thousand from 1000 to 143000"
        )
    return [(step, named_checkpoint(name, checkpoint=step)) for step in chosen]


def _revisions_by_step(source: Source, pattern: str, steps: Iterable[int] | None) -> dict[int, str]:
    """Return the names of a hub model's revisions by training step, as `_by_step`."""
    name = source.record["model"]
    if source.kind != "hub":
        raise ValueError(
            f"{name} is no hub model and has no revisions: leave revisions= out, and give the folder of its steps or a "
            "list of (step, name) pairs"
        )
    pieces = _FIELD.split(pattern)
    if pieces[1::2].count("step") != 1:
        raise ValueError(
            f"revisions={pattern!r} does not say once where the training step stands: write {{step}} there, as in "
            "'step{step}' (Pythia) or 'step{step}-tokens{tokens}B' (OLMo)"
        )
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [_STEP if field == "step" else _NUMBER for field in pieces[1::2]]
    advice = "write out in the pattern what tells them apart"
    fits = re.compile("".join(pieces))
    return _by_step(hub_revisions(source), fits, steps, f"{name} has", f"revision that fits {pattern!r}", advice)


def _by_step(
    names: Iterable[str], fits: re.Pattern[str], steps: Iterable[int] | None, has: str, what: str, advice: str
) -> dict[int, str]:
    """Return the names that fit by training step, rising, or those of `steps` in their order.

    Raises ValueError, with the other arguments in its words, where none fits, two are of one step, or a step of `steps`
    is not there.
    """
    by_step: dict[int, str] = {}
    names = list(names)
    for name in names:
        if (match := fits.fullmatch(name)) is None:
            continue
        step = int(match[1])
        if step in by_step:
            raise ValueError(f"{has} step {step} twice, as {by_step[step]} and {name}: {advice}")
        by_step[step] = name
    if not by_step:
        raise ValueError(f"{has} no {what}; it has {_some(names) or 'none at all'}")
    known = sorted(by_step)
    chosen = known if steps is None else [int(step) for step in steps]
    if missing := [step for step in chosen if step not in by_step]:
        raise ValueError(f"{has} no {what} of steps {missing}; it has steps {_some(list(map(str, known)))}")
    return {step: by_step[step] for step in chosen}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")


def labelled_checkpoints(
    checkpoints: Any, revisions: str | None, steps: Iterable[int] | None
) -> Iterable[tuple[Any, Any]]:
    """Return (label, checkpoint) pairs of what `head_history` is given.

    Those of a generator are made one by one, and no label is checked.
    """
    if isinstance(checkpoints, str | os.PathLike):
        return suite_checkpoints(checkpoints, steps, revisions)
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
    """Refuse labels that are neither rising training steps nor names that differ."""
    named = [isinstance(label, str) and _NUMBER_ALONE.fullmatch(label) is None for label in labels]
    for label, is_name in zip(labels, named, strict=True):
        if not is_name and (isinstance(label, bool) or not isinstance(label, Integral) or int(label) < 0):
            raise ValueError(f"{label!r} is no training step: give whole numbers from 0 up, or names for all")
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


def _labelled(item: Any) -> tuple[Any, LazyCheckpoint]:
    """Return an item with its label, as a checkpoint that is opened when it is needed."""
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
        return label, named_checkpoint(checkpoint)
    if isinstance(checkpoint, LazyCheckpoint):
        return label, checkpoint
    if isinstance(checkpoint, nn.Module):  # a model is callable, too
        return label, LazyCheckpoint(lambda: checkpoint)
    if not callable(checkpoint):
        raise ValueError(
            f"{called(label)}: found {type(checkpoint).__name__}, which is neither a model nor its name nor a function "
            "that loads one"
        )
    return label, LazyCheckpoint(checkpoint)


def _label(name: str, last_part: str) -> Label:
    match = STEP_NAME.fullmatch(last_part)
    return name if match is None else int(match[1])
