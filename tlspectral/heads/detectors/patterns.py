"""Named attention patterns: functions from token ids to the keys on which each query is scored."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.models.hooking.strips import Strip

WINDOW = 8
"""How many tokens back the pattern "local" reaches."""

Marked = Bool[Tensor, "batch query key"]
TokenPattern = Callable[[Int[Tensor, "batch pos"], Strip], Marked]
"""Function from token ids [batch, pos] and a strip to marks for the queries and keys of the strip."""


def _behind(strip: Strip) -> Int[Tensor, "1 query key"]:
    """Return how many tokens each key of a strip lies before each query, [1, query, key]; negative for later keys."""
    return (torch.arange(strip.start, strip.stop)[:, None] - torch.arange(strip.n_keys))[None]


def _back(nearest: int, farthest: int) -> TokenPattern:
    """Return a pattern for the keys from `nearest` to `farthest` tokens before the query; negative: after it."""

    def marked(tokens: Int[Tensor, "batch pos"], strip: Strip) -> Marked:
        behind = _behind(strip)
        return ((behind >= nearest) & (behind <= farthest)).expand(len(tokens), -1, -1)

    return marked


def _duplicate(tokens: Int[Tensor, "batch pos"], strip: Strip) -> Marked:
    """Return marks for the queries and keys of a strip: True for all earlier tokens equal to the query's token."""
    return (tokens[:, strip.queries, None] == tokens[:, None, : strip.n_keys]) & (_behind(strip) > 0)


def _induction(tokens: Int[Tensor, "batch pos"], strip: Strip) -> Marked:
    """Return marks for the queries and keys of a strip: True for every earlier token whose predecessor equals the
    query's token.
    """
    followed = torch.zeros(len(tokens), strip.stop - strip.start, strip.n_keys, dtype=torch.bool)
    followed[:, :, 1:] = tokens[:, strip.queries, None] == tokens[:, None, : strip.n_keys - 1]
    return followed & (_behind(strip) > 0)


def _first_token(tokens: Int[Tensor, "batch pos"], strip: Strip) -> Marked:
    """Return marks for the queries and keys of a strip: True for the first token, for every later query."""
    at_start = torch.arange(strip.n_keys) == 0
    return (at_start[None, None, :] & (_behind(strip) > 0)).expand(len(tokens), -1, -1)


PATTERNS: dict[str, TokenPattern] = {
    "previous_token": _back(1, 1),
    "next_token": _back(-1, -1),
    "duplicate": _duplicate,
    "induction": _induction,
    "first_token": _first_token,
    "local": _back(2, WINDOW),
    "self": _back(0, 0),
}
"""The named patterns of `detect_heads(pattern=)`: functions from token ids [batch, pos] and a strip to marks [batch,
query, key].
"""
