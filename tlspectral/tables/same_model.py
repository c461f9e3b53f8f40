"""The check that a head table and another table or model come from the same weights."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

_NAMES = ("model", "revision", "sha256")


def require_same_model(heads: pd.DataFrame, origin: Mapping[Any, Any], what: str) -> None:
    """Refuse a table or model that has other weights than those of the head table.

    Where both have a hash of the weights of equally many layers, read by the same backend, the hashes have to agree and
    names may differ. Otherwise the name of the model, its revision and the hash of its file have to agree, as far as
    both are known.

    Args:
        heads: table of `analyze_heads`, with the `attrs` that it came with.
        origin: `AttentionView.origin` of a model, or the `attrs` of a table that hold it.
        what: name of the other one in the message, in the plural: "the draws".

    Raises:
        ValueError: they differ.
    """
    attrs = heads.attrs
    if _comparable(heads, origin):
        if attrs["weights_sha256"] != origin["weights_sha256"]:
            raise ValueError(
                f"the head table was made from other weights than {what}: its weights_sha256 is "
                f"{attrs['weights_sha256'][:12]} ({_named(attrs)}), here it is {origin['weights_sha256'][:12]} "
                f"({_named(origin)}): use one model, in the precision that the table was made in"
            )
        return
    for key in _NAMES:
        here, other = attrs.get(key), origin.get(key)
        if here is not None and other is not None and here != other:
            raise ValueError(f"the head table is of {key} {here}, {what} are of {key} {other}: use one model")


def _comparable(heads: pd.DataFrame, origin: Mapping[Any, Any]) -> bool:
    both = all(attrs.get("weights_sha256") and attrs.get("backend") for attrs in (heads.attrs, origin))
    return (
        both
        and heads.attrs["backend"] == origin["backend"]
        and "layer" in heads
        and heads["layer"].nunique() == origin.get("weights_layers")
    )


def _named(attrs: Mapping[Any, Any]) -> str:
    revision = f", revision {attrs['revision']}" if attrs.get("revision") else ""
    return f"{attrs.get('model') or 'a model without a name'}{revision}"
