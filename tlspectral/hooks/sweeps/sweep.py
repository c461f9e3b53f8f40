"""`ablation_sweep`: the value of a metric without a part of one head, head by head."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture, warn_caller
from tlspectral.hooks.parts import Part, PartName, part_of
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.positions import asked_positions, listed_positions
from tlspectral.hooks.removed_off_target import keyword, refuse_off_target
from tlspectral.hooks.screening import agreement, screened
from tlspectral.hooks.sweeps.at_position import effects_at_position
from tlspectral.hooks.sweeps.controls import SETS, other_heads
from tlspectral.hooks.sweeps.layer_effects import (
    LayerEffects,
    LayerReplays,
    beside_heads,
    chosen_sets,
    effect_rows,
    effects_of,
    layer_effects,
    set_table,
)
from tlspectral.hooks.sweeps.screen import gradient_screen
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.batches import TOKENS_OF_JOB, batch_on, filled
from tlspectral.models.running.continued_runs import continued_run
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.selection import Heads, counted, head_name
from tlspectral.tables.head_columns import HEAD, PART
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import MetricValue, Task
from tlspectral.tasks.control_tests import CONTROL_COLUMNS, FEWEST_DRAWS
from tlspectral.tasks.identity import content_digest, is_own_code, sequences_identity
from tlspectral.tasks.metric_value import values_of_rows
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import TaskSequences, intact_values, metric_value_of, task_sequences

SEQUENCES = 16
CONTROL_DRAWS = 5
SCREENED = 20

ABLATION_SWEEP = Schema(
    "ablation_sweep",
    (
        *HEAD,
        PART,
        *columns("""
            position? | label         | Where the part was removed, as it was asked for. With at=.
            value     | of the metric | Value of the metric without the part of this one head, mean over sequences.
            delta     | of the metric | value less the intact one; of a loss, positive where the part helped.
            delta_se  | of the metric | Standard error of delta over sequences, paired with the intact run; NaN for one.
            delta_p   | probability   | Two-sided p of no effect by sign flips: exact to 13 sequences, else 9,999 draws.
            delta_p_floor | probability | Smallest delta_p that differences of these sizes have with any signs.
            score_rms | logit         | RMS of what was removed from the scaled scores, over unmasked pairs of tokens;
                      |               | NaN for parts of the mask and of z.
        """),
        *CONTROL_COLUMNS,
        *columns("""
            control_rms? | logit      | As score_rms, mean over the draws of the control. Of a Band.
            control_overlap? | share  | RMS of the band's own frequencies in a draw over that of the band, mean over
                      |               | draws. Of a Band.
            estimate? | of the metric | First-order estimate of delta from one backward pass. With a screen.
            measured? | label         | top (of the 20 largest estimates), control (of 20 random others), or empty: no
                      |               | delta. With a screen.
        """),
    ),
    "`tls.ablation_sweep`; `tlspectral ablate -o FILE` writes it",
)


def _sweeps_to_join(call: str, tasks: list[str]) -> str:
    """Return two lines of code: a sweep for each task, and their tables side by side."""
    others = ", ".join(f"{keyword(task)}=sweeps[{number}]" for number, task in enumerate(tasks[1:], 1))
    return f"sweeps = [{call} for task in ({', '.join(tasks)})]\ntable = tls.tables.join(sweeps[0], {others})"


@refuse_off_target(_sweeps_to_join, control="random", draws=FEWEST_DRAWS)
def ablation_sweep(
    model: Any,
    part: Part | PartName,
    *,
    heads: Heads | Mapping[str, Heads] | None = None,
    task: Task | Literal["induction", "language"] = "induction",
    at: Any = None,
    control: Literal["random"] | None = None,
    draws: int | None = None,
    screen: Literal["gradient"] | None = None,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Remove `part` from one head at a time and evaluate the model each time (FP sections 5 and 8).

    Example: one of four heads needs its rope phase for induction.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> sweep = tls.ablation_sweep(model, "rope_phase", heads="L0")
    >>> sweep["delta"].round(1).abs().tolist()
    [0.0, 0.0, 0.0, 1.3]

    Residual streams of an intact run are stored, and an ablation in layer l runs only block l and the later ones; those
    of several layers are rows of one pass, as many as a batch holds. The numbers are what whole forward passes under
    `ablate` give. Hooks on the model stay in force.

    Args:
        model: a TransformerBridge or HookedTransformer.
        part: what is removed, as in `ablate`. In the place of `"output"` stands what the head writes on the pair of
            each prompt, where the task has pairs, else zero: `attrs["replace"]` says which. An `Output` that takes from
            other sequences and has no reference takes from all of the task, never from a sequence for itself. The
            prompts of a part in blocks are the prompts of the task.
        heads: as in `ablate`; None is every head (for `RopePhase` and `Band`: of layers with rotary positions). On
            SmolLM2-135M they take 16 CPU-minutes, with the control 2 CPU-hours; the bar says so after the first layer.
            A dict, such as `{"movers": ["L9H9", "L10H0"]}`, makes a row per set, its heads removed together (`layer`
            and `head` are -1); their control is random sets with as many heads of each layer.
        task: a `Task`, such as `tls.tasks.language(prompts)`; `"induction"`: 16 repeated random sequences with segments
            of 64 tokens; `"language"`: the first 16 rows of 128 tokens of the packaged book. On two cores more would
            take hours; FP used 128 to 300 sequences. Where prompts are padded, every number is a mean over sequences of
            the mean over their real tokens.
        at: positions at each of which alone the part is removed, a row for each: names of the task's positions or
            numbers, such as `["S2", -1]`, or one of these; in a list also positions of each prompt, as the `at` of a
            part.
        control: `"random"` also removes, in place of the part, a random one of equal size: `q O k^T` of the head's own
            bias-free queries and keys before rotation, O a Haar-random orthogonal d_head x d_head matrix, scaled so
            that its RMS over unmasked pairs equals the RMS of the part, sequence by sequence. For parts in blocks: the
            same numbers taken from other blocks, by a random cycle through all of them. For a `Band`: a random set of
            the head's frequencies, the beginning of a random order of them, cut where the RMS of its contribution to
            the scores of all sequences is nearest to the RMS of the band; it is used if it is within 10 % of that. For
            parts of the mask or of z, such as `LongRange` and `Output`: the same is removed from other heads of the
            layer, chosen at random, one at a time.
        draws: random parts per head, None is five; for parts of the mask or of z other heads per head, None is all (no
            more than n - 1 in a layer with n heads); random sets per set, None is 19. For a `Band` there can be fewer
            that differ, down to none: `control_draws` has those that were found. The smallest possible `control_p` is
            in `control_p_floor`, 1 / (1 + draws): 19 reach .05. `excess_z` needs 19 too.
        screen: `"gradient"` estimates every effect to first order from one backward pass, then measures the 20 heads
            with the largest estimates and 20 random others.
        folder: a folder for one file per part and layer, or several layers of up to 2,048 tokens together. A sweep that
            was stopped is resumed from there and gives the same table. Parts may share a folder, other settings not.
        n_jobs: workers that share these jobs, by joblib (processes, each with a copy of the model) or the backend of
            `joblib.parallel_config`, Dask included.
        seed: of sequences, control draws, the screen's random set and sign flips.

    Returns:
        DataFrame sorted by layer and head. Columns: `layer, head, name, part, position?, value, delta, delta_se,
        delta_p, delta_p_floor, score_rms, control_delta?, control_delta_se?, control_excess?, control_p?,
        control_p_floor?, control_draws?, excess_z?, control_rms?, control_overlap?, estimate?, measured?`. `attrs` hold
        model and settings; with a screen `attrs["screen"]["rank_correlation"]` of estimate and effect on the random
        set, and `attrs["sets"]` the heads of each set. `tls.tables.join` puts sweeps on several tasks side by side.

    Raises:
        BadHead: a head that does not exist.
        UnsupportedArchitecture: a `RopePhase` or `Band` of layers without rotary positions.
        EditNotHonored: the model discards the edit.
        IncompatibleCheckpoint: the folder holds another sweep.
        ValueError: an unknown part, task, control or screen; arguments that do not go together; prompts that the
            task refuses; one sequence that is its own reference; a model without tokenizer on packaged text; a screen
            of a metric without a gradient.

    What it does not establish: that heads without effect do nothing. Others can stand in, and parts differ in size: set
    `delta` beside `score_rms` and the control. `delta_p` is against no effect at all: whether the part does more than a
    random one is `control_p`. It is not corrected for the number of heads, and no exact level for skewed differences:
    with 8 or 16 sequences 7.9 to 9.9 % at nominal 5 %. `excess_z` is not a normal z: draws are few and often skewed,
    and where the value does not change at all it is of rounding.
    """
    with measured(model) as view:
        removed = part_of(part)
        sets = chosen_sets(view, heads) if isinstance(heads, Mapping) else None
        by_layer = {} if isinstance(heads, Mapping) else chosen_heads(view, heads, removed)
        if sets is None and not by_layer:
            raise ValueError("no heads were given, so there is nothing to sweep")
        chosen_task = task_of(task, seed=seed, n_sequences=SEQUENCES)
        sequences = task_sequences(view, chosen_task)
        draws = _check(removed, control, draws, screen, at, of_sets=sets is not None)
        # A part that has positions of its own is settled at these, and gets no column of positions.
        listed = listed_positions(at) if removed.at is None else [removed.at]
        asked, placed = placed_parts(view, sequences, [removed], listed)
        per_head = 0 if control is None else _draws(view, None if sets else by_layer, placed[0], draws)
        measurement = Measurement(
            ABLATION_SWEEP,
            {"task": sequences.name, "control": control, "seed": seed, **placed[0].settings, **_positions(asked)},
            origin=view.origin(processing=removed.acts_on == "z"),
            identity={
                "screen": screen,
                "weights": view.weights_digest,
                **sequences_identity(sequences, chosen_task),
                # As given, so that parts with other numbers by default share a folder.
                "draws": draws if control else None,
                "tokens_of_job": TOKENS_OF_JOB,
                "heads": sets or ("every" if heads is None else _listed(by_layer)),
            },
            folder=folder,
            score=lambda: metric_value_of(view, sequences).per_sequence,
            n_jobs=n_jobs,
        )
        # A part of the caller's own is known by its code and fields: another one of that name has other files.
        label = removed.name if is_own_code(removed) else f"{removed.name}-{content_digest(removed)[:16]}"
        chosen: dict[str, dict[int, list[int]]] | list[dict[int, list[int]]] = sets or [by_layer] * len(placed)
        estimates = None
        if screen is not None:
            estimates, chosen = _screened(measurement, view, sequences, by_layer, placed, label, seed)
        how = {"kept": folder is not None, "numbered": at is not None}
        jobs = sweep_jobs(label, view, sequences, placed, chosen, per_head, seed, **how)
        layers = {
            layer for of_layers in (chosen.values() if isinstance(chosen, Mapping) else chosen) for layer in of_layers
        }
        tables = measurement.made(
            [job for _, job in jobs],
            description=f"sweep {removed.name}",
            unit="head" if sets is None else "set",
            prepare=partial(intact_values, view, sequences, sorted(layers)),
        )
        table, attrs = _joined([tables[job.name].assign(place=place) for place, job in jobs], estimates, sequences)
        place = table.pop("place")
        if at is not None:
            table["position"] = [str(asked[index][0]) for index in place]
            table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
        table["part"] = part if isinstance(part, str) else removed.name
        return measurement.table(
            table,
            **attrs,
            **placed[0].noted,
            **({} if sets is None else {"sets": {called: _names(of_set) for called, of_set in sets.items()}}),
            draws=per_head,
            higher_is_better=sequences.higher_is_better,
            **sequences.recorded(view),
        )


