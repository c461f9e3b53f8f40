"""Lists of the checkpoints of a training, on the hub or in a folder, each loaded when it is needed."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tlspectral.models.loading import load_model

PYTHIA_STEPS = (
    0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 48000, 64000, 96000, 128000, 143000,
)  # fmt: skip
"""The 22 checkpoints of Pythia in FP section 9; a step is 1024 x 2048 tokens."""

_PUBLIC_PYTHIA_STEPS = frozenset([0, *(2**i for i in range(10)), *range(1000, 143_001, 1000)])
_STEP_FOLDER = re.compile(r"(?:step|checkpoint-)(0|[1-9]\d*)")
_READ_AT_ONCE = 1 << 24  # bytes


@dataclass(frozen=True)
class LazyCheckpoint:
    """A checkpoint that is loaded when it is called.

    Attributes:
        load: returns the model.
        identity: returns what names the weights, without loading the model; a resumed history compares it.
    """

    load: Callable[[], Any] = field(repr=False)
    identity: Callable[[], str] = field(repr=False)

    def __call__(self) -> Any:
        """The model, loaded anew."""
        return self.load()


def hub_checkpoints(
    name: str = "EleutherAI/pythia-410m", steps: Iterable[int] = PYTHIA_STEPS
) -> list[tuple[int, LazyCheckpoint]]:
    """List public checkpoints of a suite that publishes its training steps (Pythia, stanford-crfm), loaded one by one.

    Files are fetched into the hub's cache as `load_model(name, checkpoint=step)` does, and stay there: nothing is ever
    deleted. The 22 steps of a model take 22 times its size on disk.

    Args:
        name: hub id.
        steps: training steps, rising.

    Raises:
        ValueError: a step that Pythia did not publish. For other suites the hub reports it when the step is loaded.

    What it does not establish: that the hub still has them, unchanged; the table's `attrs` hold the weights' hash and
    the commit.
    """
    steps = [int(step) for step in steps]
    missing = [step for step in steps if step not in _PUBLIC_PYTHIA_STEPS]
    if missing and name.lower().split("/")[-1].startswith("pythia"):
        raise ValueError(
            f"{name} has no public checkpoint of steps {missing}: there are step 0, the powers of two from 1 to 512, "
            "and every thousand from 1000 to 143000"
        )
    return [
        (step, LazyCheckpoint(partial(load_model, name, checkpoint=step), partial("{} step {}".format, name, step)))
        for step in steps
    ]


def folder_checkpoints(
    path: str | os.PathLike[str], steps: Iterable[int] | None = None
) -> list[tuple[int, LazyCheckpoint]]:
    """List the checkpoints that a folder holds as sub-folders `step{N}` or `checkpoint-{N}`, loaded one by one.

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
        match = _STEP_FOLDER.fullmatch(subfolder.name)
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
    return [
        (step, LazyCheckpoint(partial(load_model, folder, checkpoint=step), partial(_files_digest, folders[step])))
        for step in wanted
    ]


def _files_digest(folder: Path) -> str:
    """Hash of the names and contents of a checkpoint folder's files."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while block := stream.read(_READ_AT_ONCE):
                    digest.update(block)
    return digest.hexdigest()
