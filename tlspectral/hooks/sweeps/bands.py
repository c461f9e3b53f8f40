"""`band_effects`: effects of removing a head's high, middle or low rotary frequencies, compared with random sets."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd

from tlspectral.errors.settings import checked_settings, counted
from tlspectral.hooks.parts import Band
from tlspectral.hooks.parts.query_key import BANDS
from tlspectral.hooks.positions import listed_positions
from tlspectral.hooks.sweeps.sweep import ADVICE, SEQUENCES, chosen_heads, intact_attrs, placed_parts
from tlspectral.hooks.sweeps.sweep_jobs import sweep_jobs
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.running.batches import TOKENS_OF_JOB
from tlspectral.models.running.long_prompts import refuse_long
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import Task
from tlspectral.tasks.identity import sequences_identity
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import intact_values, metric_value_of, task_sequences

BAND_EFFECTS = Schema(
    "band_effects",
    (
        *HEAD,
        *columns("""
            band              | label         | Removed third of the frequencies: high (the fastest), middle or low.
            position?         | label         | Position at which the band was removed, as given in at=. With at=.
            first             | index         | The band's first frequency, the head's pairs sorted from fast to slow.
            last              | index         | The band's last frequency in that order.
            delta             | of the metric | Value without the band's part of the scores minus the intact value.
            delta_se          | of the metric | Standard error of delta over sequences, paired with the intact run.
            score_rms         | logit         | RMS of the band's contribution to the scaled scores over unmasked pairs.
            control_delta     | of the metric | As delta, mean over random sets of frequencies. Without a set, this and
                              |               | later columns are NaN, and control_draws is empty.
            control_delta_se  | of the metric | Standard error of control_delta over sets and sequences; NaN for 1 set.
            control_delta_min | of the metric | Smallest effect of a random set, mean over sequences.
            control_delta_max | of the metric | Largest effect of a random set, mean over sequences.
            control_excess    | of the metric | |delta| minus the mean over random sets of |their effect|.
            control_p         | probability   | (1 + sets with an effect as large as delta) / (1 + sets), in absolute
                              |               | values.
            control_p_floor   | probability   | Smallest possible control_p, 1 / (1 + sets).
            control_draws     | numbers       | Effects of the random sets that were found, each mean over sequences.
            excess_z          | SD of draws   | delta minus control_delta, divided by the standard deviation of
                              |               | control_draws; NaN with draws below 19, and where these are equal.
            control_rms       | logit         | As score_rms, mean over random sets.
            control_overlap   | share         | RMS of the band's own frequencies in a set, divided by the RMS of the
                              |               | band; mean over sets.
        """),
    ),
    "`tls.hooks.band_effects`",
)


@checked_settings
def band_effects(
    model: Any,
    heads: Heads,
    *,
    task: Task | Literal["induction", "language"] = "induction",
    at: Any = None,
    draws: int = 5,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Remove each third of a head's rotary frequencies in turn, and compare with random sets of equal size.

    Use it to see which frequencies a head needs. Example: an induction head needs the slower two thirds.

    >>> import tlspectral as tls
    >>> bands = tls.hooks.band_effects(tls.load_model("tiny-rope"), "L1H0", draws=0)
    >>> bands["band"][bands["delta"] > 0.5].tolist()
    ['middle', 'low']

    The numbers equal `ablation_sweep(control="random")` for `Band("high")`, `Band("middle")` and `Band("low")`.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a list of these, or a DataFrame with `layer`
            and `head`.
        task: a `Task`, "induction" (16 repeated sequences, default) or "language" (16 rows of text).
        at: positions of the task (names or numbers). Bands are removed at one position at a time, with a row for each.
            Default: everywhere.
        draws: random sets of frequencies per band. Default: 5. 19 allow a `control_p` of .05; for some bands fewer sets
            are found, see `control_p_floor`.
        folder: keeps finished layers; the same call resumes from it. n_jobs: number of workers.
        seed: of the sets and of the task's sequences.

    Returns:
        DataFrame, a row per head and band. Columns (`?`: not in every table): `layer, head, name, band, position?,
        first, last, delta, delta_se, score_rms, control_delta, control_delta_se, control_delta_min, control_delta_max,
        control_excess, control_p, control_p_floor, control_draws, excess_z, control_rms, control_overlap`. `delta` is
        the metric without the band minus the intact value; `control_p` is the share of random sets (the band included)
        with an effect as large.

    Raises:
        BadHead: a head does not exist.
        UnsupportedArchitecture: a layer has no rotary positions.
        IncompatibleCheckpoint: the folder holds bands of another model, task or settings.
        ValueError: a head has fewer than three frequencies, `draws` is not a number, or the task does not fit.

    Not established: that the head was trained to use the band. Effects of the three bands do not add up to the effect
    of the head, because frequencies act together in a softmax. Where `control_overlap` is near 1 (a head with one
    dominant frequency), a random set is almost the band itself and is not a control.
    """
    with measured(model) as view:
        bands = [Band(band) for band in BANDS]
        pairs = [(layer, head) for layer, some in heads_by_layer(view, heads).items() for head in some]
        by_layer = chosen_heads(view, pairs, bands[0])
        chosen_task = task_of(task, seed=seed, n_sequences=SEQUENCES)
        sequences = task_sequences(view, chosen_task)
        refuse_long(sequences.tokens.shape[1], "a sweep over bands needs", ADVICE)
        draws = counted(draws, 0, "draws is how many random sets each band has")
        asked, placed = placed_parts(view, sequences, bands, listed_positions(at))
        positions = {} if at is None else {"positions": {str(name): places.tolist() for name, places in asked}}
        measurement = Measurement(
            BAND_EFFECTS,
            {"task": sequences.name, "draws": draws, "seed": seed, **positions},
            origin=view.origin(),
            identity={
                "weights": view.weights_digest,
                **sequences_identity(sequences, chosen_task),
                "heads": pairs,
                "tokens_of_job": TOKENS_OF_JOB,
            },
            folder=folder,
            score=lambda: metric_value_of(view, sequences).per_sequence,
            n_jobs=n_jobs,
        )
        how = {"kept": folder is not None, "numbered": True}
        jobs = sweep_jobs("bands", view, sequences, placed, [by_layer] * len(placed), draws, seed, **how)
        tables = measurement.made(
            [job for _, job in jobs],
            description="bands",
            unit="head",
            prepare=partial(intact_values, view, sequences, sorted(by_layer)),
        )
        n_pairs = {layer: geometry.n_pairs for layer in by_layer if (geometry := view.rotary(layer)) is not None}
        rows = []
        for place, job in jobs:
            band, index = divmod(place, max(1, len(asked)))
            table = _with_control(tables[job.name])
            thirds = [np.array_split(np.arange(n_pairs[layer]), len(BANDS))[band] for layer in table["layer"]]
            table = table.assign(
                band=BANDS[band], first=[third[0] for third in thirds], last=[third[-1] for third in thirds]
            )
            rows.append(table if at is None else table.assign(position=str(asked[index][0])))
        frame = stacked(rows).sort_values(["layer", "head"], kind="stable", ignore_index=True)
        known = [column.name.rstrip("?") for column in BAND_EFFECTS.columns]
        return measurement.table(
            frame.loc[:, frame.columns.isin(known)],
            n_sequences=len(sequences.tokens),
            batch=sequences.rows_at_once(view),
            higher_is_better=sequences.higher_is_better,
            intact_value=intact_attrs(next(iter(tables.values())), sequences)["intact_value"],
            **sequences.noted,
        )


_OF_CONTROL = ("control_delta", "control_delta_se", "control_excess", "control_p", "control_p_floor", "excess_z",
    "control_rms", "control_overlap")  # fmt: skip
"""Columns of a sweep's control that are NaN in rows without a control."""


def _with_control(table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of the table of a sweep with all columns of the control (random sets of rotary pairs).

    Added are `control_delta_min` and `control_delta_max`, the smallest and largest effect of a head's sets. Numbers are
    NaN, and lists empty, where no set was found.
    """
    effects = [list(drawn) for drawn in table["control_draws"]] if "control_draws" in table else [[]] * len(table)
    return table.assign(
        **{name: table.get(name, np.nan) for name in _OF_CONTROL},
        control_delta_min=[min(drawn, default=np.nan) for drawn in effects],
        control_delta_max=[max(drawn, default=np.nan) for drawn in effects],
        control_draws=effects,
    )
