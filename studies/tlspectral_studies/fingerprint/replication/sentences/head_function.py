"""FP sections 1 and 4: whether spectra tell what heads do, on every model."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from tlspectral.stats import partial_spearman
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.sentences.power import correlations_power, significant
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, Choice, Reading, Sentence
from tlspectral_studies.fingerprint.statistics import spearman_table

_BEHAVIOURS = ("prev", "dup", "ind")
# Signs of GPT-2 in Table 1: directional previous-token heads, symmetric duplicate-token and induction heads.
_SIGNS = {"dir_frac": (1, -1, -1), "D_head": (1, -1, -1), "content_pos_frac": (-1, 1, 1)}
_REPLICATES = ("pythia-410m", "pythia-1.4b", "llama-3-8b")
_INDUCTION = 0.5  # ind above which a head counts as an induction head
_COPYING = ("dir_frac", "content_pos_frac", "imag_mass")
_EVERY_METRIC = (*_COPYING, "D_head", "henrici", "spectral_radius", "cond_eig")
_STRONG = 0.9  # a correlation that two columns have which say the same


def separates_on_every_model(tables: PublishedTables) -> Iterator[Sentence]:
    """Item 2: directionality separates head function across all seven models; Table 1 is of GPT-2."""
    by_dir, by_d = (_signed(tables, column, tuple(tables.heads)) for column in ("dir_frac", "D_head"))
    found = by_dir["right"] & significant(by_dir["pvalue"].to_numpy())
    models = [
        name
        for name in tables.heads
        if any(table.loc[table["model"] == name, "right"].all() for table in (by_dir, by_d))
    ]
    within = [_within(tables, column, tuple(tables.heads)) for column in ("dir_frac", "D_head")]
    inside = [
        name for name in tables.heads if any(table.loc[table["model"] == name, "right"].all() for table in within)
    ]
    yield Sentence(
        "sentence/separates",
        "FP, section 1, item 2, and section 4",
        "spectral directionality separates head function across all seven models",
        "rank correlations of dir_frac with prev, dup and ind on seven models, Holm over 21",
        min(tables.sizes().values()),
        correlations_power(tables.sizes(), len(by_dir)),
        Reading.every(
            f"all {len(by_dir)} correlations of dir_frac have GPT-2's sign and are significant; their number", found
        ),
        Reading(
            "on every model dir_frac or D_head has GPT-2's three signs; models",
            float(len(models)),
            len(models) == len(tables.heads),
            "dir_frac alone, and significance",
        ),
        f"not so: {_listed(by_dir.loc[~found])}",
        choices=(
            Choice(
                "layers",
                "heads as independent",
                Reading(
                    "within layers dir_frac or D_head has GPT-2's three signs on every model; models",
                    float(len(inside)),
                    len(inside) == len(tables.heads),
                ),
            ),
        ),
    )


def content_on_every_model(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 4: an architecture-general signature, and that it replicates on Pythia and Llama."""
    every, few = (_signed(tables, "content_pos_frac", names) for names in (tuple(tables.heads), _REPLICATES))
    found, again = (table["right"] & significant(table["pvalue"].to_numpy()) for table in (every, few))
    on_gpt2 = _signed(tables, "content_pos_frac", ("gpt2",))["statistic"].abs().to_numpy()
    on_llama = _signed(tables, "content_pos_frac", ("llama-3-8b",))["statistic"].abs().to_numpy()
    weaker = bool((on_llama < on_gpt2).all())
    inside = _within(tables, "content_pos_frac", _REPLICATES)
    legible = [_rank(tables.heads[name], "self_match", "content_pos_frac") for name in _REPLICATES]
    sizes = tables.sizes()
    yield Sentence(
        "sentence/architecture_general",
        "FP, section 4",
        "establishing spectral directionality as an architecture-general head-function signature",
        "rank correlations of content_pos_frac with prev, dup and ind on seven models, Holm over 21",
        min(sizes.values()),
        correlations_power(sizes, len(every)),
        Reading.every(f"all {len(every)} have GPT-2's sign and are significant; their number", found),
        Reading.every(f"all {len(every)} have GPT-2's sign; their number", every["right"], "significance"),
        f"not so: {_listed(every.loc[~found]) or 'none'}",
        choices=(
            Choice(
                "layers",
                "heads as independent",
                Reading.every(
                    f"all {len(every)} have GPT-2's sign within layers; their number",
                    _within(tables, "content_pos_frac", tuple(tables.heads))["right"],
                ),
            ),
        ),
    )
    yield Sentence(
        "sentence/replicates",
        "FP, section 4",
        "This replicates on Pythia and, attenuated, on Llama",
        "rank correlations of content_pos_frac with prev, dup and ind on three models, Holm over 9, and of "
        "self_match with content_pos_frac",
        min(tables.sizes(_REPLICATES).values()),
        correlations_power(tables.sizes(_REPLICATES), len(few)),
        Reading(
            f"all nine have GPT-2's sign and are significant, Llama's are weaker than GPT-2's, and self_match goes "
            f"with content_pos_frac above {_STRONG}; the smallest of the latter",
            min(legible),
            bool(again.all()) and weaker and min(legible) > _STRONG,
        ),
        None,
        f"content_pos_frac: {_listed(few)}; with self_match "
        + ", ".join(f"{name} {value:+.2f}" for name, value in zip(_REPLICATES, legible, strict=True)),
        choices=(
            Choice(
                "layers",
                "heads as independent",
                Reading.every(
                    "all nine have GPT-2's sign within layers and are significant; their number",
                    inside["right"] & significant(inside["pvalue"].to_numpy()),
                ),
            ),
        ),
    )


