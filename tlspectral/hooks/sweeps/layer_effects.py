"""Evaluate a metric without a part of each head (or set of heads), and with the control removed instead.

A replay is a run of the model from the layer of the head on (or the first layer of the set), with one head or set
ablated. Several replays share a batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from tlspectral.hooks.sweeps.controls import FrequencySets, HeadSet, frequency_sets, set_control, unpadded
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import group_name
from tlspectral.tables.measurement import stacked
from tlspectral.tasks.control_tests import beside_control
from tlspectral.tasks.metric_value import sign_flip_floor, sign_flip_p, standard_error
from tlspectral.tasks.task_sequences import Replays, TaskSequences, replayed_values


@dataclass(frozen=True)
class LayerEffects:
    """Values of a metric on each sequence with each head of a layer ablated.

    Attributes:
        values: the metric when the part is removed from the head.
        score_rms: root mean square of the removed part in logits, over unmasked pairs of tokens and sequences. NaN for
            a part of the mask or of z.
        controls: the metric when a random control is removed instead; NaN for controls that were not found.
        control_columns: further columns on the control, by name.
    """

    values: Float64[np.ndarray, "heads sequences"]
    score_rms: Float64[np.ndarray, "heads"]
    controls: Float64[np.ndarray, "heads draws sequences"]
    control_columns: Mapping[str, Float64[np.ndarray, "heads"]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerReplays:
    """All ablations of the heads of one layer, one head at a time, to be run in any order.

    A replay is a run of the model from this layer on with one head ablated.

    Attributes:
        view: the model.
        sequences: the prompts and metric of the task.
        layer: index of the layer.
        heads: heads to ablate.
        part: the removed part, prepared for the heads.
        draws: number of random controls per head.
        seed: seed of the controls.
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
        """Dict from head to its random sets of rotary pairs; empty if the part has another control.

        A head can have fewer sets than `draws`.
        """
        if not self.draws:
            return {}
        drawn = frequency_sets(
            self.view, self.sequences, self._folded, self.heads, self.part, draws=self.draws, seed=self.seed
        )
        return {} if drawn is None else dict(zip(self.heads, drawn, strict=True))

    @cached_property
    def drawn(self) -> int:
        """Number of random controls per head that are run; fewer than `draws` if no more were found."""
        return max((len(drawn.masks) for drawn in self.sets.values()), default=self.draws)

    @cached_property
    def replays(self) -> list[tuple[int, int]]:
        """List of (head, draw), one for each run; draw -1 removes the part itself, draw 0, 1, ... a random control."""
        return [(head, draw) for head in self.heads for draw in range(-1, self.drawn)]

    @cached_property
    def squares(self) -> Float64[Tensor, "replays sequences"]:
        """Mean square, in logits, that each run removes from the scores of each sequence; the hooks fill it in.

        NaN for parts that do not act on scores.
        """
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
        """Return hooks for the runs `chunk` (a slice of `replays`) on the sequences `batch`; each run ablates one head.

        `batch` is a slice of sequences. `stacked`: True gives each run its own copy of the batch; False ablates all
        heads in one copy. The hooks also fill in `squares`. Raises EditNotHonored if a short run shows that the edit
        does not change the logits.
        """
        self.squares[chunk, batch] *= 0.0  # forget a run that ran out of memory; NaN stays NaN
        heads = [head for head, _ in self.replays[chunk]]
        ablation = LayerAblation(self.view, self._folded, heads, self.part.of_rows(batch), stacked=stacked)
        if self._scored:
            ablation.alter = partial(self._altered, chunk, batch)
        return ablation.hooks()

    def _altered(self, chunk: slice, batch: slice, removal: Removal) -> Tensor:
        """Return the difference that each run adds to the scores, and add its mean square to `squares`.

        `chunk` selects runs of `replays`, `batch` sequences; both are slices. `removal` is the change that the part
        makes, with one run on its second axis each; it is not changed.
        """
        removal = unpadded(removal, self.sequences, batch)
        assert removal.allowed is not None
        removed = self._with_controls(removal, self.replays[chunk])
        size = root_mean_square(removed, removal.allowed)
        self.squares[chunk, batch] += size.square().T.cpu().double()
        return removed

    def _with_controls(self, removal: Removal, replays: list[tuple[int, int]]) -> Tensor:
        """Return the difference to add to the scores: of the part for draw -1, of a random control for other draws.

        `replays` are the (head, draw) on the second axis of `removal.difference`. `removal` is the change that the part
        makes; it is not changed.
        """
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
            # A head with fewer sets keeps the part itself in the replays that are left over; `effects` skips these.
            if draw < len(self.sets[head].masks):
                mask = torch.from_numpy(self.sets[head].masks[draw])
                replaced[:, [index]] = removal.scores.of_head(index).of_pairs(mask).neg_()
        return replaced

    def effects(self, values: Float64[Tensor, "replays sequences"]) -> LayerEffects:
        """Sort the metric's values of all runs by head and draw, and return them as `LayerEffects`.

        `values` are in the order of `replays`.
        """
        split = "(head draw) sequence -> head draw sequence"
        by_head = rearrange(values, split, draw=self.drawn + 1).numpy()
        sizes = rearrange(self.squares, split, draw=self.drawn + 1).mean(-1).sqrt().numpy()
        if not self.sets:
            return LayerEffects(by_head[:, 0], sizes[:, 0], by_head[:, 1:])
        n_sets = [len(drawn.masks) for drawn in self.sets.values()]
        controls = np.full((len(self.heads), self.draws, by_head.shape[2]), np.nan)
        for head, n in enumerate(n_sets):
            controls[head, :n] = by_head[head, 1 : n + 1]
        of_sets = {
            "control_rms": np.array(
                [rms[1 : n + 1].mean() if n else np.nan for rms, n in zip(sizes, n_sets, strict=True)]
            ),
            "control_overlap": np.array([drawn.overlap for drawn in self.sets.values()]),
        }
        return LayerEffects(by_head[:, 0], sizes[:, 0], controls, of_sets)


