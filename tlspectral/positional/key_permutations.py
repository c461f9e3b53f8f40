"""The keys of one pass in other places: Definition 2 and Theorem 1 themselves, without running the model again.

"Decoupling Positional and Symbolic Attention Behavior" (PS, sections 3.1 and 3.2) defines positional and symbolic heads
by what their logits do when key vectors change places. That is not what happens when the words of a prompt change
places: there deeper layers see other key vectors. The two agree in the first layer.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.positional.exclusion import ExclusionSplit, exclusion_split, exclusion_split_factored
from tlspectral.positional.readout import LastQuery, Moved


def swapped_key_means(
    logits_of: Callable[[Moved], Float64[Tensor, "*rows n"]],
    intact: Float64[Tensor, "*rows keys"],
    spans: list[tuple[int, int]],
    swaps: list[tuple[int, int]],
) -> Float64[Tensor, "swaps *rows 2"]:
    """Mean attention weight of the two places of each swap, after the keys of the two blocks have changed places.

    Only logits that change are computed: those of the two blocks, and of what lies between where their lengths differ.
    The softmax is put together from log-sums over blocks, so that nothing is subtracted from its denominator.

    Args:
        logits_of: logits of the given keys at the given positions, -inf where a position is masked.
        intact: logits of all keys where they are.
        spans: first position of each block and the one after its last; blocks follow one another.
        swaps: pairs of blocks (i, j), i < j.

    Returns:
        (d'_i, d'_j) of each swap: place i then has the length of block j.
    """
    n_keys = intact.shape[-1]
    segments = [(0, spans[0][0]), *spans, (spans[-1][1], n_keys)]
    masses = torch.stack([intact[..., start:stop].logsumexp(-1) for start, stop in segments], dim=-1)
    positions = torch.arange(n_keys, device=intact.device)
    found = []
    for i, j in swaps:
        (start, stop), (start_j, stop_j) = spans[i], spans[j]
        length_i, length_j = stop - start, stop_j - start_j
        if length_i == length_j:
            keys = [positions[start_j:stop_j], positions[start:stop]]
            places = [positions[start:stop], positions[start_j:stop_j]]
            moved = {i, j}
        else:
            keys = [positions[start_j:stop_j], positions[stop:start_j], positions[start:stop]]
            places = [positions[start:stop_j]]
            moved = set(range(i, j + 1))
        # Segment 0 is the prefix, and block b segment b + 1.
        unmoved = [segment for segment in range(len(segments)) if segment - 1 not in moved]
        logits = logits_of((torch.cat(keys), torch.cat(places)))
        total = torch.cat([masses[..., unmoved], logits], dim=-1).logsumexp(-1)
        first = logits[..., :length_j].logsumexp(-1) - total
        second = logits[..., logits.shape[-1] - length_i :].logsumexp(-1) - total
        found.append(torch.stack([first.exp() / length_j, second.exp() / length_i], dim=-1))
    return torch.stack(found)


def head_exclusion(seen: LastQuery, scale: float | None = None) -> ExclusionSplit:
    """PS Theorem 1 for whole heads, over all visible keys before the query's own: A[k, j] is the logit of key k at j.

    Args:
        seen: one layer of a prompt.
        scale: in place of the model's score scale.

    Returns:
        Split per head. Where logits do not depend on the position (no rotary positions, no ALiBi), `sym` is exactly 0.
    """
    scale = seen.score_scale if scale is None else scale
    kept = seen.visible[:-1].nonzero().flatten()
    contents = scale * seen.contents[..., kept].mT
    places = seen.places[..., kept].mT.expand(len(contents), -1, -1)
    if seen.alibi is not None:
        contents = torch.cat([contents, torch.ones_like(contents[..., :1])], dim=-1)
        places = torch.cat([places, seen.alibi.bias(kept)[..., None]], dim=-1)
    if seen.softcap is None:
        return exclusion_split_factored(contents, places)
    # A capped logit is no product of contents and places; one matrix of keys by positions is held at a time.
    pairs = zip(contents, places, strict=True)
    splits = [exclusion_split(seen.capped(of_keys @ of_places.T)) for of_keys, of_places in pairs]
    return ExclusionSplit(*(torch.stack(parts) for parts in zip(*splits, strict=True)))


def frequency_exclusion(seen: LastQuery, scale: float | None = None) -> ExclusionSplit:
    """`head_exclusion` of every rotary pair of every head, [heads, pairs]; scale 1 unless given, no softcap."""
    kept = seen.visible[:-1].nonzero().flatten()
    pairs = seen.n_pairs
    contents = (1.0 if scale is None else scale) * seen.contents[:, : 2 * pairs, kept].unflatten(1, (2, pairs))
    places = seen.places[..., : 2 * pairs, kept].unflatten(-2, (2, pairs)).movedim(-3, -1)  # (heads) pairs keys 2
    return exclusion_split_factored(contents.permute(0, 2, 3, 1), places.expand(len(contents), -1, -1, -1))
