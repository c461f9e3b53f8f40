"""Every published number beside ours, in one table."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from tlspectral.studies.fingerprint.columns import REPLICATE
from tlspectral.studies.fingerprint.replication import (
    causal_anatomy,
    constrained_training,
    exact_heads,
    head_function,
    matched_null,
    phase_ablation,
    phase_attenuation,
    positional_schemes,
    strong_heads,
    training_history,
)
from tlspectral.studies.fingerprint.replication.claims import MONTE_CARLO_TOLERANCE, VERDICTS, Claim, PublishedTables
from tlspectral.tables import named
from tlspectral.tables.published import LICENCE, SOURCE

RECOMPUTED: tuple[Callable[[PublishedTables], list[Claim]], ...] = (
    matched_null.numbers_of_heads,
    matched_null.null_levels,
    matched_null.heads_off_the_null,
    matched_null.null_referenced_partial,
    matched_null.self_checks,
    head_function.metrics_against_behaviour,
    head_function.metrics_against_copying,
    head_function.content_signature,
    head_function.composition_ranks,
    causal_anatomy.corpus_effects,
    causal_anatomy.induction_effects,
    causal_anatomy.circuit_overlap,
    causal_anatomy.effects_from_spectra,
    causal_anatomy.incremental_validity,
    positional_schemes.correlations,
    positional_schemes.partials,
    positional_schemes.intervals,
    positional_schemes.top_five,
    positional_schemes.quartile_and_quintile,
    positional_schemes.model_level_test,
    positional_schemes.head_level_test,
    strong_heads.head_4_11,
    strong_heads.content_of_top_five,
    strong_heads.rotational_profile,
    strong_heads.other_metrics,
    strong_heads.classes,
    strong_heads.bulk_and_candidates,
    strong_heads.heads_as_units,
    strong_heads.z_scores,
    phase_attenuation.attenuations,
    phase_attenuation.llama_residual,
    phase_attenuation.range_at_a_quarter,
    phase_attenuation.single_controls,
    phase_attenuation.phase_against_behaviour,
    phase_attenuation.placebos,
    phase_ablation.largest_effects,
    phase_ablation.flagged_heads,
    phase_ablation.concentration,
    phase_ablation.other_strong_heads,
    phase_ablation.weak_heads,
    phase_ablation.aggregate_correlations,
    phase_ablation.kernels,
    phase_ablation.losses,
    training_history.grid,
    training_history.first_act,
    training_history.formation,
    training_history.phase_percentiles,
    training_history.lead_or_lag,
    training_history.sculpting,
    training_history.prediction,
    constrained_training.formation_steps,
    constrained_training.delays,
    constrained_training.penalties,
    constrained_training.dissociation,
    constrained_training.kernels,
    exact_heads.existence,
    exact_heads.printed_constructions,
    exact_heads.exclusion,
    exact_heads.angle_limit,
    exact_heads.peak_weights,
)
"""The functions, in the order of the paper; each takes the tables and returns its claims."""

COLUMNS = ("id", "where", "what", "published", "ours", "difference", "verdict", "why", "function", "seed")


def markdown(table: pd.DataFrame) -> str:
    """Write the table of `replicate` as Markdown: verdicts by section, what differs, what needs weights.

    Args:
        table: of `replicate`.

    Returns:
        Three Markdown tables under headings.
    """
    section = table["where"].str.split(" and ").str[0]
    counts = pd.crosstab(section, table["verdict"]).reindex(
        index=pd.unique(section), columns=list(VERDICTS), fill_value=0
    )
    lines = ["### Verdicts", "", *_header("where", *VERDICTS)]
    lines += [
        _row(where, *map(str, of_verdict)) for where, of_verdict in zip(counts.index, counts.to_numpy(), strict=True)
    ]
    differs, unchecked = (table.loc[table["verdict"] == verdict] for verdict in VERDICTS[1:])
    lines += ["", "### What differs", "", *_header("where", "what", "printed", "here", "why")]
    for where, what, published, ours, why in zip(
        *(differs[name] for name in ("where", "what", "published", "ours", "why")), strict=True
    ):
        lines.append(_row(where, what, published, f"{ours:.4g}", why))
    lines += ["", "### What needs weights", "", *_header("where", "what", "printed", "measured by")]
    for row in zip(*(unchecked[name] for name in ("where", "what", "published", "function")), strict=True):
        lines.append(_row(*row[:3], f"`{row[3]}`"))
    return "\n".join([*lines, ""])


def _header(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("~", "\\~") for cell in cells) + " |"


def replicate(tables: PublishedTables | None = None) -> pd.DataFrame:
    """Recompute the published numbers of "Fingerprint, Not Blueprint" (FP) and the exact heads of PS.

    Args:
        tables: other tables in place of the published ones, to see what a number depends on.

    Returns:
        DataFrame, a number a row: `id`; `where` (paper, section or table) and `what`; `published`, as printed or as a
        sentence has it; `ours` and `difference` (ours less published, NaN for bounds); `verdict`, one of `VERDICTS`
        (the rule is `Claim.verdict`'s); `why`, always there where a number differs; `function`, which recomputes it, or
        measures it on a model; `seed` of a Monte-Carlo number.

    What it does not establish: that the tables are what the models are. It goes from published tables to published
    numbers; a number from weights (`analyze_heads`) is a further step, and so is whether a claim follows from it.
    """
    tables = PublishedTables() if tables is None else tables
    claims = [
        replace(claim, function=claim.function or f"{recompute.__module__}.{recompute.__qualname__}")
        for recompute in RECOMPUTED
        for claim in recompute(tables)
    ]
    table = pd.DataFrame([{name: getattr(claim, name) for name in COLUMNS} for claim in claims], columns=list(COLUMNS))
    table = table.astype({"ours": "float64", "difference": "float64", "seed": "Int64"})
    table.attrs = {
        "source": SOURCE,
        "licence": LICENCE,
        "monte_carlo_tolerance": MONTE_CARLO_TOLERANCE,
        "verdicts": {verdict: int((table["verdict"] == verdict).sum()) for verdict in VERDICTS},
    }
    return named(table, REPLICATE)