def _positions(asked: list[tuple[str | int, Int[Tensor, "sequences"]]]) -> dict[str, Any]:
    """Return the settings that name the positions at which a part is removed; none without positions."""
    if not asked:
        return {}
    return {"at": [called for called, _ in asked], "positions": [positions.tolist() for _, positions in asked]}


def _screened(
    measurement: Measurement,
    view: AttentionView,
    sequences: TaskSequences,
    by_layer: dict[int, list[int]],
    placed: list[Part],
    label: str,
    seed: int,
) -> tuple[pd.DataFrame, list[dict[int, list[int]]]]:
    """Return the estimate of each head and part, and the heads by layer that each of the parts is measured on."""

    def estimated() -> pd.DataFrame:
        of_parts = [
            gradient_screen(view, sequences, by_layer, part).assign(place=place) for place, part in enumerate(placed)
        ]
        table = pd.concat(of_parts, ignore_index=True)
        # The largest of all positions together, so that one position may have more heads than another.
        _, table["measured"] = screened(table["estimate"].to_numpy(), SCREENED, seed)
        return table

    estimates = measurement.first(Job(f"{label}_screen", estimated))
    kept = estimates[estimates["measured"] != ""]
    return estimates, [heads_by_layer(view, kept[kept["place"] == place]) for place in range(len(placed))]


