"""Named attention patterns: functions from token ids to the keys on which each query is scored."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

WINDOW = 8
"""How many tokens back the pattern "local" reaches."""

Marked = Bool[Tensor, "batch query key"]
TokenPattern = Callable[[Int[Tensor, "batch pos"]], Marked]


def _behind(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "1 query key"]:
    """Return how many tokens each key lies before each query, [1, query, key]; negative for later keys."""
    position = torch.arange(tokens.shape[1])
    return (position[:, None] - position)[None]


def _back(nearest: int, farthest: int) -> TokenPattern:
    """Return a pattern (a function from token ids [batch, pos] to marks [batch, query, key]) for the keys from
    `nearest` to `farthest` tokens before the query; negative: after it.
    """

    def marked(tokens: Int[Tensor, "batch pos"]) -> Marked:
        behind = _behind(tokens)
        return ((behind >= nearest) & (behind <= farthest)).expand(len(tokens), -1, -1)

    return marked


def _duplicate(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Return marks [batch, query, key] for the token ids `tokens`: True for all earlier tokens that are equal to the
    query's token.
    """
    return (tokens[:, :, None] == tokens[:, None, :]) & (_behind(tokens) > 0)


def _induction(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Return marks [batch, query, key] for the token ids `tokens`: True for every earlier token whose predecessor
    equals the query's token.
    """
    followed = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    followed[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    return followed & (_behind(tokens) > 0)


def _first_token(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Return marks [batch, query, key] for the token ids `tokens`: True for the first token of the prompt, for every
    later query.
    """
    at_start = torch.arange(tokens.shape[1]) == 0
    return (at_start[None, None, :] & (_behind(tokens) > 0)).expand(len(tokens), -1, -1)


PATTERNS: dict[str, TokenPattern] = {
    "previous_token": _back(1, 1),
    "next_token": _back(-1, -1),
    "duplicate": _duplicate,
    "induction": _induction,
    "first_token": _first_token,
    "local": _back(2, WINDOW),
    "self": _back(0, 0),
}
"""The named patterns of `detect_heads(pattern=)`: functions from token ids [batch, pos] to marks [batch, query,
key].
"""
