"""`analyze_models`: the head tables of many models as one dataset of parquet files, a file per model."""

import gc
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tlspectral.algebra.nulls import one_thread
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.columns import ANALYZE_MODELS
from tlspectral.heads.measure import NullSettings
from tlspectral.models.loading.finding import PACKAGED, find_source
from tlspectral.models.loading.source import Source
from tlspectral.tables import (
    HEAD_COLUMNS,
    PartFailure,
    WorkPart,
    backend_configured,
    finished_parts,
    named,
    open_parts,
    workers_kept,
    write_table,
)
from tlspectral.tables.work import stored_table
from tlspectral.version import __version__

_NO_LISTS = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth")
_WEIGHTS_AND_SETTINGS = (".safetensors", ".bin", ".json", ".model")
_DTYPES = {"index": "int64", "count": "int64"}  # by unit; other columns are labels or float64


@dataclass(frozen=True)
class _Entry:
    """A model of the list.

    Attributes:
        name: what `analyze_heads` is given; a path is absolute, because a worker can have another working directory.
        model: its name in tables.
        part: name of its file in the dataset, and of the one that says why it failed, without suffix.
        missing_part: the same while no file of this name is there, and it could be that of a hub model.
        files_state: hash of names, sizes and times of its files; None for a model of the hub or of a package.
    """

    name: str
    model: str
    part: str
    missing_part: str
    files_state: str | None


def analyze_models(
    models: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    null_draws: int = 300,
    null_dtype: Literal["float32", "float64"] = "float32",
    null_blocks: Literal["shared", "fresh"] = "shared",
    detectors: bool = True,
    backend: str = "auto",
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Write the head tables of many models as one parquet dataset, `folder/heads`, and return what failed.

    The dataset has a file per model and one schema for all: `model, revision, commit` and the columns of
    `analyze_heads`, NaN where a model has no such number. pandas, pyarrow, duckdb and polars read the folder;
    `read_table` reads one file with the `attrs` of its model. A model that fails stops nothing, and has a file in
    `folder/failures` that says why, until it succeeds. A second call leaves finished models alone, tries the failed
    ones again, and continues a model that is read from files at the layer where it stopped. Several jobs may write to
    one folder, with the same models or others: none touches what another is writing.

    Args:
        models: names or paths as for `load_model`, and text files that list such, one per line, with `#` comments. What
            is named twice is analysed once. With `detectors=False` and the automatic backend, folders and hub models
            are read layer by layer, as by `analyze_heads`.
        folder: an empty or new folder, or that of an earlier call with the same settings.
        null_draws, null_dtype, null_blocks: as for `analyze_heads`.
        detectors: as for `analyze_heads`.
        backend: of `load_model`.
        n_jobs: workers within a model, as for `analyze_heads`; one model follows another. Where the caller configured
            `joblib.parallel_config` and models are loaded whole (detectors, or a backend by name), the workers take a
            model each. The tables are the same for any number.
        seed: as for `analyze_heads`.

    Returns:
        DataFrame `model, error, message, raised_in`, a row per model that failed, in the order of `models`. Its
        `attrs["models"]` are all models of this call.

    Raises:
        IncompatibleCheckpoint: `folder` was made with other settings, or holds other files.
        ValueError: nothing is listed, a list is no text, `folder` is a file, or a setting that no model can have.
        OSError: a file cannot be written.

    Source: this package.

    What it does not establish: that heads of different models can be compared. Percentiles are within a model, and a
    row's `does_not_establish` says what else hangs on the model.
    """
    null = NullSettings(seed, null_draws, null_blocks, null_dtype)
    entries = _entries(models)
    folder = Path(os.path.abspath(folder))
    if folder.suffix == ".parquet" or folder.is_file():
        raise ValueError(f"{folder} is a file, and several models make a dataset: name a folder")
    settings = {**asdict(null), "detectors": detectors}
    described = {"what": "head tables of many models", "backend": backend, "tlspectral": __version__}
    part_folder = open_parts(folder, described | settings)
    (folder / "heads").mkdir(exist_ok=True)
    (folder / "failures").mkdir(exist_ok=True)
    shared_out = n_jobs != 1 and (detectors or backend != "auto") and backend_configured()
    inside = {"backend": backend, "n_jobs": 1 if shared_out else n_jobs} | settings
    parts = [
        WorkPart(
            f"heads/{entry.part}",
            partial(_model_table, entry, folder / "layers" / entry.part, shared_out, inside),
            partial(_require_same_files, entry, folder / "heads" / f"{entry.part}.parquet"),
        )
        for entry in entries
    ]
    by_part = {part.name: (entry, part) for entry, part in zip(entries, parts, strict=True)}
    failures: dict[str, PartFailure] = {}

    def failed(name: str, failure: PartFailure) -> None:
        entry, part = by_part[name]
        failures[entry.part] = failure
        file = folder / "failures" / f"{entry.part}.parquet"
        write_table(_failure_table([entry], failures), file, attrs_for_pandas=False)
        with suppress(IncompatibleCheckpoint):
            if stored_table(part, part_folder) is not None:  # another job finished the model as this one failed
                done(name)

    def done(name: str) -> None:
        entry, _ = by_part[name]
        failures.pop(entry.part, None)
        for part in (entry.part, entry.missing_part):
            (folder / "failures" / f"{part}.parquet").unlink(missing_ok=True)
        # A job that still reads these layers finds that the model is finished. Their common folder stays for others.
        shutil.rmtree(folder / "layers" / entry.part, ignore_errors=True)

    with workers_kept():
        finished_parts(
            parts,
            part_folder,
            description="models",
            unit="model",
            n_jobs=n_jobs if shared_out else 1,
            failed=failed,
            done=done,
        )
    return _failure_table(entries, failures)


def is_model_list(name: str | os.PathLike[str]) -> bool:
    """Return whether this is a file that lists models, and not a model."""
    path = Path(name).expanduser()
    return path.suffix.lower() not in _NO_LISTS and path.is_file()


def listed_models(models: Iterable[Any]) -> list[str]:
    """Return the entries, with those of a list file in its place.

    A list file has one entry per line. `#` begins a comment at the start of a line or after a space. Relative paths are
    those of the working directory. Raises ValueError for a file that is no text, a loaded model, or nothing.
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


def _entries(models: Iterable[str | os.PathLike[str]]) -> list[_Entry]:
    """Return each model once, in the order in which they are named first."""
    entries: dict[str, _Entry] = {}
    for name in listed_models(models):
        try:
            entry = _entry(name, find_source(name))
        except Exception:  # analyze_heads raises it again, where it is noted
            entry = _Entry(name, name, _missing_part(name), _missing_part(name), None)
        entries.setdefault(entry.part, entry)
    return list(entries.values())


def _entry(name: str, source: Source) -> _Entry:
    if source.kind in ("tiny", "hub") or name.lower() in PACKAGED:
        model = str(source.record["model"])
        part = _file_name(model, source.kind, source.location)
        return _Entry(name, model, part, _missing_part(name), None)
    path = Path(os.path.abspath(Path(name).expanduser()))
    files = [path] if source.kind == "gguf" else path.iterdir()
    state = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file() and file.suffix in (*_WEIGHTS_AND_SETTINGS, ".gguf")
    )
    real_path = os.path.realpath(path)  # two links to one folder are one model
    part = _file_name(os.path.basename(real_path), source.kind, real_path)
    return _Entry(str(path), str(path), part, _missing_part(name), hashlib.sha256(repr(state).encode()).hexdigest())


