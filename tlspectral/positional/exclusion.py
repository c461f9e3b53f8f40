"""The positional-symbolic exclusion principle: how far a head is from ignoring contents and from ignoring positions.

Theorem 1 of "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.2) bounds the variance of a query's
logits by the mean squared change of its logits under permutations of the keys. The mean over all permutations is one
over all pairs (content k, position j), so no permutation is needed. Throughout,

    A[k, j] = logit of the content of key k placed at position j,

and its diagonal holds the logits of the prompt as it stands. The query's own key is left out.
"""

from typing import NamedTuple

from jaxtyping import Float64
from torch import Tensor


class ExclusionSplit(NamedTuple):
    """How far a head is from being positional and from being symbolic on one input, in squared logits.

    Attributes:
        pos: mean squared change of the logits when contents move and positions stay; 0 for a positional head.
        sym: mean squared change of a content's logit when it moves to other positions; 0 for a symbolic head.
        variance: population variance of the logits; at most `pos + sym` (PS, Theorem 1).
    """

    pos: Float64[Tensor, "*batch"]
    sym: Float64[Tensor, "*batch"]
    variance: Float64[Tensor, "*batch"]

    @property
    def index(self) -> Float64[Tensor, "*batch"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`sym / (pos + sym)`: 0 symbolic, 1 positional, NaN where the head is both."""
        return self.sym / (self.pos + self.sym)


def exclusion_split(logits: Float64[Tensor, "*batch n n"]) -> ExclusionSplit:
    """The two squared norms of PS Theorem 1, each over `(n-1)! (n-1)`, and the variance they bound.

    Args:
        logits: A[k, j], logit of the content of key k at position j, for the n - 1 keys before the query.

    Returns:
        `pos = mean_kj (A[k, j] - A[j, j])^2`, `sym = mean_kj (A[k, j] - A[k, k])^2` and the population variance of the
        diagonal, each `[*batch]`, squared logits. NaN for no keys.

    The source is PS, section 3.2 and appendix B.2: `(k, j)` is uniform over all pairs for a random permutation.

    What it does not establish: which positions or contents the head prefers, nor that its output depends on them. The
    split follows the scale of the logits; only `index` is free of it.
    """
    in_place = logits.diagonal(dim1=-2, dim2=-1)
    pos = (logits - in_place[..., None, :]).square().mean((-2, -1))
    sym = (logits - in_place[..., :, None]).square().mean((-2, -1))
    return ExclusionSplit(pos, sym, _variance(in_place))


def exclusion_split_factored(
    contents: Float64[Tensor, "*batch n r"], places: Float64[Tensor, "*batch n r"]
) -> ExclusionSplit:
    """`exclusion_split` of `A = contents @ places^T`, in O(n r^2) time and without forming A.

    Rotary logits have this form: for the complex pair products `z = q conj(k)`, contents are `(Re z, -Im z)` and
    places `(cos, sin)` of the angle between query and position j; columns that do not turn add their product to the
    contents and a 1 to the places; a bias of position is a 1 in the contents.

    Args:
        contents: one row per key, whatever of the logit depends on the query and on the key's content.
        places: one row per position.

    Returns:
        As `exclusion_split`. Equal contents give `pos` exactly 0, equal places `sym` exactly 0; a part that vanishes by
        cancellation rounds to about 1e-16 of the squared products that cancel.

    The source is PS, section 3.2; with `F` the contents and `p_j` a place,
    `mean_k (A[k, j] - A[j, j])^2 = p_j^T Cov(F) p_j + ((Fbar - F_j) . p_j)^2`.

    What it does not establish: as `exclusion_split`.
    """
    pos = _mean_squared_change(contents, places)
    sym = _mean_squared_change(places, contents)
    return ExclusionSplit(pos, sym, _variance((contents * places).sum(-1)))


def _mean_squared_change(
    moved: Float64[Tensor, "*batch n r"], fixed: Float64[Tensor, "*batch n r"]
) -> Float64[Tensor, "*batch"]:
    """Mean over (k, j) of `((moved_k - moved_j) . fixed_j)^2`."""
    centred = _centred(moved, dim=-2)
    covariance = centred.mT @ centred / moved.shape[-2]
    # A quadratic form that vanishes can round to below 0.
    spread = ((fixed @ covariance) * fixed).sum(-1).clamp_min(0)
    return (spread + (centred * fixed).sum(-1).square()).mean(-1)


def _variance(values: Float64[Tensor, "*batch n"]) -> Float64[Tensor, "*batch"]:
    """Population variance over the last axis, exactly 0 for equal values."""
    return _centred(values, dim=-1).square().mean(-1)


def _centred(values: Tensor, dim: int) -> Tensor:
    """Values minus their mean; the first is taken off before, as the mean of equal numbers can round to another."""
    from_first = values - values.narrow(dim, 0, min(1, values.shape[dim]))
    return from_first - from_first.mean(dim, keepdim=True)
