"""Calls of the methods of a user's own part: they get copies, and their results are checked.

Methods of this package's parts are called directly. `Part.change` itself checks the result of `of` for scores.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.removal import Removal, returned_scores
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView
from tlspectral.user_functions import call_users, not_finite, require_call, returned_tensor

_FORMULAS = {
    "scores": ("of", ("scores", "pairs")),
    "mask": ("beyond", ("visible", "own")),
    "z": ("of", ("z", "heads", "run")),
}
"""For each `acts_on`: the method that a part must have, and its arguments."""
_ARGUMENTS = {
    "change": ("scores", "allowed"),
    "control": ("removal", "which", "seeds"),
    "pairs_of": ("geometry", "heads"),
    "on": ("view", "by_layer"),
}


def require_part(part: Part) -> None:
    """Raise TypeError or ValueError unless a part can be used: it has a name, a known `acts_on` and the method for it.

    `acts_on` is "scores", "mask" or "z"; another value is the ValueError. TypeError also if `settings` is not a dict,
    or a method takes other arguments than it will be called with.
    """
    kind = type(part).__name__
    name = getattr(part, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"the part {kind} has the name {name!r}: write a text such as name = 'my_part' in the class")
    if part.acts_on not in _FORMULAS:
        raise ValueError(
            f"the part {name!r} has acts_on = {shown(part.acts_on)}: write acts_on = 'scores', 'mask' or 'z' in the "
            "class"
        )
    if not isinstance(part.settings, Mapping):
        raise TypeError(
            f"the part {name!r}: settings must be a property that returns a dictionary; found "
            f"{type(part.settings).__name__}: write @property above def settings(self), and return a dictionary"
        )
    _require_control(part)
    _require_calls(part, f"the part {name!r}", formula=not _is_users(part, "on"))


def _require_control(part: Part) -> None:
    """Raise TypeError if the part has an attribute `control` that a sweep would not use, or an unknown one."""
    which_part = f"the part {part.name!r} acts on {part.acts_on!r}"
    if callable(part.control):
        if part.acts_on != "scores" and _is_users(part, "control"):
            raise TypeError(
                f"{which_part}: its control is the same part of other heads, so remove the method control from the "
                "class"
            )
    elif part.control != "heads":
        method = ", or a method control(removal, which, seeds)" if part.acts_on == "scores" else ""
        raise TypeError(
            f"{which_part} and has control = {shown(part.control)}: write control = 'heads' (other heads of the layer)"
            f"{method}"
        )


def _require_calls(part: Part, whose: str, *, formula: bool) -> None:
    """Raise TypeError if a method of the part takes other arguments than it will be called with.

    `whose` names the part for messages. `formula`: also raise if the part lacks the method of its `acts_on`, such as
    `of(scores, pairs)`.
    """
    function, arguments = _FORMULAS[part.acts_on]
    methods = _ARGUMENTS | {function: arguments}
    for name, taken in methods.items():
        if callable(method := getattr(part, name, None)):
            require_call(method, taken, f"{name}() of {whose}")
    own = callable(getattr(part, function, None)) or (part.acts_on == "scores" and type(part).change is not Part.change)
    if formula and not own:
        calls = {place: f"{name}({', '.join(taken)})" for place, (name, taken) in _FORMULAS.items()}
        elsewhere = " or ".join(f"{calls[place]} and acts_on = {place!r}" for place in calls if place != part.acts_on)
        raise TypeError(
            f"{whose} acts on {part.acts_on!r} and has no {calls[part.acts_on]}: write this method, or {elsewhere}"
        )


def _method(part: Any, name: str) -> str:
    """Return the name of a part's method for messages: "Half.of() of the part 'half'".

    `name` is the name of the method, such as "of".
    """
    return f"{type(part).__name__}.{name}() of the part {part.name!r}"


def _is_users(part: Part, function: str) -> bool:
    """Return True if the part's method named `function` is defined outside tlspectral and its studies, so by a user."""
    module = getattr(getattr(type(part), function, None), "__module__", None) or ""
    return module.partition(".")[0] not in ("tlspectral", "tlspectral_studies")


