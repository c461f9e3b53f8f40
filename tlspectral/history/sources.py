"""Checkpoints of a training, by name, on the hub or in a folder, each opened when it is needed."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tlspectral.history.revisions import revisions_by_step
from tlspectral.models.loading import load_model
from tlspectral.models.loading.source import Source, find_source

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
    source = partial(find_source, name, **choice)
    return LazyCheckpoint(
        partial(load_model, name, **choice), lambda: _identity(source()), lambda: _read_from_files(source())
    )


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
        by_step = revisions_by_step(find_source(name), revisions, chosen)
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
            raise ValueError(
                f"{folder} holds step {step} twice, as {folders[step].name} and {subfolder.name}: remove one"
            )
        folders[step] = subfolder
    if not folders:
        raise ValueError(f"{folder} holds no checkpoints: they are sub-folders named step0 or checkpoint-0")
    wanted = sorted(folders) if steps is None else [int(step) for step in steps]
    missing = [step for step in wanted if step not in folders]
    if missing:
        raise ValueError(
            f"{folder} has no checkpoint of steps {missing}; it has {', '.join(map(str, sorted(folders)))}"
        )
    return [(step, named_checkpoint(folder, checkpoint=step)) for step in wanted]


def _identity(source: Source) -> str | None:
    """Return a hub model's commit, or the hash of the files of a model on disk; None of a packaged model."""
    if source.kind == "hub":
        from tlspectral.models.loading.hub import pinned

        return f"{source.location} at commit {pinned(source).revision}"
    if source.kind == "tiny":
        return None
    files: Iterable[Path] = source.parts
    if source.kind == "folder":
        folder = Path(source.location)
        files = sorted(file for file in folder.iterdir() if _MODEL_FILE.fullmatch(file.name) and file.is_file())
    return f"files with SHA-256 {_digest(files)}"


def _read_from_files(source: Source) -> Source | None:
    return source if source.kind in ("folder", "hub") else None


def _digest(files: Iterable[Path]) -> str:
    """Hash the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()
