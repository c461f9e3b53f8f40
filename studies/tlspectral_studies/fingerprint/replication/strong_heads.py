"""FP section 6 beyond Table 2: the class of previous-token heads, the bulk, other metrics, and heads as units."""

from collections.abc import Iterator

import pandas as pd

from tlspectral.stats import partial_spearman
from tlspectral_studies.fingerprint.printed_pvalues import class_pvalue
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, needs_weights
from tlspectral_studies.fingerprint.replication.positional_schemes import ROTARY
from tlspectral_studies.fingerprint.statistics import class_test, intraclass_correlation

_WHERE = "FP, section 6"
_KV_GROUP = 4  # query heads of Llama-3-8B that share keys


def head_4_11(tables: PublishedTables) -> Iterator[Claim]:
    """GPT-2's strongest previous-token head."""
    heads = tables.heads["gpt2"]
    percentile = heads["D_head"].rank(pct=True)
    here = (heads["layer"] == 4) & (heads["head"] == 11)
    value = float(heads.loc[here, "D_head"].iloc[0])
    yield Claim(
        "section6/4.11",
        _WHERE,
        "GPT-2: percentile of D_head of head 4.11",
        "0.22",
        float(percentile[here].iloc[0]),
        if_differs=f"{value:.2f} is its D_head, not the percentile",
    )


def content_of_top_five(tables: PublishedTables) -> Iterator[Claim]:
    """Mean content_pos_frac of the top five under learned absolute positions."""
    of_model = {
        name: tables.heads[name].nlargest(5, "prev")["content_pos_frac"]
        for name in ("gpt2", "opt-1.3b", "gpt-neo-1.3b")
    }
    means = [float(values.mean()) for values in of_model.values()]
    medians = [float(values.median()) for values in of_model.values()]
    what = "learned absolute positions: {} content_pos_frac of the top 5 among three models"
    remark = f"means over the five; medians are {min(medians):.2f} to {max(medians):.2f}"
    yield Claim("section6/content/low", _WHERE, what.format("lowest"), "0.46", min(means), remark=remark)
    yield Claim("section6/content/high", _WHERE, what.format("highest"), "0.57", max(means), remark=remark)


def rotational_profile(tables: PublishedTables) -> Iterator[Claim]:
    """Under RoPE: dir_frac and D_head of the strongest heads and of the median head."""
    tops = pd.concat([tables.heads[name].nlargest(5, "prev") for name in ROTARY])
    medians = [float(tables.heads[name]["D_head"].median()) for name in ROTARY]
    what = "RoPE models: {}"
    yield Claim("section6/population/low", _WHERE, what.format("lowest median D_head"), "0.40", min(medians))
    yield Claim("section6/population/high", _WHERE, what.format("highest median D_head"), "0.45", max(medians))
    yield Claim(
        "section6/top_dir",
        _WHERE,
        what.format("median dir_frac of the 15 heads that are a model's top 5"),
        "~0.70",
        float(tops["dir_frac"].median()),
    )
    yield Claim(
        "section6/top_D",
        _WHERE,
        what.format("median D_head of the 15 heads that are a model's top 5"),
        "~0.61",
        float(tops["D_head"].median()),
        remark=f"from {tops['D_head'].min():.2f} to {tops['D_head'].max():.2f}",
    )


def other_metrics(tables: PublishedTables) -> Iterator[Claim]:
    """Signs of the partial correlations of imag_mass and henrici with prev: the same on all models."""
    counts = {}
    for metric, sign in (("imag_mass", 1), ("henrici", -1)):
        partials = [
            partial_spearman(heads[metric], heads["prev"], heads[["dir_frac"]]).statistic
            for heads in tables.heads.values()
        ]
        counts[metric] = float(sum(sign * value > 0 for value in partials))
    what = "models, of 7, on which the partial correlation with prev is"
    yield Claim("section6/imag_mass", _WHERE, f"{what} positive for imag_mass", "7", counts["imag_mass"])
    yield Claim("section6/henrici", _WHERE, f"{what} negative for henrici", "7", counts["henrici"])