def _listed(by_layer: Mapping[int, list[int]]) -> list[list[int]]:
    """Return layer and head of each head."""
    return [[layer, head] for layer, heads in by_layer.items() for head in heads]


def _names(by_layer: Mapping[int, list[int]]) -> list[str]:
    return [head_name(*pair) for pair in _listed(by_layer)]


def placed_parts(
    view: AttentionView, sequences: TaskSequences, removed: Sequence[Part], listed: list[Any] | None
) -> tuple[list[tuple[str | int, Int[Tensor, "sequences"]]], list[Part]]:
    """Settle parts on the prompts of a task, each at every listed position. Raises as `asked_positions`.

    Returns:
        The positions, with the names that tables print, and the parts: at each position the first part, then the next.
    """
    asked = [] if listed is None else asked_positions(sequences, listed)
    placed = [part.placed(one) for part in removed for _, one in asked] or [*removed]
    return asked, [part.fixed(view, sequences) for part in placed]


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
    """Return the jobs of a sweep, each with the index among `placed` of the part that it removes.

    A job is of consecutive layers or sets, as many as one pass holds. `chosen` are sets by name, or the heads by layer
    of each of `placed`. `kept`: jobs are stored in a folder. `numbered`: names hold the index.
    """
    tokens = TOKENS_OF_JOB if kept else batch_on(view.device).tokens
    jobs: list[tuple[int, Job]] = []
    of_sets = isinstance(chosen, Mapping)
    for index, part in enumerate(placed):
        own: dict[Any, Any] = {**(chosen if of_sets else chosen[index])}
        length = sequences.tokens.shape[1] - (0 if part.at is None else int(part.at.min()))
        each = len(sequences.tokens) * length
        if of_sets:
            sizes = {name: (1 + per_head) * each for name in own}
        else:
            sizes = {layer: _replays(view, part, layer, heads, per_head) * each for layer, heads in own.items()}
        for together in filled(sizes, tokens):
            group = {key: own[key] for key in together}
            numbers = [[*own].index(key) for key in group] if of_sets else group
            which = "-".join(f"{number:03d}" for number in dict.fromkeys((min(numbers), max(numbers))))
            make = partial(set_table if of_sets else _table, part, sequences, per_head, seed, group)
            name = f"{label}_at{index}" if numbered else label
            items = len(group) if of_sets else sum(map(len, group.values()))
            jobs.append((index, Job(f"{name}_{'set' if of_sets else 'L'}{which}", make, items=items)))
    return jobs


