"""Score attention on marked keys: which keys count for each query, and how much attention they get."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.heads.detectors.chance import SeenKeys
from tlspectral.heads.detectors.patterns import PATTERNS
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
Reduce = Callable[[Float[Tensor, "batch heads query key"]], Float64[Tensor, "scores batch heads"]]
Scorer = Callable[[slice], tuple[Reduce, Bool[Tensor, "scores batch"]]]


def _pattern_weights(pattern: Any, prompts: PackedTokens, rows: slice, causal: bool) -> Weights:
    """Return the weights of the keys, [batch, query, key], for the sequences `rows` of `prompts`; 0 outside of their
    tokens.

    `pattern` is a name such as "induction", a matrix, or a function of token ids. Named patterns skip queries 0 and 1:
    the first has no choice, and the key before the second is the first token, to which many heads attend by default.
    `causal`: True refuses keys after their query. Raises ValueError for weights of another shape or on a key after its
    query, TypeError if the pattern is not a matrix.
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
            shape, what = (length, length), f"pattern ({function_name(pattern)}) for prompt {index}"
            marked = call_users(pattern, {"tokens": tokens[row, :length].clone()}, what, f"a matrix of shape {shape}")
            matrix = _matrix(marked, index, function_name(pattern))
        else:
            matrix, shape = _matrix(pattern), (width, width)
            if matrix.ndim == 3 and len(matrix) == n_prompts:
                matrix = matrix[index]
                if bool(matrix[length:].any()):
                    raise ValueError(
                        f"pattern: prompt {index} has {length} tokens, but a query after them has a weight; count "
                        "positions from the first token that is not padding"
                    )
        if matrix.shape != shape:
            expected = f"{shape}" if callable(pattern) else f"{shape} or {(n_prompts, *shape)}"
            named = f" ({function_name(pattern)})" if callable(pattern) else ""
            raise ValueError(
                f"pattern{named}: prompt {index} needs weights of shape {expected}; found {tuple(matrix.shape)}: give "
                "a row per query and a column per key"
            )
        weights[row, :length, :length] = matrix[:length, :length]
    return _seen(weights, rows, causal)


def _seen(weights: Weights, rows: slice, causal: bool) -> Weights:
    """Return the weights [batch, query, key] unchanged. Raise ValueError if `causal` is True and a key after its query
    has a weight.

    `rows` are the numbers of the prompts, for the message.
    """
    above = (weights.triu(1) != 0).nonzero()
    if causal and len(above):
        row, query, key = above[0].tolist()
        raise ValueError(
            f"pattern: prompt {rows.start + row}: query {query} has a weight on key {key}, which comes after it and is "
            "never seen; keep earlier keys only, such as weights.tril()"
        )
    return weights


