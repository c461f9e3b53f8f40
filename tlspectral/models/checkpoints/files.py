"""`CheckpointFiles`: find and read the tensors of a checkpoint in safetensors files, in a folder or on the hub."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.loaders import Source
from tlspectral.models.loading.damage import read_json
from tlspectral.models.loading.hub import first_file, pinned
from tlspectral.models.loading.weight_files import (
    INDEX,
    WHOLE,
    indexed_files,
    names_in,
    refuse_adapter,
    require_indexed,
    require_one_kind,
    safetensors_file,
    weight_names,
)
from tlspectral.models.reading.digests import stored_bytes


class CheckpointFiles:
    """The safetensors files of a checkpoint, in a folder or on the hub.

    Only hub files with needed tensors are downloaded.

    Attributes:
        source: where the checkpoint is, a `Source`, fixed to one commit.
        config_folder: the folder with its config.json.
        record: origin that tables store, a dict.
        name: the checkpoint's name in messages.
        index: path of the index file, or None.
        file_of: dict from tensor name to the name of its file.

    Raises:
        FileNotFoundError, ValueError: the files do not exist, or the hub does not give them.
        BadWeights: the weights are stored only as pickles, the folder also holds an adapter, or files are damaged.
    """

    def __init__(self, source: Source):
        # Fixed to one commit, because a branch can change between two downloads.
        self.source, self.config_folder = pinned(source) if source.kind == "hub" else (source, Path(source.location))
        self.record, self.name = self.source.record, str(self.source.record["model"])
        refuse_adapter(self.config_folder, self.name)
        self.index: Path | None = None
        self.file_of = self._tensors()

    def stored(self, tensors: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a dict from tensor name to (type, shape) for the named `tensors`, read from file headers.

        The type has its name in safetensors, such as "BF16". Files of a hub model with these tensors are downloaded.
        Raises BadWeights for a damaged file, or if a file lacks a tensor that the index promises.
        """
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path, names in self._by_file(tensors).items():
            with safetensors_file(path) as file:
                held = set(file.keys())
                self._require_indexed({path.name: held})
                for name in names:
                    if name not in held:
                        raise BadWeights(f"{path} does not hold {name}, which {INDEX} says it does; fetch both again")
                    header = file.get_slice(name)
                    found[name] = str(header.get_dtype()), tuple(header.get_shape())
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return a dict from tensor name to shape, for all tensors in the files of a folder; {} for a hub model."""
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.file_of.values())) if self.source.kind == "folder" else ():
            if (path := self.config_folder / file).is_file():
                with safetensors_file(path) as opened:
                    found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        return found

    def read(self, tensors: Iterable[str]) -> dict[str, Tensor]:
        """Return a dict from name to tensor for the named `tensors`, as stored, on the CPU, memory-mapped: data are
        read when used.
        """
        values: dict[str, Tensor] = {}
        for path, names in self._by_file(tensors).items():
            with safetensors_file(path) as file:
                values |= {name: file.get_tensor(name) for name in names}
        return values

    def digest(self, tensors: Iterable[str]) -> str:
        """Return the SHA-256 (hex) of names and stored bytes of the named `tensors`, sorted by name."""
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(stored_bytes(self.read([name])[name]))
        return digest.hexdigest()

    def _by_file(self, tensors: Iterable[str]) -> dict[Path, list[str]]:
        """Return a dict from the path of a file to the names of the tensors in it, for the named `tensors`; files of a
        hub model are downloaded.
        """
        names: dict[Path, list[str]] = {}
        for tensor in tensors:
            names.setdefault(self._path(self.file_of[tensor]), []).append(tensor)
        return names

    def _tensors(self) -> dict[str, str]:
        """Return a dict from tensor name to file name, for all tensors of the checkpoint.

        Raises FileNotFoundError without weights, BadWeights if the weights are not safetensors or two files hold one
        tensor.
        """
        names = weight_names(read_json(self.config_folder / "config.json"))
        readable = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
        require_one_kind(self.config_folder, readable)
        listing = self._first(*readable)
        if listing is not None and listing.suffix == ".json":
            return self._indexed(listing)
        there = [] if self.source.kind == "hub" else sorted(path.name for path in self.config_folder.iterdir())
        files = [listing.name] if listing is not None else [file for file in there if file.endswith(".safetensors")]
        if files:
            return self._each_once(files)
        pickles = [file for file in there if file.endswith((".bin", ".pt", ".pth"))]
        missing = f"neither {INDEX} nor {WHOLE}"
        if not pickles and self.source.kind == "folder":
            raise FileNotFoundError(f"{self.name} holds no weights: {missing}")
        reason = f"its weights are in {pickles[0]}, a pickle" if pickles else f"{missing} is there"
        raise BadWeights(
            f"{self.name} has no safetensors ({reason}), and nothing else is read without loading the model: save it "
            "again by save_pretrained, or pass a loaded model"
        )

    def _indexed(self, index: Path) -> dict[str, str]:
        """Return a dict from tensor name to file name, from an index and from existing files with further tensors.

        Files of a hub model are not downloaded for this; `stored` compares the files that it opens. Raises BadWeights
        for a damaged index, or for files with different values of one tensor.
        """
        self.index, named = index, indexed_files(index)
        files = [] if self.source.kind == "hub" else sorted(set(named.values()))
        held = {file: names_in(path) for file in files if (path := self.config_folder / file).is_file()}
        self.file_of = named
        self._require_indexed(held)
        return {tensor: file for file, tensors in held.items() for tensor in tensors} | named

    def _require_indexed(self, held: Mapping[str, Iterable[str]]) -> None:
        """Raise BadWeights if files disagree with their index, if any, or hold different values of one tensor.

        held: from file name to the names of the tensors in it.
        """
        if self.index is not None:
            require_indexed(self.index, self.file_of, held, self._path)

    def _each_once(self, files: list[str]) -> dict[str, str]:
        """Return a dict from tensor name to file name, from safetensors files without an index.

        files: names of the files. Raises BadWeights if two files hold the same tensor.
        """
        found: dict[str, str] = {}
        for file in files:
            for tensor in names_in(self._path(file)):
                if tensor in found:
                    raise BadWeights(
                        f"{self.name}: {found[tensor]} and {file} both hold {tensor}, and no {INDEX} says which is the "
                        "model's; move the files of another model to another folder"
                    )
                found[tensor] = file
        return found

    def _path(self, file: str) -> Path:
        """Return the path of a file of weights, downloaded if needed. Raises BadWeights if it does not exist."""
        path = self._first(file)
        if path is None:
            raise BadWeights(f"{self.name}: {file}, which {INDEX} names, is not there; fetch the safetensors again")
        return path

    def _first(self, *files: str) -> Path | None:
        """Return the path of the first of these files that exists, downloaded for a hub model if needed; or None."""
        if self.source.kind == "hub":
            return first_file(self.source, files)
        paths = [self.config_folder / file for file in files]
        return next((path for path in paths if path.is_file()), None)
