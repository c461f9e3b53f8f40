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
from tlspectral.errors.settings import checked_settings, require_path
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
    """One model of the list, and its names in tables and folders.

    Attributes:
        name: name or path for `analyze_heads`. A path is absolute, because workers can have another working directory.
        model: name in the column `model`.
        part: file name, without suffix, of its table in `heads` and of its error in `failures`.
        missing_part: the file name that the model has while no file of this name exists (it may then be a hub model).
        files_state: state of its files on disk; None for a hub model or a packaged model.
        size: bytes on disk, for the order of work; infinite for a hub model, even if it is in the cache.
    """

    name: str
    model: str
    part: str
    missing_part: str
    files_state: str | None = None
    size: float = math.inf


@checked_settings
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
    """Write the head tables of many models as one parquet dataset, `folder/heads`, and return the models that failed.

    Use it for more than a few models. A model that fails does not stop the rest; a second call tries only the missing
    ones.

    >>> import tempfile, pandas as pd, tlspectral as tls
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     models = ["tiny-rope", "tiny-ape"]
    ...     failed = tls.heads.analyze_models(models, folder, null_draws=2, detectors=False)
    ...     len(failed), len(pd.read_parquet(f"{folder}/heads"))
    (0, 16)

    Args:
        models: names or paths as for `load_model`, and text files that list them, one per line, with `#` comments. With
            `detectors=False`, folders and hub models are read layer by layer without loading.
        folder: an empty or new folder, or the folder of an earlier call with the same settings.
        null_draws: random matrices per head, the null of the spectrum; 2 or more.
        null_dtype: precision of the null's eigenvalues, "float32" (used where its rounding does not matter) or
            "float64".
        detectors: True also runs each model on 200 random sequences with a repeated segment, for attention scores.
        max_se: these runs stop early once all standard errors are below it. None: all sequences are run.
        n_jobs: threads (or processes, for models read from files) within a model. Inside `joblib.parallel_config`, if
            models are loaded for detectors, each worker takes one model. The tables do not depend on it.
        seed: seed of the null and of the sequences.

    Returns:
        DataFrame with a row per model that failed, in the order of `models`. Columns of `analyze_models.failures`:
        `model, error, message, raised_in`. `attrs["models"]` lists all models of this call. On disk: `folder/heads` has
        a file per model, a row per head, with columns `model, revision, commit` and the columns of `analyze_heads`;
        `folder/failures` has a file per model that failed.

    Raises:
        IncompatibleCheckpoint: `folder` was made with other settings, or holds other files.
        ValueError: `models` is empty, a list is not text, `folder` is a file, or a setting is not valid.
        OSError: a file cannot be written.

    Not established: that heads of different models can be compared. Percentiles are within a model. More:
    docs/scale.md.
    """
    null = NullSettings(seed, null_draws, "shared", null_dtype)
    entries: dict[str, _Entry] = {}
    for entry in map(_entry, listed_models(models)):
        entries.setdefault(entry.part, entry)
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.suffix.lower() in _TABLES or folder.is_file():
        raise ValueError(f"{folder} is the name of a file, but several models are written to a folder: give a folder")
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
        # Large models first: otherwise one worker would end long after the rest.
        for part, entry in sorted(entries.items(), key=lambda item: -item[1].size)
    }
    failures: dict[str, JobFailure] = {}

    def failed(name: str, failure: JobFailure) -> None:
        """Write the error of a model to `folder/failures` and keep it in `failures`; `name` is the name of its job,
        "heads/<part>".
        """
        part = name.removeprefix("heads/")
        failures[part] = failure
        table = _failure_table([entries[part]], failures)
        write_table(table, folder / "failures" / f"{part}.parquet", attrs_for_pandas=False)
        with suppress(IncompatibleCheckpoint):
            if stored_table(parts[part], kept) is not None:  # another process has finished this model
                done(name)

    def done(name: str) -> None:
        """Remove the stored errors and the unfinished layers of a model that is finished; `name` is the name of its
        job.
        """
        part = name.removeprefix("heads/")
        failures.pop(part, None)
        for failure in (part, entries[part].missing_part):
            (folder / "failures" / f"{failure}.parquet").unlink(missing_ok=True)
        # Another process that reads these layers sees the finished table. The common folder stays for other models.
        shutil.rmtree(folder / "layers" / part, ignore_errors=True)

    with workers_kept():
        try:
            measurement.made(list(parts.values()), description="models", unit="model", failed=failed, done=done)
        except MissingParts:
            if not failures:
                raise
    return _failure_table(entries.values(), failures)