def _file_name(shown: str, kind: str, location: str) -> str:
    """Return a name of a file that no other model has."""
    readable = re.sub(r"[^\w.-]+", "--", shown).strip("-.")[-80:]
    return f"{readable}-{hashlib.sha256(f'{kind} {location}'.encode()).hexdigest()[:10]}"


def _missing_part(name: str) -> str:
    return _file_name(name, "hub", name)


def _require_same_files(entry: _Entry, file: Path, table: pd.DataFrame) -> None:
    if table.attrs["files_state"] != entry.files_state:
        raise IncompatibleCheckpoint(
            f"{file} was made before the files of {entry.model} were changed: remove it, or choose another folder"
        )


def _model_table(entry: _Entry, layers: Path, shared_out: bool, settings: dict[str, Any]) -> pd.DataFrame:
    """Return the rows of a model in the dataset. Layers that are read from files are stored in `layers` meanwhile."""
    given = dict(settings)
    backend = given.pop("backend")
    model: Any = entry.name
    if backend != "auto":
        from tlspectral.models.loading import load_model

        model = load_model(entry.name, backend=backend)
    elif not given["detectors"] and find_source(entry.name).streams:
        given["folder"] = layers
    try:
        with one_thread() if shared_out else nullcontext():
            heads = analyze_heads(model, **given)
    finally:
        del model
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded
    return _in_schema(heads, entry)


def _in_schema(heads: pd.DataFrame, entry: _Entry) -> pd.DataFrame:
    """Return the table with the columns and types that the files of all models have."""
    dtypes = {column.name: _DTYPES.get(column.unit, "float64") for column in HEAD_COLUMNS if column.unit != "label"}
    table = heads[[column.name for column in HEAD_COLUMNS]].astype(dtypes)
    table.insert(0, "model", entry.model)
    for place, name in ((1, "revision"), (2, "commit")):
        table.insert(place, name, pd.array([heads.attrs.get(name)] * len(heads), dtype="string"))
    meanings = {column.name: column.meaning for column in ANALYZE_MODELS["heads"].columns}
    table.attrs = {**heads.attrs, "columns": meanings, "files_state": entry.files_state}
    return named(table, ANALYZE_MODELS["heads"])


def _failure_table(entries: list[_Entry], failures: dict[str, PartFailure]) -> pd.DataFrame:
    rows = [
        (entry.model, failure.error, failure.message, failure.raised_in)
        for entry in entries
        if (failure := failures.get(entry.part)) is not None
    ]
    columns = [column.name for column in ANALYZE_MODELS["failures"].columns]
    table = pd.DataFrame(rows, columns=columns, dtype="string")
    table.attrs = {"models": [entry.model for entry in entries]}
    return named(table, ANALYZE_MODELS["failures"])
