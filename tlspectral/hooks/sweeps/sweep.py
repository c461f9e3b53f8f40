"""`ablation_sweep`: evaluate a metric without a part of one head, for each head in turn."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture, shown, warn_caller
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.hooks.parts import Part, PartName, part_of
from tlspectral.hooks.parts.checked_calls import acts_by_strip, bound_parts
from tlspectral.hooks.positions import asked_positions, listed_positions
from tlspectral.hooks.screening import agreement, screened
from tlspectral.hooks.sweeps.controls import SETS, SetControl, set_control
from tlspectral.hooks.sweeps.layer_effects import (
    chosen_sets,
    group_sets,
)
from tlspectral.hooks.sweeps.screen import gradient_screen
from tlspectral.hooks.sweeps.sweep_jobs import sweep_jobs
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import TOKENS_OF_JOB
from tlspectral.models.running.long_prompts import refuse_long
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import HEAD, PART
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import MetricValue, Task
from tlspectral.tasks.control_tests import CONTROL_COLUMNS
from tlspectral.tasks.identity import content_digest, is_own_code, sequences_identity
from tlspectral.tasks.metric_value import values_of_rows
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import TaskSequences, intact_values, metric_value_of, task_sequences

ADVICE = "evaluate the task inside tls.ablate(model, head, part), one head at a time, or "
"""What to do in place of a sweep over parts of scores on long prompts."""

SEQUENCES = 16
CONTROL_DRAWS = 5
SCREENED = 20

ABLATION_SWEEP = Schema(
    "ablation_sweep",
    (
        *HEAD,
        PART,
        *columns("""
            position? | label         | Position at which the part was removed, as given in at=. With at=.
            value     | of the metric | Metric without the part of this head, mean over sequences.
            delta     | of the metric | value minus the intact value; for a loss, positive if the part helped.
            delta_se  | of the metric | Standard error of delta over sequences, paired with the intact run; NaN for one.
            delta_p   | probability   | Two-sided p of no effect by sign flips: exact up to 13 sequences, then 9,999
                      |               | random flips.
            delta_p_floor | probability | Smallest delta_p that differences of these sizes can have with any signs.
            score_rms | logit         | RMS of the removed part of the scaled scores, over unmasked pairs of tokens; NaN
                      |               | for parts of the mask and of z.
        """),
        *CONTROL_COLUMNS,
        *columns("""
            control_rms? | logit      | As score_rms, mean over the draws of the control. For a Band.
            control_overlap? | share  | RMS of the band's own frequencies in a draw, divided by the RMS of the band;
                      |               | mean over draws. For a Band.
            estimate? | of the metric | First-order estimate of delta from one backward pass. With a screen.
            measured? | label         | top (the 20 largest estimates), control (20 random others), or empty: not
                      |               | measured, no delta. With a screen.
        """),
    ),
    "`tls.ablation_sweep`; `tlspectral ablate -o FILE` writes it",
)


@checked_settings
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
    """Remove a part from one head at a time, and measure a task each time ("Fingerprint, Not Blueprint", §5, §8).

    Use it to find the heads that a task needs. Example: one of four heads needs its rope phase for induction.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> sweep = tls.ablation_sweep(model, "rope_phase", heads="L0")
    >>> sweep["delta"].round(1).abs().tolist()
    [0.0, 0.0, 0.0, 1.3]

    Args:
        model: a TransformerBridge or HookedTransformer.
        part: "symmetric" (M_S), "antisymmetric" (M_A), "rope_phase" (Im(M_t)), "output" (replaced by the output on the
            paired prompt if the task has pairs, else by zero), or a value of `tls.parts`.
        heads: "L5H1", (5, 1), "L5", "L5KV1" (a key/value group), or a list. A dict such as `{"movers": ["L9H9",
            "L10H0"]}` has a row per set, whose heads are removed together; "groups" has one row per key/value group.
            Default: all heads.
        task: a `Task`, "induction" (16 repeated sequences, default) or "language" (16 rows of text).
        at: positions of the task, names or numbers: the part is removed at each alone, a row for each.
        control: "random" also measures random parts of equal size, one at a time in place of the part. For parts of the
            mask or z it takes the same part of other heads of the layer.
        draws: random parts per head (default 5), other heads (default all) or random sets per set of a dict (default
            19; random groups for a set of whole groups).
        screen: "gradient" estimates all heads by one backward pass, then measures the 20 largest and 20 random others.
        folder: keeps finished layers; the same call resumes from it.
        n_jobs: workers. seed: of sequences, controls, the screen and the sign flips of `delta_p`.

    Returns:
        DataFrame, a row per head. Columns (`?`: not in every table): `layer, head, name, part, position?, value, delta,
        delta_se, delta_p, delta_p_floor, score_rms, control_delta?, control_delta_se?, control_excess?, control_p?,
        control_p_floor?, control_draws?, excess_z?, control_rms?, control_overlap?, estimate?, measured?`. `delta` is
        the value without the part minus the intact value, in units of the metric. `tls.tables.join` joins sweeps on
        several tasks.

    Raises: BadHead, ValueError (unknown part, unfit options), UnsupportedArchitecture (no such part), EditNotHonored
    (the model ignores the edit), IncompatibleCheckpoint (the folder holds another sweep).

    Not established: that a head without effect does nothing; other heads may replace it. `delta_p` is not corrected for
    the number of heads; with 8 or 16 skewed sequences it rejects 7.9 to 9.9 % at nominal 5 %. `control_p` tells whether
    a part does more than a random one. More: docs/parts.md
    """
    with measured(model) as view:
        removed = part_of(part)
        sets = chosen_sets(view, heads) if isinstance(heads, Mapping) else None
        if isinstance(heads, str) and heads.strip() == "groups":
            sets = group_sets(view, chosen_heads(view, None, removed))
        by_layer = {} if sets is not None else chosen_heads(view, heads, removed)
        if sets is None and not by_layer:
            raise ValueError("heads= names no heads: give some, or leave it out for all heads")
        chosen_task = task_of(task, seed=seed, n_sequences=SEQUENCES)
        sequences = task_sequences(view, chosen_task)
        if removed.acts_on == "scores" or screen is not None:
            refuse_long(sequences.tokens.shape[1], "a sweep over parts of scores, or with a screen, needs", ADVICE)
        draws = _check(removed, control, draws, screen, at, of_sets=sets is not None)
        # A part with positions of its own is removed there, and the table has no column `position`.
        listed = listed_positions(at) if removed.at is None else [removed.at]
        asked, placed = placed_parts(view, sequences, [removed], listed)
        per_head = 0 if control is None else _draws(view, None if sets else by_layer, placed[0], draws)
        controls = {name: set_control(view, of_set) for name, of_set in (sets or {}).items() if per_head}
        _warn_of_few(controls, draws)
        measurement = Measurement(
            ABLATION_SWEEP,
            {"task": sequences.name, "control": control, "seed": seed, **placed[0].settings, **_positions(asked)},
            origin=view.origin(processing=removed.acts_on == "z"),
            identity={
                "screen": screen,
                "weights": view.weights_digest,
                **sequences_identity(sequences, chosen_task),
                # The argument, not the resolved number: parts with different defaults can then share a folder.
                "draws": draws if control else None,
                "tokens_of_job": TOKENS_OF_JOB,
                "heads": sets or ("every" if heads is None else _listed(by_layer)),
            },
            folder=folder,
            score=lambda: metric_value_of(view, sequences).per_sequence,
            n_jobs=n_jobs,
        )
        # A part class of the user is identified by code and fields: another class of the same name gets other files.
        label = removed.name if is_own_code(removed) else f"{removed.name}-{content_digest(removed)[:16]}"
        chosen: dict[str, dict[int, list[int]]] | list[dict[int, list[int]]] = sets or [by_layer] * len(placed)
        estimates = None
        if screen is not None:
            estimates, chosen = _screened(measurement, view, sequences, by_layer, placed, label, seed)
        how = {"kept": folder is not None, "numbered": at is not None}
        jobs = sweep_jobs(label, view, sequences, placed, chosen, per_head, seed, **how)
        layers = {
            layer for by_layer in (chosen.values() if isinstance(chosen, Mapping) else chosen) for layer in by_layer
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
        recorded = sequences.recorded(view)
        if removed.acts_on != "z" and not acts_by_strip(removed):  # a user's part gets whole matrices
            recorded.pop("strip", None)
        return measurement.table(
            table,
            **attrs,
            **placed[0].noted,
            **({} if sets is None else {"sets": {name: _names(of_set) for name, of_set in sets.items()}}),
            **({"control_of_sets": {name: one.kind for name, one in controls.items()}} if controls else {}),
            draws=per_head,
            higher_is_better=sequences.higher_is_better,
            **recorded,
        )


def _positions(asked: list[tuple[str | int, Int[Tensor, "sequences"]]]) -> dict[str, Any]:
    """Return a dict of settings: `at` (labels) and `positions` (per label, one per sequence); empty without positions.

    `asked` are pairs (label, positions), as `asked_positions` returns them.
    """
    if not asked:
        return {}
    return {"at": [label for label, _ in asked], "positions": [positions.tolist() for _, positions in asked]}


def _screened(
    measurement: Measurement,
    view: AttentionView,
    sequences: TaskSequences,
    by_layer: dict[int, list[int]],
    placed: list[Part],
    label: str,
    seed: int,
) -> tuple[pd.DataFrame, list[dict[int, list[int]]]]:
    """Return a table with the estimate of each head and part, and for each part a dict from layer to heads to measure.

    `view` is the model. The table has `layer, head, estimate, score_rms`, `place` (index of the part) and `measured`
    ("top", "control" or ""). `placed` are the parts, one per position, `by_layer` the heads to estimate, `label` the
    beginning of the job's name. `measurement` makes the estimates, or loads stored ones. The 20 largest estimates and
    20 random others (drawn with `seed`) are measured, over all parts together.
    """

    def estimated() -> pd.DataFrame:
        tables = [
            gradient_screen(view, sequences, by_layer, part).assign(place=place) for place, part in enumerate(placed)
        ]
        table = pd.concat(tables, ignore_index=True)
        # The largest over all positions together: one position may get more heads than another.
        _, table["measured"] = screened(table["estimate"].to_numpy(), SCREENED, seed)
        return table

    estimates = measurement.first(Job(f"{label}_screen", estimated))
    kept = estimates[estimates["measured"] != ""]
    return estimates, [heads_by_layer(view, kept[kept["place"] == place]) for place in range(len(placed))]


def _listed(by_layer: Mapping[int, list[int]]) -> list[list[int]]:
    """Return the heads in `by_layer`, a dict from layer to heads, as a list of [layer, head]."""
    return [[layer, head] for layer, heads in by_layer.items() for head in heads]


def _names(by_layer: Mapping[int, list[int]]) -> list[str]:
    """Return the names of the heads in `by_layer`, a dict from layer to heads, such as "L5H1"."""
    return [head_name(*pair) for pair in _listed(by_layer)]


def placed_parts(
    view: AttentionView, sequences: TaskSequences, removed: Sequence[Part], listed: list[Any] | None
) -> tuple[list[tuple[str | int, Int[Tensor, "sequences"]]], list[Part]]:
    """Prepare parts for the prompts of a task, each part at every listed position.

    `removed` are the parts, `listed` the entries of `at=` or None for all positions, `view` is the model, `sequences`
    are the tokenized prompts. The given parts are not changed. Raises ValueError or TypeError for an unusable position.

    Returns:
        Pairs (label, positions), and the prepared parts: the first part at every position, then the second part at
        every position, and so on. Without positions the pairs are an empty list.
    """
    asked = [] if listed is None else asked_positions(sequences, listed)
    placed = [part.placed(positions) for part in removed for _, positions in asked] or [*removed]
    return asked, [part.fixed(view, sequences) for part in placed]


def _warn_of_few(controls: Mapping[str, SetControl], draws: int | None) -> None:
    """Warn of sets without a control, and of fewer other sets of groups than the `draws` that the user asked for.

    `controls`: dict from the name of a set to its control. `draws`: None for the default.
    """
    without = [name for name, control in controls.items() if control.kind == "none"]
    if without:
        warn_caller(
            f"{shown(without)}: a set of all heads of its layers has no other heads as a control, so control_p is NaN: "
            "leave control= out, or give sets that leave heads"
        )
    few = {name: control.others for name, control in controls.items() if control.kind == "groups"}
    if draws is not None and few and min(few.values()) < draws:
        name = min(few, key=few.__getitem__)
        warn_caller(
            f"draws={draws}, but the control of {name!r} is other sets of key/value groups of its layers, at most "
            f"{few[name]}: control_p cannot be below 1 / {1 + few[name]}"
        )


def _check(part: Part, control: Any, draws: Any, screen: Any, at: Any = None, *, of_sets: bool = False) -> int | None:
    """Check options of `ablation_sweep` and return `draws` as a number, or None for the default.

    `part` is the part to remove; `control`, `draws`, `screen` and `at` are the user's arguments. `of_sets`: True if the
    user gave sets of heads. Raises ValueError for options that are unknown or do not go together.
    """
    if control not in (None, "random"):
        raise ValueError(f"control must be None or 'random', not {shown(control)}")
    if draws is not None and control is None:
        raise ValueError(f"draws={shown(draws)} needs control='random': give that too")
    number = None if draws is None else counted(draws, 1, "draws is how many controls each effect has")
    if screen not in (None, "gradient"):
        raise ValueError(f"screen must be None or 'gradient', not {shown(screen)}")
    if screen is not None and not part.screened:
        raise ValueError(
            f"screen='gradient' cannot estimate the part {part.name!r}: it needs replace='zero' or 'counterfactual', "
            "or a part without blocks: leave screen= out"
        )
    if screen is not None and of_sets:
        raise ValueError("screen='gradient' estimates single heads, and heads= has sets: leave screen= out")
    if at is not None and part.at is not None:
        raise ValueError(
            f"at={shown(at)} was given, and the part has at={shown(part.at)} of its own: give only one of the two"
        )
    return number


def intact_attrs(table: pd.DataFrame, sequences: TaskSequences) -> dict[str, Any]:
    """Return a dict of attrs, `intact_value` and `intact_value_se`, from the table of any job of a sweep.

    They are the metric without ablation, mean over `sequences`, and its standard error.
    """
    intact = MetricValue(np.array(table.attrs["intact_per_sequence"]), distinct=sequences.distinct)
    return {"intact_value": intact.value, "intact_value_se": intact.se}


def _draws(view: AttentionView, layers: Iterable[int] | None, part: Part, draws: int | None) -> int:
    """Return the number of controls per head: random parts, or other heads of the layer at most.

    `view` is the model, `layers` are the layers with heads to ablate, `part` is the removed part. `draws` is the user's
    number, None for the default. `layers=None` means sets of heads: return the number of random sets per set. Raises
    ValueError for a layer with one head, if the control is other heads.
    """
    if layers is None:
        return draws or SETS
    if not part.beside_heads:
        return part.draws_of(draws or CONTROL_DRAWS)
    others = {layer: view.n_heads(layer) - 1 for layer in layers}
    for layer, n_others in others.items():
        if n_others == 0:
            raise ValueError(
                f"layer {layer}: the control of {part.name!r} is other heads, and this layer has one head: "
                "leave control= out"
            )
    most = max(others.values())
    if draws is not None and draws > most:
        warn_caller(
            f"draws={draws}, but the control of {part.name!r} is other heads of the layer, at most {most}: "
            f"control_p cannot be below 1 / {1 + most}; give draws={most} or less"
        )
    return min(draws or most, most)


def chosen_heads(view: AttentionView, heads: Heads | None, part: Part) -> dict[int, list[int]]:
    """Return the heads that a user named, as a dict from layer to heads; None stands for all heads.

    `view` is the model, `part` the removed part. For a part of rotary pairs, all heads are the heads of layers with
    rotary positions. Raises BadHead for heads that do not exist; UnsupportedArchitecture if a named layer has no rotary
    positions; ValueError for frequencies that do not exist, or an empty list of them.
    """
    chosen = heads_by_layer(view, heads)
    if not part.rotary:
        return chosen
    non_rotary = [layer for layer in chosen if view.rotary(layer) is None]
    if non_rotary and (heads is not None or len(non_rotary) == len(chosen)):
        raise UnsupportedArchitecture(
            f"layer {non_rotary[0]}: no rotary positions, so there is no {part.name} to remove: name heads of other "
            "layers, or remove another part"
        )
    # By default, layers without rotary positions (SmolLM3 has some) are left out.
    rotary = {layer: indices for layer, indices in chosen.items() if layer not in non_rotary}
    if set(bound_parts(part, view, rotary)) != set(rotary):
        raise ValueError("the part has frequencies=[], so nothing is removed: name some frequencies")
    return rotary


def _joined(
    tables: list[pd.DataFrame], estimated: pd.DataFrame | None, sequences: TaskSequences
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Join the tables of all jobs with the estimates of a screen; return the table and a dict of its `attrs`.

    `estimated` is the table of estimates, None without a screen; with it, heads that were not measured get rows with
    NaN effects. `sequences` are the prompts with the metric. The attrs are `intact_value, intact_value_se`, `screen`
    (None, or a dict with `kind, top, control, rank_correlation, pvalue`) and, without a screen, `sums_per_sequence`.
    The given tables are not changed.
    """
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
    # The screen also knows the size of the part for heads that were not measured.
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