def _replays(view: AttentionView, part: Part, layer: int, heads: list[int], draws: int) -> int:
    """Return how many replays the heads of a layer have, with their controls."""
    most = len(heads) * (1 + draws)
    return min(most, view.n_heads(layer)) if part.beside_heads else most


def _check(part: Part, control: Any, draws: Any, screen: Any, at: Any = None, *, of_sets: bool = False) -> int | None:
    """Return the draws as a number. Raises ValueError for arguments that do not exist or do not go together."""
    if control not in (None, "random"):
        raise ValueError(f"control must be None or 'random', not {control!r}")
    if draws is not None and control is None:
        raise ValueError(f"draws={draws} is of control='random': give that too")
    number = None if draws is None else counted(draws, 1, "draws is how many controls each effect has")
    if screen not in (None, "gradient"):
        raise ValueError(f"screen must be None or 'gradient', not {screen!r}")
    if screen is not None and not part.screened:
        raise ValueError(
            "screen='gradient' is for replace='zero' or 'counterfactual', and for parts without blocks: leave it out"
        )
    if screen is not None and of_sets:
        raise ValueError("screen='gradient' estimates heads one by one: leave it out for sets")
    if at is not None and part.at is not None:
        raise ValueError(f"at={at!r} are positions to remove the part at, one by one: give a part without at")
    return number


