"""Score attention on marked keys: which keys count for each query, and how much attention they get."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.heads.detectors.chance import SeenKeys
from tlspectral.heads.detectors.patterns import PATTERNS
from tlspectral.models.hooking.strips import Strip
from tlspectral.models.running.batches import PackedTokens
from tlspectral.user_functions import (
    call_users,
    function_name,
    not_finite,
    real_tensor,
    require_call,
    result_described,
)

Weights = Float64[Tensor, "batch query key"]
Reduce = Callable[[Float[Tensor, "batch heads query key"], Strip], Float64[Tensor, "scores batch heads"]]
Scorer = Callable[[slice], tuple[Reduce, Bool[Tensor, "scores batch"]]]
MOST_KEPT = 2**23
"""Marked keys of a batch that are kept between layers. More are found again for each layer and strip."""


def takes_queries(pattern: Any) -> bool:
    """Return True if a user's pattern has a parameter `queries` and so is called for some queries at a time."""
    try:
        return "queries" in inspect.signature(pattern).parameters
    except (TypeError, ValueError):  # functions written in C may not have a signature
        return False


class _Pattern:
    """The weights of the keys of some sequences, strip by strip.

    `pattern` is a name such as "induction", a matrix, or a function of token ids; `rows` are the sequences of `prompts`
    to which it is applied. `causal`: True refuses keys after their query. Named patterns skip queries 0 and 1: the
    first has no choice, and the key before the second is the first token, to which many heads attend by default.
    """

    def __init__(self, pattern: Any, prompts: PackedTokens, rows: slice, causal: bool):
        self.pattern, self.prompts, self.rows, self.causal = pattern, prompts, rows, causal
        self._whole: dict[int, Tensor] = {}  # matrices of functions, by sequence

    def weights(self, strip: Strip) -> Weights:
        """Return the weights for the queries and keys of a strip, [batch, query, key]; 0 outside of the sequences.

        Raises ValueError for weights of another shape or on a key after its query, TypeError if the pattern is not a
        matrix.
        """
        tokens, width = self.prompts.tokens[self.rows], self.prompts.tokens.shape[1]
        if isinstance(self.pattern, str) and self.pattern in PATTERNS:
            counted = self.prompts.real[self.rows] & (torch.arange(width) >= 2)
            return self._seen((PATTERNS[self.pattern](tokens, strip) & counted[:, strip.queries, None]).double(), strip)
        weights = torch.zeros(len(tokens), strip.stop - strip.start, strip.n_keys, dtype=torch.float64)
        for row, length in enumerate(self.prompts.lengths[self.rows].tolist()):
            queries = slice(strip.start, min(length, strip.stop))
            if queries.start < queries.stop:
                by_query = self._matrix(row, length, queries)[:, : strip.n_keys]
                weights[row, : len(by_query), : by_query.shape[1]] = by_query
        return self._seen(weights, strip)

    def _matrix(self, row: int, length: int, queries: slice) -> Float64[Tensor, "queries keys"]:
        """Return the weights of some queries of one sequence, for all its keys.

        `row` is the number of the sequence in the batch, `length` its number of tokens.
        """
        index, (n_prompts, width) = self.rows.start + row, self.prompts.tokens.shape
        function = function_name(self.pattern) if callable(self.pattern) else ""
        some = callable(self.pattern) and takes_queries(self.pattern)
        shape = (length, length) if callable(self.pattern) else (width, width)
        if some:
            shape = (queries.stop - queries.start, length)
        if callable(self.pattern) and (some or row not in self._whole):
            what = f"pattern ({function}) for prompt {index}"
            given: dict[str, Any] = {"tokens": self.prompts.tokens[index, :length].clone()}
            given |= {"queries": queries} if some else {}
            marked = call_users(self.pattern, given, what, f"a matrix of shape {shape}")
            matrix = _matrix(marked, index, function)
            if not some:  # a copy, because a function may return the same tensor at every call
                self._whole[row] = matrix.clone()
        else:
            matrix = self._whole[row] if callable(self.pattern) else _matrix(self.pattern)
        if not callable(self.pattern) and matrix.ndim == 3 and len(matrix) == n_prompts:
            matrix = matrix[index]
            if bool(matrix[length:].any()):
                raise ValueError(
                    f"pattern: prompt {index} has {length} tokens, but a query after them has a weight; count "
                    "positions from the first token that is not padding"
                )
        if matrix.shape != shape:
            expected = f"{shape}" if callable(self.pattern) else f"{shape} or {(n_prompts, *shape)}"
            named = f" ({function})" if callable(self.pattern) else ""
            raise ValueError(
                f"pattern{named}: prompt {index} needs weights of shape {expected}; found {tuple(matrix.shape)}: give "
                "a row per query and a column per key"
            )
        return (matrix if some else matrix[queries])[:, :length].double()

    def _seen(self, weights: Weights, strip: Strip) -> Weights:
        """Return the weights [batch, query, key] unchanged. Raise ValueError if no later key may be seen, and a key
        after its query has a weight.
        """
        above = (weights.triu(1 + strip.start) != 0).nonzero()
        if self.causal and len(above):
            row, query, key = above[0].tolist()
            raise ValueError(
                f"pattern: prompt {self.rows.start + row}: query {strip.start + query} has a weight on key {key}, "
                "which comes after it and is never seen; keep earlier keys only, such as weights.tril()"
            )
        return weights


