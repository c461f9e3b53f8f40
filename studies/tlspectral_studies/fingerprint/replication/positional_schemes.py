"""FP Table 2 and the inference of section 6: seven models, three positional schemes; the contrast for any models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.stats import (
    PartialCorrelation,
    benjamini_hochberg,
    layer_bootstrap,
    model_permutation_test,
    partial_spearman,
    top_head_percentile,
)
from tlspectral.stats.permutation import ModelPermutation
from tlspectral.tables.head_columns import HEAD_COLUMNS
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.fingerprint.printed_pvalues import gap_pvalue, mann_whitney_pvalue
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables
from tlspectral_studies.fingerprint.statistics import (
    leave_one_model_out,
    mann_whitney,
    spearman_table,
    top_k_sensitivity,
)

POSITIONS = {
    "gpt2": "absolute",
    "opt-1.3b": "absolute",
    "gpt-neo-1.3b": "absolute",
    "bloom-1b1": "ALiBi",
    "pythia-410m": "RoPE",
    "pythia-1.4b": "RoPE",
    "llama-3-8b": "RoPE",
}
"""Positional scheme of each model."""

ROTARY = tuple(name for name, positions in POSITIONS.items() if positions == "RoPE")

ROPE, NOT_ROPE = "RoPE", "not RoPE"

_columns = partial(
    columns,
    shared=(
        *columns("""
            model  | label | Name of the model.
            scheme | label | RoPE where rope_imag_frac is there and not all NaN, else not RoPE.
        """),
        *HEAD_COLUMNS,
    ),
)
_MODELS = Schema(
    "scheme_contrast.models",
    _columns("""
        model, scheme
        n_heads    | count | Heads ranked.
        k          | count | Strongest previous-token heads taken.
        percentile | share | Median over those heads of the percentile of D_head within the model, rank / n.
        midrank    | share | The same with (rank - 1/2) / n, which is 1/2 on average for heads at random.
    """),
    "`scheme_contrast` of `tlspectral_studies.fingerprint`: `.models`; `tlspectral study schemes` prints it",
)
_HEADS = Schema(
    "scheme_contrast.heads",
    _columns("""
        model, scheme, layer, head, name
        percentile | share | Percentile of the head's D_head within its model, rank / n.
    """),
)
BOOTSTRAP_DRAWS, BOOTSTRAP_SEED = 4000, 0

_TABLE, _SECTION = "FP, Table 2", "FP, section 6"
# rho_dir, rho_D, partial, low and high end of its interval, percentile of the top five.
_PRINTED = {
    "gpt2": ("+0.47", "+0.29", "-0.21", "-0.51", "+0.08", "0.21"),
    "opt-1.3b": ("+0.08", "+0.28", "+0.35", "+0.19", "+0.48", "0.23"),
    "gpt-neo-1.3b": ("+0.35", "+0.41", "+0.20", "+0.07", "+0.33", "0.14"),
    "bloom-1b1": ("+0.13", "+0.25", "+0.34", "+0.22", "+0.47", "0.26"),
    "pythia-410m": ("+0.57", "+0.62", "+0.35", "+0.21", "+0.47", "0.89"),
    "pythia-1.4b": ("+0.31", "+0.60", "+0.50", "+0.38", "+0.59", "0.85"),
    "llama-3-8b": ("+0.32", "+0.38", "+0.33", "+0.21", "+0.45", "0.79"),
}


def scheme(name: str) -> str:
    """`RoPE` or `not RoPE`, the two groups of the model-level test."""
    return ROPE if POSITIONS[name] == ROPE else NOT_ROPE


def correlations(tables: PublishedTables) -> Iterator[Claim]:
    """Table 2's rank correlations of dir_frac and D_head with prev."""
    for name, printed in _PRINTED.items():
        rho = spearman_table(tables.heads[name], ["dir_frac", "D_head"], "prev")["statistic"]
        for short, metric, text, value in zip(("dir", "D"), ("dir_frac", "D_head"), printed, rho, strict=False):
            yield Claim(
                f"table2/{name}/rho_{short}", _TABLE, f"{name}: rank correlation of {metric} with prev", text, value
            )


def partials(tables: PublishedTables) -> Iterator[Claim]:
    """Table 2's partial correlation of D_head with prev given dir_frac; RoPE models survive BH over the seven."""
    pvalues = {}
    for name, printed in _PRINTED.items():
        hybrid, rank, within_layer = three_partials(tables.heads[name])
        pvalues[name] = hybrid.pvalue
        yield Claim(
            f"table2/{name}/partial",
            _TABLE,
            f"{name}: partial correlation of D_head with prev given dir_frac",
            printed[2],
            hybrid.statistic,
            remark=f"{rank.statistic:+.2f} on ranks; {within_layer.statistic:+.2f} with layers as controls too",
        )
    q = benjamini_hochberg(np.array(list(pvalues.values()))).q
    worst = max(value for name, value in zip(pvalues, q, strict=True) if scheme(name) == ROPE)
    what = "RoPE models: largest q (BH over seven models) of the partial correlation"
    yield Claim("table2/q", _TABLE, what, "< 0.05", float(worst))