def classes(tables: PublishedTables) -> Iterator[Claim]:
    """Previous-token heads against the rest, by the residual of D_head."""
    printed = (
        ("pythia-410m", 0.2, "+0.44"),
        ("pythia-1.4b", 0.2, "+0.60"),
        ("llama-3-8b", 0.1, "+0.29"),
        ("gpt2", 0.2, "-0.39"),
        ("opt-1.3b", 0.2, "-0.11"),
        ("gpt-neo-1.3b", 0.2, "+0.13"),
        ("gpt-neo-1.3b", 0.1, "+0.34"),
    )
    significant = {"gpt2": "< 0.05", "opt-1.3b": "> 0.05", "gpt-neo-1.3b": "> 0.05"}
    for name, threshold, text in printed:
        test = class_test(tables.heads[name], threshold=threshold)
        what = f"{name}: rank-biserial of heads with prev > {threshold} against the rest"
        row = f"section6/class/{name}/{threshold}"
        yield Claim(row, _WHERE, what, text, test.statistic, remark=f"{test.n_class} heads")
        if threshold == 0.2 and name in significant:
            yield Claim(
                f"{row}/p", _WHERE, f"{what}, p", significant[name], class_pvalue(tables.heads[name], threshold)
            )


def bulk_and_candidates(tables: PublishedTables) -> Iterator[Claim]:
    """The partial correlation among heads with and without previous-token attention."""
    gpt2, opt = tables.heads["gpt2"], tables.heads["opt-1.3b"]
    parts = (
        ("gpt2/bulk", "gpt2: partial correlation among heads with prev <= 0.05", "+0.25", gpt2[gpt2["prev"] <= 0.05]),
        ("opt-1.3b/candidates", "opt-1.3b: the same with prev > 0.05", "-0.18", opt[opt["prev"] > 0.05]),
    )
    for row, what, text, part in parts:
        partial = partial_spearman(part["D_head"], part["prev"], part[["dir_frac"]])
        yield Claim(f"section6/{row}", _WHERE, what, text, partial.statistic, remark=f"{partial.n} heads")
    within = [
        partial_spearman(part["D_head"], part["prev"], part[["dir_frac"]]).pvalue
        for part in (heads[heads["prev"] > 0.2] for heads in (tables.heads[name] for name in ROTARY))
    ]
    what = "RoPE models: smallest p of the partial correlation within heads with prev > 0.2"
    yield Claim("section6/within_class", _WHERE, what, "> 0.05", min(within))


def heads_as_units(tables: PublishedTables) -> Iterator[Claim]:
    """Intraclass correlation of heads of a layer, and of heads that share keys."""
    llama = tables.heads["llama-3-8b"]
    llama = llama.assign(kv_head=llama["head"] // _KV_GROUP)
    shared = {
        column: intraclass_correlation(llama, column, ("layer", "kv_head"))
        for column in ("prev", "dir_frac", "freq_centroid", "D_head", "rope_imag_frac")
    }
    share = {column: correlation.eta_squared for column, correlation in shared.items()}
    corrected = [correlation.statistic for correlation in shared.values()]
    least, most = min(share, key=share.__getitem__), max(share, key=share.__getitem__)
    chance = shared[least].eta_squared_chance
    remark = (
        f"share of the sum of squares, {chance:.2f} by chance; corrected for chance {min(corrected):.2f} to "
        f"{max(corrected):.2f}"
    )
    of_layer = [intraclass_correlation(heads, "D_head").design_effect for heads in tables.heads.values()]
    convention = (
        f"1 + (m - 1) ICC of D_head by layer gives {min(of_layer):.1f} to {max(of_layer):.1f} over the seven models; "
        "which convention was used is not said"
    )
    group = "Llama-3-8B: {} share of variance between groups of shared keys"
    for end, which, text, column in (("low", "smallest", "0.55", least), ("high", "largest", "0.79", most)):
        what = f"{group.format(which)} ({column})"
        yield Claim(f"section6/groups/{end}", _WHERE, what, text, share[column], remark=remark)
    for end, which, text, value in (
        ("low", "smallest", "3.6", min(of_layer)),
        ("high", "largest", "6.9", max(of_layer)),
    ):
        where, what = "FP, Table 2 and limitation iii", f"{which} design effect of layers among the models"
        yield Claim(f"section6/design/{end}", where, what, text, value, if_differs=convention)


def z_scores(tables: PublishedTables) -> Iterator[Claim]:
    """z-scores against each head's own null: the tables hold a null for GPT-2 alone."""
    printed = (
        ("pythia-410m/population", "pythia-410m: median z of D_head over all heads", "-11"),
        ("pythia-410m/low", "pythia-410m: lowest z of D_head among previous-token heads", "-0.1"),
        ("pythia-410m/high", "pythia-410m: highest z of D_head among previous-token heads", "+5.0"),
        ("pythia-1.4b/top", "pythia-1.4b: median z of D_head among previous-token heads", "-3.7"),
        ("pythia-1.4b/population", "pythia-1.4b: median z of D_head over all heads", "-13.9"),
    )
    for row, what, text in printed:
        yield needs_weights(
            f"section6/z/{row}", _WHERE, what, text, "tlspectral.heads.analyze_heads", "no null was released"
        )