def _matrix(weights: Any, index: int | None = None, function: str = "") -> Tensor:
    """Return a user's weights (tensor, array or nested list) as a tensor on the CPU, of their own type.

    `index` is the number of the prompt and `function` the name of the function that returned the weights, for the
    message. Raises TypeError for anything else and for values that are not finite.
    """
    try:
        values = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError):
        values = None
    not_finite_at = not_finite(values) if real_tensor(values) else None
    if not real_tensor(values) or not_finite_at is not None:
        description = (
            result_described(weights)
            if isinstance(weights, Tensor)
            else f"{type(weights).__name__} {shown(weights, 80)}"
        )
        if real_tensor(values) and not_finite_at is not None:
            place = not_finite_at.nonzero()[0].tolist()
            description = f"{values[tuple(place)].item()} at {place}"
        description += "" if index is None else f" for prompt {index}"
        description += f" from the function {function}" if function else ""
        raise TypeError(
            "pattern= takes a matrix of weights or of 0 and 1, [pos, pos] or [sequences, pos, pos], a function from a "
            f"prompt's token ids to one, or a name ({', '.join(PATTERNS)}); found {description}"
        )
    return values.detach().cpu()


class _Marked(NamedTuple):
    """The keys of a strip to which any pattern gives a weight.

    Attributes:
        target: for each key, the number of its pattern and sequence together.
        where: sequence, query (from the first of the strip) and key.
        weight: the weights.
    """

    target: Int[Tensor, "marks"]
    where: Int[Tensor, "3 marks"]
    weight: Float64[Tensor, "marks"]


