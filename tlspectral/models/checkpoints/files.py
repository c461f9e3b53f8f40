"""The safetensors files of a checkpoint, in a folder or on the hub: which holds which tensor, and reading them."""

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
    """The safetensors files of a checkpoint. From a hub only the files that are asked for are fetched.

    `record` is the provenance that tables store, and `name` the checkpoint's name in messages.

    Raises:
        FileNotFoundError, ValueError: there are no such files, or the hub does not give them.
        BadWeights: the weights are stored as pickles only, an adapter lies beside them, or the files cannot be read.
    """

    def __init__(self, source: Source):
        # Pinned to one commit: a branch may move on between one file and the next.
        self.source, self.config_folder = pinned(source) if source.kind == "hub" else (source, Path(source.location))
        self.record, self.name = self.source.record, str(self.source.record["model"])
        refuse_adapter(self.config_folder, self.name)
        self.index: Path | None = None
        self.file_of = self._tensors()

    def stored(self, tensors: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type (as safetensors writes it, `"BF16"`) and shape of tensors, from the files' headers alone.

        Raises BadWeights for a file that is damaged, or does not hold a tensor that the index promises.
        """
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path, names in self._by_file(tensors).items():
            with safetensors_file(path) as file:
                held = set(file.keys())
                self._require_indexed({path.name: held})
                for name in names:
                    if name not in held:
                        raise BadWeights(f"{path} does not hold {name}, which {INDEX} says it does")
                    header = file.get_slice(name)
                    found[name] = str(header.get_dtype()), tuple(header.get_shape())
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors in the files of a folder that are there; of a hub model none."""
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.file_of.values())) if self.source.kind == "folder" else ():
            if (path := self.config_folder / file).is_file():
                with safetensors_file(path) as opened:
                    found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        return found

    def read(self, tensors: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors as stored, mapped from their files: a page is read when it is used. Nothing is copied."""
        values: dict[str, Tensor] = {}
        for path, names in self._by_file(tensors).items():
            with safetensors_file(path) as file:
                values |= {name: file.get_tensor(name) for name in names}
        return values

    def digest(self, tensors: Iterable[str]) -> str:
        """Return the SHA-256 of names and bytes of tensors, as stored, in the order of their names."""
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
        """Return the file of each tensor by an index, and of tensors that the index does not name, by the files.

        Shards of a hub model are not fetched for it: `stored` compares those that it opens. Raises BadWeights as
        `require_indexed`.
        """
        self.index, named = index, indexed_files(index)
        files = [] if self.source.kind == "hub" else sorted(set(named.values()))
        held = {file: names_in(path) for file in files if (path := self.config_folder / file).is_file()}
        self.file_of = named
        self._require_indexed(held)
        return {tensor: file for file, tensors in held.items() for tensor in tensors} | named

    def _require_indexed(self, held: Mapping[str, Iterable[str]]) -> None:
        if self.index is not None:
            require_indexed(self.index, self.file_of, held, self._path)

    def _each_once(self, files: list[str]) -> dict[str, str]:
        """Return the file of each tensor. Raises BadWeights for one that two files hold."""
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
        path = self._first(file)
        if path is None:
            raise BadWeights(f"{self.name}: {file}, which {INDEX} names, is not there; fetch the safetensors again")
        return path

    def _first(self, *files: str) -> Path | None:
        """Return the first of these files that exists; of a hub model, from the cache where it is cached."""
        if self.source.kind == "hub":
            return first_file(self.source, files)
        paths = [self.config_folder / file for file in files]
        return next((path for path in paths if path.is_file()), None)
