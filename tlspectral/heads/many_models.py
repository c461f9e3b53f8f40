"""`analyze_models`: the head tables of many models as one dataset of parquet files, a file per model."""

from __future__ import annotations

import gc
import math
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
from tlspectral.errors import IncompatibleCheckpoint, MissingParts
from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.detectors.heads import require_max_se
from tlspectral.heads.weight_columns import NullSettings
from tlspectral.models.loading.finding import PACKAGED, find_source
from tlspectral.models.loading.weight_files import file_name, files_state, model_files
from tlspectral.models.running.text import NEWLINE
from tlspectral.tables import write_table
from tlspectral.tables.head_columns import HEAD_COLUMNS, LATENT_COLUMNS
from tlspectral.tables.job import Job, JobFailure
from tlspectral.tables.measurement import Measurement, backend_configured, stored_table, workers_kept
from tlspectral.tables.schema import Schema, columns
from tlspectral.version import __version__

_TABLES = (".parquet", ".csv")
_NO_LISTS = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth")
_DTYPES = {column.name: column.dtype for column in HEAD_COLUMNS if column.unit != "label"}

_MODEL = columns("model | label | Name of the model: hub id, absolute path, or name of a packaged model.")
_MADE_BY = "`tlspectral.heads.analyze_models`; `tlspectral analyze A B -o FOLDER` writes it, a file per model"
ANALYZE_MODELS_HEADS = Schema(
    "analyze_models.heads",
    (
        *_MODEL,
        *columns("""
            revision | label | Branch, tag or commit that was asked for; missing where none was.
            commit   | label | Commit of the hub that the files are of; missing for other models.
        """),
        *HEAD_COLUMNS,
        *LATENT_COLUMNS,
    ),
    _MADE_BY,
)
ANALYZE_MODELS_FAILURES = Schema(
    "analyze_models.failures",
    (
        *_MODEL,
        *columns("""
            error     | label | Type of the error that the model ended with.
            message   | label | What the error said.
            raised_in | label | File, line and function that raised the error.
        """),
    ),
    f"{_MADE_BY} that failed",
)


@dataclass(frozen=True)
class _Entry:
    """A model of the list, and its name in tables.

    Attributes:
        name: what `analyze_heads` is given; a path is absolute, because a worker can have another working directory.
        part: name of its file in the dataset, and of the one that says why it failed, without suffix.
        missing_part: the same while no file of this name is there, and it could be a hub model's.
        files_state: of its files on disk; None for a model of the hub or of a package.
        size: bytes on disk, by which models are ordered; infinite of a model of the hub, whatever its cache holds.
    """

    name: str
    model: str
    part: str
    missing_part: str
    files_state: str | None = None
    size: float = math.inf


