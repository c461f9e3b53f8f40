"""The patterns of attention that have a name: the keys that a query is scored on, from the token ids alone."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

WINDOW = 8
"""How far back `"local"` reaches."""

Marked = Bool[Tensor, "batch query key"]


def _behind(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "1 query key"]:
    """Return how far each key lies behind each query."""
    position = torch.arange(tokens.shape[1])
    return (position[:, None] - position)[None]


def previous_token(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the token before the query."""
    return (_behind(tokens) == 1).expand(len(tokens), -1, -1)


def duplicate(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the earlier tokens that are equal to the query's."""
    return (tokens[:, :, None] == tokens[:, None, :]) & (_behind(tokens) > 0)


def induction(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the tokens that followed earlier tokens equal to the query's, the query's own position left out."""
    followed = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    followed[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    return followed & (_behind(tokens) > 0)


def first_token(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the first token of the sequence."""
    at_start = torch.arange(tokens.shape[1]) == 0
    return (at_start[None, None, :] & (_behind(tokens) > 0)).expand(len(tokens), -1, -1)


def local(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the tokens 2 to `WINDOW` before the query: the last ones but the query's own and the previous token."""
    behind = _behind(tokens)
    return ((behind >= 2) & (behind <= WINDOW)).expand(len(tokens), -1, -1)


def own(tokens: Int[Tensor, "batch pos"]) -> Marked:
    """Mark the query's own token."""
    return (_behind(tokens) == 0).expand(len(tokens), -1, -1)


PATTERNS: dict[str, Callable[[Int[Tensor, "batch pos"]], Marked]] = {
    "previous_token": previous_token,
    "duplicate": duplicate,
    "induction": induction,
    "first_token": first_token,
    "local": local,
    "self": own,
}
"""The named patterns that `detect_heads(pattern=)` takes and `head_types` measures."""
