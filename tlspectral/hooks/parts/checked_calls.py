"""Calls of the functions that a user's own part may replace: on copies, with the result checked.

`QueryKeyPart.change` itself checks what `of` returns. A function of a part of this package is called as it is.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.hooks.parts.content_position import BlockPart
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.output import Replacement
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.query_key import QueryKeyPart, returned_scores
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView
from tlspectral.user_functions import not_finite, require_call, returned_tensor

_ACTS_ON = {QueryKeyPart: "scores", BlockPart: "scores", LongRange: "mask", Replacement: "z"}
_CONTROLS = ("scores", "blocks", "frequencies", "modes", "heads")
_ARGUMENTS = {
    "of": ("scores", "pairs"),
    "change": ("scores", "allowed"),
    "beyond": ("visible", "own"),
    "pairs_of": ("geometry", "heads"),
    "on": ("view", "by_layer"),
}


def require_part(part: Part) -> None:
    """Raise TypeError or ValueError for a part without a name, or whose functions or settings have another form."""
    kind = type(part).__name__
    name = getattr(part, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"the part {kind} needs a name for tables: write name = 'my_part' in the class; found {name!r}")
    if part.acts_on not in _ACTS_ON.values():
        raise ValueError(f"the part {name!r}: acts_on is 'scores', 'mask' or 'z'; found {part.acts_on!r}")
    if part.control not in _CONTROLS:
        raise ValueError(f"the part {name!r}: control is {', '.join(map(repr, _CONTROLS))}; found {part.control!r}")
    if not isinstance(part.settings, Mapping):
        raise TypeError(
            f"the part {name!r}: settings is a property that returns a dictionary; found {type(part.settings).__name__}"
        )
    _require_calls(part, f"the part {name!r}")


def _require_calls(part: Any, said: str) -> None:
    """Raise TypeError for a function of a part, or of what it binds, that takes other arguments."""
    for function, arguments in _ARGUMENTS.items():
        if callable(called := getattr(part, function, None)):
            given = ("z", "heads", "run") if isinstance(part, Replacement) else arguments
            require_call(called, given, f"{function}() of {said}")


def bound_parts(
    part: Part, view: AttentionView, by_layer: Mapping[int, list[int]], *, every: bool = False
) -> dict[int, Any]:
    """Return `part.on` of heads by layer.

    Raises ValueError unless `on` returns what acts on `part.acts_on` for some of these layers; with `every`, for all.
    """
    said = f"on() of the part {part.name!r} returns a dictionary from layers to what is removed there"
    found = part.on(view, {layer: [*heads] for layer, heads in by_layer.items()})
    if not isinstance(found, Mapping):
        raise ValueError(f"{said}; found {type(found).__name__}")
    for layer, bound in found.items():
        acts_on = [place for kind, place in _ACTS_ON.items() if isinstance(bound, kind)]
        if layer not in by_layer:
            raise ValueError(f"{said}, from {list(by_layer)}; found {layer!r}")
        if acts_on != [part.acts_on]:
            raise ValueError(
                f"{said}, a value that acts on {part.acts_on!r} as acts_on says (a QueryKeyPart acts on 'scores', a "
                f"LongRange on 'mask', a Replacement on 'z'); found {type(bound).__name__} for layer {layer}"
            )
        if bound is not part:
            _require_calls(bound, f"{type(bound).__name__}, which on() of the part {part.name!r} returns")
    missing = [layer for layer in by_layer if layer not in found]
    if every and missing:
        raise ValueError(f"{said}; nothing is removed in layer {missing[0]}: leave its heads out")
    return dict(found)


def change_of(
    part: QueryKeyPart | BlockPart, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"]
) -> tuple[Float[Tensor, "batch heads pos pos"], Bool[Tensor, "*batch pos pos"]]:
    """Call `part.change`, and return its result after checks: the change of the scaled scores, and its pairs.

    The change is a tensor of its own: the part may keep what it returned.

    Raises ValueError as `returned_scores`, and for pairs of tokens that the model masks.
    """
    if type(part).change in (QueryKeyPart.change, BlockPart.change):
        return part.change(scores, allowed)
    function, found = f"change() of the part {part.name!r}", part.change(scores.copied(), allowed.clone())
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{function} returns two tensors: the change of the scores, and a mask of pairs of tokens")
    change = returned_scores(found[0], scores, allowed, function)
    said = f"{function} returns second the pairs of tokens that it changes"
    shape = scores.shape if getattr(found[1], "ndim", 0) == len(scores.shape) else scores.shape[-2:]
    pairs = returned_tensor(found[1], shape, said, kind="True and False", like=allowed)
    return change.clone(), pairs & allowed


def hidden_keys(
    part: LongRange, visible: Bool[Tensor, "*rows pos pos"], own: Bool[Tensor, "pos pos"]
) -> Bool[Tensor, "*rows pos pos"]:
    """Return `part.beyond`. Raises ValueError unless it is such a mask and leaves a key to every query that has one."""
    if type(part).beyond is LongRange.beyond:
        return part.beyond(visible, own)
    said = f"beyond() of the part {part.name!r} returns the pairs of query and key that the head no longer sees"
    found = part.beyond(visible.clone(), own.clone())
    hidden = returned_tensor(found, tuple(visible.shape), said, kind="True and False", like=visible)
    blind = (visible.any(-1) & ~(visible & ~hidden).any(-1)).nonzero()
    if len(blind):
        raise ValueError(f"{said}, and leaves a key to each query; query {int(blind[0, -1])} sees none")
    return hidden & visible


def replaced_z(
    part: Replacement, z: Float[Tensor, "batch pos chosen d_head"], heads: list[int], run: int = 0
) -> Float[Tensor, "batch pos chosen d_head"]:
    """Return `part.of`. Raises ValueError unless it is a finite z of these heads."""
    if type(part).of is Replacement.of:
        return part.of(z, heads, run)
    said = f"of() of {type(part).__name__} returns what replaces z, [batch, pos, heads, d_head]"
    found = part.of(z.clone(), [*heads], run)
    replaced = returned_tensor(found, tuple(z.shape), said, kind="floating-point numbers", like=z)
    wrong = not_finite(replaced)
    if wrong is not None:
        row, position, head, _ = wrong.nonzero()[0].tolist()
        raise ValueError(f"{said}, which is finite; it is not at position {position} of row {row}, head {heads[head]}")
    return replaced
