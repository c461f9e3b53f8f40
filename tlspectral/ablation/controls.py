"""Random sets of heads: the control of what is removed as a whole, a head's output or its attention to far keys."""

from math import comb, prod
from typing import Any

import numpy as np

from tlspectral.ablation.effects import LayerEffects, layer_effects
from tlspectral.models.attention import attention_view
from tlspectral.models.attention.replay import IntactRun
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.parts import Bound
from tlspectral.selection import Heads, head_name
from tlspectral.tasks import ScoredSequences

HeadSet = list[tuple[int, int]]


def random_head_sets(model: Any, heads: Heads, *, draws: int = 19, seed: int = 0) -> list[HeadSet]:
    """Draw random sets with as many heads of each layer as `heads` has.

    Removing each set as `heads` was removed gives the control effects of `tlspectral.tasks.control_test`.

    >>> import tlspectral as tls
    >>> from tlspectral.ablation import random_head_sets
    >>> random_head_sets(tls.load_model("tiny-rope"), ["L0H3", "L1H0"], draws=2)
    [[(0, 3), (1, 2)], [(0, 2), (1, 1)]]

    Sets differ from each other and from `heads`, and are drawn uniformly from all such sets, so they may share heads
    with `heads`, though not all. Drawn from the other heads alone, they would make one head of large effect count in
    `heads` and never in the control, and randomly chosen heads would have a small p too often.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: as in `ablate`.
        draws: how many sets; all there are, if these are fewer (of one head n - 1 in a layer with n heads).
        seed: of the draw.

    Returns:
        A list of sets, each a list of (layer, head).

    Raises:
        BadHead: a head that does not exist.
        ValueError: no heads, all heads of their layers, or `draws` below 1.

    What it does not establish: that heads in other layers would do less. Sets are of the same layers alone.
    """
    view = attention_view(model)
    by_layer = heads_by_layer(view, heads)
    if not by_layer:
        raise ValueError("no heads were given, so there is no set to match")
    return head_sets({layer: view.n_heads(layer) for layer in by_layer}, by_layer, draws, np.random.default_rng(seed))


def head_sets(
    n_heads: dict[int, int], by_layer: dict[int, list[int]], draws: int, rng: np.random.Generator
) -> list[HeadSet]:
    """Draw the sets of `random_head_sets` for heads by layer, given the number of heads of each layer.

    Raises as it does.
    """
    check_draws(draws)
    others = prod(comb(n_heads[layer], len(heads)) for layer, heads in by_layer.items()) - 1
    if not others:
        names = ", ".join(head_name(layer, head) for layer, heads in by_layer.items() for head in heads)
        raise ValueError(
            f"{names}: these are all heads of their layers, so there are no other heads to compare with: leave the "
            "control out"
        )
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


def effects_beside_heads(
    intact: IntactRun,
    sequences: ScoredSequences,
    layer: int,
    heads: list[int],
    part: Bound,
    *,
    draws: int,
    seed: int,
) -> LayerEffects:
    """Ablate each of the heads in turn; the controls of each are other heads of the layer, ablated in the same way.

    The arguments are those of `layer_effects`; `draws` is limited to the other heads. Raises as `random_head_sets`.
    """
    n_heads = {layer: intact.view.n_heads(layer)}
    others: list[list[int]] = []
    for head in heads:
        sets = head_sets(n_heads, {layer: [head]}, draws, np.random.default_rng([seed, layer, head]))
        others.append([other for ((_, other),) in sets])
    measured = [*heads, *sorted({other for drawn in others for other in drawn}.difference(heads))]
    values = layer_effects(intact, sequences, layer, measured, part, seed=seed).values
    controls = np.stack([values[[measured.index(other) for other in drawn]] for drawn in others])
    return LayerEffects(values[: len(heads)], np.full(len(heads), np.nan), controls)


def check_draws(draws: int | None) -> None:
    """Raise ValueError for less than one draw."""
    if draws is not None and draws < 1:
        raise ValueError(f"draws must be 1 or more, not {draws}")
