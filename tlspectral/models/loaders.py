"""What is known of a model before it is opened, and loaders that stand on a higher floor than `loading`.

The face of the package registers these: this imports nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TINY = ("tiny-ape", "tiny-ape-sym", "tiny-rope", "tiny-rope-imag", "tiny-rope-sym")
"""Names of the checkpoints that this package holds."""


@dataclass(frozen=True)
class Source:
    """A model to load: `location` is a hub id, a folder, a GGUF file or a checkpoint of this package, as `kind` says.

    `kind` is `"hub"`, `"folder"`, `"adapter"`, `"gguf"`, `"tiny"` or the kind of a registered loader; `record` is
    stored in tables. A GGUF file in several `parts` has the first as location, and the SHA-256 of the joined file.
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


class Loader(NamedTuple):
    """How one kind of model is loaded.

    `claims` says of a folder (a Path) or an object whether it holds such a model. `load` returns the TransformerLens
    model of that object, or of the folder's `Source`, by `backend`, `device`, `dtype` and `tokenizer` of `load_model`.
    """

    claims: Callable[[Any], bool]
    load: Callable[..., Any]


LOADERS: dict[str, Loader] = {}
"""Loaders by the kind that a `Source` has."""


def claimed(given: Any) -> str | None:
    """Return the kind of the loader that claims a folder or an object, None where none does."""
    return next((kind for kind, loader in LOADERS.items() if loader.claims(given)), None)
