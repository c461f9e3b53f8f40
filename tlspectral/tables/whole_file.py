"""Write a file so that it is there either complete or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to; the file there replaces `path` when the block ends without an error.

    Args:
        path: path of the finished file. A link is followed: the file it names is replaced.

    Yields:
        A path in the same folder with the same suffix. If the block raises, interrupts included, that file is removed
        and the file at `path`, if there is one, stays as it was.

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist, make it first")
    # tempfile would make the file readable by its owner only, and os.replace would keep that.
    partial = target.with_name(f".{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
