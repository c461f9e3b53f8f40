"""Calls of the functions that a user's own part may replace: on copies, with the result checked.

`Part.change` itself checks what `of` returns. A function of a part of this package is called as it is.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.removal import Removal, returned_scores
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView
from tlspectral.user_functions import not_finite, require_call, returned_tensor

_FORMULAS = {
    "scores": ("of", ("scores", "pairs")),
    "mask": ("beyond", ("visible", "own")),
    "z": ("of", ("z", "heads", "run")),
}
"""The function of a part, and its arguments, by what it acts on."""
_ARGUMENTS = {
    "change": ("scores", "allowed"),
    "control": ("removal", "which", "seeds"),
    "pairs_of": ("geometry", "heads"),
    "on": ("view", "by_layer"),
}


def require_part(part: Part) -> None:
    """Raise TypeError or ValueError for a part without a name or its formula, or whose functions have another form."""
    kind = type(part).__name__
    name = getattr(part, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"the part {kind} needs a name for tables: write name = 'my_part' in the class; found {name!r}")
    if part.acts_on not in _FORMULAS:
        raise ValueError(f"the part {name!r}: acts_on is 'scores', 'mask' or 'z'; found {part.acts_on!r}")
    if not isinstance(part.settings, Mapping):
        raise TypeError(
            f"the part {name!r}: settings is a property that returns a dictionary; found {type(part.settings).__name__}"
        )
    _require_control(part)
    _require_calls(part, f"the part {name!r}", formula=not _is_users(part, "on"))


def _require_control(part: Part) -> None:
    """Raise TypeError for a control that would not be asked."""
    said = f"the part {part.name!r} acts on {part.acts_on!r}: its control"
    if callable(part.control):
        if part.acts_on != "scores" and _is_users(part, "control"):
            raise TypeError(f"{said} is other heads of the layer, so leave the method control out")
    elif part.control != "heads":
        called = "a method, control(removal, which, seeds), or " if part.acts_on == "scores" else ""
        raise TypeError(f"{said} is {called}'heads', other heads of the layer; found {part.control!r}")


def _require_calls(part: Part, said: str, *, formula: bool) -> None:
    """Raise TypeError for a function that takes other arguments, and with `formula` for a part that lacks its own."""
    function, arguments = _FORMULAS[part.acts_on]
    known = _ARGUMENTS | {function: arguments}
    for name, given in known.items():
        if callable(called := getattr(part, name, None)):
            require_call(called, given, f"{name}() of {said}")
    own = callable(getattr(part, function, None)) or (part.acts_on == "scores" and type(part).change is not Part.change)
    if formula and not own:
        named = {place: f"{one}({', '.join(taken)})" for place, (one, taken) in _FORMULAS.items()}
        others = " or ".join(f"{named[place]} and acts_on = {place!r}" for place in named if place != part.acts_on)
        raise TypeError(f"{said} acts on {part.acts_on!r} and has no {named[part.acts_on]}: write that, or {others}")


def _is_users(part: Part, function: str) -> bool:
    """Return whether a function of a part is defined outside this project."""
    module = getattr(getattr(type(part), function, None), "__module__", None) or ""
    return module.partition(".")[0] not in ("tlspectral", "tlspectral_studies")


def bound_parts(
    part: Part, view: AttentionView, by_layer: Mapping[int, list[int]], *, every: bool = False
) -> dict[int, Part]:
    """Return `part.on` of heads by layer, each at the positions of the part.

    Raises ValueError unless `on` returns what acts on `part.acts_on` for some of these layers; with `every`, for all.
    """
    said = f"on() of the part {part.name!r} returns a dictionary from layers to what is removed there"
    found = part.on(view, {layer: [*heads] for layer, heads in by_layer.items()})
    if not isinstance(found, Mapping):
        raise ValueError(f"{said}; found {type(found).__name__}")
    for layer, bound in found.items():
        if layer not in by_layer:
            raise ValueError(f"{said}, from {list(by_layer)}; found {layer!r}")
        if not isinstance(bound, Part) or bound.acts_on != part.acts_on:
            raise ValueError(
                f"{said}, a part that acts on {part.acts_on!r} as acts_on says; found {type(bound).__name__} for layer "
                f"{layer}"
            )
        own = f"the part {part.name!r}"
        bound_said = own if bound is part else f"{type(bound).__name__}, which on() of {own} returns,"
        _require_calls(bound, bound_said, formula=True)
    missing = [layer for layer in by_layer if layer not in found]
    if every and missing:
        raise ValueError(f"{said}; nothing is removed in layer {missing[0]}: leave its heads out")
    return {layer: one if part.at is None else one.placed(part.at) for layer, one in found.items()}


def change_of(
    part: Part, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"]
) -> tuple[Float[Tensor, "batch heads pos pos"], Bool[Tensor, "*batch pos pos"]]:
    """Call `part.change`, and return its result after checks: the change of the scaled scores, and its pairs.

    The change is a tensor of its own: the part may keep what it returned.

    Raises ValueError as `returned_scores`, and for pairs of tokens that the model masks.
    """
    if not _is_users(part, "change"):
        return part.change(scores, allowed)
    function, found = f"change() of the part {part.name!r}", part.change(scores.copied(), allowed.clone())
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{function} returns two tensors: the change of the scores, and a mask of pairs of tokens")
    change = returned_scores(found[0], scores, allowed, function)
    said = f"{function} returns second the pairs of tokens that it changes"
    shape = scores.shape if getattr(found[1], "ndim", 0) == len(scores.shape) else scores.shape[-2:]
    pairs = returned_tensor(found[1], shape, said, kind="True and False", like=allowed)
    return change.clone(), pairs & allowed


def control_of(
    part: Part, removal: Removal, which: list[int], seeds: list[list[int]]
) -> Float[Tensor, "batch drawn pos pos"]:
    """Return `part.control`. Raises ValueError unless it is a finite change of the scores for each draw."""
    if not _is_users(part, "control"):
        return part.control(removal, which, seeds)
    assert removal.allowed is not None
    assert removal.scores is not None
    copied = Removal(removal.difference.clone(), removal.allowed.clone(), removal.scores.copied())
    shape = (len(removal.difference), len(which), *removal.difference.shape[2:])
    said = f"control() of the part {part.name!r} returns what is added to the scores for each draw"
    found = part.control(copied, [*which], [[*one] for one in seeds])
    drawn = returned_tensor(found, shape, said, kind="floating-point numbers", like=removal.difference)
    if not_finite(drawn) is not None:
        raise ValueError(f"{said}, which is finite; found NaN or infinite numbers")
    return drawn


def hidden_keys(
    part: Any, visible: Bool[Tensor, "*rows pos pos"], own: Bool[Tensor, "pos pos"]
) -> Bool[Tensor, "*rows pos pos"]:
    """Return `part.beyond`. Raises ValueError unless it is such a mask and leaves a key to every query that has one."""
    if not _is_users(part, "beyond"):
        return part.beyond(visible, own)
    said = f"beyond() of the part {part.name!r} returns the pairs of query and key that the head no longer sees"
    found = part.beyond(visible.clone(), own.clone())
    hidden = returned_tensor(found, tuple(visible.shape), said, kind="True and False", like=visible)
    blind = (visible.any(-1) & ~(visible & ~hidden).any(-1)).nonzero()
    if len(blind):
        raise ValueError(f"{said}, and leaves a key to each query; query {int(blind[0, -1])} sees none")
    return hidden & visible


def replaced_z(
    part: Any, z: Float[Tensor, "batch pos chosen d_head"], heads: list[int]
) -> Float[Tensor, "batch pos chosen d_head"]:
    """Return `part.of`. Raises ValueError unless it is a finite z of these heads."""
    if not _is_users(part, "of"):
        return part.of(z, heads, 0)
    said = f"of() of the part {part.name!r} returns what replaces z, [batch, pos, heads, d_head]"
    found = part.of(z.clone(), [*heads], 0)
    replaced = returned_tensor(found, tuple(z.shape), said, kind="floating-point numbers", like=z)
    wrong = not_finite(replaced)
    if wrong is not None:
        row, position, head, _ = wrong.nonzero()[0].tolist()
        raise ValueError(f"{said}, which is finite; it is not at position {position} of row {row}, head {heads[head]}")
    return replaced
