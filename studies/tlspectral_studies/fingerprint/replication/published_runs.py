"""A grid of the paper preset beside the published constrained runs of the same seeds, step by step (FP, section 10)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.selection.node_names import head_name
from tlspectral.tables.schema import Schema, columns, require
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS
from tlspectral_studies.fingerprint.constrained import PRESETS, formation, previous_token_heads
from tlspectral_studies.fingerprint.published import CONSTRAINED, ConstrainedTables, published_constrained
from tlspectral_studies.fingerprint.replication.constrained_training import VOCABULARY

MEASURES = ("ce_pred", "ce_unpred", "prev_best", "ind_best", "penalty")
SPECTRA = ("dir_frac_raw", "D_head_raw", "rope_imag_frac_raw")
SAME = 1e-5
"""Difference of ce_pred, in nats, up to which two trajectories count as one."""

_columns = partial(columns, shared=(*CONSTRAINED, *RUN_COLUMNS))
_COMPARED = _columns("layer, head, prev, dir_frac_raw, D_head_raw, rope_imag_frac_raw")
_SCHEMAS = {
    name: Schema(
        f"beside_published.{name}",
        described,
        f"`beside_published` of `tlspectral_studies.fingerprint.replication.published_runs`: `.{name}`; `tlspectral "
        f"study beside-published FOLDER -o FOLDER` writes {name}.parquet",
    )
    for name, described in {
        "steps": _columns("""
            arm, seed, step
            measure      | label          | Which column of the evaluations.
            here         | of the measure | Its value in the grid.
            published    | of the measure | Its value in the published run of the same arm and seed.
            difference   | of the measure | here less published.
            published_sd | of the measure | Standard deviation (ddof 1) over the published seeds at that step.
        """),
        "runs": _columns("""
            arm, seed
            last_step             | step | Last step that both runs have an evaluation of.
            same_until            | step | Last step until which ce_pred is within 1e-5 nats of the published. NaN:
                                  |      | none.
            largest_difference    | nat  | Largest absolute difference of ce_pred over the steps.
            largest_at            | step | Step of largest_difference.
            formed_loss           | step | formed_loss of the grid's run; NaN where it has not formed so far.
            formed_loss_published | step | The same of the published run.
            formed_both           | step | formed_both of the grid's run; NaN where it has not formed so far.
            formed_both_published | step | The same of the published run.
        """),
        "heads": (
            *_columns("arm, seed, step, name"),
            *(
                replace(column, name=f"{column.name}{whose}", meaning=f"{column.meaning}{of}")
                for column in _COMPARED
                for whose, of in (("", ""), ("_published", " Of the published run's previous-token head at that step."))
            ),
        ),
    }.items()
}

_RUN = ["arm", "seed"]
_CRITERIA = ("formed_loss", "formed_both")
_SHOWN_EVERY = 500  # steps


@dataclass(frozen=True)
class BesidePublished:
    """Trajectories, formation and previous-token heads of a grid, each number with the published one.

    Attributes:
        steps: a row per arm, seed, step and measure.
        runs: a row per arm and seed.
        heads: a row per arm and seed, of its previous-token head at the last step that is here.
    """

    steps: pd.DataFrame
    runs: pd.DataFrame
    heads: pd.DataFrame


def beside_published(tables: Mapping[str, pd.DataFrame]) -> BesidePublished:
    """Compare a grid of the paper preset, finished or not, with the published runs of the same arms and seeds.

    Args:
        tables: `evaluations` and `heads` of `constrained_grid` with the preset `"paper"`.

    Returns:
        `BesidePublished`. A formation that is published and later than the last step here is NaN here.

    Raises:
        ValueError: a missing column, a grid of another preset, or none of the published arms and seeds.

    What it does not establish: that runs which part were trained differently. Sums are rounded in another order by
    another version or processor, and training amplifies that; compare `difference` with `published_sd`.
    """
    require(tables["evaluations"], (*_RUN, "step", *MEASURES), "a constrained grid", name="table of evaluations")
    require(tables["heads"], (*_RUN, "step", "layer", "head", "prev", *SPECTRA), "a constrained grid")
    _require_paper_preset(tables["evaluations"].attrs)
    published = published_constrained()
    steps = _steps(tables["evaluations"], published)
    if steps.empty:
        raise ValueError("the grid has none of the published arms and seeds (0 to 4)")
    return BesidePublished(
        _SCHEMAS["steps"].frame(steps),
        _SCHEMAS["runs"].frame(_runs(tables["evaluations"], published, steps)),
        _SCHEMAS["heads"].frame(_heads(tables["heads"], published)),
    )


def _require_paper_preset(attrs: Mapping[Any, Any]) -> None:
    """Refuse a grid of other sizes or another schedule, whose steps are not those of the published runs."""
    paper, given = PRESETS["paper"].settings(), attrs.get("preset") or {}
    differing = sorted(name for name in ("config", "task", "training") if given.get(name) != paper[name])
    if differing:
        raise ValueError(
            f"the preset {given.get('name', 'that is not recorded')} has another {', '.join(differing)} than the "
            "published runs: give a grid of the preset 'paper'"
        )


def _steps(evaluations: pd.DataFrame, published: ConstrainedTables) -> pd.DataFrame:
    keys = [*_RUN, "step"]
    long_here, long_published = (
        table.melt(id_vars=keys, value_vars=list(MEASURES), var_name="measure", value_name=name)
        for table, name in ((evaluations, "here"), (published.evaluations, "published"))
    )
    spread = long_published.groupby(["arm", "step", "measure"], as_index=False)["published"].std(ddof=1)
    joined = long_here.merge(long_published, on=[*keys, "measure"]).merge(
        spread.rename(columns={"published": "published_sd"}), on=["arm", "step", "measure"]
    )
    joined = joined.dropna(subset=["here", "published"])  # a free arm has no penalty
    joined["difference"] = joined["here"] - joined["published"]
    runs = {run: index for index, run in enumerate(evaluations[_RUN].drop_duplicates().itertuples(index=False))}
    order = [runs[run] for run in joined[_RUN].itertuples(index=False)]
    ordered = joined.assign(order=order).sort_values(["order", "step"], kind="stable", ignore_index=True)
    return ordered.drop(columns="order")


def _runs(evaluations: pd.DataFrame, published: ConstrainedTables, steps: pd.DataFrame) -> pd.DataFrame:
    theirs = formation(published.evaluations, vocabulary=VOCABULARY).set_index(_RUN)
    ours = formation(evaluations, vocabulary=VOCABULARY).set_index(_RUN)
    rows = []
    for key, run in steps.loc[steps["measure"] == "ce_pred"].groupby(_RUN, sort=False):
        apart = run["difference"].abs().to_numpy()
        same = np.logical_and.accumulate(apart <= SAME)
        row: dict[str, Any] = dict(zip(_RUN, key, strict=True))
        row["last_step"] = int(run["step"].max())
        row["same_until"] = float(run["step"].to_numpy()[same].max()) if same.any() else np.nan
        row["largest_difference"] = float(apart.max())
        row["largest_at"] = int(run["step"].to_numpy()[apart.argmax()])
        for criterion in _CRITERIA:
            row[criterion] = float(ours.loc[key, criterion])
            row[f"{criterion}_published"] = float(theirs.loc[key, criterion])
        rows.append(row)
    return pd.DataFrame(rows)


def _heads(heads: pd.DataFrame, published: ConstrainedTables) -> pd.DataFrame:
    """Previous-token heads at the last step of each run, and the published ones at the same step."""
    keys = [*_RUN, "step"]
    wanted = [*keys, *(column.name for column in _COMPARED)]
    ours = previous_token_heads(heads).loc[:, wanted]
    same_steps = published.heads.merge(ours.loc[:, keys], on=keys)
    theirs = previous_token_heads(same_steps).loc[:, wanted]
    return ours.merge(theirs, on=keys, suffixes=("", "_published"))


def beside_markdown(found: BesidePublished) -> str:
    """Write the comparison as Markdown: runs, previous-token heads, and losses every 500 steps.

    Args:
        found: of `beside_published`.

    Returns:
        Three Markdown tables.
    """
    runs = [
        (
            f"`{row['arm']}`",
            str(row["seed"]),
            str(row["last_step"]),
            _step(row["same_until"]),
            f"{row['largest_difference']:.2g} at {row['largest_at']}",
            *(f"{_step(row[name])} ({_step(row[f'{name}_published'])})" for name in _CRITERIA),
        )
        for row in found.runs.to_dict(orient="records")
    ]
    heads = [
        (
            f"`{row['arm']}`",
            str(row["seed"]),
            str(row["step"]),
            f"{head_name(row['layer'], row['head'])} ({head_name(row['layer_published'], row['head_published'])})",
            *(_pair(row[name], row[f"{name}_published"]) for name in ("prev", *SPECTRA)),
        )
        for row in found.heads.to_dict(orient="records")
    ]
    shown = found.steps.loc[(found.steps["measure"] == "ce_pred") & (found.steps["step"] % _SHOWN_EVERY == 0)]
    losses = [
        (
            f"`{row['arm']}`",
            str(row["seed"]),
            str(row["step"]),
            _pair(row["here"], row["published"]),
            f"{row['difference']:+.1e}",
            f"{row['published_sd']:.1e}",
        )
        for row in shown.to_dict(orient="records")
    ]
    lines = markdown_table(
        (
            "arm", "seed", "steps", "`ce_pred` within 1e-5 until", "largest difference, nats",
            "formed by the loss (published)", "by both (published)",
        ),
        runs,
    )  # fmt: skip
    spectra = [f"`{name}`" for name in ("prev", *SPECTRA)]
    lines += markdown_table(("arm", "seed", "step", "previous-token head (published)", *spectra), heads)
    columns = ("arm", "seed", "step", "`ce_pred` (published)", "difference", "sd over published seeds")
    return "\n".join([*lines, *markdown_table(columns, losses)])


def _pair(here: float, published: float) -> str:
    return "none" if np.isnan(here) else f"{here:.4f} ({published:.4f})"


def _step(step: float) -> str:
    return "none" if np.isnan(step) else f"{step:.0f}"
