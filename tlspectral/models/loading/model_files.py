"""Which files a model on disk is made of, what tells one state of them from another, and names of files for it."""

import hashlib
import re
from pathlib import Path

from tlspectral.models.loaders import Source

# What a model and its tokenizer are made of. Other files beside the weights do not make it another model.
_MODEL_FILE = re.compile(
    r".*\.(safetensors|bin|pt|pth|model|index\.json)|((adapter_|spectral_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab|tekken)"
    r"\.json|(merges|vocab)\.txt"
)
_READ_AT_ONCE = 1 << 24  # bytes


def model_files(source: Source) -> list[Path]:
    """Return the files of a model on disk, sorted by name; a GGUF file in parts has them in order."""
    if source.parts:
        return list(source.parts)
    files = Path(source.location).iterdir()
    return sorted(file for file in files if _MODEL_FILE.fullmatch(file.name) and file.is_file())


def file_name(shown: str, identity: str) -> str:
    """Return a readable name of a file, without suffix, that nothing of another identity has."""
    readable = re.sub(r"[^\w.-]+", "--", shown).strip("-.")[-80:]
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def files_state(source: Source) -> str:
    """Hash names, sizes and times of a model's files, without reading them."""
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model_files(source)]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def files_digest(source: Source) -> str:
    """Hash names and contents of a model's files."""
    digest = hashlib.sha256()
    for file in model_files(source):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()
