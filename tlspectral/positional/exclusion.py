"""Permutations of the keys of one query: the exclusion split, and attention after two blocks of keys swap.

"Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.1, Definition 2) defines positional and symbolic
heads by the change of logits when key vectors exchange positions. Swapping the words of a prompt is a different
experiment, because deeper layers then see other key vectors. In the first layer both agree.

The positional-symbolic exclusion principle (PS, section 3.2, Theorem 1) bounds the variance of a query's logits by the
mean squared change of its logits under permutations of the keys. The mean over all permutations equals a mean over all
pairs (content k, position j), so no permutation is drawn. In this file

    A[k, j] = logit of the content of key k at position j.

The diagonal of A holds the logits of the unchanged prompt. The query's own key is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.reading.layer import softcapped
from tlspectral.positional.readout import LastQuery, Moved
from tlspectral.tasks.block_places import centred


class ExclusionSplit(NamedTuple):
    """Distance of a head from purely positional and from purely symbolic on one input, in squared logits.

    Attributes:
        pos: mean squared change of logits when contents move and positions stay; 0 for a positional head.
        sym: mean squared change of a content's logit when it moves to other positions; 0 for a symbolic head.
        variance: population variance of the logits; at most `pos + sym` (PS, Theorem 1).
    """

    pos: Float64[Tensor, "*batch"]
    sym: Float64[Tensor, "*batch"]
    variance: Float64[Tensor, "*batch"]

    @property
    def index(self) -> Float64[Tensor, "*batch"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`sym / (pos + sym)`: 0 for a symbolic head, 1 for a positional head, NaN if pos and sym are 0."""
        return self.sym / (self.pos + self.sym)


def exclusion_split(logits: Float64[Tensor, "*batch n n"]) -> ExclusionSplit:
    """Return the two terms of the exclusion principle and the variance that they bound (PS, Theorem 1, appendix B.2).

    Use it on a table of logits of your own; `positional_symbolic` returns the index for the heads of a model.

    >>> import torch
    >>> from tlspectral.positional import exclusion_split
    >>> by_content = torch.tensor([[0.0], [1.0], [2.0]]).double().expand(3, 3)
    >>> float(exclusion_split(by_content).index), float(exclusion_split(by_content.mT).index)
    (0.0, 1.0)

    Args:
        logits: A[k, j], logit of the content of key k at position j, for the n keys before the query.

    Returns:
        `ExclusionSplit`, squared logits, each `[*batch]`: `pos = mean_kj (A[k, j] - A[j, j])^2`, `sym = mean_kj (A[k,
            j] - A[k, k])^2`, and the population variance of the diagonal. NaN without keys.

    Not established: which positions or contents the head prefers, or that its output depends on them. `pos` and `sym`
    grow with the scale of the logits; only `index` does not.
    """
    in_place = logits.diagonal(dim1=-2, dim2=-1)
    pos = (logits - in_place[..., None, :]).square().mean((-2, -1))
    sym = (logits - in_place[..., :, None]).square().mean((-2, -1))
    return ExclusionSplit(pos, sym, _variance(in_place))


def exclusion_split_factored(
    contents: Float64[Tensor, "*batch n r"], places: Float64[Tensor, "*batch n r"]
) -> ExclusionSplit:
    """Return `exclusion_split` of `A = contents @ places^T` in O(n r^2) time, without forming A.

    Rotary logits have this form. For the complex product `z = q conj(k)` of a pair, contents are `(Re z, -Im z)` and
    places `(cos, sin)` of the angle between query and position j. Non-rotary columns add their product to the contents
    and a 1 to the places. A positional bias adds a 1 to the contents and itself to the places.

    Args:
        contents: one row per key: the factor that depends on the query and on the key's content.
        places: one row per position: the other factor.

    Returns:
        `ExclusionSplit`. Equal contents give `pos` exactly 0, equal places `sym` exactly 0. A part that vanishes by
        cancellation has rounding of about 1e-16 of the squared products.

    With `F` the contents and `p_j` a row of the places, `mean_k (A[k, j] - A[j, j])^2 = p_j^T Cov(F) p_j + ((Fbar -
    F_j) . p_j)^2` (PS, section 3.2).
    """
    pos = _mean_squared_change(contents, places)
    sym = _mean_squared_change(places, contents)
    return ExclusionSplit(pos, sym, _variance((contents * places).sum(-1)))


