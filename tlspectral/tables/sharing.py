"""Shards: processes on any machines that share the jobs of one folder.

The place of a job in the list decides which shard makes it. No process waits for another, claims a job or asks a
server.
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
from tlspectral.errors.settings import checked_settings
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.job import sharing

if TYPE_CHECKING:
    from tlspectral.tables.job import Job
    from tlspectral.tables.resume_folder import ResumeFolder

_WORKS = ".shards"  # hidden, because the visible files must equal the files of a single process
_NAMED = 8


@dataclass(frozen=True)
class Shard:
    """The jobs of one process: every `count`-th job, beginning with job number `index` (from 1); no job if `index` is
    0.

    Attributes:
        index: number of the process.
        count: number of processes.
        asked: the command or call that started this work, as JSON, stored in the folder for `tlspectral collect`.
    """

    index: int
    count: int
    asked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def numbered(cls, index: int, count: int, **asked: Any) -> Shard:
        """Return the `Shard` of process `index` of `count`; `asked` are entries (as JSON) about the command or call,
        which it stores.

        Raises ValueError unless 1 <= index <= count.
        """
        if not 1 <= index <= count:
            raise ValueError(f"there is no shard {index} of {count}: shards count from 1, as in sbatch --array=1-16")
        return cls(index, count, asked)

    def tables(
        self,
        jobs: Iterable[Job],
        folder: ResumeFolder | None,
        finish: Callable[[Sequence[Job]], dict[str, pd.DataFrame]],
    ) -> dict[str, pd.DataFrame]:
        """Make the jobs of this process, read all other jobs from the folder, and return a dict from job name to table.

        `finish` is a function that makes or reads the jobs it is given and returns their tables by name. Raises
        MissingParts if a job of another process is missing, ValueError without a folder or for a generator of jobs.
        """
        if folder is None:
            raise ValueError(
                "a shard needs a folder that all shards can read: give folder=, or measure outside of the block"
            )
        if not isinstance(jobs, Sequence):
            raise ValueError("a generator of models or jobs cannot be shared out: give a list of names or functions")
        names = [job.name for job in jobs]
        if self.index:
            _note(folder.path, {"parts": names, **self.asked})
        own = jobs[self.index - 1 :: self.count] if self.index else []
        with sharing(None):  # measurements inside a job are not shared out again
            tables = finish(own)
            failed = {job.name for job in own if job.name not in tables}
            require_parts(folder.path, [name for name in names if name not in failed])
            tables |= finish([job for job in jobs if job.name not in tables and job.name not in failed])
        return {name: tables[name] for name in names if name in tables}


@checked_settings
def shard(index: int, count: int) -> AbstractContextManager[None]:
    """Let the measurement in this block make only every `count`-th job, in its folder. Use it to run one measurement in
    several processes or on several machines.

    >>> import tempfile
    >>> import tlspectral as tls
    >>> model, folder = tls.load_model("tiny-rope"), tempfile.mkdtemp()
    >>> for index in (1, 2):
    ...     with tls.tables.shard(index, 2):
    ...         sweep = tls.ablation_sweep(model, "output", folder=folder)
    ...         print(f"shard {index} finds all jobs: {len(sweep)} heads")
    shard 2 finds all jobs: 8 heads

    Every process runs the same block with its own `index`. If jobs of other processes are missing, the block ends after
    the measurement's own jobs, without an error: code after the measurement runs only in a process that finds all jobs.
    A process that was killed makes only its missing jobs when it is started again. A second measurement needs its own
    block.

    Args:
        index: number of this process, from 1 to `count`.
        count: number of processes.

    Returns:
        A context manager, for `with`. It yields None; the measurement in it returns the whole table if all jobs are
        there.

    Raises:
        ValueError: `index` is not one of 1 to `count`; or the measurement in the block has no folder or gets an
            iterator.

    A warning is given if the result is not used with `with`.

    Not established: that the other processes run. `tlspectral collect FOLDER` lists missing jobs. More: docs/scale.md
    """
    return _ShardBlock(Shard.numbered(index, count))


class _ShardBlock(UserBlock):
    """The context manager that `tls.tables.shard` returns: in it, measurements make the jobs of `share` only. If jobs
    of other processes are missing, the MissingParts that ends the block is not passed on.
    """

    unentered = (
        "`tls.tables.shard` was called without `with`, so this process makes all jobs: write "
        "`with tls.tables.shard(index, count):`"
    )

    def __init__(self, share: Shard):
        self.shard = share

    def __enter__(self) -> None:
        self.entered = True
        with ExitStack() as entered:
            entered.enter_context(suppress(MissingParts))
            entered.enter_context(sharing(self.shard))
            self._left = entered.pop_all()

    def __exit__(self, *raised: Any) -> bool:
        return bool(self._left.__exit__(*raised))


def require_parts(folder: Path, names: Collection[str]) -> None:
    """Raise MissingParts unless the folder has a parquet file for each job in `names`; the message names up to 8
    missing jobs.
    """
    missing = [name for name in names if not (folder / f"{name}.parquet").exists()]
    if missing:
        others = f" and {len(missing) - _NAMED} others" if len(missing) > _NAMED else ""
        raise MissingParts(
            f"{folder}: {len(names) - len(missing)} of {len(names)} jobs are there; missing: "
            f"{', '.join(missing[:_NAMED])}{others}. Run the other shards"
        )


def noted_works(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (folder with the jobs' files, record) for all work that processes shared at any depth below `folder`.

    A record is a dict with `parts`, the names of all jobs, and the entries of `Shard.asked`, such as the command.
    """
    for file in sorted(folder.rglob(f"{_WORKS}/*.json")):
        yield file.parents[1], json.loads(file.read_text(encoding="utf-8"))


def _note(folder: Path, work: Mapping[str, Any]) -> None:
    """Store the record `work` of shared jobs as JSON in a hidden subfolder of `folder`, unless it is stored already."""
    text = json.dumps(work)
    file = folder / _WORKS / f"{sha256(text.encode()).hexdigest()[:16]}.json"
    file.parent.mkdir(exist_ok=True)
    with whole_file(file, replace=False) as partial:
        partial.write_text(text, encoding="utf-8")