class Marks:
    """Scores of sequences on patterns, batch by batch. A score is a head's mean attention to the keys that a pattern
    marks.

    `sequences` are the prompts. `patterns` are names, matrices of weights or functions of token ids. `causal`: True
    refuses patterns that mark a key after its query. `strips` are the parts of the prompts whose attention is scored at
    a time. `largest`: True adds a score behind the patterns' scores, for the last pattern: the share of queries whose
    largest attention is on a key of the pattern. `uniform` collects, for each batch, the scores of uniform attention
    under each mask of `seen`: [masks, scores, batch].
    """

    def __init__(
        self,
        sequences: PackedTokens,
        patterns: list[Any],
        seen: SeenKeys,
        strips: list[Strip],
        *,
        causal: bool,
        largest: bool = False,
    ):
        self.sequences, self.patterns, self.causal, self.strips = sequences, patterns, causal, strips
        self.largest = largest
        for pattern in patterns:
            if callable(pattern):
                some = ["some queries"] if takes_queries(pattern) else []
                require_call(pattern, ("the token ids of a prompt", *some), "pattern")
        self.uniform: list[Float64[Tensor, "masks scores batch"]] = []
        self._seen = seen

    def scorer(self, rows: slice) -> tuple[Reduce, Bool[Tensor, "scores batch"]]:
        """Return a function and a mask for the sequences in `rows`, by which their attention is scored on all patterns.

        The function maps attention [batch, heads, query, key] in a strip to scores [scores, batch, heads], which add up
        over strips. The mask [scores, batch] is True where a sequence has a query with a marked key.
        """
        patterns = [_Pattern(pattern, self.sequences, rows, self.causal) for pattern in self.patterns]
        kept: dict[int, _Marked] = {}
        n_kept, sums, n_queries = 0, [], []
        for strip in self.strips:
            weights = [pattern.weights(strip) for pattern in patterns]
            uniform = self._seen.uniform(strip)
            # All keys of uniform attention are equally large: each counts with its share of the ties.
            scored = [*weights, (weights[-1] != 0).double()] if self.largest else weights
            sums.append(torch.stack([_score(marked, uniform) for marked in scored], dim=1))
            n_queries.append(torch.stack([(marked != 0).any(-1).sum(-1).double() for marked in scored]))
            marked = _marked(weights)
            n_kept += len(marked.weight)
            if n_kept <= MOST_KEPT or len(self.strips) == 1:
                kept[strip.start] = marked
        counts = torch.stack(n_queries).sum(0)
        self.uniform.append(torch.stack(sums).sum(0) / counts.clamp_min(1))
        placed: dict[tuple[torch.device, int], Tensor] = {}

        def reduce(attention: Tensor, strip: Strip) -> Tensor:
            marked = kept.get(strip.start) or _marked([pattern.weights(strip) for pattern in patterns])
            place = attention.device, strip.start
            where = placed.get(place)
            where = marked.where.to(attention.device) if where is None else where
            if strip.start in kept:
                placed[place] = where
            row, query, key = where
            # Copied to the CPU before the sum, because some devices have no float64.
            seen = attention[row, :, query, key].cpu().double() * marked.weight[:, None]
            n_prompts, n_heads = attention.shape[:2]
            total = torch.zeros(len(patterns) * n_prompts, n_heads, dtype=torch.float64)
            total.index_add_(0, marked.target, seen)
            scores = total.unflatten(0, (len(patterns), n_prompts))
            if self.largest:
                of_last = marked.target >= (len(patterns) - 1) * n_prompts
                scores = torch.cat([scores, _largest_on(marked.where[:, of_last], attention)[None]])
            return scores / counts.clamp_min(1)[..., None]

        return reduce, counts > 0


def _marked(weights: list[Weights]) -> _Marked:
    """Return the keys to which any pattern gives a weight, so that a layer's attention is read once for all patterns.

    `weights` has the weights of each pattern.
    """
    marks = [matrix.nonzero() for matrix in weights]
    target = torch.cat(
        [index * len(matrix) + mark[:, 0] for index, (matrix, mark) in enumerate(zip(weights, marks, strict=True))]
    )
    return _Marked(target, torch.cat(marks).T, torch.cat([matrix[matrix != 0] for matrix in weights]))


def _largest_on(
    where: Int[Tensor, "3 marks"], attention: Float[Tensor, "batch heads query key"]
) -> Float64[Tensor, "batch heads"]:
    """Return the number of each prompt's marked queries whose largest attention is on a marked key, by head.

    `where` has prompt, query and key of each mark; `attention` is the attention of a layer in a strip. If n keys share
    the largest attention, each counts 1 / n.
    """
    total = torch.zeros(attention.shape[:2], dtype=torch.float64)
    for prompt in where[0].unique().tolist():  # the attention of one prompt is copied at a time
        query, key = where[1:, where[0] == prompt]
        queries, rank = query.unique(return_inverse=True)
        marked = torch.zeros(len(queries), attention.shape[-1], dtype=torch.bool)
        marked[rank, key] = True
        seen = attention[prompt][:, queries.to(attention.device)]
        tied = seen == seen.amax(-1, keepdim=True)
        hits = (tied & marked.to(attention.device)).sum(-1)
        total[prompt] = (hits.cpu().double() / tied.sum(-1).cpu()).sum(-1)
    return total


def _score(weights: Weights, attention: Float64[Tensor, "masks query key"]) -> Float64[Tensor, "masks batch"]:
    """Return the attention [masks, query, key] times `weights` [batch, query, key], summed over a strip: [masks,
    batch].
    """
    return torch.stack([(weights * matrix).sum(-1).sum(-1) for matrix in attention])  # the keys of a query first