def head_exclusion(seen: LastQuery) -> ExclusionSplit:
    """Return the exclusion split (`pos`, `sym`, `variance`) of each head, over all visible keys before the query's own.

    Without rotary positions and ALiBi the logits do not depend on positions, and `sym` is exactly 0.
    """
    visible = seen.visible[:-1].nonzero().flatten()
    contents = seen.score_scale * seen.contents[..., visible].mT
    places = seen.places[..., visible].mT.expand(len(contents), -1, -1)
    if seen.alibi is not None:
        contents = torch.cat([contents, torch.ones_like(contents[..., :1])], dim=-1)
        places = torch.cat([places, seen.alibi.bias(visible)[..., None]], dim=-1)
    if seen.softcap is None:
        return exclusion_split_factored(contents, places)
    # A capped logit is not a product of contents and places. One matrix of keys by positions is held at a time.
    pairs = zip(contents, places, strict=True)
    splits = [exclusion_split(softcapped(of_keys @ of_places.T, seen.softcap)) for of_keys, of_places in pairs]
    return ExclusionSplit(*(torch.stack(parts) for parts in zip(*splits, strict=True)))


def frequency_exclusion(seen: LastQuery) -> ExclusionSplit:
    """Return the exclusion split (`pos`, `sym`, `variance`) of every rotary pair [heads, pairs], before the softcap."""
    visible = seen.visible[:-1].nonzero().flatten()
    pairs = seen.n_pairs
    contents = rearrange(
        seen.score_scale * seen.contents[:, : 2 * pairs, visible], "head (two pair) key -> head pair key two", two=2
    )
    places = rearrange(seen.places[..., : 2 * pairs, visible], "... (two pair) key -> ... pair key two", two=2)
    return exclusion_split_factored(contents, places.expand(len(contents), -1, -1, -1))


def swapped_key_means(
    logits_of: Callable[[Moved], Float64[Tensor, "*rows n"]],
    intact: Float64[Tensor, "*rows keys"],
    spans: list[tuple[int, int]],
    swaps: list[tuple[int, int]],
) -> Float64[Tensor, "swaps *rows 2"]:
    """Return the mean attention weight in both slots of each swap, after the keys of two blocks exchanged positions.

    Args:
        logits_of: function from (keys, new positions) to their logits, -inf at masked positions.
        intact: logits of all keys in place.
        spans: start and stop of each block; blocks follow one another.
        swaps: pairs of blocks (i, j), i < j.

    Returns:
        (d'_i, d'_j) of each swap; slot i then has the length of block j.
    """
    # Only changed logits are computed: of both blocks and, if their lengths differ, of the keys between them.
    # The denominator of the softmax is a sum over blocks. Subtracting the old blocks from it would lose digits.
    n_keys = intact.shape[-1]
    segments = [(0, spans[0][0]), *spans, (spans[-1][1], n_keys)]
    masses = torch.stack([intact[..., start:stop].logsumexp(-1) for start, stop in segments], dim=-1)
    positions = torch.arange(n_keys, device=intact.device)
    means = []
    for i, j in swaps:
        (start, stop), (start_j, stop_j) = spans[i], spans[j]
        length_i, length_j = stop - start, stop_j - start_j
        if length_i == length_j:
            keys = [positions[start_j:stop_j], positions[start:stop]]
            new_positions = [positions[start:stop], positions[start_j:stop_j]]
            moved = {i, j}
        else:
            keys = [positions[start_j:stop_j], positions[stop:start_j], positions[start:stop]]
            new_positions = [positions[start:stop_j]]
            moved = set(range(i, j + 1))
        # Segment 0 is the prefix, and block b segment b + 1.
        unmoved = [segment for segment in range(len(segments)) if segment - 1 not in moved]
        logits = logits_of((torch.cat(keys), torch.cat(new_positions)))
        total = torch.cat([masses[..., unmoved], logits], dim=-1).logsumexp(-1)
        first = logits[..., :length_j].logsumexp(-1) - total
        second = logits[..., logits.shape[-1] - length_i :].logsumexp(-1) - total
        means.append(torch.stack([first.exp() / length_j, second.exp() / length_i], dim=-1))
    return torch.stack(means)


def _mean_squared_change(
    moved: Float64[Tensor, "*batch n r"], fixed: Float64[Tensor, "*batch n r"]
) -> Float64[Tensor, "*batch"]:
    """Return the mean over (k, j) of `((moved_k - moved_j) . fixed_j)^2`."""
    deviations = centred(moved, dim=-2)
    covariance = deviations.mT @ deviations / moved.shape[-2]
    # A quadratic form that vanishes can round to below 0.
    spread = ((fixed @ covariance) * fixed).sum(-1).clamp_min(0)
    return (spread + (deviations * fixed).sum(-1).square()).mean(-1)


def _variance(values: Float64[Tensor, "*batch n"]) -> Float64[Tensor, "*batch"]:
    """Return the population variance over the last axis, exactly 0 for equal values."""
    return centred(values, dim=-1).square().mean(-1)
