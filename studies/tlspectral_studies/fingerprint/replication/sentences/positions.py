"""FP section 6 and the abstract: whether the strongest previous-token heads rotate under RoPE and not elsewhere."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from tlspectral.stats import PartialCorrelation, partial_spearman, top_head_percentile
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.positional_schemes import (
    NOT_ROPE,
    POSITIONS,
    ROPE,
    ROTARY,
    places_of_top,
    scheme,
    three_partials,
    top_percentiles,
)
from tlspectral_studies.fingerprint.replication.sentences.power import (
    apart_power,
    correlations_power,
    detectable_correlation,
    significant,
)
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, Choice, Power, Reading, Sentence
from tlspectral_studies.fingerprint.statistics import top_k_sensitivity

_WHERE = "FP, section 6"
_OTHERS = [name for name in POSITIONS if scheme(name) == NOT_ROPE]
_ABSOLUTE = [name for name, positions in POSITIONS.items() if positions == "absolute"]
_TRIED, _EXAMINED = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50), (1, 3, 5, 10)
_MODERATE = 0.3  # |rho| that "no gradation" has to exclude
_RANDOM = math.sqrt(0.5)  # dir_frac of a random M
_NORMAL = 1.959964


def strong_heads_rotate(tables: PublishedTables) -> Iterator[Sentence]:
    """The abstract's main sentence, head by head and model by model."""
    places = {name: top_head_percentile(heads).percentiles for name, heads in tables.heads.items()}
    right = {
        name: sum((value > 0.5) == (name in ROTARY) for value in percentiles) for name, percentiles in places.items()
    }
    heads = sum(map(len, places.values()))
    medians = {name: float(np.median(percentiles)) for name, percentiles in places.items()}
    apart = sum(medians[name] > 0.5 for name in ROTARY) + sum(medians[name] < 0.5 for name in _OTHERS)
    wrong = {name: [value for value in places[name] if (value > 0.5) != (name in ROTARY)] for name in places}
    listed = "; ".join(f"{name} {', '.join(f'{v:.2f}' for v in values)}" for name, values in wrong.items() if values)
    yield Sentence(
        "sentence/rotational",
        "FP, abstract and section 6",
        "the strongest previous-token heads are spectrally rotational under RoPE and non-rotational [...] where "
        "position enters outside QK",
        "percentile of D_head within the model of the top 5 by prev, seven models",
        len(places),
        apart_power(len(ROTARY), len(_OTHERS)),
        Reading(
            f"all {heads} heads are on their side of the model's median; their number",
            float(sum(right.values())),
            sum(right.values()) == heads,
        ),
        Reading(
            "the median of every model's five is; models", float(apart), apart == len(places), "every head: medians"
        ),
        f"on the other side: {listed or 'none'}",
        choices=tuple(
            Choice(
                "heads",
                "the top 5",
                Reading(
                    f"the median of every model's top {k} is on its side; models",
                    float(_sided(tables, k)),
                    _sided(tables, k) == len(places),
                ),
            )
            for k in (3, 10)
        ),
    )


def _sided(tables: PublishedTables, k: int) -> int:
    """Models whose median percentile of D_head of the top k heads by prev is on the side of their positions."""
    medians = {name: np.median(top_head_percentile(heads, k=k).percentiles) for name, heads in tables.heads.items()}
    return sum(bool(value > 0.5) if name in ROTARY else bool(value < 0.5) for name, value in medians.items())


def separation_at_every_k(tables: PublishedTables) -> Iterator[Sentence]:
    """Perfect separation at every top-k examined: four were."""
    groups = {name: scheme(name) for name in tables.heads}
    fits = tuple(k for k in _TRIED if k <= min(tables.sizes().values()))
    table = top_k_sensitivity(tables.heads, groups, ks=fits).set_index("k")
    right = (table["upper"] == ROPE) & table["separated"]
    fails = ", ".join(map(str, right.index[~right])) or "none"
    yield Sentence(
        "sentence/every_k",
        "FP, abstract and section 6",
        "the model-level separation is perfect at every top-k examined",
        f"medians of RoPE models above all others, for k of {', '.join(map(str, fits))}",
        len(tables.heads),
        apart_power(len(ROTARY), len(_OTHERS)),
        Reading.every("at the four that the text examines (1, 3, 5, 10); how many", right[list(_EXAMINED)]),
        None,
        f"of the k tried here it fails at {fails}, which the text does not examine",
    )