def layer_effects(run: IntactRun, sequences: TaskSequences, layers: list[LayerReplays]) -> list[LayerEffects]:
    """Ablate the heads of `layers` one at a time, on all sequences; return the effects per layer.

    The list has a `LayerEffects` for each of `layers`, in their order. `run` is the run without ablation, from which
    layers are run again. `sequences` are the prompts with the metric.
    """
    replays = [Replays(layer.layer, len(layer.replays), layer.hooks) for layer in layers]
    return by_layer(layers, replayed_values(run, sequences, replays))


def by_layer(layers: list[LayerReplays], values: Float64[Tensor, "replays sequences"]) -> list[LayerEffects]:
    """Split the values of all runs, which stand in the order of `layers`, into the `LayerEffects` of each layer.

    `values` are the metric of each run on each sequence.
    """
    split_values = values.split([len(layer.replays) for layer in layers])
    return [layer.effects(own_values) for layer, own_values in zip(layers, split_values, strict=True)]


def effects_of(
    part: Part,
    sequences: TaskSequences,
    values: Float64[np.ndarray, "*rows sequences"],
    intact_value: Float64[np.ndarray, "sequences"],
) -> Float64[np.ndarray, "*rows sequences"]:
    """Return values minus the intact values: the effect of a removed part on each sequence, in units of the metric.

    `values` are the metric without the part, `intact_value` with it. The effect is exactly 0 for sequences in which
    `part` changes nothing.
    """
    deltas = values - intact_value
    # Without this line such sequences would differ by rounding, because batches have other sizes.
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
    """Return a DataFrame with rows of a sweep: columns `names`, `value`, `delta` and its tests, and the control.

    With the entries of the dict `names`, `value, delta, delta_se, delta_p, delta_p_floor`, and `control_delta,
    control_p`, ... (left out with 0 draws). `values` are the metric without the part, `deltas` the changes, `controls`
    the changes with random controls removed. `distinct`: an integer per sequence; equal sequences have the same and
    count as one observation; None: all differ. `seed` is for random sign flips.
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
    """Return the effects of the first heads of `measured`, with the values of other heads as their controls.

    `effects` are the effects of all heads in `measured`. `others[i]` are the heads that are the control of the i-th
    head; they stand in `measured` too. The result is a new `LayerEffects` with as many heads as `others` has entries.
    """
    values = effects.values
    controls = np.stack([values[[measured.index(other) for other in drawn]] for drawn in others])
    return LayerEffects(values[: len(others)], np.full(len(others), np.nan), controls)


def chosen_sets(view: AttentionView, sets: Mapping[str, Heads]) -> dict[str, dict[int, list[int]]]:
    """Return a dict from the name of each set of heads to a dict from layer to its heads.

    `view` is the model, `sets` is what the user gave as `heads=`: a dict from name to heads. Raises BadHead for a head
    that does not exist or columns of a table, ValueError for an empty set.
    """
    if {"layer", "head"} <= set(sets):
        raise BadHead(
            "heads={'layer': ..., 'head': ...} has two readings. Write pd.DataFrame(...) or list(zip(layers, heads)) "
            "for columns of a table; give sets of heads other names"
        )
    heads_of_sets = {name: heads_by_layer(view, heads) for name, heads in sets.items()}
    empty = [name for name, by_layer in heads_of_sets.items() if not by_layer]
    if empty or not heads_of_sets:
        raise ValueError(
            f"the set {empty[0]!r} has no heads: give it some or leave it out"
            if empty
            else "heads={} has no sets of heads: write a set such as heads={'movers': ['L9H9', 'L10H0']}"
        )
    return heads_of_sets


def group_sets(view: AttentionView, layers: Iterable[int]) -> dict[str, dict[int, list[int]]]:
    """Return all key/value groups of some layers as sets: a dict from "L5KV1" to a dict from layer to query heads.

    `view` is the model. In a layer without shared keys each head is a group.
    """
    sets = {}
    for layer in layers:
        size = view.heads_per_group(layer)
        for group in range(view.n_heads(layer) // size):
            sets[group_name(layer, group)] = {layer: list(range(group * size, (group + 1) * size))}
    return sets


def set_table(
    part: Part,
    sequences: TaskSequences,
    draws: int,
    seed: int,
    sets: Mapping[str, dict[int, list[int]]],
    prepared: tuple[IntactRun, Float64[np.ndarray, "sequences"]],
) -> pd.DataFrame:
    """Return a DataFrame with a row per set: its heads ablated together, compared with random sets of equal size.

    With `layer, head` (both -1), `name` of the set, `value, delta, delta_se, delta_p, delta_p_floor, score_rms`
    (NaN), and with draws the control (`control_delta, control_p`, ...; NaN for a set that fills its layers). Its attrs
    have the intact values. `part` is the removed part, `sequences` are the prompts with the metric, `sets` is a dict
    from name to heads by layer, `draws` the number of random sets for each, `seed` draws them. `prepared`: the run
    without ablation and its value on each sequence.
    """
    intact, intact_value = prepared
    view = intact.view
    runs: list[HeadSet] = []  # each is ablated once
    runs_of_sets: list[list[int]] = []  # indices into `runs`: of the set, then of its control
    of_groups: dict[tuple[tuple[int, int], ...], int] = {}
    for by_layer in sets.values():
        own: HeadSet = [(layer, head) for layer, heads in by_layer.items() for head in heads]
        control = set_control(view, by_layer)
        drawn = control.sets(draws, np.random.default_rng(seed)) if draws else []
        runs_of_sets.append([])
        for ablated in (own, *drawn):
            index = len(runs)
            # The groups of a layer are each other's control, so the same group is in many rows.
            if control.kind == "groups":
                index = of_groups.setdefault(tuple(ablated), index)
            if index == len(runs):
                runs.append(ablated)
            runs_of_sets[-1].append(index)
    values_of_runs = set_values(part, sequences, runs, intact).numpy()
    tables = []
    for name, indices in zip(sets, runs_of_sets, strict=True):
        values = values_of_runs[indices]
        deltas = effects_of(part, sequences, values, intact_value)
        names = {"layer": [-1], "head": [-1], "name": [name]}
        controls = deltas[None, 1:]
        if draws and not controls.shape[1]:
            controls = np.full((1, 1, deltas.shape[1]), np.nan)  # columns of the control without a draw
        tables.append(effect_rows(names, values[:1], deltas[:1], controls, seed, sequences.distinct))
    table = stacked(tables).assign(score_rms=np.nan)
    table.attrs = {"sums_per_sequence": {}, "intact_per_sequence": intact_value.tolist()}
    return table


def set_values(
    part: Part, sequences: TaskSequences, sets: Sequence[HeadSet], intact: IntactRun
) -> Float64[Tensor, "sets sequences"]:
    """Return the metric of each sequence, with the heads of each set ablated together.

    `part` is the removed part, `sequences` are the prompts with the metric, `sets` are lists of (layer, head), `intact`
    is the run without ablation, from the first layer of every set on.
    """
    view = intact.view
    layers = sorted({layer for ablated in sets for layer, _ in ablated})
    every = bound_parts(part, view, {layer: [*range(view.n_heads(layer))] for layer in layers}, every=True)
    return replayed_values(intact, sequences, [_replay_of(view, every, ablated) for ablated in sets])


def _replay_of(view: AttentionView, bound: Mapping[int, Any], chosen: HeadSet) -> Replays:
    """Return the run (`Replays`) in which all heads `chosen`, pairs (layer, head), are ablated together.

    `view` is the model. `bound`: dict from layer to the part, prepared for all heads of the layer. Nothing is run yet.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in chosen:
        by_layer.setdefault(layer, []).append(head)

    def hooks_of(replays: slice, batch: slice) -> list[Hook]:
        hooks = []
        for layer, heads in by_layer.items():
            hooks += LayerAblation(view, view.layer(layer), heads, bound[layer].of_rows(batch)).hooks()
        return hooks

    return Replays(min(by_layer), 1, hooks_of)
