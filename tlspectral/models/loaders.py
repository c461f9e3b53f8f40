"""`Source`: where a model's weights are, before it is opened. `LOADERS`: loaders that `loading` must not import.

`tlspectral/__init__.py` registers the loaders, so this module imports none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TINY = ("tiny-ape", "tiny-ape-sym", "tiny-rope", "tiny-rope-imag", "tiny-rope-sym")
"""Names of the checkpoints in this package."""


@dataclass(frozen=True)
class Source:
    """Where the weights of a model are, before the model is opened.

    Attributes:
        kind: `"hub"`, `"folder"`, `"adapter"`, `"gguf"`, `"tiny"`, or the kind of a registered loader.
        location: hub id, folder, GGUF file (the first, if it is in parts) or name of a checkpoint of this package.
        revision: branch, tag or commit on the hub.
        record: origin of the weights, which tables store: a dict with at least `model` and `revision`.
        parts: the files of a GGUF file, in order.
        sha256: hash that the joined GGUF file must have; None if unknown.
    """

    kind: str
    location: str
    revision: str | None
    record: dict[str, Any]
    parts: tuple[Path, ...] = ()
    sha256: str | None = None

    @property
    def streams(self) -> bool:
        """True for a folder or hub model, whose layers can be read from files without loading the model."""
        return self.kind in ("folder", "hub")


def tiny_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    """Return the `Source` of the checkpoint `name` in this package, such as "tiny-rope".

    Raises ValueError if a revision or a training step (`checkpoint`) is given, because there is only one.
    """
    if revision is not None or checkpoint is not None:
        raise ValueError(
            f"{name} is one packaged set of weights; it has no revision or checkpoint to choose: leave revision= and "
            "checkpoint= out."
        )
    return Source("tiny", name.lower(), None, {"model": name.lower(), "revision": None})


class Loader(NamedTuple):
    """How one kind of model is recognised and loaded.

    Attributes:
        claims: function of a folder (a Path) or an object that returns whether it holds such a model.
        load: function of that object, or of the folder's `Source`, with the arguments `backend`, `device`, `dtype` and
            `tokenizer` of `load_model`; it returns a TransformerLens model.
    """

    claims: Callable[[Any], bool]
    load: Callable[..., Any]


LOADERS: dict[str, Loader] = {}
"""Registered loaders, by `Source.kind`."""


def claimed(given: Any) -> str | None:
    """Return the kind (a key of `LOADERS`) of the registered loader for a model; None if no loader claims it.

    given: a folder or file as a Path, or a model object.
    """
    return next((kind for kind, loader in LOADERS.items() if loader.claims(given)), None)
