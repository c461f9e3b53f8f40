"""`Removal`, the change that a removed part makes to a layer, and checks of the scores that a part returns."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.user_functions import not_finite, returned_tensor


@dataclass(frozen=True)
class Removal:
    """The change that a part makes to some heads of a layer in one run, for code that records or replaces it.

    Attributes:
        difference: the tensor that is added to the scaled scores before a softcap, [batch, heads, pos, pos]; for a part
            that acts on z (a head's output before W_O), added to z, [batch, heads, pos, d_head].
        allowed: True for pairs of query and key that the model does not mask; None for a part of z.
        scores: queries and keys of these heads in the run; None for a part of z.
    """

    difference: Float[Tensor, "batch heads pos width"]
    allowed: Bool[Tensor, "*batch query key"] | None
    scores: HeadScores | None


def root_mean_square(
    scores: Float[Tensor, "batch heads query key"], allowed: Bool[Tensor, "*batch query key"]
) -> Float[Tensor, "batch heads"]:
    """Return the root mean square of scores over the pairs of tokens where `allowed` is True, [batch, heads]."""
    square = (scores * allowed).square().sum((-2, -1))
    return (square / allowed.sum((-2, -1))).sqrt()


def returned_scores(
    values: Any, scores: HeadScores, allowed: Bool[Tensor, "*batch query key"], function: str
) -> Float[Tensor, "batch heads query key"]:
    """Check the scores that a user's part returned, and return them with the dtype of the run's scores.

    `values` is the returned object, `scores` the heads' scores in the run, `function` the name of the part's method for
    messages, such as "of() of the part 'half'". Infinities at masked pairs of tokens become 0 in a copy. Raises
    ValueError for another shape, type or device, for NaN, and for infinite numbers at pairs that the model does not
    mask (`allowed` is False where it masks).
    """
    expected = f"{function} must return a score for each pair of tokens, [batch, heads, pos, pos]"
    part = returned_tensor(values, scores.shape, expected, kind="floating-point numbers", like=scores.query.whole)
    wrong = not_finite(part)
    if wrong is None:
        return part
    masked = wrong & part.detach().isinf() & ~allowed
    seen = (wrong & ~masked).nonzero()
    if len(seen):
        row, head, query, key = seen[0].tolist()
        raise ValueError(
            f"{expected}, finite wherever the key is not masked; found {part[row, head, query, key].item()} for query "
            f"{query} and key {key} of row {row}, head {scores.heads[head]} of the layer: return 0 for no change there"
        )
    return part.masked_fill(masked, 0.0)
