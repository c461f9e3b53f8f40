"""Positions in prompts as callers give them, as positions counted from the first token of each."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def attention_positions(lengths: Int[Tensor, "sequences"], attention: Any) -> Int[Tensor, "sequences 2"] | None:
    """Return query and key position of each sequence, counted from its first token; None without.

    Raises as `positions_in`; ValueError for a key behind its query.
    """
    if attention is None:
        return None
    pairs = torch.as_tensor(attention)
    if pairs.shape not in ((2,), (len(lengths), 2)):
        raise ValueError(
            f"attention is a query and a key position per sequence, [{len(lengths)}, 2]; found shape "
            f"{tuple(pairs.shape)}"
        )
    positions = positions_in(lengths, pairs, "attention")
    behind = (positions[:, 1] > positions[:, 0]).nonzero().flatten().tolist()
    if behind:
        raise ValueError(f"attention of sequence {behind[0]}: its key comes after its query")
    return positions


def positions_in(lengths: Int[Tensor, "sequences"], given: Any, what: str) -> Int[Tensor, "sequences chosen"]:
    """Return positions counted from the first token of each sequence; negative ones count from its end.

    Raises ValueError for a position that a prompt does not have, TypeError for no whole numbers; `what` names them.
    """
    positions = torch.as_tensor([given] if isinstance(given, int) else given)
    if positions.is_floating_point() or positions.dtype is torch.bool or positions.ndim not in (1, 2):
        raise TypeError(
            f"{what} are whole numbers, one list for all prompts or a row per prompt; found {given!r}"[:200]
        )
    if positions.ndim == 1:
        positions = positions.expand(len(lengths), -1)
    if len(positions) != len(lengths) or positions.shape[1] == 0:
        raise ValueError(f"{what} has shape {tuple(positions.shape)} and there are {len(lengths)} prompts")
    ends = lengths[:, None]
    wrong = ((positions >= ends) | (positions < -ends)).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise ValueError(
            f"{what}: prompt {row} has no position {int(positions[row, column])}; it has {int(lengths[row])} tokens"
        )
    return torch.where(positions < 0, positions + ends, positions).long().cpu()
