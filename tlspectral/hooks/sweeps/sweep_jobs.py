"""The jobs of a sweep: some heads or sets ablated in one pass of the model, and the table of their effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.sweeps.at_position import effects_at_position
from tlspectral.hooks.sweeps.controls import other_heads, set_control
from tlspectral.hooks.sweeps.layer_effects import (
    LayerEffects,
    LayerReplays,
    beside_heads,
    effect_rows,
    effects_of,
    layer_effects,
    set_table,
)
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import TOKENS_OF_JOB, batch_on, filled
from tlspectral.models.running.continued_runs import continued_run
from tlspectral.models.running.long_prompts import is_long
from tlspectral.models.running.partial_runs import IntactRun, share_behind
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import stacked
from tlspectral.tasks.task_sequences import TaskSequences


def sweep_jobs(
    label: str,
    view: AttentionView,
    sequences: TaskSequences,
    placed: Sequence[Part],
    chosen: Mapping[str, dict[int, list[int]]] | list[dict[int, list[int]]],
    per_head: int,
    seed: int,
    *,
    kept: bool,
    numbered: bool,
) -> list[tuple[int, Job]]:
    """Return the jobs of a sweep as pairs (index into `placed` of the removed part, job). No job is run yet.

    A job ablates the heads of consecutive layers, or some sets, as many as one pass of the model holds. Its result is a
    table of effects.

    Args:
        label: beginning of the jobs' names.
        view, sequences: the model, and the prompts with the metric.
        placed: the parts, each at one position.
        chosen: heads by layer, one dict per part in `placed`; or a dict from the name of a set to its heads by layer.
        per_head: number of controls per head or set.
        seed: seed of the controls.
        kept: True if jobs are stored in a folder.
        numbered: True if names of jobs contain the index of the part.
    """
    tokens = TOKENS_OF_JOB if kept else batch_on(view.device).tokens
    jobs: list[tuple[int, Job]] = []
    of_sets = isinstance(chosen, Mapping)
    for index, part in enumerate(placed):
        own: dict[Any, Any] = {**(chosen if of_sets else chosen[index])}
        length = sequences.tokens.shape[1] - (0 if part.at is None else int(part.at.min()))
        n_tokens = len(sequences.tokens) * length
        runs: dict[tuple[Any, ...], int]
        if of_sets:
            runs = {**_set_replays(view, own, per_head)}
        else:
            runs = {(layer,): len(heads) * (1 + per_head) for layer, heads in own.items()}  # controls included
            if part.beside_heads:
                runs = {(layer,): min(n, view.n_heads(layer)) for (layer,), n in runs.items()}
        sizes = {keys: n * n_tokens for keys, n in runs.items()}
        for together in filled(sizes, tokens):
            group = {key: own[key] for keys in together for key in keys}
            numbers = [[*own].index(key) for key in group] if of_sets else group
            which = "-".join(f"{number:03d}" for number in dict.fromkeys((min(numbers), max(numbers))))
            make = partial(set_table if of_sets else _table, part, sequences, per_head, seed, group)
            name = f"{label}_at{index}" if numbered else label
            items = len(group) if of_sets else sum(map(len, group.values()))
            passes = 0.0
            if is_long(length):  # otherwise the work is short
                begun = {keys: min(own[keys[0]]) if of_sets else int(keys[0]) for keys in together}
                passes = sum(runs[keys] * share_behind(view, layer) for keys, layer in begun.items())
            jobs.append((index, Job(f"{name}_{'set' if of_sets else 'L'}{which}", make, items=items, passes=passes)))
    return jobs


def _set_replays(
    view: AttentionView, sets: Mapping[str, dict[int, list[int]]], draws: int
) -> dict[tuple[str, ...], int]:
    """Return the number of ablated runs of sets that belong into one job, a dict from the names of these sets.

    `view` is the model, `sets` is a dict from name to heads by layer, `draws` the number of controls per set.
    Consecutive sets of equally many key/value groups of the same layers belong together, because each is a control of
    the others and is run once. Any other set stands alone.
    """
    replays: dict[tuple[str, ...], int] = {}
    before = None
    for name, by_layer in sets.items():
        control = set_control(view, by_layer) if draws else None
        shape = None
        if control is not None and control.kind == "groups":
            shape = [(layer, len(groups)) for layer, groups in control.chosen.items()]
        if control is None or shape is None:
            replays[(name,)] = 1 + draws
        elif shape != before:
            replays[(name,)] = 1 + min(draws, control.others)
        else:
            *_, (names, runs) = replays.items()
            del replays[names]
            replays[(*names, name)] = min(runs + 1 + min(draws, control.others), 1 + control.others)
        before = shape
    return replays


def _table(
    part: Part,
    sequences: TaskSequences,
    draws: int,
    seed: int,
    by_layer: dict[int, list[int]],
    prepared: tuple[IntactRun, Float64[np.ndarray, "sequences"]],
) -> pd.DataFrame:
    """Ablate the heads `by_layer` (layer to heads) one at a time; return a DataFrame with a row per head.

    Its columns are `layer, head, value, delta, delta_se, delta_p, delta_p_floor, score_rms`, and with draws the control
    (`control_delta, control_p`, ...). `part` is the removed part, `sequences` are the prompts with the metric, `draws`
    is the number of controls per head and `seed` draws them, `prepared` is the run without ablation and its value of
    each sequence. The table's attrs are `intact_per_sequence` and `sums_per_sequence`, the sums of effects over heads.
    """
    intact, intact_value = prepared
    beside = draws > 0 and part.beside_heads
    tables, sums = [], dict[str, Any]()
    for layer, effects in _effects(part, sequences, draws, seed, by_layer, intact).items():
        deltas = effects_of(part, sequences, effects.values, intact_value)
        controls = effects_of(part, sequences, effects.controls, intact_value)  # [heads, draws, sequences]
        names = {"layer": layer, "head": by_layer[layer]}
        rows = effect_rows(names, effects.values, deltas, controls, seed, sequences.distinct)
        tables.append(rows.assign(score_rms=effects.score_rms, **effects.control_columns))
        # A head that lost nothing has no effect per size, and is left out of that sum.
        sizes = np.where(effects.score_rms > 0, effects.score_rms, np.nan)
        own = {"delta": deltas.sum(0), "delta_per_rms": np.nansum(deltas / sizes[:, None], axis=0)}
        if draws and not beside:
            own["delta_above_control"] = _above_control(deltas, controls)
        sums = {name: total + sums.get(name, 0.0) for name, total in own.items()}
    table = stacked(tables)
    table.attrs = {
        "sums_per_sequence": {name: total.tolist() for name, total in sums.items()},
        "intact_per_sequence": intact_value.tolist(),
    }
    return table


def _above_control(
    deltas: Float64[np.ndarray, "heads sequences"], controls: Float64[np.ndarray, "heads draws sequences"]
) -> Float64[np.ndarray, "sequences"]:
    """Return for each sequence the sum over heads of (effect minus the mean effect of the head's controls).

    `deltas` are the effects of the heads, `controls` the effects of their controls. Heads without controls are left
    out.
    """
    exists = ~np.isnan(controls[:, :, 0])
    above = [
        delta - drawn[kept].mean(0) for delta, drawn, kept in zip(deltas, controls, exists, strict=True) if any(kept)
    ]
    return np.sum(above, axis=0) if above else np.zeros(deltas.shape[1])


def _effects(
    part: Part, sequences: TaskSequences, draws: int, seed: int, by_layer: dict[int, list[int]], intact: IntactRun
) -> dict[int, LayerEffects]:
    """Ablate heads one at a time, and their controls (random parts, or other heads); return effects by layer.

    The result is a dict from layer to `LayerEffects`. `part` is the removed part, `sequences` are the prompts with the
    metric, `by_layer` is a dict from layer to heads, `draws` the number of controls per head, `seed` draws them,
    `intact` is the run without ablation.
    """
    view, others, ablated = intact.view, dict[int, list[list[int]]](), by_layer
    if draws and part.beside_heads:
        others = {layer: other_heads(view, layer, heads, draws, seed) for layer, heads in by_layer.items()}
        ablated = {
            layer: [*heads, *sorted({other for drawn in others[layer] for other in drawn}.difference(heads))]
            for layer, heads in by_layer.items()
        }
        # The controls are ablations of other heads, so no random parts are drawn.
        draws = 0
    bound, at = bound_parts(part, view, ablated, every=True), part.at
    layers = [
        LayerReplays(view, sequences, layer, heads, bound[layer], draws, seed) for layer, heads in ablated.items()
    ]
    run = None if at is None else continued_run(intact, int(at.min()))
    if at is None or run is None:
        effects = layer_effects(intact, sequences, layers)
    else:
        effects = effects_at_position(run, sequences, at, layers)
    return {
        layer: beside_heads(own, ablated[layer], others[layer]) if others else own
        for layer, own in zip(ablated, effects, strict=True)
    }
