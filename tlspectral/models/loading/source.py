"""What is known of a model before it is opened, and the names of the models that this package holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = ("tiny-ape", "tiny-ape-sym", "tiny-rope", "tiny-rope-imag", "tiny-rope-sym")
"""Names of the checkpoints that this package holds."""


@dataclass(frozen=True)
class Source:
    """A model to load: `location` is a hub id, a folder, a GGUF file or a checkpoint of this package, as `kind` says.

    `kind` is `"hub"`, `"folder"`, `"adapter"`, `"gguf"`, `"tiny"` or that of a registered loader; `record` is stored in
    tables. A GGUF file in several `parts` has the first as location, and the SHA-256 of the joined file.
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