def induction_reads_as_content(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 4's own surprise, head by head."""
    heads = tables.heads["gpt2"]
    induction = heads["ind"] > _INDUCTION
    place = heads["content_pos_frac"].rank(pct=True)[induction]
    lower = heads["content_pos_frac"].rank(pct=True)[heads["ind"] > _INDUCTION / 2]
    inside = partial_spearman(heads["content_pos_frac"], heads["ind"], heads[[]], layers=heads["layer"], method="rank")
    tested = spearman_table(heads, "content_pos_frac", "ind")
    rho, pvalue = float(tested["statistic"].iloc[0]), float(tested["pvalue"].iloc[0])
    yield Sentence(
        "sentence/induction_content",
        "FP, section 4",
        "induction heads read as content-like",
        f"GPT-2: percentile of content_pos_frac of heads with ind > {_INDUCTION}; its rank correlation with ind",
        len(heads),
        correlations_power({"gpt2": len(heads)}, 1),
        Reading(
            "every induction head is above the median and the correlation is positive and significant; the lowest "
            "percentile",
            float(place.min()),
            bool(induction.any() and (place > 0.5).all() and rho > 0 and pvalue <= LEVEL),
        ),
        None,
        f"rho {rho:+.2f}; {int(induction.sum())} induction heads, {int((place > 0.5).sum())} of them above the median",
        choices=(
            Choice(
                "level",
                f"ind > {_INDUCTION}",
                Reading.every(f"heads with ind > {_INDUCTION / 2} are above the median; their number", lower > 0.5),
            ),
            Choice(
                "layers",
                "heads as independent",
                Reading(
                    "the correlation within layers is positive and significant; it",
                    inside.statistic,
                    inside.statistic > 0 and inside.pvalue <= LEVEL,
                ),
            ),
        ),
    )


def copying_is_orthogonal(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 4's control: OV copying goes with no query-key metric."""
    table = spearman_table(tables.heads["gpt2"], list(_EVERY_METRIC), "copying").set_index("column")
    heads = tables.heads["gpt2"]
    inside = [
        partial_spearman(heads[name], heads["copying"], heads[[]], layers=heads["layer"], method="rank")
        for name in _COPYING
    ]
    listed = significant(table.loc[list(_COPYING), "pvalue"].to_numpy())
    of_all = significant(table["pvalue"].to_numpy())
    size = table["statistic"].abs()
    found = ", ".join(f"{name} {table['statistic'][name]:+.2f}" for name in table.index[of_all])
    yield Sentence(
        "sentence/copying",
        "FP, section 4",
        "Copying (OV) is orthogonal to every QK metric",
        f"GPT-2: rank correlations of {len(table)} spectral columns with copying, Holm over {len(table)}",
        len(tables.heads["gpt2"]),
        correlations_power({"gpt2": len(tables.heads["gpt2"])}, len(table)),
        Reading("none is significant; largest |rho|", float(size.max()), not of_all.any()),
        Reading(
            "none of Table 1's three is (Holm over 3); their largest |rho|",
            float(size[list(_COPYING)].max()),
            not listed.any(),
            "every metric but the three of Table 1",
        ),
        f"significant: {found or 'none'}; absence of significance is no proof of orthogonality",
        choices=(
            Choice(
                "layers",
                "heads as independent",
                Reading(
                    "none of Table 1's three is significant within layers (Holm over 3); their largest |rho|",
                    max(abs(partial.statistic) for partial in inside),
                    not significant(np.array([partial.pvalue for partial in inside])).any(),
                ),
            ),
        ),
    )


def _signed(tables: PublishedTables, column: str, names: tuple[str, ...]) -> pd.DataFrame:
    """Rank correlations of a column with three behaviours: `model, against, statistic, pvalue, right` (as in GPT-2)."""
    table = tables.correlations(names, column, _BEHAVIOURS)
    signs = table["against"].map(dict(zip(_BEHAVIOURS, _SIGNS[column], strict=True)))
    return table.assign(right=np.sign(table["statistic"]) == signs)


def _within(tables: PublishedTables, column: str, names: tuple[str, ...]) -> pd.DataFrame:
    """`_signed` with layers held fixed: `model, against, pvalue, right`."""
    rows = []
    for name in names:
        heads = tables.heads[name]
        for against, sign in zip(_BEHAVIOURS, _SIGNS[column], strict=True):
            found = partial_spearman(heads[column], heads[against], heads[[]], layers=heads["layer"], method="rank")
            rows.append((name, against, found.pvalue, bool(np.sign(found.statistic) == sign)))
    return pd.DataFrame(rows, columns=["model", "against", "pvalue", "right"])


def _listed(table: pd.DataFrame) -> str:
    rows = zip(table["model"], table["against"], table["statistic"], table["pvalue"], strict=True)
    return ", ".join(f"{model} {against} {value:+.3f} (p = {p:.1g})" for model, against, value, p in rows)


def _rank(heads: pd.DataFrame, column: str, other: str) -> float:
    return float(spearman_table(heads, column, other)["statistic"].iloc[0])