def is_model_list(name: str | os.PathLike[str]) -> bool:
    """Return True if the path `name` is a text file that lists models: an existing file without the suffix of a weight
    file.
    """
    path = Path(name).expanduser()
    return path.suffix.lower() not in _NO_LISTS and path.is_file()


def listed_models(models: Iterable[Any]) -> list[str]:
    """Return the names of all models, with the lines of a list file in the place of its name.

    A list file has one name or path per line; `#` at the start of a line or after a space begins a comment. Relative
    paths start at the working directory. Raises ValueError for a file that is not text, a loaded model, or an empty
    list.
    """
    entries = [models] if isinstance(models, str | os.PathLike) else list(models)
    names: list[str] = []
    for entry in entries:
        if not isinstance(entry, str | os.PathLike):
            raise ValueError(
                f"models= has an object of type {type(entry).__name__}: give names or paths, or give a loaded model to "
                "analyze_heads"
            )
        require_path("models", entry)
        names += _lines(Path(entry).expanduser()) if is_model_list(entry) else [os.fspath(entry)]
    if not names:
        raise ValueError(f"{', '.join(map(str, entries)) or 'models='} lists no models: give at least one name or path")
    return names


def _lines(file: Path) -> list[str]:
    """Return the lines of a list file without comments and empty lines. Raises ValueError unless it is UTF-8 text."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is neither a .gguf file nor a text file that lists models, one per line ({error.reason}): save "
            "the list as UTF-8 text, or give the names and paths in a list"
        ) from error
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in NEWLINE.split(text))
    return [line for line in lines if line]


def _entry(name: str) -> _Entry:
    """Return the `_Entry` of a model from its name or path: its names in tables and folders, and the state of its
    files.

    A model that cannot be found gets an entry, too: `analyze_heads` then raises its error.
    """
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
    except Exception:  # analyze_heads raises the error again, and it is stored there
        return _Entry(name, name, missing_part, missing_part)


def _require_same_files(entry: _Entry, file: Path, table: pd.DataFrame) -> None:
    """Raise IncompatibleCheckpoint if the files of the model `entry` changed after its table was written.

    `table` is the stored table, with the state of the files in its attrs; `file` is its path, for the message.
    """
    if table.attrs["files_state"] != entry.files_state:
        raise IncompatibleCheckpoint(
            f"{file} was made before the files of {entry.model} were changed: remove it, or choose another folder"
        )


def _model_table(entry: _Entry, layers: Path, shared_out: bool, settings: dict[str, Any]) -> pd.DataFrame:
    """Return the head table of the model `entry`, with columns `model, revision, commit` in front and the same column
    types for all models.

    `layers` is a folder for finished layers of a model that is read from files. `shared_out` is True if other processes
    measure other models: this one then uses a single thread. `settings` are keyword arguments of `analyze_heads`.
    Raises what `analyze_heads` raises.
    """
    if not settings["detectors"] and find_source(entry.name).streams:
        settings = {**settings, "folder": layers}
    try:
        with one_thread() if shared_out else nullcontext():
            heads = analyze_heads(entry.name, **settings)
    finally:
        gc.collect()  # models hold reference cycles, and must be freed before the next one is loaded
    origin = {name: pd.array([heads.attrs.get(name)] * len(heads), dtype="string") for name in ("revision", "commit")}
    meanings = {column.name: column.meaning for column in ANALYZE_MODELS_HEADS.columns}
    # Columns have the same types in the files of all models.
    return ANALYZE_MODELS_HEADS.frame(
        heads.astype(_DTYPES).assign(model=entry.model, **origin),
        {"columns": meanings, "files_state": entry.files_state},
    )


def _failure_table(entries: Iterable[_Entry], failures: dict[str, JobFailure]) -> pd.DataFrame:
    """Return the table of models that failed, with columns `model, error, message, raised_in`, in the order of
    `entries`.

    `failures` has the errors by the `part` (file name) of an entry. The table's `attrs["models"]` lists all entries.
    """
    rows = [{"model": entry.model, **asdict(failures[entry.part])} for entry in entries if entry.part in failures]
    names = [column.name for column in ANALYZE_MODELS_FAILURES.columns]
    table = pd.DataFrame(rows, columns=names, dtype="string")
    return ANALYZE_MODELS_FAILURES.frame(table, {"models": [entry.model for entry in entries]})
