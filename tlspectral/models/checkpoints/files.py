"""Where a checkpoint's tensors lie, in a folder or on the hub, and the tensors themselves, mapped from their files."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.attention import stored_bytes
from tlspectral.models.loading.hub import first_file, pinned
from tlspectral.models.loading.source import Source
from tlspectral.models.loading.weight_files import INDEX, WHOLE, indexed_files


class StoredTensor(NamedTuple):
    """What a file's header says of a tensor: its type in safetensors' words (`"BF16"`), and its shape."""

    dtype: str
    shape: tuple[int, ...]


class CheckpointFiles:
    """The safetensors files of a checkpoint. Of a hub model, only the files that are asked for are fetched.

    Raises:
        FileNotFoundError, ValueError: there are no such files, or the hub does not give them.
        BadWeights: the weights are there as pickles only, or the files cannot be read.
    """

    def __init__(self, source: Source):
        # One commit: a branch may move on between one file and the next.
        self.source = pinned(source) if source.kind == "hub" else source
        self._at: dict[str, Path] = {}
        config = self._first(["config.json"])
        if config is None:
            raise FileNotFoundError(f"{self.name} has no config.json, so it is not a checkpoint")
        self.config_folder = config.parent
        self.file_of = self._tensors()

    @property
    def name(self) -> str:
        """What messages call the checkpoint."""
        return str(self.source.record["model"])

    @property
    def record(self) -> dict[str, Any]:
        """What a table's provenance keeps: model, revision and, of a hub model, the commit."""
        return dict(self.source.record)

    def config_digest(self) -> str:
        """SHA-256 of config.json."""
        return hashlib.sha256((self.config_folder / "config.json").read_bytes()).hexdigest()

    def fetch(self, tensors: Iterable[str]) -> None:
        """Bring the files that hold these tensors to the disk. Raises as the class."""
        for file in sorted({self.file_of[tensor] for tensor in tensors}):
            self._path(file)

    def stored(self, tensors: Iterable[str]) -> dict[str, StoredTensor]:
        """Types and shapes, from the files' headers alone.

        Raises:
            BadWeights: a file is cut off or damaged, or does not hold a tensor that the index promises.
        """
        found: dict[str, StoredTensor] = {}
        for path, names in self._by_file(tensors).items():
            with _opened(path) as file:
                held = set(file.keys())
                for name in names:
                    if name not in held:
                        raise BadWeights(f"{path} does not hold {name}, which {INDEX} says it does")
                    piece = file.get_slice(name)
                    found[name] = StoredTensor(str(piece.get_dtype()), tuple(piece.get_shape()))
        return found

    def read(self, tensors: Iterable[str]) -> dict[str, Tensor]:
        """The tensors as stored, mapped from their files: their pages are read when they are used, and not copied.

        Raises:
            BadWeights: a file is cut off or damaged.
        """
        found: dict[str, Tensor] = {}
        for path, names in self._by_file(tensors).items():
            with _opened(path) as file:
                found |= {name: file.get_tensor(name) for name in names}
        return found

    def digest(self, tensors: Iterable[str]) -> str:
        """SHA-256 of names and bytes of tensors, as stored, in the order of their names."""
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(stored_bytes(self.read([name])[name]))
        return digest.hexdigest()

    def _by_file(self, tensors: Iterable[str]) -> dict[Path, list[str]]:
        names: dict[Path, list[str]] = {}
        for tensor in tensors:
            names.setdefault(self._path(self.file_of[tensor]), []).append(tensor)
        return names

    def _tensors(self) -> dict[str, str]:
        """The file that holds each tensor."""
        found = self._first([INDEX, WHOLE])
        if found is None and self.source.kind == "folder":
            files = sorted(path.name for path in Path(self.source.location).glob("*.safetensors"))
            if files:
                return {tensor: file for file in files for tensor in _names_in(self._path(file))}
        if found is None:
            raise self._without_safetensors()
        if found.name != INDEX:
            return dict.fromkeys(_names_in(found), WHOLE)
        return indexed_files(found)

    def _without_safetensors(self) -> Exception:
        pickles: list[str] = []
        if self.source.kind == "folder":
            folder = Path(self.source.location)
            pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
            if not pickles:
                return FileNotFoundError(f"{self.name} holds no weights: neither {INDEX} nor {WHOLE}")
        what = f"its weights are in {pickles[0]}, a pickle" if pickles else f"neither {INDEX} nor {WHOLE} is there"
        return BadWeights(
            f"{self.name} has no safetensors ({what}), and nothing else is read without loading the model: save it "
            "again by save_pretrained, or pass a loaded model"
        )

    def _path(self, file: str) -> Path:
        found = self._first([file])
        if found is None:
            raise BadWeights(f"{self.name}: {file}, which {INDEX} names, is not there; fetch the safetensors again")
        return found

    def _first(self, files: list[str]) -> Path | None:
        """The first of these files that exists; of a hub model, from the cache if it is there."""
        for file in files:
            if file in self._at:
                return self._at[file]
        found = first_file(self.source, files) if self.source.kind == "hub" else self._in_folder(files)
        if found is not None:
            self._at[found.name] = found
        return found

    def _in_folder(self, files: list[str]) -> Path | None:
        paths = [Path(self.source.location) / file for file in files]
        return next((path for path in paths if path.is_file()), None)


def _names_in(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{path} cannot be read as safetensors ({error}); fetch it again") from error
