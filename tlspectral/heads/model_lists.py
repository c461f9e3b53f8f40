"""Lists of models: names, folders, GGUF files, and text files that hold such entries, one per line."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OTHER_FILES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth")


def is_model_list(name: str | os.PathLike[str]) -> bool:
    """Return whether this is a file that lists models, and not a model."""
    path = Path(name).expanduser()
    return path.suffix.lower() not in _OTHER_FILES and path.is_file()


def listed_models(models: Iterable[Any]) -> list[str]:
    """Return the entries, with those of a list file in its place.

    A list file has one entry per line. `#` begins a comment at the start of a line or after a space. Relative paths are
    those of the working directory.

    Raises:
        ValueError: a file is no text, an entry is a loaded model, or nothing is listed.
    """
    given = [models] if isinstance(models, str | os.PathLike) else list(models)
    names: list[str] = []
    for entry in given:
        if not isinstance(entry, str | os.PathLike):
            raise ValueError(
                f"found an object of type {type(entry).__name__} among the models: give names or paths; analyze_heads "
                "takes a loaded model"
            )
        names += _lines(Path(entry).expanduser()) if is_model_list(entry) else [os.fspath(entry)]
    if not names:
        raise ValueError(f"no models are listed in {', '.join(map(str, given)) or 'an empty list'}: name at least one")
    return names


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is neither a .gguf file nor a text file that lists models, one per line ({error.reason})"
        ) from error
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
