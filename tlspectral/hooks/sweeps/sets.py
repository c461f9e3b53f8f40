"""A part removed from sets of heads at once, beside random sets of the same layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Part
from tlspectral.hooks.sweeps.effects import HeadSet, effect_rows, head_sets
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.replay import IntactRun
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.threads import Hook
from tlspectral.selection import Heads
from tlspectral.tasks import ScoredSequences, replayed_values

SETS = 19
"""Random sets of a control, with which the smallest p is .05."""


def chosen_sets(view: AttentionView, sets: Mapping[str, Heads]) -> dict[str, dict[int, list[int]]]:
    """Return the heads of each set by layer. Raises BadHead as `heads_by_layer`, ValueError for an empty set."""
    found = {name: heads_by_layer(view, heads) for name, heads in sets.items()}
    empty = [name for name, by_layer in found.items() if not by_layer]
    if empty or not found:
        raise ValueError(f"the set {empty[0]!r} has no heads" if empty else "no sets of heads were given")
    return found


def set_table(
    part: Part,
    sequences: ScoredSequences,
    draws: int,
    seed: int,
    name: str,
    by_layer: dict[int, list[int]],
    prepared: tuple[IntactRun, Float64[np.ndarray, "sequences"]],
) -> pd.DataFrame:
    """Measure one set after an intact run, with `draws` random sets of as many heads of each layer."""
    intact, intact_value = prepared
    view = intact.view
    sets: list[HeadSet] = [[(layer, head) for layer, heads in by_layer.items() for head in heads]]
    if draws:
        n_heads = {layer: view.n_heads(layer) for layer in by_layer}
        sets += head_sets(n_heads, by_layer, draws, np.random.default_rng(seed))
    every = part.on(view, {layer: list(range(view.n_heads(layer))) for layer in by_layer})
    values = np.concatenate([_values(every, intact, sequences, one) for one in sets])
    deltas = values - intact_value
    names = {"layer": [-1], "head": [-1], "name": [name]}
    table = effect_rows(names, values[:1], deltas[:1], deltas[None, 1:], seed).assign(score_rms=np.nan)
    table.attrs = {"sums_per_sequence": {}, "intact_per_sequence": intact_value.tolist()}
    return table


def _values(
    bound: Mapping[int, Any], intact: IntactRun, sequences: ScoredSequences, chosen: HeadSet
) -> Float64[np.ndarray, "one sequences"]:
    """Return the score of each sequence without a part, bound to all heads of the layers, of the heads of a set."""
    view = intact.view
    by_layer: dict[int, list[int]] = {}
    for layer, head in chosen:
        by_layer.setdefault(layer, []).append(head)

    def hooks_of(jobs: slice, batch: slice) -> list[Hook]:
        hooks = []
        for layer, heads in by_layer.items():
            hooks += LayerAblation(view, view.layer(layer), heads, bound[layer].of_rows(batch)).hooks()
        return hooks

    return replayed_values(intact, sequences, min(by_layer), 1, hooks_of).numpy()
