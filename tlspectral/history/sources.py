"""What `head_history` accepts as checkpoints: names, folders, hub models, models, as (label, checkpoint) pairs.

Those of a name or path are opened when they are needed.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from tlspectral.models.loading import load_model
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import hub_revisions, pinned
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
# What a model and its tokenizer are made of. Other files beside the weights do not make it another model.
_MODEL_FILE = re.compile(
    r".*\.(safetensors|bin|pt|pth|model|index\.json)|(config|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|vocab|tekken)\.json|(merges|vocab)\.txt"
)
_READ_AT_ONCE = 1 << 24  # bytes
_FIELD = re.compile(r"\{(\w+)\}")  # of a pattern of revisions
# A digit beside a field would belong to its number.
_STEP, _NUMBER = r"(?<!\d)(\d+)(?!\d)", r"(?<!\d)\d+(?:\.\d+)?(?!\d)"


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
    identity: Callable[[], str | None] = field(repr=False)
    files: Callable[[], Source | None] = field(repr=False, default=lambda: None)

    def __call__(self) -> Any:
        """The model, loaded anew."""
        return self.load()


def named_checkpoint(name: str | os.PathLike[str], **choice: Any) -> LazyCheckpoint:
    """Return the checkpoint of a name or path for `load_model`; `choice` is its `revision` or `checkpoint`."""

    def files() -> Source | None:
        source = find_source(name, **choice)
        return source if source.streams else None

    return LazyCheckpoint(partial(load_model, name, **choice), lambda: _identity(find_source(name, **choice)), files)


def hub_checkpoints(
    name: str = "EleutherAI/pythia-410m", steps: Iterable[int] | None = None, revisions: str | None = None
) -> list[tuple[int, LazyCheckpoint]]:
    """List public checkpoints of a suite that publishes its training steps, opened one by one.

    Files are fetched into the hub's cache as `load_model` does, and stay there: nothing is ever deleted. The 22 steps
    of a model take 22 times its size on disk.

    Args:
        name: hub id.
        steps: training steps, rising. None for all that fit `revisions`, or `PYTHIA_STEPS` of a Pythia model.
        revisions: how the suite names its branches or tags, with `{step}` where the training step stands and other
            names in braces for other numbers: `"step{step}"` (Pythia), `"step{step}-tokens{tokens}B"` or
            `"stage1-step{step}-tokens{tokens}B"` (OLMo). The hub is asked which there are; where it cannot be reached,
            those in its cache are used. None: as Pythia and stanford-crfm name them, without asking.

    Raises:
        ValueError: `revisions` without `{step}`, or that fits no revision or two of one step; steps that the suite does
            not have. Without `revisions`: a step that Pythia did not publish, or no steps for another suite, of which
            the hub reports a missing step when it is loaded.

    What it does not establish: that the hub still has them, unchanged; the table's `attrs` hold the weights' hash and
    the commit.
    """
    chosen = None if steps is None else [int(step) for step in steps]
    if revisions is not None:
        by_step = _revisions_by_step(find_source(name), revisions, chosen)
        return [(step, named_checkpoint(name, revision=revision)) for step, revision in by_step.items()]
    is_pythia = name.lower().split("/")[-1].startswith("pythia")
    if chosen is None and not is_pythia:
        raise ValueError(
            f"it is not known which training steps of {name} there are: give revisions=, such as 'step{{step}}' or "
            "'step{step}-tokens{tokens}B', or steps=; of single checkpoints, give a list"
        )
    chosen = list(PYTHIA_STEPS) if chosen is None else chosen
    missing = [step for step in chosen if step not in _PUBLIC_PYTHIA_STEPS]
    if missing and is_pythia:
        raise ValueError(
            f"{name} has no public checkpoint of steps {missing}: there are step 0, the powers of two from 1 to 512, "
            "and every thousand from 1000 to 143000"
        )
    return [(step, named_checkpoint(name, checkpoint=step)) for step in chosen]


def folder_checkpoints(
    path: str | os.PathLike[str], steps: Iterable[int] | None = None
) -> list[tuple[int, LazyCheckpoint]]:
    """List the checkpoints that a folder holds as sub-folders `step{N}` or `checkpoint-{N}`, opened one by one.

    Args:
        path: the folder.
        steps: which of them, rising; None for all.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder holds no checkpoints, two of one step, or not those asked for.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    folders: dict[int, Path] = {}
    for subfolder in sorted(folder.iterdir()):
        match = STEP_NAME.fullmatch(subfolder.name)
        if match is None or not subfolder.is_dir():
            continue
        step = int(match[1])
        if step in folders:
            names = f"{folders[step].name} and {subfolder.name}"
            raise ValueError(f"{folder} holds step {step} twice, as {names}: remove one")
        folders[step] = subfolder
    if not folders:
        raise ValueError(f"{folder} holds no checkpoints: they are sub-folders named step0 or checkpoint-0")
    return [
        (step, named_checkpoint(folder, checkpoint=step))
        for step in _chosen(folders, steps, f"{folder} has no checkpoint")
    ]


def _revisions_by_step(source: Source, pattern: str, steps: Sequence[int] | None) -> dict[int, str]:
    """Return the names of a hub model's revisions by training step, rising, or those of `steps` in their order."""
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
    fits = re.compile("".join(pieces))
    by_step: dict[int, str] = {}
    names = hub_revisions(source)
    for revision in names:
        if (match := fits.fullmatch(revision)) is None:
            continue
        step = int(match[1])
        if step in by_step:
            raise ValueError(
                f"{name} has two revisions of step {step} that fit {pattern!r}, {by_step[step]} and {revision}: write "
                "out in the pattern what tells them apart"
            )
        by_step[step] = revision
    if not by_step:
        raise ValueError(f"no revision of {name} fits {pattern!r}; there are {_some(names)}")
    return {step: by_step[step] for step in _chosen(by_step, steps, f"{name} has no revision that fits {pattern!r}")}


def _chosen(there: Iterable[int], steps: Iterable[int] | None, lacks: str) -> list[int]:
    """Return the chosen steps, None for all, rising. Raises ValueError for one that is not there."""
    known = sorted(there)
    chosen = known if steps is None else [int(step) for step in steps]
    missing = [step for step in chosen if step not in known]
    if missing:
        raise ValueError(f"{lacks} of steps {missing}; it has steps {_some(list(map(str, known)))}")
    return chosen


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")


def labelled_checkpoints(
    checkpoints: Any, revisions: str | None, steps: Iterable[int] | None
) -> Iterable[tuple[Any, Any]]:
    """Return (label, checkpoint) pairs of what `head_history` is given.

    Those of a generator are made one by one, and no label is checked.
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
    """Refuse labels that are neither rising training steps nor names that differ."""
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


def _identity(source: Source) -> str | None:
    """Return a hub model's commit, or the hash of the files of a model on disk; None of a packaged model."""
    if source.kind == "hub":
        return f"{source.location} at commit {pinned(source)[0].revision}"
    if source.kind == "tiny":
        return None
    files: Iterable[Path] = source.parts
    if source.kind == "folder":
        folder = Path(source.location)
        files = sorted(file for file in folder.iterdir() if _MODEL_FILE.fullmatch(file.name) and file.is_file())
    return f"files with SHA-256 {_digest(files)}"


def _digest(files: Iterable[Path]) -> str:
    """Hash the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()
