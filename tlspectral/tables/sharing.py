"""Shards: processes, on any machines, that make the jobs of one folder between them.

A shard makes jobs by their place in the list alone, so no process waits for another, claims a job or asks a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tlspectral.errors import MissingParts, UserBlock
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.job import sharing

if TYPE_CHECKING:
    from tlspectral.tables.job import Job
    from tlspectral.tables.resume_folder import ResumeFolder

_WORKS = ".shards"  # hidden, so that what is seen of the folder is what one process leaves
_NAMED = 8


@dataclass(frozen=True)
class Shard:
    """What one of several processes makes: every `count`-th job, from job number `index` on; none where that is 0.

    Attributes:
        asked: how this work is asked for again, as JSON, noted in the folder for `tlspectral collect`.
    """

    index: int
    count: int
    asked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def numbered(cls, index: int, count: int, **asked: Any) -> Shard:
        """Return shard `index` of `count`. Raises ValueError unless it is one of 1 to `count`."""
        if not 1 <= index <= count:
            raise ValueError(f"there is no shard {index} of {count}: shards count from 1, as in sbatch --array=1-16")
        return cls(index, count, asked)

    def tables(
        self,
        jobs: Iterable[Job],
        folder: ResumeFolder | None,
        finish: Callable[[Sequence[Job]], dict[str, pd.DataFrame]],
    ) -> dict[str, pd.DataFrame]:
        """Make the jobs of this shard by `finish`, and read all others. Raises MissingParts if one is not there."""
        if folder is None:
            raise ValueError(
                "a shard needs a folder that the other shards see too: give folder=, or measure outside of the block"
            )
        if not isinstance(jobs, Sequence):
            raise ValueError("jobs of a generator cannot be shared out: give a list, of names or functions")
        names = [job.name for job in jobs]
        if self.index:
            _note(folder.path, {"parts": names, **self.asked})
        own = jobs[self.index - 1 :: self.count] if self.index else []
        with sharing(None):  # what a job measures by itself is not shared out
            tables = finish(own)
            failed = {job.name for job in own if job.name not in tables}
            require_parts(folder.path, [name for name in names if name not in failed])
            tables |= finish([job for job in jobs if job.name not in tables and job.name not in failed])
        return {name: tables[name] for name in names if name in tables}


def shard(index: int, count: int) -> AbstractContextManager[None]:
    """Let the measurement in this block make the jobs of one of `count` shards, in the folder that it is given.

    Every process runs the same block with an `index` of its own, from 1 to `count`. A stored job is never made again,
    so a process that was killed makes what is missing of its jobs when it is started again. Where jobs of other shards
    are missing, the block ends there without an error: what stands behind the measurement runs in the processes that
    find all jobs. A second measurement needs a block of its own.

    Raises:
        ValueError: `index` is not one of 1 to `count`; inside, a measurement without a folder, or of a generator.

    A shard whose block is never entered warns.

    What it does not establish: that other processes run. `tlspectral collect FOLDER` says which jobs are missing.

    Example:
        >>> import tempfile
        >>> import tlspectral as tls
        >>> model, folder = tls.load_model("tiny-rope"), tempfile.mkdtemp()
        >>> for index in (1, 2):
        ...     with tls.tables.shard(index, 2):
        ...         sweep = tls.ablation_sweep(model, "output", folder=folder)
        ...         print(f"shard {index} finds all jobs: {len(sweep)} heads")
        shard 2 finds all jobs: 8 heads
    """
    return _ShardBlock(Shard.numbered(index, count))


class _ShardBlock(UserBlock):
    unentered = (
        "`tls.tables.shard` made a block that was never entered, so this process makes all jobs: write "
        "`with tls.tables.shard(index, count):`"
    )

    def __init__(self, one: Shard):
        self.shard = one

    def __enter__(self) -> None:
        self.entered = True
        with ExitStack() as entered:
            entered.enter_context(suppress(MissingParts))
            entered.enter_context(sharing(self.shard))
            self._left = entered.pop_all()

    def __exit__(self, *raised: Any) -> bool:
        return bool(self._left.__exit__(*raised))


def require_parts(folder: Path, names: Collection[str]) -> None:
    """Raise MissingParts unless the folder has all of these jobs; the message names those that are missing."""
    missing = [name for name in names if not (folder / f"{name}.parquet").exists()]
    if missing:
        others = f" and {len(missing) - _NAMED} others" if len(missing) > _NAMED else ""
        raise MissingParts(
            f"{folder}: {len(names) - len(missing)} of {len(names)} jobs are there; missing: "
            f"{', '.join(missing[:_NAMED])}{others}"
        )


def noted_works(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of jobs, at any depth, with what shards noted: `parts`, all names of jobs, and `asked`."""
    for file in sorted(folder.rglob(f"{_WORKS}/*.json")):
        yield file.parents[1], json.loads(file.read_text(encoding="utf-8"))


def _note(folder: Path, work: Mapping[str, Any]) -> None:
    text = json.dumps(work)
    file = folder / _WORKS / f"{sha256(text.encode()).hexdigest()[:16]}.json"
    file.parent.mkdir(exist_ok=True)
    with whole_file(file, replace=False) as partial:
        partial.write_text(text, encoding="utf-8")
