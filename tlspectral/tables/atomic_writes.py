"""Files of unfinished work: each job has its own, and a finished one appears whole or not at all.

Nothing is locked, so a job that dies blocks no other. A file is published by a link or a rename, each of which is one
step on network file systems too.
"""

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LEFT_OVER = re.compile(r"\..+\.([^.]+)-(\d+)-[0-9a-f]{8}\.part")
_OLD = 24 * 3600.0  # seconds since the last change; a live job on another machine can be suspended for hours


@contextmanager
def whole_file(
    path: str | os.PathLike[str], *, replace: bool = True, unfinished_in: Path | None = None
) -> Iterator[Path]:
    """Yield a path to write to; the file there becomes `path` when the block ends without an error.

    Args:
        path: path of the finished file. A link is followed: the file it names is replaced.
        replace: whether a file at `path` is replaced. If not, a file that is there by then stays, and the written one
            is dropped.
        unfinished_in: folder of the file while it is written, on the same file system; the folder of `path` by default.

    Yields:
        A path of `unfinished_path`. If the block raises, interrupts included, that file is removed and the file at
        `path`, if there is one, stays as it was.

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist, make it first")
    # tempfile would make the file readable by its owner only, and os.replace would keep that.
    partial = unfinished_path(target, unfinished_in)
    try:
        yield partial
        if replace:
            os.replace(partial, target)
        else:
            _publish(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _publish(partial: Path, target: Path) -> None:
    """Make `partial` also the file `target`, unless there is one."""
    try:
        os.link(partial, target)
    except FileExistsError:
        pass
    except OSError:  # some file systems have no links
        if not target.exists():
            os.replace(partial, target)


def unfinished_path(target: Path, folder: Path | None = None) -> Path:
    """Return a hidden path for what becomes `target`, which no other process or thread uses.

    It names machine and process, for `remove_left_overs`. It does not end as `target` does, because readers of
    `FOLDER/*.parquet` such as duckdb take hidden files too.
    """
    host = _host()
    name = f".{target.name[:40]}.{host}-{os.getpid()}-{secrets.token_hex(4)}.part"
    return (target.parent if folder is None else folder) / name


def remove_left_overs(folder: Path) -> None:
    """Remove unfinished files and folders of dead jobs, at any depth.

    A job counts as dead if its file was not changed for a day and, where it ran on this machine, its process is gone.
    """
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            match = _LEFT_OVER.fullmatch(name)
            if match is None or (match[1] == _host() and _is_running(int(match[2]))):
                continue
            with suppress(OSError):  # another job removed it, or it belongs to another user
                if time.time() - path.stat().st_mtime > _OLD:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:32]


def _is_running(process: int) -> bool:
    if os.name == "nt":  # os.kill would interrupt the process there
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user; no number of a process
        return True
    return True
