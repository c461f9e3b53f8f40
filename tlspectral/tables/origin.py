"""What a table records of the model that it was measured on, so that tables of two models can be told apart."""

import hashlib
from collections.abc import Mapping
from typing import Any

_ORIGIN = (
    "model", "revision", "commit", "sha256", "backend", "weights_sha256", "weights_by_layer", "n_layers",
    "skipped_layers", "stacks",
)  # fmt: skip


def recorded_weights(digests: Mapping[int, str], n_layers: int) -> dict[str, Any]:
    """Return the hashes by which a table's `attrs` tell the weights that it was measured on.

    Args:
        digests: a hash of each layer that was read, by layer.
        n_layers: number of layers of the model.

    Returns:
        `weights_sha256` (of these layers together), `weights_by_layer` (of each, by its index as text, since JSON has
        no other keys) and `n_layers`.
    """
    return {
        "weights_sha256": _sha256("".join(digests.values())),
        "weights_by_layer": {str(layer): _sha256(digest) for layer, digest in digests.items()},
        "n_layers": n_layers,
    }


def origin_of(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the part of a table's `attrs` that tells its model, for a table that is computed from it."""
    return {key: attrs[key] for key in _ORIGIN if key in attrs}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