def intact_attrs(table: pd.DataFrame, sequences: TaskSequences) -> dict[str, Any]:
    """Return the intact value, of a part's table."""
    intact = MetricValue(np.array(table.attrs["intact_per_sequence"]), distinct=sequences.distinct)
    return {"intact_value": intact.value, "intact_value_se": intact.se}


def _draws(view: AttentionView, layers: Iterable[int] | None, part: Part, draws: int | None) -> int:
    """Return the random parts per head, or the most other heads that a head is compared with.

    `layers` None is of sets: the random sets per set.
    """
    if layers is None:
        return draws or SETS
    if not part.beside_heads:
        return part.draws_of(draws or CONTROL_DRAWS)
    others = {layer: view.n_heads(layer) - 1 for layer in layers}
    for layer, n_others in others.items():
        if n_others == 0:
            raise ValueError(
                f"layer {layer}: the control of {part.name!r} is other heads of the layer, and there is one head: "
                "leave control out"
            )
    most = max(others.values())
    if draws is not None and draws > most:
        warn_caller(
            f"draws={draws}, but the control of {part.name!r} is other heads of the layer, of which there are {most}: "
            f"control_p is not below 1 / {1 + most}"
        )
    return min(draws or most, most)


def chosen_heads(view: AttentionView, heads: Heads | None, part: Part) -> dict[int, list[int]]:
    """Return heads by layer, of layers with rotary positions for a part of rotary pairs.

    Raises BadHead; UnsupportedArchitecture for layers without; ValueError for pairs that they lack, or none.
    """
    chosen = heads_by_layer(view, heads)
    if not part.rotary:
        return chosen
    non_rotary = [layer for layer in chosen if view.rotary(layer) is None]
    if non_rotary and (heads is not None or len(non_rotary) == len(chosen)):
        raise UnsupportedArchitecture(
            f"layer {non_rotary[0]}: no rotary positions, so there is no {part.name} to remove"
        )
    # Every head was asked for: layers without rotary positions, as of SmolLM3, are left out.
    rotary = {layer: indices for layer, indices in chosen.items() if layer not in non_rotary}
    if set(bound_parts(part, view, rotary)) != set(rotary):
        raise ValueError("no frequencies were given, so there is nothing to sweep")
    return rotary


