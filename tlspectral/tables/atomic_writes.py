"""Write files of unfinished work so that a finished file appears whole or not at all.

Each job writes a file of its own. Nothing is locked, so a job that dies blocks no other job. A finished file is
published by a link or a rename. Both are a single step on network file systems too.
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
    """Yield a temporary path to write to; when the block ends without an error, that file becomes `path`.

    Args:
        path: path of the finished file. If it is a link, the file that the link names is replaced.
        replace: True replaces a file at `path`. False keeps a file that stands at `path` when the block ends, and drops
            the new file.
        unfinished_in: folder of the temporary file, on the same file system. Default: the folder of `path`.

    Yields:
        A path made by `unfinished_path`. If the block raises, interrupts included, the temporary file is removed and
        `path` is unchanged.

    Raises:
        FileNotFoundError: the folder of `path` does not exist.
        IsADirectoryError: `path` is a folder.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist, make it first")
    # Not tempfile: its files are readable by their owner only, and os.replace keeps these permissions.
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
    """Make the finished file `partial` appear as `target` in one step; if `target` exists, it stays as it is and
    `partial` is not published.
    """
    try:
        os.link(partial, target)
    except FileExistsError:
        pass
    except OSError:  # some file systems have no links
        if not target.exists():
            os.replace(partial, target)


def unfinished_path(target: Path, folder: Path | None = None) -> Path:
    """Return a hidden path for the temporary file of `target`, in `folder` (default: the folder of `target`). No file
    is made.

    No other process or thread uses the path. Its name contains machine and process number, which `remove_left_overs`
    reads. It ends in ".part" because readers of `FOLDER/*.parquet` such as duckdb also read hidden files.
    """
    host = _host()
    name = f".{target.name[:40]}.{host}-{os.getpid()}-{secrets.token_hex(4)}.part"
    return (target.parent if folder is None else folder) / name


def remove_left_overs(folder: Path) -> None:
    """Remove unfinished files and folders of dead jobs (names that `unfinished_path` makes) anywhere below `folder`.

    A job counts as dead if its file was not changed for a day. If the job ran on this machine, its process must be gone
    too.
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
    """Return the name of this machine, at most 32 letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:32]


def _is_running(process: int) -> bool:
    """Return whether a process with this number (pid) runs on this machine; always False on Windows, where asking would
    end it.
    """
    if os.name == "nt":  # os.kill would interrupt the process there
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user; a number that is too large for a process
        return True
    return True