def analyze_models(
    models: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    null_draws: int = 100,
    null_dtype: Literal["float32", "float64"] = "float32",
    detectors: bool = True,
    max_se: float | None = 0.02,
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Write the head tables of many models as one parquet dataset, `folder/heads`, and return what failed.

    The dataset has a file per model and one schema for all: `model, revision, commit` and the columns of
    `analyze_heads`, NaN where a model has no such number. pandas, pyarrow, duckdb and polars read the folder;
    `read_table` reads one file with the `attrs` of its model. A model that fails stops nothing, and has a file in
    `folder/failures` that says why, until it succeeds. A second call leaves finished models alone, tries the failed
    ones again, and continues a model that is read from files at the layer where it stopped. Several jobs may write to
    one folder, with the same models or others: none touches what another is writing. Models of the hub come first,
    then the largest files.

    Args:
        models: names or paths as for `load_model`, and text files that list such, one per line, with `#` comments. What
            is named twice is analysed once. With `detectors=False` folders and hub models are read layer by layer,
            as by `analyze_heads`.
        folder: an empty or new folder, or the folder of an earlier call with the same settings.
        null_draws, null_dtype, detectors, max_se: as for `analyze_heads`.
        n_jobs: workers within a model, as for `analyze_heads`; one model follows another. Where the caller configured
            `joblib.parallel_config` and models are loaded for detectors, the workers take a model each. The tables are
            the same for any number.
        seed: as for `analyze_heads`.

    Returns:
        DataFrame with a row per model that failed, in the order of `models`. Columns of `analyze_models.failures`:
        `model, error, message, raised_in`. Its `attrs["models"]` are all models of this call.

    Raises:
        IncompatibleCheckpoint: `folder` was made with other settings, or holds other files.
        ValueError: nothing is listed, a list is no text, `folder` is a file, or a setting that no model can have.
        OSError: a file cannot be written.

    Source: this package.

    What it does not establish: that heads of different models can be compared. Percentiles are within a model, and
    `does_not_establish` of a column says what else hangs on the model. A model's name does not say which weights these
    were: `weights_sha256` in the attrs of its file does.
    """
    null = NullSettings(seed, null_draws, "shared", null_dtype)
    entries: dict[str, _Entry] = {}
    for entry in map(_entry, listed_models(models)):
        entries.setdefault(entry.part, entry)
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.suffix.lower() in _TABLES or folder.is_file():
        raise ValueError(f"{folder} is a file, and several models make a dataset: name a folder")
    shared_out = n_jobs != 1 and detectors and backend_configured()
    require_max_se(max_se)
    settings = {**asdict(null), "detectors": detectors, "max_se": max_se}
    identity = {"tlspectral": __version__}
    measurement = Measurement(ANALYZE_MODELS_HEADS, settings, {}, identity, folder, n_jobs=n_jobs if shared_out else 1)
    kept = measurement.kept
    for kind in ("heads", "failures"):
        (folder / kind).mkdir(exist_ok=True)
    inside = {"n_jobs": 1 if shared_out else n_jobs, **settings}
    parts = {
        part: Job(
            f"heads/{part}",
            partial(_model_table, entry, folder / "layers" / part, shared_out, inside),
            partial(_require_same_files, entry, folder / "heads" / f"{part}.parquet"),
        )
        for part, entry in sorted(entries.items(), key=lambda item: -item[1].size)  # the last to end is a small one
    }
    failures: dict[str, JobFailure] = {}

    def failed(name: str, failure: JobFailure) -> None:
        part = name.removeprefix("heads/")
        failures[part] = failure
        table = _failure_table([entries[part]], failures)
        write_table(table, folder / "failures" / f"{part}.parquet", attrs_for_pandas=False)
        with suppress(IncompatibleCheckpoint):
            if stored_table(parts[part], kept) is not None:  # another job finished the model as this one failed
                done(name)

    def done(name: str) -> None:
        part = name.removeprefix("heads/")
        failures.pop(part, None)
        for failure in (part, entries[part].missing_part):
            (folder / "failures" / f"{failure}.parquet").unlink(missing_ok=True)
        # A job that still reads these layers finds that the model is finished. Their common folder stays for others.
        shutil.rmtree(folder / "layers" / part, ignore_errors=True)

    with workers_kept():
        try:
            measurement.made(list(parts.values()), description="models", unit="model", failed=failed, done=done)
        except MissingParts:
            if not failures:
                raise
    return _failure_table(entries.values(), failures)


def is_model_list(name: str | os.PathLike[str]) -> bool:
    """Return whether this is a file that lists models, and not a model."""
    path = Path(name).expanduser()
    return path.suffix.lower() not in _NO_LISTS and path.is_file()


def listed_models(models: Iterable[Any]) -> list[str]:
    """Return the entries, with the entries of a list file in its place.

    A list file has one entry per line. `#` begins a comment at the start of a line or after a space. Relative paths are
    taken from the working directory. Raises ValueError for a file that is no text, a loaded model, or nothing.
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
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in NEWLINE.split(text))
    return [line for line in lines if line]


def _entry(name: str) -> _Entry:
    missing_part = file_name(name, f"hub {name}")
    try:
        source = find_source(name)
        if source.kind in ("tiny", "hub") or name.lower() in PACKAGED:
            model = str(source.record["model"])
            part = file_name(model, f"{source.kind} {source.location}")
            return _Entry(name, model, part, missing_part, size=0.0 if source.kind == "tiny" else math.inf)
        path = os.path.abspath(Path(name).expanduser())
        real_path = os.path.realpath(path)  # two links to one folder are one model
        part = file_name(os.path.basename(real_path), f"{source.kind} {real_path}")
        size = float(sum(file.stat().st_size for file in model_files(source)))
        return _Entry(path, path, part, missing_part, files_state(source), size)
    except Exception:  # analyze_heads raises it again, where it is noted
        return _Entry(name, name, missing_part, missing_part)


def _require_same_files(entry: _Entry, file: Path, table: pd.DataFrame) -> None:
    if table.attrs["files_state"] != entry.files_state:
        raise IncompatibleCheckpoint(
            f"{file} was made before the files of {entry.model} were changed: remove it, or choose another folder"
        )


def _model_table(entry: _Entry, layers: Path, shared_out: bool, given: dict[str, Any]) -> pd.DataFrame:
    """Return the rows of a model in the dataset. Layers that are read from files are stored in `layers` meanwhile."""
    if not given["detectors"] and find_source(entry.name).streams:
        given = {**given, "folder": layers}
    try:
        with one_thread() if shared_out else nullcontext():
            heads = analyze_heads(entry.name, **given)
    finally:
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded
    origin = {name: pd.array([heads.attrs.get(name)] * len(heads), dtype="string") for name in ("revision", "commit")}
    meanings = {column.name: column.meaning for column in ANALYZE_MODELS_HEADS.columns}
    # The files of all models have the same types.
    return ANALYZE_MODELS_HEADS.frame(
        heads.astype(_DTYPES).assign(model=entry.model, **origin),
        {"columns": meanings, "files_state": entry.files_state},
    )


def _failure_table(entries: Iterable[_Entry], failures: dict[str, JobFailure]) -> pd.DataFrame:
    rows = [{"model": entry.model, **asdict(failures[entry.part])} for entry in entries if entry.part in failures]
    names = [column.name for column in ANALYZE_MODELS_FAILURES.columns]
    table = pd.DataFrame(rows, columns=names, dtype="string")
    return ANALYZE_MODELS_FAILURES.frame(table, {"models": [entry.model for entry in entries]})