def intervals(tables: PublishedTables) -> Iterator[Claim]:
    """Table 2's intervals: layers resampled, controls refitted in each resample."""
    ends = {}
    for name, printed in _PRINTED.items():
        bootstrap = layer_bootstrap(tables.heads[name], draws=BOOTSTRAP_DRAWS, seed=BOOTSTRAP_SEED)
        ends[name] = bootstrap.interval
        for end, text, value in zip(("low", "high"), printed[3:5], bootstrap.interval, strict=True):
            yield Claim(
                f"table2/{name}/{end}",
                _TABLE,
                f"{name}: {end} end of the interval over layers of the partial correlation",
                text,
                value,
                seed=BOOTSTRAP_SEED,
            )
    rope = [ends[name] for name in ends if scheme(name) == ROPE]
    for end, text, value in (
        ("low", "+0.21", min(low for low, _ in rope)),
        ("high", "+0.59", max(high for _, high in rope)),
    ):
        yield Claim(
            f"section6/rope/{end}",
            _SECTION,
            f"RoPE models: {end}est end of all three intervals",
            text,
            value,
            seed=BOOTSTRAP_SEED,
        )


def top_five(tables: PublishedTables) -> Iterator[Claim]:
    """Table 2's last column and Fig. 2a: where the five strongest previous-token heads stand by D_head."""
    for name, printed in _PRINTED.items():
        top = top_head_percentile(tables.heads[name])
        each = ", ".join(f"{value:.2f}" for value in top.percentiles)
        yield Claim(
            f"table2/{name}/top5",
            "FP, Table 2 and Fig. 2a",
            f"{name}: median percentile of D_head among the top 5 by prev",
            printed[5],
            top.statistic,
            remark=f"the five: {each}",
        )


def quartile_and_quintile(tables: PublishedTables) -> Iterator[Claim]:
    """Abstract and section 6: bottom quartile without RoPE, top quintile with it."""
    values = top_percentiles(tables)
    low = {name: value for name, value in values.items() if scheme(name) == NOT_ROPE}
    high = {name: value for name, value in values.items() if scheme(name) == ROPE}
    above = ", ".join(f"{name} is at {value:.3f}" for name, value in low.items() if value > 0.25)
    below = ", ".join(f"{name} is at {value:.3f}" for name, value in high.items() if value < 0.8)
    yield Claim(
        "section6/bottom_quartile",
        _SECTION,
        "models without RoPE whose top 5 are in the bottom quartile",
        "4",
        float(sum(value <= 0.25 for value in low.values())),
        if_differs=f"{above}: above the quartile, though below all RoPE models",
    )
    yield Claim(
        "section6/top_quintile",
        _SECTION,
        "RoPE models whose top 5 are in the top quintile",
        "3",
        float(sum(value >= 0.8 for value in high.values())),
        if_differs=f"{below}: below the quintile, though above all other models",
    )


def model_level_test(tables: PublishedTables) -> Iterator[Claim]:
    """The contrast with models as the unit: permutation, other numbers of top heads, each model left out."""
    values = top_percentiles(tables)
    groups = {name: scheme(name) for name in values}
    rope, others = (
        np.array([value for name, value in values.items() if (groups[name] == ROPE) is rotary])
        for rotary in (True, False)
    )
    by_k = top_k_sensitivity(tables.heads, groups, ks=(1, 3, 5, 10)).set_index("k")
    further = top_k_sensitivity(tables.heads, groups, ks=(2, 4, 7, 15, 20, 30, 50)).set_index("k")
    separated = leave_one_model_out(values, groups)["separated"]
    without_one = [gap_pvalue(np.delete(rope, index), others) for index in range(len(rope))]
    without_one += [gap_pvalue(rope, np.delete(others, index)) for index in range(len(others))]
    fails = ", ".join(str(k) for k in further.index[~further["separated"]])
    right_way = (by_k["upper"] == ROPE) & by_k["separated"]
    yield Claim(
        "section6/permutation",
        _SECTION,
        "exact model-level permutation p",
        "0.029",
        gap_pvalue(rope, others),
        remark="one-sided; 1/35 is the smallest there is with seven models",
    )
    yield Claim(
        "section6/ks",
        _SECTION,
        "numbers of top heads, of 1, 3, 5 and 10, at which the separation is perfect",
        "4",
        float(right_way.sum()),
        remark=f"of {', '.join(str(k) for k in further.index)} it fails at {fails or 'none'}",
    )
    yield Claim(
        "section6/leave_one_out",
        _SECTION,
        "models that can be left out with separation perfect, of 7",
        "7",
        float(separated.sum()),
        remark=f"p is then {min(without_one):.3f} to {max(without_one):.3f}",
    )


