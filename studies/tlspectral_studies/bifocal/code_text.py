"""PyTorch's own source as text (BA, section 5.2): the .py files of the installed package, split by file."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

_HELD_OUT_SHARE = 10  # one file of so many is held out


def source_files(package: str = "torch") -> dict[str, list[Path]]:
    """List the package's .py files, `train` and `held_out`, each in the order of a hash of the path inside the package.

    A file is held out if 10 divides that hash. So the split depends on no random number, and a file stays on its side
    from version to version.

    Raises:
        ValueError: the package is not installed as a folder of files.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package!r} is not installed as a package of files")
    folder = Path(next(iter(spec.submodule_search_locations)))
    split: dict[str, list[Path]] = {"train": [], "held_out": []}
    hashes = {path: _hash(path.relative_to(folder).as_posix()) for path in folder.rglob("*.py")}
    for path in sorted(hashes, key=lambda path: hashes[path]):
        split["train" if hashes[path] % _HELD_OUT_SHARE else "held_out"].append(path)
    return split


def code_rows(
    tokenizer: Any, files: list[Path], n_rows: int, *, length: int, start_token: int, seed: int = 0
) -> Int64[Tensor, "rows pos"]:
    """Take a row of tokens, at a random position, from each of the first files that are long enough.

    Args:
        tokenizer: of the model.
        files: in the order in which they are taken.
        n_rows: rows, and so files.
        length: tokens of a row, the start token included.
        start_token: opens each row.
        seed: of the positions.

    Raises:
        ValueError: fewer files are long enough.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    for path in files:
        if len(rows) == n_rows:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) < length - 1:
            continue
        first = int(torch.randint(0, len(ids) - length + 2, (1,), generator=generator))
        rows.append([start_token, *ids[first : first + length - 1]])
    if len(rows) < n_rows:
        raise ValueError(
            f"{len(rows)} of {len(files)} files have {length - 1} tokens, but {n_rows} rows were asked for: "
            "ask for fewer or shorter rows"
        )
    return torch.tensor(rows, dtype=torch.int64)


def _hash(path: str) -> int:
    return int(hashlib.sha256(path.encode()).hexdigest(), 16)
