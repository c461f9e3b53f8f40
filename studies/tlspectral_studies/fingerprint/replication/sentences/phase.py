"""FP sections 7 and 11: where the phase of previous-token heads sits, and whether weights alone find these heads."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pandas as pd

from tlspectral.stats import partial_spearman
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.positional_schemes import ROTARY, places_of_top
from tlspectral_studies.fingerprint.replication.sentences.power import correlations_power, no_sample, significant
from tlspectral_studies.fingerprint.replication.sentences.sentence import Choice, Reading, Sentence
from tlspectral_studies.fingerprint.statistics import mann_whitney

_WHERE = "FP, section 7"
_NOTHING, _ALMOST_ENTIRELY = 0.05, 0.9  # attenuation
_STRONG = 0.5  # prev of a positional-routing head


def at_high_frequencies(tables: PublishedTables) -> Iterator[Sentence]:
    """The phase of previous-token heads is concentrated at high frequencies; printed for Llama alone."""
    table = tables.correlations(ROTARY, "hi_freq_dir", "prev")
    places = np.concatenate([places_of_top(tables.heads[name], "hi_freq_dir") for name in ROTARY])
    shares = np.concatenate([tables.heads[name].nlargest(5, "prev")["hi_freq_dir"].to_numpy() for name in ROTARY])
    sizes = tables.sizes(ROTARY)
    listed = ", ".join(f"{name} {value:+.2f}" for name, value in zip(ROTARY, table["statistic"], strict=True))
    yield Sentence(
        "sentence/high_frequencies",
        _WHERE,
        "previous-token heads have high rotary directional fraction concentrated at high frequencies",
        "hi_freq_dir against prev on three models, and its percentile within the model of the top 5 by prev",
        min(sizes.values()),
        correlations_power(sizes, len(table)),
        Reading.every(f"all {len(places)} heads are above their model's median; their number", places > 0.5),
        None,
        f"rank correlations {listed}; the text prints Llama's",
        choices=(
            Choice(
                "criterion",
                "more than the model's other heads",
                Reading.every(
                    f"more than half of the phase of all {len(places)} heads is in the faster half of the pairs; heads",
                    shares > 0.5,
                ),
            ),
        ),
    )


def covariate_changes(tables: PublishedTables) -> Iterator[Sentence]:
    """Attenuation runs through the amount of phase on Pythia and through its frequency on Llama."""
    shares = {name: {control: _share(tables.heads[name], control) for control in _CONTROLS} for name in ROTARY}
    pythia, llama = [shares[name] for name in ROTARY[:2]], shares[ROTARY[2]]
    most = max(of_model["freq_centroid"] for of_model in pythia)
    strict = most < _NOTHING and llama["freq_centroid"] > _ALMOST_ENTIRELY
    order = sum(of_model["rope_imag_frac"] > of_model["freq_centroid"] for of_model in pythia)
    order += llama["freq_centroid"] > llama["rope_imag_frac"]
    ranked = [{c: _share(tables.heads[name], c, "rank") for c in _CONTROLS} for name in ROTARY]
    on_ranks = sum(of_model["rope_imag_frac"] > of_model["freq_centroid"] for of_model in ranked[:2])
    on_ranks += ranked[2]["freq_centroid"] > ranked[2]["rope_imag_frac"]
    listed = "; ".join(
        f"{name} {of_model['rope_imag_frac']:.0%} by rope_imag_frac, {of_model['freq_centroid']:.0%} by freq_centroid"
        for name, of_model in shares.items()
    )
    yield Sentence(
        "sentence/covariate",
        _WHERE,
        "on partial-RoPE Pythia the attenuation runs through rope_imag_frac (freq_centroid alone attenuates "
        "nothing), whereas on full-RoPE Llama it runs almost entirely through freq_centroid",
        "attenuation of the partial correlation of D_head with prev by either control alone",
        len(ROTARY),
        no_sample(len(ROTARY), "models", "; no error published"),
        Reading(
            f"freq_centroid alone attenuates less than {_NOTHING:.0%} on both Pythias and more than "
            f"{_ALMOST_ENTIRELY:.0%} on Llama; its larger share on Pythia",
            most,
            strict,
        ),
        Reading(
            "rope_imag_frac attenuates more on both Pythias, freq_centroid on Llama; models",
            float(order),
            order == 3,
            "nothing and almost entirely: which of the two does more",
        ),
        listed,
        choices=(
            Choice(
                "estimator",
                "the paper's",
                Reading("on ranks: which of the two attenuates more; models", float(on_ranks), on_ranks == 3),
            ),
        ),
    )


def flags_without_a_forward_pass(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 11's practical reading: phase or D_head flag positional-routing heads."""
    rows = []
    for name in ROTARY:
        heads = tables.heads[name]
        strong = heads["prev"] > _STRONG
        if not strong.any() or strong.all():
            rows.append((name, "rope_imag_frac", 0, float("nan"), float("nan"), 1.0))
            continue
        for column in ("rope_imag_frac", "D_head"):
            test = mann_whitney(heads[column][strong], heads[column][~strong], alternative="greater")
            hits = float(strong[heads[column].nlargest(int(strong.sum())).index].mean())
            rows.append((name, column, int(strong.sum()), hits, (test.rank_biserial + 1) / 2, test.pvalue))
    table = pd.DataFrame(rows, columns=["model", "column", "positive", "hits", "auc", "pvalue"])
    of_model = {name: table.loc[table["model"] == name] for name in ROTARY}
    best = min(float(own["hits"].max()) for own in of_model.values())
    listed = "; ".join(
        f"{row['model']} {row['column']} AUC {row['auc']:.2f} (p = {row['pvalue']:.2g}), hits {row['hits']:.0%}"
        for _, row in table.iterrows()
    )
    sure = significant(table["pvalue"].to_numpy())
    found = [bool(sure[(table["model"] == name).to_numpy()].any()) for name in ROTARY]
    positive = {name: int(own["positive"].iloc[0]) for name, own in of_model.items()}
    yield Sentence(
        "sentence/triage",
        "FP, section 11",
        "under RoPE, rope_imag_frac (or the D_head percentile) flags positional-routing heads without a forward pass",
        f"heads with prev > {_STRONG} among as many of the highest by either column, and AUC, on three models",
        min(positive.values()),
        no_sample(
            sum(positive.values()),
            "such heads",
            f": {', '.join(f'{name} {count}' for name, count in positive.items())}; Holm over {len(table)} finds "
            f"{int(sure.sum())} of {len(table)} AUC above 1/2",
        ),
        Reading(
            "on every model at least half of those flagged by the better column are such heads; smallest share",
            best,
            best >= 0.5,
        ),
        None,
        listed,
        choices=(
            Choice(
                "criterion",
                "half of those flagged are right",
                Reading(
                    f"on every model the AUC of a column is above 1/2 (Holm over {len(table)}); models",
                    float(sum(found)),
                    all(found),
                ),
            ),
        ),
    )


_CONTROLS = ("rope_imag_frac", "freq_centroid")


def _share(heads: pd.DataFrame, control: str, method: Literal["hybrid", "rank"] = "hybrid") -> float:
    """Share of the partial correlation of D_head with prev that a further control takes away."""
    before, after = (
        partial_spearman(heads["D_head"], heads["prev"], heads[["dir_frac", *more]], method=method).statistic
        for more in ([], [control])
    )
    return float(np.divide(before - after, before))