def acts_by_strip(part: Part) -> bool:
    """Return True if a part takes some queries of a prompt at a time; a user's own method gets whole prompts."""
    methods = [name for name in ("of", "change", "beyond") if hasattr(part, name)]
    return part.by_strip and not any(_is_users(part, name) for name in methods)


def bound_parts(
    part: Part, view: AttentionView, by_layer: Mapping[int, list[int]], *, every: bool = False
) -> dict[int, Part]:
    """Call `part.on` and return a dict from layer to the part that acts there, at the positions of `part`.

    `view` is the model, `by_layer` a dict from layer to heads. `part` is not changed; parts that `on` returns without
    positions are copied. `every`: True requires a part for each of the layers. Raises ValueError unless `on` returns
    parts with the same `acts_on` for some of these layers (with `every`: for all), TypeError if their methods
    take other arguments than they will be called with.
    """
    expected = f"{_method(part, 'on')} must return a dictionary from layer to part"
    arguments = {"view": view, "by_layer": {layer: [*heads] for layer, heads in by_layer.items()}}
    if _is_users(part, "on"):
        bound_by_layer = call_users(part.on, arguments, _method(part, "on"), "a dictionary from layer to part")
    else:
        bound_by_layer = part.on(*arguments.values())
    if not isinstance(bound_by_layer, Mapping):
        raise ValueError(f"{expected}; found {type(bound_by_layer).__name__}: return for example {{layer: self}}")
    for layer, bound in bound_by_layer.items():
        if layer not in by_layer:
            raise ValueError(
                f"{expected}, with layers from {shown(list(by_layer))}; found {shown(layer)}: leave it out"
            )
        if not isinstance(bound, Part) or bound.acts_on != part.acts_on:
            raise ValueError(
                f"{expected}, each with acts_on = {part.acts_on!r}; found {type(bound).__name__} for layer {layer}: "
                "return for example {layer: self}"
            )
        own = f"the part {part.name!r}"
        whose = own if bound is part else f"{type(bound).__name__}, which on() of {own} returns,"
        _require_calls(bound, whose, formula=True)
    missing = [layer for layer in by_layer if layer not in bound_by_layer]
    if every and missing:
        raise ValueError(
            f"the part {part.name!r} removes nothing in layer {missing[0]} (on() leaves this layer out): leave the "
            "heads of this layer out"
        )
    return {layer: bound if part.at is None else bound.placed(part.at) for layer, bound in bound_by_layer.items()}


def change_of(
    part: Part, scores: HeadScores, allowed: Bool[Tensor, "*batch query key"]
) -> tuple[Float[Tensor, "batch heads q k"], Bool[Tensor, "*batch q k"]]:
    """Return the change of the scaled scores that removes a part, and a mask of the pairs of tokens that change.

    Calls `part.change` and checks its result. `scores` are the heads' scores in the run, `allowed` is True for pairs of
    query and key that the model does not mask. The returned tensors share no memory with the part's own. Raises
    ValueError for a result of another form, shape, type or device, or with NaN or infinities.
    """
    if not _is_users(part, "change"):
        return part.change(scores, allowed)
    function, arguments = _method(part, "change"), {"scores": scores.copied(), "allowed": allowed.clone()}
    returns = f"a tuple of a change of shape {tuple(scores.shape)} and a mask of pairs of tokens"
    returned = call_users(part.change, arguments, function, returns)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(
            f"{function} must return a tuple of two tensors (the change of the scores, and a mask of the pairs of "
            f"tokens that change); found {type(returned).__name__}"
        )
    change = returned_scores(returned[0], scores, allowed, function)
    expected = f"{function} must return as its second value a mask of the pairs of tokens that change"
    shape = scores.shape if getattr(returned[1], "ndim", 0) == len(scores.shape) else scores.shape[-2:]
    pairs = returned_tensor(returned[1], shape, expected, kind="True and False", like=allowed)
    return change.clone(), pairs & allowed


