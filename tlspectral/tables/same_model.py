"""Check that two tables, or a table and a model, have the same weights, using the hashes and names in their `attrs`."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

_NAMES = ("model", "revision", "commit", "sha256")
_ORIGIN = (*_NAMES, "backend", "weights_sha256", "weights_by_layer", "n_layers", "skipped_layers")


def origin_of(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a dict with the entries of a table's `attrs` that identify its model: names, hashes of weights, number of
    layers.
    """
    return {key: attrs[key] for key in _ORIGIN if key in attrs}


def require_same_model(heads: pd.DataFrame, origin: Mapping[Any, Any], what: str, *, name: str = "head table") -> str:
    """Raise ValueError if `origin` has other weights than the model of the head table `heads`.

    Models of different depth are refused. If the same backend read both, the hashes of all common layers must agree,
    and names may differ. Otherwise the model's name, revision, commit and file hash must agree, as far as both sides
    have them.

    Args:
        heads: a table whose `attrs` identify its model.
        origin: the `attrs` of another table, or a dict about a loaded model with the same keys.
        what: words for `origin` in messages, such as "the draws".
        name: word for `heads` in messages.

    Returns:
        "" if they agree. Otherwise a text: the reason why they could not be compared (hashes are missing or cover other
        layers, or a name is unknown).

    Raises:
        ValueError: they differ.
    """
    attrs = heads.attrs
    _require_equal(attrs, origin, ("n_layers",), what, name)
    backends = attrs.get("backend"), origin.get("backend")
    by_layer, other_by_layer = (side.get("weights_by_layer") or {} for side in (attrs, origin))
    whole, other_whole = (side.get("weights_sha256") for side in (attrs, origin))
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
                f"{whole[:12]} ({_named(attrs)}), here it is {other_whole[:12]} ({_named(origin)}). One of them comes "
                "from an older version, without a hash per layer: make both again on one model"
            )
    _require_equal(attrs, origin, _NAMES, what, name)
    if None not in backends and len({*backends}) > 1:
        if attrs.get("model") and origin.get("model"):
            return ""
        return f"their backends differ ({backends[0]!r} and {backends[1]!r}), and one of them does not name its model"
    lacking = [title for title, hashes in ((f"the {name}", by_layer), (what, other_by_layer)) if not hashes]
    return f"no hash of the weights is known for {' and '.join(lacking)}" if lacking else "they have no layer in common"


def layers_apart(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[str, Any]:
    """Return which layers have different and which have equal weights, from `a` and `b`, the `attrs` of two tables.

    The result is a dict such as `{"differ": [1], "equal": [0]}`, or `{"unknown": reason}` if hashes cannot be compared.
    The hash of a layer covers its attention weights and norm as stored, the embedding, the unembedding and the final
    norm.
    """
    backends = a.get("backend"), b.get("backend")
    if None in backends or len({*backends}) > 1:
        return {"unknown": f"hashes of backends {backends[0]!r} and {backends[1]!r} cannot be compared"}
    by_layer, other = (side.get("weights_by_layer") or {} for side in (a, b))
    common = sorted(by_layer.keys() & other.keys(), key=int)
    if not common:
        return {"unknown": "the tables hold no hash of a layer that both have"}
    differ = [int(layer) for layer in common if by_layer[layer] != other[layer]]
    return {"differ": differ, "equal": [int(layer) for layer in common if int(layer) not in differ]}


def _require_equal(
    attrs: Mapping[Any, Any], origin: Mapping[Any, Any], keys: tuple[str, ...], what: str, name: str
) -> None:
    """Raise ValueError if both `attrs` and `origin` have one of the `keys` and its values differ.

    `name` and `what` are the words for `attrs` and `origin` in the message.
    """
    for key in keys:
        here, other = attrs.get(key), origin.get(key)
        if here is not None and other is not None and here != other:
            raise ValueError(f"the {name} was made with {key} {here}, {what} with {key} {other}: use one model")


def _named(attrs: Mapping[Any, Any]) -> str:
    """Return the model's name and revision in a table's `attrs` as text for messages."""
    revision = f", revision {attrs['revision']}" if attrs.get("revision") else ""
    return f"{attrs.get('model') or 'a model without a name'}{revision}"
