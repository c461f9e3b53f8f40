"""Controls of sweeps that are drawn before the run: random sets of rotary pairs, and other heads.

Other controls, random parts of equal size, are drawn by `Part.control` during the run.
"""

from dataclasses import dataclass, replace
from math import comb, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Band, Part
from tlspectral.hooks.parts.removal import Removal
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import run_until
from tlspectral.tasks.task_sequences import TaskSequences

HeadSet = list[tuple[int, int]]

SETS = 19
"""Default number of random sets of a control. With 19 the smallest p is .05."""

_TRIES = 200  # random orders of the frequencies that are tried per set
_TOLERANCE = 0.1  # the RMS of a random set may differ by this share


def unpadded(removal: Removal, sequences: TaskSequences, batch: slice) -> Removal:
    """Return a copy of the removal with `allowed` False for padding tokens; the removal itself if nothing is padded.

    `sequences` are all prompts, `batch` (a slice) the prompts of the run. Padding follows the sequence, so only padding
    queries see padding keys, and masking these queries is enough.
    """
    if removal.allowed is None or not sequences.padded:
        return removal
    queries = sequences.real[batch][:, None, :, None].to(removal.allowed.device)
    return replace(removal, allowed=(removal.allowed & queries).expand_as(removal.difference))


# --- random sets of rotary pairs ---


class FrequencySets(NamedTuple):
    """Random sets of rotary pairs of one head that contribute as much to its scores as a band does (equal RMS).

    Attributes:
        masks: a mask over the head's rotary pairs per set.
        overlap: RMS of the band's own pairs that are in a set, divided by the RMS of the band; mean over sets. NaN
            without a set.
    """

    masks: list[Bool[np.ndarray, "pairs"]]
    overlap: float


def frequency_sets(
    view: AttentionView,
    sequences: TaskSequences,
    layer: AttentionLayer,
    heads: list[int],
    part: Part,
    *,
    draws: int,
    seed: int,
) -> list[FrequencySets] | None:
    """Return for each head up to `draws` random sets of rotary pairs with about the RMS of the part (a `Band`).

    An entry is a `FrequencySets` with `.masks` (a mask of rotary pairs per set) and `.overlap`. Return None if the part
    has another kind of control. `view` is the model, `sequences` are run through `layer` to find the RMS of each pair,
    `seed` draws the sets. A set is the beginning of a random order of the pairs, cut where its RMS is nearest to the
    part's, and kept if it is within 10 %.
    """
    pairs_of_heads = part.control_pairs(layer.rotary, heads)
    if pairs_of_heads is None:
        return None
    (own, named), sets_of_heads = pairs_of_heads, []
    products_of_heads = _score_products(view, sequences, layer, heads, part.at)
    for head, chosen, products in zip(heads, own.numpy(), products_of_heads, strict=True):
        sets = equal_sets(products, chosen, draws, np.random.default_rng([seed, layer.layer, head, *named]))
        shared = [_set_rms(products, drawn & chosen) for drawn in sets]
        overlap = float(np.mean(shared) / _set_rms(products, chosen)) if sets else np.nan
        sets_of_heads.append(FrequencySets(sets, overlap))
    return sets_of_heads


def equal_sets(
    products: Float64[np.ndarray, "pairs pairs"], band: Bool[np.ndarray, " pairs"], draws: int, rng: np.random.Generator
) -> list[Bool[np.ndarray, "pairs"]]:
    """Draw up to `draws` different random sets of rotary pairs whose contribution to the scores has the RMS of a band.

    `products[s, t]`: product of the contributions of the pairs s and t, mean over unmasked pairs of tokens. The sum of
    `products` over a set is the mean square of its contribution. `band`: mask of the band's own pairs. A set is the
    beginning of a random order from `rng`, cut where its RMS is nearest to the band's, and kept if it is within 10 %.
    Returns a list of masks over rotary pairs.
    """
    wanted = _set_rms(products, band)
    sets: list[np.ndarray] = []
    for _ in range(_TRIES * draws):
        if len(sets) == draws:
            break
        order = rng.permutation(len(band))
        prefixes = np.zeros((len(band) - 1, len(band)), dtype=bool)
        for size in range(1, len(band)):
            prefixes[size - 1, order[:size]] = True
        sizes = np.array([_set_rms(products, prefix) for prefix in prefixes])
        best = int(np.argmin(np.abs(sizes - wanted)))
        drawn = prefixes[best]
        fits = abs(sizes[best] - wanted) <= _TOLERANCE * wanted
        if fits and not any((drawn == other).all() for other in [band, *sets]):
            sets.append(drawn)
    return sets