def increment_is_robust(tables: PublishedTables) -> Iterator[Sentence]:
    """D_head beyond dir_frac on RoPE models, with other estimators too."""
    partials = {name: three_partials(tables.heads[name]) for name in ROTARY}
    every = [partial for of_model in partials.values() for partial in of_model]
    robust = significant(np.array([partial.pvalue for partial in every]))
    worst = min(partial.statistic for partial in every)
    listed = "; ".join(
        f"{name} {', '.join(f'{partial.statistic:+.2f}' for partial in of_model)}"
        for name, of_model in partials.items()
    )
    yield Sentence(
        "sentence/robust",
        _WHERE,
        "On every RoPE model, D_head's incremental contribution beyond dir_frac is positive and robust",
        "partial correlations of D_head with prev given dir_frac: the paper's, on ranks, and with layers held "
        "fixed too, on three models, Holm over 9",
        min(partial.n for partial in every),
        correlations_power({name: of_model[0].n for name, of_model in partials.items()}, len(every)),
        Reading("all nine are positive and significant; the smallest", worst, bool(robust.all()) and worst > 0),
        None,
        f"the paper's, on ranks, with layers: {listed}",
    )


def content_like_profiles(tables: PublishedTables) -> Iterator[Sentence]:
    """Content-like symmetric profiles under learned absolute positions."""
    content = {name: places_of_top(tables.heads[name], "content_pos_frac") for name in POSITIONS}
    medians = {name: float(np.median(content[name])) for name in _ABSOLUTE}
    rope = {name: float(np.median(content[name])) for name in ROTARY}
    least = min(medians.values()) - max(rope.values())
    under_rope = ", ".join(f"{name} {value:.2f}" for name, value in rope.items())
    tops = pd.concat([tables.heads[name].nlargest(5, "prev") for name in _ABSOLUTE])["dir_frac"]
    listed = ", ".join(f"{name} {value:.2f}" for name, value in medians.items())
    above = ", ".join(f"{value:.2f}" for value in tops[tops >= _RANDOM])
    models = apart_power(len(_ABSOLUTE), len(ROTARY))
    by_ten = {name: float(np.median(_places(tables.heads[name], 10))) for name in _ABSOLUTE}
    within = [float(np.median(_places(tables.heads[name], 5, "dir_frac"))) for name in _ABSOLUTE]
    yield Sentence(
        "sentence/content_like",
        _WHERE,
        "all with content-like symmetric profiles, content_pos_frac 0.46-0.57",
        "learned-absolute models: percentile of content_pos_frac within the model of the top 5 by prev",
        len(_ABSOLUTE),
        models,
        Reading(
            "the median of the five is above the model's on all three; the lowest",
            min(medians.values()),
            min(medians.values()) > 0.5,
        ),
        Reading(
            "each of the three is above each RoPE model; the smallest difference",
            least,
            least > 0,
            "the level: more content-like than under RoPE",
        ),
        f"medians of the five: {listed}; RoPE {under_rope}",
        choices=(
            Choice(
                "heads",
                "the top 5",
                Reading(
                    "the median of the top 10 is above the model's on all three; the lowest",
                    min(by_ten.values()),
                    min(by_ten.values()) > 0.5,
                ),
            ),
        ),
    )
    yield Sentence(
        "sentence/symmetric_end",
        "FP, section 10",
        "trained learned-absolute LLMs end at symmetric profiles",
        "dir_frac of the top 5 by prev of three models, against sqrt(1/2) of a random M",
        len(_ABSOLUTE),
        models,
        Reading.every(f"all {len(tops)} are below random; their number", tops < _RANDOM),
        Reading("their median is; it", float(tops.median()), float(tops.median()) < _RANDOM, "every head: the median"),
        f"from {tops.min():.2f} to {tops.max():.2f}, 0 is symmetric; not below random: {above or 'none'}",
        choices=(
            Choice(
                "criterion",
                "dir_frac below that of a random M",
                Reading(
                    "the median of the five is below that of the model's heads on all three; the highest percentile",
                    max(within),
                    max(within) < 0.5,
                ),
            ),
        ),
    )


def head_dimension_is_excluded(tables: PublishedTables) -> Iterator[Sentence]:
    """Three models with d_k = 64 cannot be tested; their order can be seen."""
    values = top_percentiles(tables)
    gap = values["pythia-410m"] - max(values["gpt2"], values["opt-1.3b"])
    yield Sentence(
        "sentence/head_dimension",
        _WHERE,
        "Holding d_k = 64 fixed [...] ties the contrast to the positional scheme, not head dimension",
        "median percentile of the top 5: Pythia-410m against GPT-2 and OPT-1.3B",
        3,
        apart_power(1, 2),
        Reading("Pythia-410m is above both; by", gap, gap > 0),
        None,
        "needs the weights of more models with d_k = 64: three with RoPE and three without for p = 1/20",
    )


