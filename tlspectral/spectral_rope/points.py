"""Rotations that stand in a TransformerLens model for good, at the hook points of its queries and keys.

Rotations commute, so the residual acts where queries and keys are made (`hook_q`, `hook_k`), before the model's own
rotation. After a query/key norm, which does not commute with a gain per column, it acts after the model's own rotation
(`hook_rot_q`, `hook_rot_k`). It is part of the hook point and not a hook: hooks see what they see without it, whenever
they were added, and taking them off leaves it.
"""

import threading
from typing import Any, get_args

import torch
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models.reading.view import AttentionView
from tlspectral.spectral_rope.module import Side, SpectralRoPE
from tlspectral.spectral_rope.swapped import Swapped, swap

# Positions of the new tokens of the attention module that a thread is in. Attention modules pass them to no hook point.
_inside = threading.local()


class RotatedPoint(Swapped):
    """A hook point that rotates what passes, after its hooks.

    `rotation` holds the spectral module, in a tuple, so that it is no part of this one, the side, and the name.
    """

    rotation: tuple[SpectralRoPE, Side, str]
    hook_conversion: Any

    def _call_impl(self, x: Tensor) -> Tensor:
        x = self.own._call_impl(self, x)
        rotary, side, name = self.rotation
        conversion = self.hook_conversion  # to heads in a dimension of their own
        heads = x if conversion is None else conversion.convert(x)
        rotated = rotary(heads, _positions(heads.shape[1], name), side)
        return rotated if conversion is None else conversion.revert(rotated)


class PositionedAttention(Swapped):
    """An attention module that tells the hook points in it where its tokens stand."""

    def _call_impl(self, *given: Any, **named: Any) -> Any:
        outer = getattr(_inside, "positions", None)
        _inside.positions = _given_positions(self, given, named)
        try:
            return self.own._call_impl(self, *given, **named)
        finally:
            _inside.positions = outer


def place(view: AttentionView, layers: dict[int, SpectralRoPE]) -> None:
    """Put the rotations of every spectral layer into a model, in place."""
    points = view.model.hook_dict
    for index, rotary in layers.items():
        raw = view.raw(index)
        normed = raw.q_norm is not None or raw.k_norm is not None
        for side in get_args(Side):
            name = f"blocks.{index}.attn.hook_{'rot_' if normed else ''}{side[0]}"
            swap(points[name], RotatedPoint)
            points[name].rotation = (rotary, side, name)
        swap(view.blocks[index].module.attn, PositionedAttention)


def _given_positions(attention: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, int]:
    tokens = next(
        value for value in (*given, named.get("hidden_states"), named.get("query_input")) if isinstance(value, Tensor)
    )
    cache, entry = named.get("past_key_values", named.get("layer_past")), named.get("past_kv_cache_entry")
    if entry is not None:
        cached = int(entry.past_keys.shape[1])
    elif cache is None:
        cached = 0
    else:
        cached = cache.get_seq_length(attention.original_component.layer_idx)
    positions = named.get("position_ids")
    if positions is None:
        positions = torch.arange(cached, cached + tokens.shape[1], device=tokens.device)
    return positions, cached


def _positions(length: int, name: str) -> Tensor:
    inside = getattr(_inside, "positions", None)
    if inside is None:
        raise EditNotHonored(f"{name} ran outside of its attention module, so the positions of its tokens are unknown")
    positions, cached = inside
    if length == positions.shape[-1]:
        return positions
    if length == cached + positions.shape[-1]:  # some models pass on all keys, the cached ones first
        return torch.arange(length, device=positions.device)
    raise EditNotHonored(
        f"{name}: {length} keys for {positions.shape[-1]} new tokens after {cached} cached ones: their positions are "
        "unknown; run without a key/value cache"
    )