def _set_rms(products: Float64[np.ndarray, "pairs pairs"], chosen: Bool[np.ndarray, "pairs"]) -> float:
    """Return the RMS, in logits, of the contribution of the chosen rotary pairs to the scores.

    `products` are the mean products of the contributions of every two pairs.
    """
    # Rounding can make the mean square slightly negative.
    return float(np.sqrt(max(products[np.ix_(chosen, chosen)].sum(), 0.0)))


def _score_products(
    view: AttentionView, sequences: TaskSequences, layer: AttentionLayer, heads: list[int], at: Any
) -> Float64[np.ndarray, "heads pairs pairs"]:
    """Return the mean product of the contributions of every two rotary pairs to the scaled scores, for each head.

    The model `view` is run on `sequences` up to this layer. The mean is over unmasked pairs of tokens of a sequence
    (with `at`, one position per sequence: pairs with this query), then over sequences. Numbers are in squared logits.
    """
    assert layer.rotary is not None
    n_pairs = layer.rotary.n_pairs
    total = torch.zeros(len(heads), n_pairs, n_pairs, dtype=torch.float64)
    batch = slice(0, 0)
    of_batch = torch.zeros_like(total)

    def add_products(removal: Removal) -> Tensor:
        """Add each sequence's mean products to `of_batch`, and return zeros: nothing is removed."""
        removal = unpadded(removal, sequences, batch)
        assert removal.scores is not None
        assert removal.allowed is not None
        for index in range(len(total)):
            scores = removal.scores.of_head(index)
            allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, index]
            unmasked = allowed.expand(len(removal.difference), *allowed.shape[-2:])
            products = torch.stack(
                [scores.of_pairs(torch.arange(n_pairs) == pair)[:, 0][unmasked] for pair in range(n_pairs)]
            )  # [pairs, unmasked pairs of tokens]
            products = in_float64(products)
            per_sequence = unmasked.sum((-2, -1)).to(products.device)
            weights = (1.0 / per_sequence.double()).repeat_interleave(per_sequence)  # one per unmasked pair of tokens
            of_batch[index] += (products * weights @ products.T).cpu()
        return torch.zeros_like(removal.difference)

    every = Band(range(n_pairs), at=at)

    def products_of(sequences_run: slice) -> Tensor:
        """Return the sum over some sequences of their mean products."""
        nonlocal batch
        batch = sequences_run
        of_batch.zero_()
        hooks = LayerAblation(view, layer, heads, every.of_rows(batch), alter=add_products).hooks()
        run_until(view, sequences.tokens[batch], hooks, last=view.hook_names(layer.layer)["z"])
        return of_batch

    for summed_products in sequences.in_batches(view, products_of):
        total += summed_products
    return (total / len(sequences.tokens)).numpy()


# --- other heads ---


def other_sets(n_heads: dict[int, int], by_layer: dict[int, list[int]]) -> int:
    """Return the number of sets of heads, other than `by_layer`, with as many heads in each layer.

    `n_heads` has the number of all heads of each layer, `by_layer` the heads of the set.
    """
    return prod(comb(n_heads[layer], len(heads)) for layer, heads in by_layer.items()) - 1


def head_sets(
    n_heads: dict[int, int], by_layer: dict[int, list[int]], draws: int, rng: np.random.Generator
) -> list[HeadSet]:
    """Draw `draws` random sets with as many heads in each layer as `by_layer`, or all such sets if fewer exist.

    Return a list of sets; a set is a list of (layer, head). `n_heads`: number of all heads by layer. Sets are drawn
    with `rng`, uniformly from all sets but the given one, so they may share some heads with it. The list is empty if
    `by_layer` holds all heads of its layers.
    """
    # Sets of other heads only would be biased: one head with a large effect would count in the given set and never in
    # the control, and randomly chosen heads would have a small p too often.
    others = other_sets(n_heads, by_layer)
    sets = [[(layer, head) for layer, heads in by_layer.items() for head in sorted(heads)]]
    seen = {tuple(sets[0])}
    while len(sets) <= min(draws, others):
        drawn = [
            (layer, int(head))
            for layer, heads in by_layer.items()
            for head in sorted(rng.choice(n_heads[layer], len(heads), replace=False))
        ]
        if tuple(drawn) not in seen:
            seen.add(tuple(drawn))
            sets.append(drawn)
    return sets[1:]


