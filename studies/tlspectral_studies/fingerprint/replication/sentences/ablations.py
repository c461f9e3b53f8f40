"""FP sections 5 and 8: what removing M_A or the rope phase of one head shows."""

import math
from collections.abc import Iterator

import numpy as np

from tlspectral_studies.fingerprint.replication.causal_anatomy import LISTED, NAMED_CIRCUIT, UNLISTED
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.phase_ablation import LOSSES
from tlspectral_studies.fingerprint.replication.sentences.power import (
    correlation_power,
    correlations_power,
    detectable_correlation,
    holm,
    no_sample,
    significant,
)
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, ROUNDING, Choice, Reading, Sentence
from tlspectral_studies.fingerprint.statistics import spearman_table

_EFFECT = "induction loss"
_NAMED = ("D_head", "dir_frac", "rope_imag_frac")
_EVERY = (*_NAMED, "imag_mass", "henrici", "content_pos_frac", "freq_centroid", "hi_freq_dir", "spectral_radius")
_PRINTED_RHO, _PRINTED_LOSS = 0.1, 0.02
_TENTH = 0.1  # share of the largest effect from which another counts
_STRONG = 0.5  # prev above which a head is flagged
_ELIMINATED = 0.95  # share of the gain lost
_VOCABULARY = {"pythia-410m": 50304, "pythia-1.4b": 50304, "llama-3-8b": 128256}  # ln of it is the loss of a guess


