"""What each query of a prompt is scored on: weights of its keys, and the attention that they get."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.heads.detectors.chance import SeenKeys
from tlspectral.heads.detectors.patterns import PATTERNS
from tlspectral.models.running.batches import PackedTokens
from tlspectral.user_functions import not_finite, real_tensor, require_call, result_described

Weights = Float64[Tensor, "batch query key"]
Reduce = Callable[[Float[Tensor, "batch heads query key"]], Float64[Tensor, "scores batch heads"]]
Scorer = Callable[[slice], tuple[Reduce, Bool[Tensor, "scores batch"]]]


def _pattern_weights(pattern: Any, prompts: PackedTokens, rows: slice, causal: bool) -> Weights:
    """Return the weights of a pattern by name, or of a caller's, for some prompts, 0 outside of their tokens.

    The first two positions are no queries of a named pattern: there is no choice at the first, and the token before the
    second is the one that many heads attend to when they have nothing to do. Raises ValueError for a pattern of another
    shape, without a mark, or with a key after its query, TypeError for no matrix.
    """
    tokens, lengths = prompts.tokens[rows], prompts.lengths[rows].tolist()
    n_prompts, width = prompts.tokens.shape
    if isinstance(pattern, str) and pattern in PATTERNS:
        queries = (prompts.real[rows] & (torch.arange(width) >= 2))[:, :, None]
        return _seen((PATTERNS[pattern](tokens) & queries).double(), rows, causal)
    weights = torch.zeros(len(tokens), width, width, dtype=torch.float64)
    for row, length in enumerate(lengths):
        index = rows.start + row
        if callable(pattern):
            given, shape = _matrix(pattern(tokens[row, :length].clone()), index), (length, length)
        else:
            given, shape = _matrix(pattern), (width, width)
            if given.ndim == 3 and len(given) == n_prompts:
                given = given[index]
                if bool(given[length:].any()):
                    raise ValueError(
                        f"pattern: prompt {index} has {length} tokens, and a later query is marked; positions count "
                        "from the first real token of a prompt"
                    )
        if given.shape != shape:
            expected = f"{shape}" if callable(pattern) else f"{shape} or {(n_prompts, *shape)}"
            raise ValueError(f"pattern: prompt {index} needs weights of shape {expected}; found {tuple(given.shape)}")
        weights[row, :length, :length] = given[:length, :length]
    return _seen(weights, rows, causal)


def _seen(weights: Weights, rows: slice, causal: bool) -> Weights:
    """Return weights, and refuse the weights of keys that a decoder never sees. Raises ValueError."""
    above = (weights.triu(1) != 0).nonzero()
    if causal and len(above):
        row, query, key = above[0].tolist()
        raise ValueError(
            f"pattern: prompt {rows.start + row}: query {query} is marked with key {key}, which comes after it and is "
            "never seen; mark earlier keys alone (.tril())"
        )
    return weights


def _matrix(given: Any, index: int | None = None) -> Tensor:
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        values = None
    wrong = not_finite(values) if real_tensor(values) else None
    if not real_tensor(values) or wrong is not None:
        found = result_described(given) if isinstance(given, Tensor) else f"{type(given).__name__} {given!r}"[:100]
        if real_tensor(values) and wrong is not None:
            place = wrong.nonzero()[0].tolist()
            found = f"{values[tuple(place)].item()} at {place}"
        found += "" if index is None else f" for prompt {index}"
        raise TypeError(
            "pattern is a matrix of weights or of 0 and 1, [pos, pos] or [sequences, pos, pos], a function of a "
            f"prompt's token ids that returns one, or a name ({', '.join(PATTERNS)}); found {found}"
        )
    return values.detach().cpu().double()


class Marks:
    """The keys that sequences are scored on, by patterns: names of `PATTERNS`, matrices or functions.

    `uniform` collects, for each batch, the scores of a head that attends alike to all keys that its queries see:
    [masks, scores, batch], for each mask of `seen`.
    """

    def __init__(self, sequences: PackedTokens, patterns: list[Any], seen: SeenKeys, *, causal: bool):
        self.sequences, self.patterns, self.causal = sequences, patterns, causal
        for pattern in patterns:
            if callable(pattern):
                require_call(pattern, ("the token ids of a prompt",), "pattern")
        self.uniform: list[Float64[Tensor, "masks scores batch"]] = []
        self._attention = seen.uniform()

    def scorer(self, rows: slice) -> tuple[Reduce, Bool[Tensor, "scores batch"]]:
        """Return the function of a pattern that gives the scores of a batch, and which of its sequences count."""
        weights = [_pattern_weights(pattern, self.sequences, rows, self.causal) for pattern in self.patterns]
        self.uniform.append(torch.stack([_score(marked, self._attention) for marked in weights], dim=1))
        n_queries = torch.stack([scored_queries(marked) for marked in weights])
        # The marks of all patterns together, so that a layer's attention is read once.
        marks = [one.nonzero() for one in weights]
        target = torch.cat(
            [index * len(one) + mark[:, 0] for index, (one, mark) in enumerate(zip(weights, marks, strict=True))]
        )
        where = torch.cat(marks).T
        marked = torch.cat([one[one != 0] for one in weights])
        placed: dict[torch.device, Tensor] = {}

        def reduce(attention: Tensor) -> Tensor:
            if attention.device not in placed:
                placed[attention.device] = where.to(attention.device)
            row, query, key = placed[attention.device]
            # Copied as stored, and summed in float64 on the CPU: a device computes nothing in that type.
            seen = attention[row, :, query, key].cpu().double() * marked[:, None]
            n_prompts, n_heads = attention.shape[:2]
            total = torch.zeros(len(weights) * n_prompts, n_heads, dtype=torch.float64)
            total.index_add_(0, target, seen)
            return total.unflatten(0, (len(weights), n_prompts)) / n_queries.clamp_min(1)[..., None]

        return reduce, n_queries > 0


def scored_queries(weights: Weights) -> Float64[Tensor, "batch"]:
    """Return how many queries of each prompt have a key with a weight."""
    return (weights != 0).any(-1).sum(-1).double()


def _score(weights: Weights, attention: Float64[Tensor, "masks query key"]) -> Float64[Tensor, "masks batch"]:
    """Return the score of each prompt for each pattern of attention."""
    by_mask = torch.stack([(weights * each).sum(-1).sum(-1) for each in attention])  # the keys of a query first
    return by_mask / scored_queries(weights).clamp_min(1)