@dataclass(frozen=True)
class SetControl:
    """Source of random sets for the control of a set of heads: heads of its layers, or whole key/value groups.

    `set_control` makes it. Heads of a layer without shared keys are groups of one head.

    Attributes:
        kind: "groups" if the set consists of whole groups of heads that share keys and values, otherwise "heads";
            "none" if the set fills its layers, so that no other set exists.
        others: number of other sets with as many heads (or groups) in each layer.
        of_layer: dict from layer to the number of all its heads (or groups).
        chosen: dict from layer to the set's heads (or groups).
        size: dict from layer to the number of heads per group; 1 for heads.
    """

    kind: Literal["heads", "groups", "none"]
    others: int
    of_layer: dict[int, int]
    chosen: dict[int, list[int]]
    size: dict[int, int]

    def sets(self, draws: int, rng: np.random.Generator) -> list[HeadSet]:
        """Draw `draws` random other sets with `rng`, or all sets if fewer exist; lists of (layer, head)."""
        return [
            [
                (layer, head)
                for layer, unit in drawn
                for head in range(unit * self.size[layer], (unit + 1) * self.size[layer])
            ]
            for drawn in head_sets(self.of_layer, self.chosen, draws, rng)
        ]


def set_control(view: AttentionView, by_layer: dict[int, list[int]]) -> SetControl:
    """Return the source of random sets for the control of a set of heads.

    `by_layer` is a dict from layer to the heads of the set.
    """
    n_heads = {layer: view.n_heads(layer) for layer in by_layer}
    size = {layer: view.heads_per_group(layer) for layer in by_layer}
    groups = {layer: sorted({head // size[layer] for head in heads}) for layer, heads in by_layer.items()}
    whole = all(len(groups[layer]) * size[layer] == len(heads) for layer, heads in by_layer.items())
    if not whole or max(size.values()) == 1:
        size, groups = dict.fromkeys(by_layer, 1), by_layer
    of_layer = {layer: n // size[layer] for layer, n in n_heads.items()}
    others = other_sets(of_layer, groups)
    kind = "none" if not others else "groups" if max(size.values()) > 1 else "heads"
    return SetControl(kind, others, of_layer, groups, size)


def sets_apart(
    n_heads: dict[int, int], by_layer: dict[int, list[int]], draws: int, rng: np.random.Generator
) -> list[HeadSet]:
    """Draw up to `draws` different random sets with as many heads in each layer as `by_layer`, but other heads.

    Return a list of sets; a set is a list of (layer, head). `n_heads`: number of all heads by layer. If a layer has too
    few other heads, all are taken, and some of the given heads. Sets are drawn with `rng`; there are fewer
    than `draws` only if fewer exist, and none if the given set holds all heads of its layers.
    """
    others = {layer: sorted({*range(n_heads[layer])} - {*heads}) for layer, heads in by_layer.items()}
    short = {layer: max(0, len(heads) - len(others[layer])) for layer, heads in by_layer.items()}
    exist = prod(
        comb(len(others[layer]), len(heads) - short[layer]) * comb(len(heads), short[layer])
        for layer, heads in by_layer.items()
    )
    own = {tuple((layer, head) for layer, heads in by_layer.items() for head in sorted(heads))}
    sets: dict[tuple[tuple[int, int], ...], None] = {}
    while len(sets) < min(draws, exist):
        drawn: HeadSet = []
        for layer, heads in by_layer.items():
            chosen = [
                *rng.choice(others[layer], len(heads) - short[layer], replace=False),
                *rng.choice(sorted(heads), short[layer], replace=False),
            ]
            drawn += [(layer, int(head)) for head in sorted(chosen)]
        sets.setdefault(tuple(drawn))
        if own >= sets.keys():
            return []
    return [[*drawn] for drawn in sets]


def other_heads(view: AttentionView, layer: int, heads: list[int], draws: int, seed: int) -> list[list[int]]:
    """Return, for each of the heads, a list of up to `draws` other random heads of the layer: its control.

    `view` is the model, `seed` draws the heads. Raises ValueError for a layer with one head.
    """
    n_heads = {layer: view.n_heads(layer)}
    drawn = [head_sets(n_heads, {layer: [head]}, draws, np.random.default_rng([seed, layer, head])) for head in heads]
    return [[other for ((_, other),) in sets] for sets in drawn]
