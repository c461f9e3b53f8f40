"""Permanent rotations at the hook points of queries and keys in a TransformerLens model.

Rotations commute. The residual rotation therefore acts where queries and keys are made (`hook_q`, `hook_k`), before the
model's own rotation. A query/key norm does not commute with a gain per column; there it acts after the model's own
rotation (`hook_rot_q`, `hook_rot_k`). The rotation belongs to the hook point and is not a hook: hooks see activations
before it, whenever they were added, and removing hooks does not remove it.
"""

import threading
from typing import Any, get_args

import torch
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models.reading.view import AttentionView
from tlspectral.spectral_rope.module import Side, SpectralRoPE
from tlspectral.spectral_rope.swapped import Swapped, swap

# For each thread: positions of the new tokens in the running attention module, which does not pass them to hook points.
_inside = threading.local()


class RotatedPoint(Swapped):
    """A hook point that rotates its activation after its hooks have run.

    `rotation`: (`SpectralRoPE` module, "query" or "key", name of the hook point). The tuple keeps the module from
    becoming a submodule. `hook_conversion`: the bridge's object that gives heads an axis of their own, or None.
    """

    rotation: tuple[SpectralRoPE, Side, str]
    hook_conversion: Any

    def _call_impl(self, x: Tensor) -> Tensor:
        """Run the hooks on queries or keys `x`, and return their result with the learned rotation applied, in the shape
        of `x`.
        """
        x = self.own._call_impl(self, x)
        rotary, side, name = self.rotation
        conversion = self.hook_conversion  # to heads in a dimension of their own
        heads = x if conversion is None else conversion.convert(x)
        rotated = rotary(heads, _positions(heads.shape[1], name), side)
        return rotated if conversion is None else conversion.revert(rotated)


class PositionedAttention(Swapped):
    """An attention module that stores the positions of its tokens, in a variable of the thread, for its hook points
    while it runs.
    """

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run the attention module with its usual arguments and return its output; the positions of its tokens are
        stored meanwhile.
        """
        outer = getattr(_inside, "positions", None)
        _inside.positions = _given_positions(self, args, kwargs)
        try:
            return self.own._call_impl(self, *args, **kwargs)
        finally:
            _inside.positions = outer


def place(view: AttentionView, layers: dict[int, SpectralRoPE]) -> None:
    """Change a TransformerLens model in place: its hook points of queries and keys apply the learned rotations.

    `view`: the model. `layers`: the `SpectralRoPE` of each layer; layers that are not in it stay as they are.
    """
    points = view.model.hook_dict
    for index, rotary in layers.items():
        raw = view.raw(index)
        normed = raw.q_norm is not None or raw.k_norm is not None
        for side in get_args(Side):
            name = f"blocks.{index}.attn.hook_{'rot_' if normed else ''}{side[0]}"
            swap(points[name], RotatedPoint)
            points[name].rotation = (rotary, side, name)
        swap(view.blocks[index].module.attn, PositionedAttention)


def _given_positions(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the positions of the new tokens of an attention call, and the number of tokens already in the cache.

    `attention`: the attention module. `args`, `kwargs`: arguments of its call. Without `position_ids` the positions go
    on from the cached tokens.
    """
    tokens = next(
        value for value in (*args, kwargs.get("hidden_states"), kwargs.get("query_input")) if isinstance(value, Tensor)
    )
    named = [kwargs.get(name) for name in ("past_key_values", "layer_past", "cache")]  # by version and family
    cache = next((given for given in named if given is not None), None)
    entry = kwargs.get("past_kv_cache_entry")
    if entry is not None:
        cached = int(entry.past_keys.shape[1])
    elif cache is None:
        cached = 0
    else:
        cached = cache.get_seq_length(attention.original_component.layer_idx)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(cached, cached + tokens.shape[1], device=tokens.device)
    return positions, cached


def _positions(length: int, name: str) -> Tensor:
    """Return the positions of `length` queries or keys at the hook point `name`.

    Raises EditNotHonored if the attention module is not running, or the number fits neither new nor all tokens.
    """
    inside = getattr(_inside, "positions", None)
    if inside is None:
        raise EditNotHonored(
            f"{name} ran outside of its attention module, so the positions of its tokens are unknown: run the whole "
            "attention module"
        )
    positions, cached = inside
    if length == positions.shape[-1]:
        return positions
    if length == cached + positions.shape[-1]:  # some models pass on all keys, the cached ones first
        return torch.arange(length, device=positions.device)
    raise EditNotHonored(
        f"{name}: {length} keys for {positions.shape[-1]} new tokens after {cached} cached ones: their positions are "
        "unknown; run without a key/value cache"
    )