def no_scalar_predicts(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 5: no spectral scalar predicts which heads need M_A."""
    heads = tables.heads["gpt2"]
    table = spearman_table(heads, [*LISTED, *UNLISTED], "dICL_sym").set_index("column")
    size, pvalues = table["statistic"].abs(), table["pvalue"]
    largest = float(size[list(LISTED)].max())
    found = significant(np.asarray(table["pvalue"]))
    others = ", ".join(
        f"{name} {table['statistic'][name]:+.2f} (p = {pvalues[name]:.2g})" for name in table.index[found]
    )
    yield Sentence(
        "sentence/scalars",
        "FP, section 5",
        "no spectral scalar (dir_frac, D_head, imag_mass, |M_A|) predicts which heads need M_A (all |rho| <~ 0.1)",
        f"GPT-2: rank correlations with the change of {_EFFECT} without M_A",
        len(heads),
        correlations_power(
            {"gpt2": len(heads)},
            more=f"; |rho| of {_PRINTED_RHO} with power {correlation_power(_PRINTED_RHO, len(heads)):.2f}",
        ),
        Reading("|rho| of the three in the table is at most 0.1; largest", largest, largest <= _PRINTED_RHO),
        Reading(
            "it is 0.1 to its printed digit; the largest",
            largest,
            round(largest, 1) <= _PRINTED_RHO,
            ROUNDING,
        ),
        f"of columns that the text does not list, significant (Holm over {len(table)}): {others or 'none'}; the "
        "norm of M_A needs the weights",
        choices=(
            Choice(
                "columns",
                "those that the text lists",
                Reading(
                    f"none of the {len(table)} columns is significant (Holm over {len(table)}); how many are",
                    float(found.sum()),
                    not found.any(),
                ),
            ),
        ),
    )


def inert_elsewhere(tables: PublishedTables) -> Iterator[Sentence]:
    """Item 3: M_A is critical for the circuit and inert elsewhere, on induction and on the corpus."""
    heads = tables.heads["gpt2"].set_index(["layer", "head"])
    effect = heads["dICL_sym"]
    circuit = [head for head in NAMED_CIRCUIT if head in effect.index]
    inside, outside = effect[circuit], effect.drop(circuit)
    above = outside.sort_values(ascending=False).head(int((outside > inside.min()).sum()))
    largest, corpus = float(outside.max()), float(heads["dCE_sym"].max())
    listed = ", ".join(f"{head[0]}.{head[1]} {value:+.3f}" for head, value in zip(above.index, above, strict=True))
    yield Sentence(
        "sentence/inert_elsewhere",
        "FP, section 1, item 3, and section 5",
        "M_A is causally critical only for the canonical induction/previous-token circuit and inert elsewhere",
        f"GPT-2: change of {_EFFECT} without M_A of each head, the four heads of the text against the others",
        len(heads),
        no_sample(len(heads), "heads", "; no error published: a small effect cannot be told from 0"),
        Reading(
            "no other head has an effect as large as the smallest of the four; heads that do",
            float(len(above)),
            above.empty,
        ),
        Reading(
            f"no other head reaches {_TENTH} of the largest effect; the largest other one, nats",
            largest,
            largest < _TENTH * float(inside.max()),
            "effects below a tenth of the largest",
        ),
        f"smallest of the four {inside.min():+.3f}; others above it: {listed or 'none'}",
        choices=tuple(
            Choice(
                "level",
                f"{_TENTH} of the largest effect",
                Reading(
                    f"no other head reaches {level} of the largest effect; the largest other one, nats",
                    largest,
                    largest < level * float(inside.max()),
                ),
            )
            for level in (_TENTH / 2, 2 * _TENTH)
        ),
    )
    yield Sentence(
        "sentence/corpus_cost",
        "FP, section 5",
        "killing M_A costs <= 0.02 general CE anywhere",
        "GPT-2: largest change of corpus loss without M_A",
        len(heads),
        no_sample(len(heads), "heads", "; no error published"),
        Reading("at most 0.02 nats; it", corpus, corpus <= _PRINTED_LOSS),
        Reading("at most 0.02 to its printed digits; it", corpus, round(corpus, 2) <= _PRINTED_LOSS, ROUNDING),
        f"above 0.02 by {corpus - _PRINTED_LOSS:+.4f}",
    )


def eliminates_induction(tables: PublishedTables) -> Iterator[Sentence]:
    """Abstract: zeroing the phase of one head eliminates induction in all three RoPE models."""
    shares, ratios, gains, losses = {}, {}, {}, {}
    for name, (intact, _) in LOSSES.items():
        losses[name] = float(tables.heads[name]["dInd_rope"].max())
        gains[name] = math.log(_VOCABULARY[name]) - intact
        shares[name] = losses[name] / gains[name]
        ratios[name] = 1 + losses[name] / intact
    listed = ", ".join(
        f"{name} loses {losses[name]:.2f} of {gains[name]:.1f} ({shares[name]:.0%}), its loss grows "
        f"{ratios[name]:.2f}-fold"
        for name in LOSSES
    )
    yield Sentence(
        "sentence/eliminates",
        "FP, abstract and section 8",
        "zeroing the per-frequency RoPE phase Im(M_t) eliminates induction on a pre-identified previous-token head "
        "in all three RoPE models",
        "largest change of induction loss without the phase of one head, over the in-context gain that there is "
        "to lose",
        len(LOSSES),
        no_sample(len(LOSSES), "models"),
        Reading(
            f"at least {_ELIMINATED:.0%} of the gain is lost on all three; smallest share",
            min(shares.values()),
            min(shares.values()) >= _ELIMINATED,
        ),
        None,
        f"nats: {listed}. The gain is ln of the vocabulary less the printed intact loss",
        choices=(
            Choice(
                "level",
                f"{_ELIMINATED:.0%} of the gain",
                Reading(
                    f"at least {_ELIMINATED / 2:.1%} of the gain is lost on all three; smallest share",
                    min(shares.values()),
                    min(shares.values()) >= _ELIMINATED / 2,
                ),
            ),
        ),
    )


def exactly_the_flagged_heads(tables: PublishedTables) -> Iterator[Sentence]:
    """Item 6: the ablation destroys induction on exactly the flagged heads."""
    wrong, top = {}, {}
    for name in LOSSES:
        heads = tables.heads[name]
        effect = heads["dInd_rope"]
        counts, flagged = effect > _TENTH * effect.max(), heads["prev"] > _STRONG
        wrong[name] = (int((counts & ~flagged).sum()), int((flagged & ~counts).sum()))
        top[name] = int((heads["prev"] >= heads.loc[effect.idxmax(), "prev"]).sum())
    total = float(sum(map(sum, wrong.values())))
    listed = ", ".join(f"{name} {more} and {less}" for name, (more, less) in wrong.items())
    least = min(tables.sizes(LOSSES).values())
    yield Sentence(
        "sentence/exactly_flagged",
        "FP, section 1, item 6",
        "ablating Im(M_t) [...] destroys induction on exactly the flagged heads",
        f"heads with an effect above {_TENTH} of the model's largest, against heads with prev > {_STRONG}",
        least,
        no_sample(least, "heads of the smallest model"),
        Reading("both are the same heads on all three models; heads in one alone", total, total == 0),
        None,
        f"with an effect but not flagged, and flagged without one: {listed}. The largest effect is on one of the two "
        f"heads with the largest prev on {sum(rank <= 2 for rank in top.values())} of {len(top)} models",
        choices=tuple(
            Choice(
                "level",
                f"{_TENTH} of the largest effect",
                Reading(
                    f"an effect above {level} of the largest on the same heads; heads in one alone",
                    float(_in_one_alone(tables, level)),
                    _in_one_alone(tables, level) == 0,
                ),
            )
            for level in (_TENTH / 2, 2 * _TENTH)
        ),
    )


def _in_one_alone(tables: PublishedTables, level: float) -> int:
    """Heads of all models with an effect above a share of the largest that are not flagged, or the other way round."""
    return sum(
        int(((heads["dInd_rope"] > level * heads["dInd_rope"].max()) != (heads["prev"] > _STRONG)).sum())
        for heads in (tables.heads[name] for name in LOSSES)
    )


def aggregate_is_null(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 8: correlations of the effect over all heads are null."""
    table = tables.correlations(LOSSES, _EVERY, "dInd_rope")
    named = table["column"].isin(_NAMED)
    found = significant(table["pvalue"].to_numpy())
    sizes = tables.sizes(LOSSES)
    listed = ", ".join(
        f"{row['column']} on {row['model']} {row['statistic']:+.2f} (p = {row['pvalue']:.2g})"
        for _, row in table.loc[found].iterrows()
    )
    alone = detectable_correlation(max(sizes.values()))
    own = [float(holm(table.loc[named & (table["model"] == name), "pvalue"].to_numpy()).min()) for name in LOSSES]
    yield Sentence(
        "sentence/aggregate_null",
        "FP, section 8",
        "head-level aggregate correlations are correspondingly null",
        f"rank correlations of {len(_EVERY)} spectral columns with the effect on three models, Holm over {len(table)}",
        min(sizes.values()),
        correlations_power(sizes, len(table), more=f"; alone {alone:.2f}"),
        Reading("none is significant; how many are", float(found.sum()), not found.any()),
        Reading(
            f"none of {', '.join(_NAMED)} is (Holm over 9); smallest p",
            float(np.nanmin(table.loc[named, "pvalue"])),
            not significant(table.loc[named, "pvalue"].to_numpy()).any(),
            f"the other {len(_EVERY) - len(_NAMED)} columns",
        ),
        f"significant: {listed or 'none'}",
        choices=(
            Choice(
                "family",
                "three models in one",
                Reading(
                    f"none of {', '.join(_NAMED)} is, each model a family of {len(_NAMED)}; smallest p after Holm",
                    min(own),
                    min(own) > LEVEL,
                ),
            ),
        ),
    )