def no_gradation_within(tables: PublishedTables) -> Iterator[Sentence]:
    """No further gradation within confirmed previous-token heads."""
    parts = {name: heads[heads["prev"] > 0.2] for name, heads in tables.heads.items() if name in ROTARY}
    partials = {name: partial_spearman(p["D_head"], p["prev"], p[["dir_frac"]]) for name, p in parts.items()}
    ends = [_largest_end(partial) for partial in partials.values()]
    pvalues = np.array([partial.pvalue for partial in partials.values()])
    largest = max(abs(partial.statistic) for partial in partials.values())
    detectable = [detectable_correlation(partial.n) for partial in partials.values()]
    sizes = correlations_power({name: partial.n for name, partial in partials.items()}, len(partials))
    listed = ", ".join(f"{name} {p.statistic:+.2f} (n = {p.n}, p = {p.pvalue:.2g})" for name, p in partials.items())
    yield Sentence(
        "sentence/within_class",
        _WHERE,
        "within confirmed prev heads there is no further gradation (subset partials n.s.)",
        "partial correlation of D_head with prev given dir_frac among heads with prev > 0.2, three models",
        min(partial.n for partial in partials.values()),
        Power(
            f"|rho| of {min(detectable):.2f} to {max(detectable):.2f} is found with power 0.8: the test cannot see "
            "less",
            sizes.least_p,
            max(detectable),
            "partial |rho| in the smallest model",
        ),
        Reading(
            f"all 95 % intervals lie within +-{_MODERATE}; the end furthest from 0", max(ends), max(ends) < _MODERATE
        ),
        Reading(
            "none is significant (Holm over 3); largest |rho|",
            largest,
            not math.isnan(largest) and not significant(pvalues).any(),
            "none was found, for there is none",
        ),
        listed,
        within=max(ends) < _MODERATE,
    )


def other_metrics_agree(tables: PublishedTables) -> Iterator[Sentence]:
    """imag_mass positive and Henrici negative on all models."""
    found = {
        (metric, method, name): (sign, partial_spearman(heads[metric], heads["prev"], heads["dir_frac"], method=method))
        for metric, sign in (("imag_mass", 1), ("henrici", -1))
        for method in ("hybrid", "rank")
        for name, heads in tables.heads.items()
    }
    signs = {key: sign * partial.statistic > 0 for key, (sign, partial) in found.items()}
    own = [key for key in found if key[1] == "hybrid"]
    right = np.array([signs[key] for key in own])
    sure = right & significant(np.array([found[key][1].pvalue for key in own]))
    other = [key for key in found if key[1] == "rank"]
    on_ranks = np.array([signs[key] for key in other])
    on_ranks &= significant(np.array([found[key][1].pvalue for key in other]))
    ranks = ", ".join(
        f"{metric} of {name} {found[metric, method, name][1].statistic:+.2f}"
        for (metric, method, name), fine in signs.items()
        if method == "rank" and not fine
    )
    tied = ", ".join(
        f"{metric} of {name} (p = {partial.pvalue:.2g})"
        for (metric, method, name), (_, partial) in found.items()
        if method == "rank" and partial.pvalue > LEVEL
    )
    sizes = tables.sizes()
    yield Sentence(
        "sentence/metric_specificity",
        _WHERE,
        "imag_mass is incrementally positive on all models and Henrici non-normality negative on all",
        f"partial correlations with prev given dir_frac, seven models, by the paper's estimator, Holm over {len(own)}",
        min(sizes.values()),
        correlations_power(sizes, len(own)),
        Reading.every(f"all {len(own)} have the sign and are significant; their number", sure),
        None,
        f"on ranks of the other sign: {ranks or 'none'}; not significant alone: {tied or 'none'}",
        choices=(
            Choice(
                "estimator",
                "the paper's",
                Reading.every(f"all {len(own)} have the sign on ranks and are significant; their number", on_ranks),
            ),
        ),
    )


def _places(heads: pd.DataFrame, k: int, column: str = "content_pos_frac") -> np.ndarray:
    """Percentiles of a column within the model of the top k heads by prev."""
    return heads[column].rank(pct=True)[heads.nlargest(k, "prev").index].to_numpy()


def _largest_end(partial: PartialCorrelation) -> float:
    """End of the 95 % interval (Fisher's z) that is further from 0."""
    if partial.n < 5 or math.isnan(partial.statistic):
        return 1.0
    z = math.atanh(min(abs(partial.statistic), 1 - LEVEL / 1e9))
    return math.tanh(z + _NORMAL / math.sqrt(partial.n - 3 - partial.n_controls))