def control_of(
    part: Part, removal: Removal, which: list[int], seeds: list[list[int]]
) -> Float[Tensor, "batch drawn query key"]:
    """Return random changes of the scaled scores, one for each random control of a sweep, from `part.control`.

    `removal` is the change that the part itself makes (a user's method gets a copy), `which` the index of a head in it
    for each control, `seeds` the seed of each control, a list of numbers. Raises ValueError unless the result is finite
    and has one change per control.
    """
    if not _is_users(part, "control"):
        return part.control(removal, which, seeds)
    assert removal.allowed is not None
    assert removal.scores is not None
    copied = Removal(removal.difference.clone(), removal.allowed.clone(), removal.scores.copied())
    shape = (len(removal.difference), len(which), *removal.difference.shape[2:])
    expected = f"{_method(part, 'control')} must return a change of the scores for each draw"
    arguments = {"removal": copied, "which": [*which], "seeds": [[*seed] for seed in seeds]}
    returned = call_users(part.control, arguments, _method(part, "control"), f"a tensor of shape {shape}")
    drawn = returned_tensor(returned, shape, expected, kind="floating-point numbers", like=removal.difference)
    if not_finite(drawn) is not None:
        raise ValueError(f"{expected}, with finite numbers; found NaN or infinite numbers: return 0 for no change")
    return drawn


def hidden_keys(
    part: Any, visible: Bool[Tensor, "*rows query key"], own: Bool[Tensor, "query key"]
) -> Bool[Tensor, "*rows query key"]:
    """Return a mask of the visible keys (last axis) that each query no longer sees, from `part.beyond`.

    `visible` is True where a query sees a key in this run, `own` where the layer would show it without padding; both
    are [..., query, key]. Raises ValueError for a result of another shape or dtype, or if it leaves a query without any
    key.
    """
    if not _is_users(part, "beyond"):
        return part.beyond(visible, own)
    expected = f"{_method(part, 'beyond')} must return a mask of the keys that each query no longer sees"
    arguments = {"visible": visible.clone(), "own": own.clone()}
    returned = call_users(part.beyond, arguments, _method(part, "beyond"), f"a mask of shape {tuple(visible.shape)}")
    hidden = returned_tensor(returned, tuple(visible.shape), expected, kind="True and False", like=visible)
    blind = (visible.any(-1) & ~(visible & ~hidden).any(-1)).nonzero()
    if len(blind):
        raise ValueError(f"{expected}, and leave each query a key; query {int(blind[0, -1])} sees none")
    return hidden & visible


def replaced_z(
    part: Any, z: Float[Tensor, "batch pos chosen d_head"], heads: list[int]
) -> Float[Tensor, "batch pos chosen d_head"]:
    """Return the replacement for z, the output of these heads before W_O, from `part.of`.

    A user's method gets a copy of `z`. `heads` are the indices of the heads on the third axis. Raises ValueError unless
    the result is finite and has the shape of z.
    """
    if not _is_users(part, "of"):
        return part.of(z, heads, 0)
    expected = f"{_method(part, 'of')} must return the replacement for z, [batch, pos, heads, d_head]"
    arguments = {"z": z.clone(), "heads": [*heads], "run": 0}
    returned = call_users(part.of, arguments, _method(part, "of"), f"a tensor of shape {tuple(z.shape)}")
    replaced = returned_tensor(returned, tuple(z.shape), expected, kind="floating-point numbers", like=z)
    wrong = not_finite(replaced)
    if wrong is not None:
        row, position, head, _ = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{expected}, with finite numbers; found NaN or infinity at position {position} of row {row}, head "
            f"{heads[head]}: return z there to leave it unchanged"
        )
    return replaced
