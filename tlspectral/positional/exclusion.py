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

from tlspectral.errors import shown
from tlspectral.models.reading.layer import softcapped
from tlspectral.positional.readout import LastQuery, Moved
from tlspectral.tasks.block_places import centred


class ExclusionSplit(NamedTuple):
    """How far a head is from purely positional and from purely symbolic on one input, in squared logits.

    Attributes:
        pos: mean squared change of the logit at a position when another content moves there; 0 for a positional head.
        sym: mean squared change of the logit of a content when it moves to another position; 0 for a symbolic head.
        variance: population variance of the unchanged logits (the diagonal of the table); at most `pos + sym` (Theorem
            1 of "Decoupling Positional and Symbolic Attention Behavior").
    """

    pos: Float64[Tensor, "*batch"]
    sym: Float64[Tensor, "*batch"]
    variance: Float64[Tensor, "*batch"]

    @property
    def index(self) -> Float64[Tensor, "*batch"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`sym / (pos + sym)`, from 0 (symbolic head) to 1 (positional head); NaN if pos and sym are 0."""
        return self.sym / (self.pos + self.sym)


def exclusion_split(logits: Float64[Tensor, "*batch n n"]) -> ExclusionSplit:
    """Measure how far a table of logits is from purely positional and from purely symbolic.

    The split comes from "Decoupling Positional and Symbolic Attention Behavior", Theorem 1 and appendix B.2. Use it on
    your own table of logits; `tls.positional_symbolic` gives the index for the heads of a model.

    >>> import torch
    >>> import tlspectral as tls
    >>> by_content = torch.tensor([[0.0], [1.0], [2.0]]).double().expand(3, 3)
    >>> symbolic = tls.positional.exclusion_split(by_content)
    >>> round(float(symbolic.pos), 2), float(symbolic.sym), float(symbolic.index)
    (1.33, 0.0, 0.0)
    >>> float(tls.positional.exclusion_split(by_content.mT).index)
    1.0

    Args:
        logits: table A of n keys, [..., n, n]: A[k, j] is the logit of the content of key k if it stood at position j.
            The diagonal holds the real logits.

    Returns:
        `ExclusionSplit`, a named tuple of tensors of shape [...]; the first three are in squared logits:
            `.pos`: mean over k and j of (A[k, j] - A[j, j])^2, the change when contents move; 0 for a positional head.
            `.sym`: mean over k and j of (A[k, j] - A[k, k])^2, the change when a content changes position; 0 for a
                symbolic head.
            `.variance`: population variance of the diagonal; at most `.pos + .sym`.
            `.index`: `.sym / (.pos + .sym)`, no unit: 0 symbolic, 1 positional, NaN if both are 0.

    Not established: which positions or contents the head prefers, or that the model's output depends on them. `.pos`
    and `.sym` grow with the scale of the logits; only `.index` does not. All numbers are NaN without keys.
    """
    square = isinstance(logits, Tensor) and logits.ndim >= 2 and logits.shape[-1] == logits.shape[-2]
    if not square or not logits.is_floating_point():
        raise TypeError(f"logits must be a tensor of real numbers of shape [..., n, n]; found {shown(logits)}")
    in_place = logits.diagonal(dim1=-2, dim2=-1)
    pos = (logits - in_place[..., None, :]).square().mean((-2, -1))
    sym = (logits - in_place[..., :, None]).square().mean((-2, -1))
    return ExclusionSplit(pos, sym, _variance(in_place))


def exclusion_split_factored(
    contents: Float64[Tensor, "*batch n r"], places: Float64[Tensor, "*batch n r"]
) -> ExclusionSplit:
    """Return the `ExclusionSplit` (`pos`, `sym`, `variance`) of the table `A = contents @ places^T`, without forming A.

    Rotary logits have this form. For the complex product `z = q conj(k)` of a rotary pair, contents are `(Re z, -Im z)`
    and places `(cos, sin)` of the angle between the query and position j. Non-rotary columns add their product to the
    contents and a 1 to the places. A positional bias adds a 1 to the contents and the bias to the places.

    Args:
        contents: a row per key: the factor that depends on the query and on the key's content.
        places: a row per position: the factor that depends on the position only.

    Returns:
        `ExclusionSplit` in squared logits, one number per batch entry. Equal contents give `pos` exactly 0, equal
            places `sym` exactly 0. A part that vanishes by cancellation has rounding of about 1e-16 of the squared
            products.

    It takes O(n r^2) time. With `F` the contents and `p_j` a row of the places, `mean_k (A[k, j] - A[j, j])^2 = p_j^T
    Cov(F) p_j + ((Fbar - F_j) . p_j)^2` ("Decoupling Positional and Symbolic Attention Behavior", section 3.2).
    """
    pos = _mean_squared_change(contents, places)
    sym = _mean_squared_change(places, contents)
    return ExclusionSplit(pos, sym, _variance((contents * places).sum(-1)))


def head_exclusion(seen: LastQuery) -> ExclusionSplit:
    """Return the exclusion split of every head of a layer: `pos`, `sym` and `variance` [heads], in squared logits.

    `seen`: factors of the last query's logits. All visible keys before the query count. Without rotary positions and
    ALiBi the logits do not depend on positions, and `sym` is exactly 0.
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
    """Return the exclusion split of every rotary pair: `pos`, `sym` and `variance`, each [heads, pairs], before the
    softcap.

    `seen`: factors of the last query's logits in one layer.
    """
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
    """Return the last query's mean attention weights in both slots of each swap, after the keys of two blocks exchanged
    positions.

    Args:
        logits_of: function from (indices of keys, their new positions) to logits, -inf at masked positions.
        intact: logits of all keys in place.
        spans: start and stop position of each block; blocks follow one another.
        swaps: pairs of blocks (i, j), i < j.

    Returns:
        For each swap and row two weights: the mean in the first slot (where block j now stands) and in the second slot
            (where block i now stands).
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
    """Return the mean over all pairs of rows (k, j) of `((moved_k - moved_j) . fixed_j)^2`.

    `moved`: the factor of the logit (content or place) that changes from row j to row k. `fixed`: the other factor.
    """
    deviations = centred(moved, dim=-2)
    covariance = deviations.mT @ deviations / moved.shape[-2]
    # A quadratic form that vanishes can round to below 0.
    spread = ((fixed @ covariance) * fixed).sum(-1).clamp_min(0)
    return (spread + (deviations * fixed).sum(-1).square()).mean(-1)


def _variance(values: Float64[Tensor, "*batch n"]) -> Float64[Tensor, "*batch"]:
    """Return the population variance over the last axis, exactly 0 for equal values."""
    return centred(values, dim=-1).square().mean(-1)