def _table(
    part: Part,
    sequences: TaskSequences,
    draws: int,
    seed: int,
    by_layer: dict[int, list[int]],
    prepared: tuple[IntactRun, Float64[np.ndarray, "sequences"]],
) -> pd.DataFrame:
    """Return the rows of heads of some layers, one after the other."""
    intact, intact_value = prepared
    beside = draws > 0 and part.beside_heads
    tables, sums = [], dict[str, Any]()
    for layer, effects in _effects(part, sequences, draws, seed, by_layer, intact).items():
        deltas = effects_of(part, sequences, effects.values, intact_value)
        controls = effects_of(part, sequences, effects.controls, intact_value)  # [heads, draws, sequences]
        names = {"layer": layer, "head": by_layer[layer]}
        rows = effect_rows(names, effects.values, deltas, controls, seed, sequences.distinct)
        tables.append(rows.assign(score_rms=effects.score_rms, **effects.control_columns))
        # Heads from whose scores nothing was removed are in no sum of effects per size.
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
    """Return the sum over heads of effects less the mean of their draws; heads of which none was found are left out."""
    found = ~np.isnan(controls[:, :, 0])
    above = [
        delta - drawn[kept].mean(0) for delta, drawn, kept in zip(deltas, controls, found, strict=True) if any(kept)
    ]
    return np.sum(above, axis=0) if above else np.zeros(deltas.shape[1])


def _effects(
    part: Part, sequences: TaskSequences, draws: int, seed: int, by_layer: dict[int, list[int]], intact: IntactRun
) -> dict[int, LayerEffects]:
    """Ablate each of some heads in turn, and random parts in their place, or other heads of their layers."""
    view, others, ablated = intact.view, dict[int, list[list[int]]](), by_layer
    if draws and part.beside_heads:
        others = {layer: other_heads(view, layer, heads, draws, seed) for layer, heads in by_layer.items()}
        ablated = {
            layer: [*heads, *sorted({other for drawn in others[layer] for other in drawn}.difference(heads))]
            for layer, heads in by_layer.items()
        }
        # The control heads are ablated like the others, so no random parts are drawn.
        draws = 0
    bound, at = bound_parts(part, view, ablated, every=True), part.at
    layers = [
        LayerReplays(view, sequences, layer, heads, bound[layer], draws, seed) for layer, heads in ablated.items()
    ]
    run = None if at is None else continued_run(intact, int(at.min()))
    if at is None or run is None:
        found = layer_effects(intact, sequences, layers)
    else:
        found = effects_at_position(run, sequences, at, layers)
    return {
        layer: beside_heads(one, ablated[layer], others[layer]) if others else one
        for layer, one in zip(ablated, found, strict=True)
    }


def _joined(
    tables: list[pd.DataFrame], estimated: pd.DataFrame | None, sequences: TaskSequences
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the rows of all layers, beside the estimates of a screen, and the `attrs` of the table."""
    attrs: dict[str, Any] = {**intact_attrs(tables[0], sequences), "screen": None}
    table = stacked(tables)
    if estimated is None:
        per_layer = [layer_table.attrs["sums_per_sequence"] for layer_table in tables]
        attrs["sums_per_sequence"] = {
            name: values_of_rows(np.sum([sums[name] for sums in per_layer], axis=0), sequences.distinct).tolist()
            for name in per_layer[0]
        }
        return table, attrs
    table = estimated.drop(columns="score_rms").merge(table, on=["layer", "head", "place"], how="left")
    # The screen knows the size of what would be removed of heads that were not measured too.
    table["score_rms"] = estimated["score_rms"].to_numpy()
    correlation, pvalue = agreement(table.loc[table["measured"] == "control"])
    attrs["screen"] = {
        "kind": "gradient",
        "top": int((table["measured"] == "top").sum()),
        "control": int((table["measured"] == "control").sum()),
        "rank_correlation": correlation,
        "pvalue": pvalue,
    }
    return table, attrs
