"""The check that two tables, or a table and a model, are of the same weights, by what their `attrs` record of them."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

_NAMES = ("model", "revision", "commit", "sha256")
_ORIGIN = (*_NAMES, "backend", "weights_sha256", "weights_by_layer", "n_layers", "skipped_layers")


def origin_of(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the part of a table's `attrs` that tells its model, for a table that is computed from it."""
    return {key: attrs[key] for key in _ORIGIN if key in attrs}


def require_same_model(heads: pd.DataFrame, origin: Mapping[Any, Any], what: str, *, name: str = "head table") -> str:
    """Refuse a table or model that has other weights than the head table was made from.

    Models of different depth are refused. Where the same backend read both, the hashes of the layers that both
    have must agree, and names may differ. In all other cases the name of the model, its revision, its commit and the
    hash of its file must agree, as far as both are known.

    `origin` is the origin of a model's view, or the `attrs` of a table; `what` and `name` are their names in messages.

    Returns:
        Why they could not be compared: hashes are missing or of other layers, or no name is known. Empty if they agree.

    Raises:
        ValueError: they differ.
    """
    attrs = heads.attrs
    _require_equal(attrs, origin, ("n_layers",), what, name)
    backends = attrs.get("backend"), origin.get("backend")
    by_layer, other_by_layer = (each.get("weights_by_layer") or {} for each in (attrs, origin))
    whole, other_whole = (each.get("weights_sha256") for each in (attrs, origin))
    if None not in backends and len({*backends}) == 1:
        common = sorted(by_layer.keys() & other_by_layer.keys(), key=int)
        for layer in common:
            if by_layer[layer] != other_by_layer[layer]:
                raise ValueError(
                    f"the {name} was made from other weights than {what}: the hash of layer {layer} is "
                    f"{by_layer[layer][:12]} ({_named(attrs)}), here it is {other_by_layer[layer][:12]} "
                    f"({_named(origin)}): use one model, in the precision that the table was made in"
                )
        if common or (whole and whole == other_whole):
            return ""
        if whole and other_whole and not (by_layer and other_by_layer):
            raise ValueError(
                f"the {name} was made from other weights or other layers than {what}: its weights_sha256 is "
                f"{whole[:12]} ({_named(attrs)}), here it is {other_whole[:12]} ({_named(origin)}), and one of them "
                "has no hash of each layer, as older versions wrote tables: make both again on one model"
            )
    _require_equal(attrs, origin, _NAMES, what, name)
    if None not in backends and len({*backends}) > 1:
        if attrs.get("model") and origin.get("model"):
            return ""
        return f"their backends differ ({backends[0]!r} and {backends[1]!r}) and not both name their model"
    lacking = [said for said, hashes in ((f"the {name}", by_layer), (what, other_by_layer)) if not hashes]
    return f"no hash of the weights is known for {' and '.join(lacking)}" if lacking else "they have no layer in common"


def layers_apart(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the layers whose weights differ, and are equal, by the `attrs` of two tables.

    It is such as `{"differ": [1], "equal": [0]}`, or `{"unknown": why}` where hashes cannot be compared. A layer's hash
    is of its attention weights and norm as they are stored, and of embedding, unembedding and final norm.
    """
    backends = a.get("backend"), b.get("backend")
    if None in backends or len({*backends}) > 1:
        return {"unknown": f"hashes of backends {backends[0]!r} and {backends[1]!r} cannot be compared"}
    by_layer, other = (each.get("weights_by_layer") or {} for each in (a, b))
    common = sorted(by_layer.keys() & other.keys(), key=int)
    if not common:
        return {"unknown": "the tables hold no hash of a layer that both have"}
    differ = [int(layer) for layer in common if by_layer[layer] != other[layer]]
    return {"differ": differ, "equal": [int(layer) for layer in common if int(layer) not in differ]}


def _require_equal(
    attrs: Mapping[Any, Any], origin: Mapping[Any, Any], keys: tuple[str, ...], what: str, name: str
) -> None:
    for key in keys:
        here, other = attrs.get(key), origin.get(key)
        if here is not None and other is not None and here != other:
            raise ValueError(f"the {name} is of {key} {here}, {what} are of {key} {other}: use one model")


def _named(attrs: Mapping[Any, Any]) -> str:
    revision = f", revision {attrs['revision']}" if attrs.get("revision") else ""
    return f"{attrs.get('model') or 'a model without a name'}{revision}"
