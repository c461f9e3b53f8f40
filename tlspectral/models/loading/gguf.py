"""Convert GGUF files, whole or in parts, to float32 checkpoint folders, which are kept in the hub's cache.

transformers reads a file of 135 million weights in about ten seconds, and its copy in one second. A copy is written to
a temporary folder and then renamed, so it is complete or absent. If two processes convert one file, one copy stays.

The last file of a copy lists size, time and SHA-256 of its files. Every load compares sizes and times. A file with
another time, such as after a move of the cache, is compared by its SHA-256. A copy that does not fit is made again.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlspectral.errors import BadWeights, require_package
from tlspectral.models.loaders import Source
from tlspectral.models.loading.checks import require_filled
from tlspectral.models.loading.damage import check_counts, empty_model, from_files, quiet, refusing, require_room
from tlspectral.tables.atomic_writes import remove_left_overs, unfinished_path, whole_file

_FORMAT = 2  # part of a copy's folder name: raise it when conversion writes something else
_LIST = "files.json"
_LONGEST_LIST = 2**22  # more entries than any vocabulary or list of merges has
_CONVERTING = threading.Lock()  # two conversions would put each other's readers back


def cache_folder() -> Path:
    """Return the folder that holds the float32 copies of all GGUF files; `HF_HOME` and `HF_ASSETS_CACHE` move it."""
    from huggingface_hub import cached_assets_path, constants

    return cached_assets_path("tlspectral", "gguf", assets_dir=constants.HF_ASSETS_CACHE)


def converted_folder(source: Source) -> tuple[Path, str]:
    """Return (folder of a GGUF file's float32 copy, SHA-256 of the GGUF file). The copy is written to the cache if it
    is missing.

    source: the `Source` of the GGUF file. Raises BadWeights for a damaged file, ImportError if a package is missing.
    """
    hasher, name = hashlib.sha256(), source.record["file"]
    for block in _blocks(source):
        hasher.update(block)
    digest = hasher.hexdigest()
    if source.sha256 not in (None, digest):
        raise BadWeights(
            f"The {len(source.parts)} parts of {name} do not make that file (SHA-256 {digest}, not {source.sha256}); "
            "install the packages that ship them again, all in one version."
        )
    folder = cache_folder() / f"{digest[:32]}-{_FORMAT}"
    if _fits(folder):
        return folder, digest
    require_package("gguf", f"Reading {name}", "gguf")
    remove_left_overs(folder.parent)
    partial, (file, *more) = unfinished_path(folder), source.parts
    partial.mkdir()
    try:
        if more:
            file = partial / "whole.gguf"
            with file.open("wb") as stream:
                stream.writelines(_blocks(source))
        convert(source, file, partial / "copy")
        _write_list(partial / "copy", _described(partial / "copy"))
        if folder.is_dir() and not _fits(folder):
            os.rename(folder, partial / "damaged")
        try:
            os.rename(partial / "copy", folder)
        except OSError:
            if not _fits(folder):  # otherwise another process converted the same weights first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, digest


def _fits(folder: Path) -> bool:
    """Return True if a converted copy exists in this folder and fits its list of sizes, times and hashes.

    Files with another time are compared by hash; if they agree, the new times are written to the list.
    """
    try:
        listed = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        states = {name: (folder / name).stat() for name in listed}
        if not listed or any(state.st_size != listed[name]["size"] for name, state in states.items()):
            return False
        moved = [name for name, state in states.items() if state.st_mtime_ns != listed[name]["time"]]
        if any(_sha256(folder / name) != listed[name]["sha256"] for name in moved):
            return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no copy, no list of files, or a damaged list
        return False
    if moved:
        with contextlib.suppress(OSError):  # a read-only cache is hashed at every load
            _write_list(folder, listed | {name: listed[name] | {"time": states[name].st_mtime_ns} for name in moved})
    return True


def _described(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a dict from name of each file in a folder to its `size` in bytes, `time` of change in ns, and `sha256`."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return {
        file.name: {"size": file.stat().st_size, "time": file.stat().st_mtime_ns, "sha256": _sha256(file)}
        for file in files
    }


def _write_list(folder: Path, described: dict[str, dict[str, Any]]) -> None:
    """Write `described`, as `_described` returns it, into a copy's folder as the JSON file files.json."""
    with whole_file(folder / _LIST) as partial:
        partial.write_text(json.dumps(described, indent=1), encoding="utf-8")


def _sha256(file: Path) -> str:
    """Return the SHA-256 (hex) of a file's content."""
    with file.open("rb") as stream:
        hasher = hashlib.sha256()
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _blocks(source: Source) -> Iterator[bytes]:
    """Yield the bytes of the GGUF file `source`, or of all its parts in order, a MiB at a time."""
    for part in source.parts:
        with part.open("rb") as stream:
            while block := stream.read(1 << 20):
                yield block


def convert(source: Source, file: Path, folder: Path) -> None:
    """Write a GGUF file as a checkpoint folder: float32 weights, config and tokenizer.

    source: names the model in messages. file: the whole GGUF file. folder: the folder to write. Raises BadWeights for a
    damaged file.
    """
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name}
    with refusing(f"{file} cannot be converted; fetch it again"):
        reader = _checked_reader(file)
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
        # A bar of the conversion ignores transformers' own setting for bars.
        with quiet(), contextlib.redirect_stderr(io.StringIO()), _read_once(file, reader):
            config = from_files(transformers.AutoConfig.from_pretrained, source, file.parent, **options)
            require_room(empty_model(config, tensors=len(reader.tensors), file=str(file)), elements, str(file))
            options["dtype"], auto = torch.float32, transformers.AutoModelForCausalLM
            model, report = from_files(
                auto.from_pretrained, source, file.parent, config=config, output_loading_info=True, **options
            )
            tokenizer = from_files(transformers.AutoTokenizer.from_pretrained, source, file.parent, gguf_file=file.name)
        require_filled(report, model, str(file))
        # The weights are plain float32 now, but the model is still marked as quantised, which prevents saving.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def _checked_reader(file: Path) -> Any:
    """Return a `GGUFReader` of the package `gguf` that has read the header of a file.

    The package builds a list entry for every item that the header promises. Raises ValueError if the header promises
    more than the file holds, BadWeights if it asks for too many layers or heads.
    """
    import gguf

    class WithinFile(gguf.GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, *order: Any, **options: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("its header promises more than the file holds")
            return super()._get(offset, dtype, count, *order, **options)

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY and self._get(orig_offs + 4, np.uint64)[0] > _LONGEST_LIST:
                raise ValueError("its header promises a list longer than any vocabulary")
            return super()._get_field_parts(orig_offs, raw_type)

    reader = WithinFile(file)
    settings = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    check_counts(settings, str(file))
    return reader


@contextlib.contextmanager
def _read_once(file: Path, reader: Any) -> Iterator[None]:
    """Let transformers use the `GGUFReader` `reader` of the file, and a cached map of tensor names, until the `with`
    block ends.

    Otherwise transformers reads the header three times, which takes seconds each, and makes the map for every module.
    """
    import gguf

    def reader_of(path: Any, *given: Any, **options: Any) -> Any:
        return reader if Path(path) == file else real_reader(path, *given, **options)

    with _CONVERTING:
        real_reader, real_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = reader_of, functools.cache(real_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = real_reader, real_map