def head_level_test(tables: PublishedTables) -> Iterator[Claim]:
    """All top-five heads of RoPE models against all those of the others, as if heads were independent."""
    pooled: dict[str, list[float]] = {ROPE: [], NOT_ROPE: []}
    for name, heads in tables.heads.items():
        pooled[scheme(name)] += top_head_percentile(heads).percentiles
    rope, others = np.array(pooled[ROPE]), np.array(pooled[NOT_ROPE])
    exact = mann_whitney(rope, others).pvalue
    yield Claim(
        "section6/head_level",
        _SECTION,
        "head-level Mann-Whitney p, 15 heads against 20",
        "2.5e-5",
        mann_whitney_pvalue(rope, others),
        remark=f"asymptotic; the exact p is {exact:.1e}, and heads of a model are not independent",
    )


def top_percentiles(tables: PublishedTables) -> dict[str, float]:
    """Median percentile of each model's top five."""
    return {name: top_head_percentile(heads).statistic for name, heads in tables.heads.items()}


def places_of_top(heads: pd.DataFrame, column: str) -> Float64[np.ndarray, "five"]:
    """Percentiles of a column within the model, of the top five by prev."""
    return heads[column].rank(pct=True)[heads["prev"].nlargest(5).index].to_numpy(dtype=np.float64)


def three_partials(heads: pd.DataFrame) -> list[PartialCorrelation]:
    """FP's partial correlation of D_head with prev given dir_frac, the rank-based one, and FP's with layers too."""
    layers = pd.get_dummies(heads["layer"], drop_first=True, dtype=float).add_prefix("layer_")
    x, y, dir_frac = heads["D_head"], heads["prev"], heads[["dir_frac"]]
    return [
        partial_spearman(x, y, dir_frac),
        partial_spearman(x, y, dir_frac, method="rank"),
        partial_spearman(x, y, pd.concat([dir_frac, layers], axis=1)),
    ]


@dataclass(frozen=True, eq=False)
class SchemeContrast:
    """Models with and without rotary positions, by the percentile of their strongest previous-token heads.

    Attributes:
        models: a model a row.
        heads: a previous-token head a row.
        test: RoPE against the rest, one value per model, RoPE tending to be higher; None where a group is empty.
    """

    models: pd.DataFrame
    heads: pd.DataFrame
    test: ModelPermutation | None


def scheme_contrast(tables: Mapping[str, pd.DataFrame], *, k: int = 5) -> SchemeContrast:
    """Compare models as in Table 2 and Fig. 2a of "Fingerprint, Not Blueprint" (FP, section 6).

    Args:
        tables: table of heads by model: `layer, head, D_head, prev`. A model counts as rotary if `rope_imag_frac` is
            there and not all NaN.
        k: previous-token heads per model.

    Raises:
        ValueError: no table, a missing column, or fewer than k heads with both numbers; the message names the model.

    What it does not establish: that positions make the difference. Models are few, share data and code, and differ in
    more than their positions; a percentile says nothing of how far apart heads are.
    """
    if not tables:
        raise ValueError("no table was given: give at least one table of heads")
    rows, members = [], []
    for model, table in tables.items():
        try:
            top = top_head_percentile(table, k=k)
        except ValueError as error:
            raise ValueError(f"{model}: {error}") from error
        scheme = ROPE if "rope_imag_frac" in table and table["rope_imag_frac"].notna().any() else NOT_ROPE
        rows.append((model, scheme, top.n, k, top.statistic, top.statistic_midrank))
        members += [
            (model, scheme, *head, percentile) for head, percentile in zip(top.heads, top.percentiles, strict=True)
        ]
    models = _MODELS.frame(pd.DataFrame(rows, columns=[column.name for column in _MODELS.columns]))
    rotary = models["scheme"] == ROPE
    test = None
    if rotary.any() and not rotary.all():
        groups = (models.loc[chosen, "percentile"].to_numpy(dtype=float) for chosen in (rotary, ~rotary))
        test = model_permutation_test(*groups, alternative="greater")
    heads = pd.DataFrame(members, columns=["model", "scheme", "layer", "head", "percentile"])
    return SchemeContrast(models, _HEADS.frame(heads), test)
