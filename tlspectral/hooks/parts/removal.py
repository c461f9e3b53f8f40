"""What removing a part changes in a run: the change itself, its size, and the check of what a part returns."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.user_functions import not_finite, returned_tensor


@dataclass(frozen=True)
class Removal:
    """The part that is removed from the chosen heads of a layer, for code that records or replaces it.

    `difference` is added to the scaled scores, before a softcap; of a part of z it is added to z. `allowed` are pairs
    of tokens that the model does not mask, and `scores` the scores that the part belongs to; both None for z.
    """

    difference: Float[Tensor, "batch heads pos width"]
    allowed: Bool[Tensor, "*batch pos pos"] | None
    scores: HeadScores | None


def root_mean_square(
    scores: Float[Tensor, "batch heads pos pos"], allowed: Bool[Tensor, "*batch pos pos"]
) -> Float[Tensor, "batch heads"]:
    """Return the root mean square over the allowed pairs of each sequence."""
    square = (scores * allowed).square().sum((-2, -1))
    return (square / allowed.sum((-2, -1))).sqrt()


def returned_scores(
    values: Any, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"], function: str
) -> Float[Tensor, "batch heads pos pos"]:
    """Return what a part made of scores, in their type, with 0 in place of infinities at masked pairs of tokens.

    `function` names the part's function for the message. Raises ValueError for another shape, type or device, for NaN,
    and for infinite numbers at pairs of tokens that the model does not mask.
    """
    said = f"{function} returns a score for each pair of tokens, [batch, heads, pos, pos]"
    part = returned_tensor(values, scores.shape, said, kind="floating-point numbers", like=scores.query.whole)
    wrong = not_finite(part)
    if wrong is None:
        return part
    masked = wrong & part.detach().isinf() & ~allowed
    seen = (wrong & ~masked).nonzero()
    if len(seen):
        row, head, query, key = seen[0].tolist()
        raise ValueError(
            f"{said}, which are finite; found {part[row, head, query, key].item()} for query {query} and key {key} of "
            f"row {row}, head {scores.heads[head]} of the layer"
        )
    return part.masked_fill(masked, 0.0)