def _matrix(weights: Any, index: int | None = None, function: str = "") -> Tensor:
    """Return a user's weights (tensor, array or nested list) as a float64 tensor.

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
    return values.detach().cpu().double()


class Marks:
    """Scores of sequences on patterns, batch by batch. A score is a head's mean attention to the keys that a pattern
    marks.

    `sequences` are the prompts. `patterns` are names, matrices of weights or functions of token ids. `causal`: True
    refuses patterns that mark a key after its query. `largest`: True adds one more score behind those of the patterns,
    for the last pattern: the share of queries whose largest attention is on a marked key. `uniform` collects, for each
    batch, the scores of uniform attention under each mask of `seen`: [masks, scores, batch].
    """

    def __init__(
        self, sequences: PackedTokens, patterns: list[Any], seen: SeenKeys, *, causal: bool, largest: bool = False
    ):
        self.sequences, self.patterns, self.causal, self.largest = sequences, patterns, causal, largest
        for pattern in patterns:
            if callable(pattern):
                require_call(pattern, ("the token ids of a prompt",), "pattern")
        self.uniform: list[Float64[Tensor, "masks scores batch"]] = []
        self._attention = seen.uniform()

    def scorer(self, rows: slice) -> tuple[Reduce, Bool[Tensor, "scores batch"]]:
        """Return a function and a mask for the sequences in `rows`, by which their attention is scored on all patterns.

        The function maps attention [batch, heads, query, key] to scores [scores, batch, heads]. The mask [scores,
        batch] is True where a sequence has a query with a marked key.
        """
        weights = [_pattern_weights(pattern, self.sequences, rows, self.causal) for pattern in self.patterns]
        n_queries = torch.stack([scored_queries(marked) for marked in weights])
        # All keys of uniform attention are equally large: each counts with its share of the ties.
        scored = [*weights, (weights[-1] != 0).double()] if self.largest else weights
        self.uniform.append(torch.stack([_score(marked, self._attention) for marked in scored], dim=1))
        # All patterns are read together, so a layer's attention is read once.
        marks = [matrix.nonzero() for matrix in weights]
        target = torch.cat(
            [index * len(matrix) + mark[:, 0] for index, (matrix, mark) in enumerate(zip(weights, marks, strict=True))]
        )
        where = torch.cat(marks).T
        marked = torch.cat([matrix[matrix != 0] for matrix in weights])
        placed: dict[torch.device, Tensor] = {}

        def reduce(attention: Tensor) -> Tensor:
            if attention.device not in placed:
                placed[attention.device] = where.to(attention.device)
            row, query, key = placed[attention.device]
            # Copied to the CPU before the sum, because some devices have no float64.
            seen = attention[row, :, query, key].cpu().double() * marked[:, None]
            n_prompts, n_heads = attention.shape[:2]
            total = torch.zeros(len(weights) * n_prompts, n_heads, dtype=torch.float64)
            total.index_add_(0, target, seen)
            scores = total.unflatten(0, (len(weights), n_prompts)) / n_queries.clamp_min(1)[..., None]
            return torch.cat([scores, _largest_on(weights[-1] != 0, attention)[None]]) if self.largest else scores

        return reduce, (torch.cat([n_queries, n_queries[-1:]]) if self.largest else n_queries) > 0


def _largest_on(
    marked: Bool[Tensor, "batch query key"], attention: Float[Tensor, "batch heads query key"]
) -> Float64[Tensor, "batch heads"]:
    """Return the share of each prompt's marked queries whose largest attention is on a marked key, by head.

    `marked` says which keys count for each query, `attention` is a layer's. Of n keys with the same largest attention
    each counts 1 / n. 0 for a prompt without a marked query.
    """
    row, query = marked.any(-1).nonzero().T
    total = torch.zeros(len(attention), attention.shape[1], dtype=torch.float64)
    for prompt in row.unique().tolist():  # the attention of one prompt is copied at a time
        queries = query[row == prompt].to(attention.device)
        seen = attention[prompt][:, queries]
        tied = seen == seen.amax(-1, keepdim=True)
        hits = (tied & marked[prompt].to(attention.device)[queries]).sum(-1)
        total[prompt] = (hits.cpu().double() / tied.sum(-1).cpu()).mean(-1)
    return total


def scored_queries(weights: Weights) -> Float64[Tensor, "batch"]:
    """Return, for each prompt, how many queries have at least one key with a weight other than 0 in `weights` [batch,
    query, key].
    """
    return (weights != 0).any(-1).sum(-1).double()


def _score(weights: Weights, attention: Float64[Tensor, "masks query key"]) -> Float64[Tensor, "masks batch"]:
    """Return the score of each prompt under each of several attention matrices: [masks, batch].

    A score is the attention [masks, query, key] times `weights` [batch, query, key], summed over keys, and its mean
    over the queries that have a weight.
    """
    by_mask = torch.stack([(weights * matrix).sum(-1).sum(-1) for matrix in attention])  # the keys of a query first
    return by_mask / scored_queries(weights).clamp_min(1)
