"""Values of a metric without a part of each head of some layers or of sets of heads, beside their controls' values.

Blocks are replayed from the layer of a head or the first of a set, several of them in a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import BadHead
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import bound_parts, control_of
from tlspectral.hooks.parts.removal import Removal, root_mean_square
from tlspectral.hooks.sweeps.controls import FrequencySets, HeadSet, frequency_sets, head_sets, unpadded
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.selection import Heads
from tlspectral.tables.measurement import stacked
from tlspectral.tasks.control_tests import beside_control
from tlspectral.tasks.metric_value import sign_flip_floor, sign_flip_p, standard_error
from tlspectral.tasks.task_sequences import Replays, TaskSequences, replayed_values


@dataclass(frozen=True)
class LayerEffects:
    """Values of a metric with a layer's heads ablated; `controls` with a random part of equal size removed instead.

    `score_rms` is the root mean square of the removed part, over the unmasked pairs of a sequence and then over
    sequences; NaN for a part of the mask or of z. Controls that were not found are NaN, and `control_columns` say more
    of them, by name.
    """

    values: Float64[np.ndarray, "heads sequences"]
    score_rms: Float64[np.ndarray, "heads"]
    controls: Float64[np.ndarray, "heads draws sequences"]
    control_columns: Mapping[str, Float64[np.ndarray, "heads"]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerReplays:
    """Ablations of the heads of a layer one by one, by a part that is bound to them: replays, to be run in any order.

    A replay is a head and either the part itself (draw -1) or a random part of equal size. `squares` are the mean
    squares of what was removed.
    """

    view: AttentionView
    sequences: TaskSequences
    layer: int
    heads: list[int]
    part: Part
    draws: int = 0
    seed: int = 0

    @cached_property
    def sets(self) -> dict[int, FrequencySets]:
        """Random sets of rotary pairs by head, if these are the control; there can be fewer than `draws`."""
        if not self.draws:
            return {}
        drawn = frequency_sets(
            self.view, self.sequences, self._folded, self.heads, self.part, draws=self.draws, seed=self.seed
        )
        return {} if drawn is None else dict(zip(self.heads, drawn, strict=True))

    @cached_property
    def drawn(self) -> int:
        """Draws of each head that are run."""
        return max((len(one.masks) for one in self.sets.values()), default=self.draws)

    @cached_property
    def replays(self) -> list[tuple[int, int]]:
        """Head and draw of each replay."""
        return [(head, draw) for head in self.heads for draw in range(-1, self.drawn)]

    @cached_property
    def squares(self) -> Float64[Tensor, "replays sequences"]:
        """Mean square of what each replay removes from the scores of each sequence, as far as it ran; NaN without."""
        return torch.full(
            (len(self.replays), len(self.sequences.tokens)), 0.0 if self._scored else torch.nan, dtype=torch.float64
        )

    @cached_property
    def _scored(self) -> bool:
        return self.part.acts_on == "scores"

    @cached_property
    def _folded(self) -> AttentionLayer:
        return self.view.layer(self.layer)

    def hooks(self, chunk: slice, batch: slice, *, stacked: bool = True) -> list[Hook]:
        """Return the hooks of some replays on some sequences: each on its copy, or all at once (not `stacked`)."""
        self.squares[chunk, batch] *= 0.0  # of a run that memory ran out in; NaN stays
        heads = [head for head, _ in self.replays[chunk]]
        ablation = LayerAblation(self.view, self._folded, heads, self.part.of_rows(batch), stacked=stacked)
        if self._scored:
            ablation.alter = partial(self._altered, chunk, batch)
        return ablation.hooks()

    def _altered(self, chunk: slice, batch: slice, removal: Removal) -> Tensor:
        """Substitute random parts for the replays of the control, and add up the mean square of each removed part."""
        removal = unpadded(removal, self.sequences, batch)
        assert removal.allowed is not None
        removed = self._with_controls(removal, self.replays[chunk])
        size = root_mean_square(removed, removal.allowed)
        self.squares[chunk, batch] += size.square().T.cpu().double()
        return removed

    def _with_controls(self, removal: Removal, replays: list[tuple[int, int]]) -> Tensor:
        random = [index for index, (_, draw) in enumerate(replays) if draw >= 0]
        if not random:
            return removal.difference
        replaced = removal.difference.clone()
        if not self.sets:
            seeds = [[self.seed, self.layer, *replays[index]] for index in random]
            replaced[:, random] = control_of(self.part, removal, random, seeds)
            return replaced
        assert removal.scores is not None
        for index in random:
            head, draw = replays[index]
            # Of a head with fewer sets than the others some replays stand in for none; `effects` leaves them out.
            if draw < len(self.sets[head].masks):
                mask = torch.from_numpy(self.sets[head].masks[draw])
                replaced[:, [index]] = removal.scores.of_head(index).of_pairs(mask).neg_()
        return replaced

    def effects(self, values: Float64[Tensor, "replays sequences"]) -> LayerEffects:
        """Return the values of all replays by head."""
        of_each = "(head draw) sequence -> head draw sequence"
        by_head = rearrange(values, of_each, draw=self.drawn + 1).numpy()
        sizes = rearrange(self.squares, of_each, draw=self.drawn + 1).mean(-1).sqrt().numpy()
        if not self.sets:
            return LayerEffects(by_head[:, 0], sizes[:, 0], by_head[:, 1:])
        found = [len(one.masks) for one in self.sets.values()]
        controls = np.full((len(self.heads), self.draws, by_head.shape[2]), np.nan)
        for head, n in enumerate(found):
            controls[head, :n] = by_head[head, 1 : n + 1]
        of_sets = {
            "control_rms": np.array(
                [rms[1 : n + 1].mean() if n else np.nan for rms, n in zip(sizes, found, strict=True)]
            ),
            "control_overlap": np.array([one.overlap for one in self.sets.values()]),
        }
        return LayerEffects(by_head[:, 0], sizes[:, 0], controls, of_sets)


def layer_effects(run: IntactRun, sequences: TaskSequences, layers: list[LayerReplays]) -> list[LayerEffects]:
    """Ablate heads of some layers in turn, on all sequences."""
    replays = [Replays(one.layer, len(one.replays), one.hooks) for one in layers]
    return by_layer(layers, replayed_values(run, sequences, replays))


def by_layer(layers: list[LayerReplays], values: Float64[Tensor, "replays sequences"]) -> list[LayerEffects]:
    """Return the values of the replays of some layers, one layer after the other, as the effects of each layer."""
    of_layers = values.split([len(one.replays) for one in layers])
    return [one.effects(of_layer) for one, of_layer in zip(layers, of_layers, strict=True)]


def effects_of(
    part: Part,
    sequences: TaskSequences,
    values: Float64[np.ndarray, "*rows sequences"],
    intact_value: Float64[np.ndarray, "sequences"],
) -> Float64[np.ndarray, "*rows sequences"]:
    """Return values less the intact ones, exactly 0 where a settled part is known to change nothing.

    Batches of other sizes round otherwise there.
    """
    deltas = values - intact_value
    deltas[..., part.idle(sequences.tokens).numpy()] = 0.0
    return deltas


def effect_rows(
    names: dict[str, Any],
    values: Float64[np.ndarray, "rows sequences"],
    deltas: Float64[np.ndarray, "rows sequences"],
    controls: Float64[np.ndarray, "rows draws sequences"],
    seed: int,
    distinct: Int[np.ndarray, "sequences"] | None,
) -> pd.DataFrame:
    """Return rows of a sweep: what names them, values and effects, and the control where it has draws.

    Equal sequences, which have one number in `distinct`, are one observation.
    """
    table = pd.DataFrame(
        {
            **names,
            "value": values.mean(1),
            "delta": deltas.mean(1),
            "delta_se": [standard_error(delta, distinct) for delta in deltas],
            "delta_p": [sign_flip_p(delta, seed, distinct) for delta in deltas],
            "delta_p_floor": [sign_flip_floor(delta, seed, distinct) for delta in deltas],
        }
    )
    if not controls.shape[1]:
        return table
    return table.assign(**beside_control(deltas, controls, distinct))


def beside_heads(effects: LayerEffects, measured: list[int], others: list[list[int]]) -> LayerEffects:
    """Return the effects of the first of the measured heads, whose controls are the values of `others`."""
    values = effects.values
    controls = np.stack([values[[measured.index(other) for other in drawn]] for drawn in others])
    return LayerEffects(values[: len(others)], np.full(len(others), np.nan), controls)


def chosen_sets(view: AttentionView, sets: Mapping[str, Heads]) -> dict[str, dict[int, list[int]]]:
    """Return the heads of each set by layer. Raises BadHead as `heads_by_layer`, ValueError for an empty set."""
    if {"layer", "head"} <= set(sets):
        raise BadHead(
            "heads={'layer': ..., 'head': ...} has two readings: columns of a table, or sets of heads of these "
            "names. Write pd.DataFrame(...) or list(zip(layers, heads)) for the first, other names for the second"
        )
    found = {name: heads_by_layer(view, heads) for name, heads in sets.items()}
    empty = [name for name, by_layer in found.items() if not by_layer]
    if empty or not found:
        raise ValueError(f"the set {empty[0]!r} has no heads" if empty else "no sets of heads were given")
    return found


def set_table(
    part: Part,
    sequences: TaskSequences,
    draws: int,
    seed: int,
    sets: Mapping[str, dict[int, list[int]]],
    prepared: tuple[IntactRun, Float64[np.ndarray, "sequences"]],
) -> pd.DataFrame:
    """Measure some sets after an intact run, each with `draws` random sets of as many heads of each layer."""
    intact, intact_value = prepared
    view = intact.view
    measured: list[list[HeadSet]] = []
    for by_layer in sets.values():
        own: HeadSet = [(layer, head) for layer, heads in by_layer.items() for head in heads]
        n_heads = {layer: view.n_heads(layer) for layer in by_layer}
        drawn = head_sets(n_heads, by_layer, draws, np.random.default_rng(seed)) if draws else []
        measured.append([own, *drawn])
    whole_layers = {layer: [*range(view.n_heads(layer))] for layer in sorted({*chain(*sets.values())})}
    every = bound_parts(part, view, whole_layers, every=True)
    replays = [_replay_of(view, every, one) for of_set in measured for one in of_set]
    found = replayed_values(intact, sequences, replays).split([len(of_set) for of_set in measured])
    tables = []
    for name, of_set in zip(sets, found, strict=True):
        values = of_set.numpy()
        deltas = effects_of(part, sequences, values, intact_value)
        names = {"layer": [-1], "head": [-1], "name": [name]}
        tables.append(effect_rows(names, values[:1], deltas[:1], deltas[None, 1:], seed, sequences.distinct))
    table = stacked(tables).assign(score_rms=np.nan)
    table.attrs = {"sums_per_sequence": {}, "intact_per_sequence": intact_value.tolist()}
    return table


def _replay_of(view: AttentionView, bound: Mapping[int, Any], chosen: HeadSet) -> Replays:
    """Return the replay without a part of a set of heads; the part is bound to all heads of their layers."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in chosen:
        by_layer.setdefault(layer, []).append(head)

    def hooks_of(replays: slice, batch: slice) -> list[Hook]:
        hooks = []
        for layer, heads in by_layer.items():
            hooks += LayerAblation(view, view.layer(layer), heads, bound[layer].of_rows(batch)).hooks()
        return hooks

    return Replays(min(by_layer), 1, hooks_of)
