"""How often each test rejects where there is nothing to find, and each interval leaves out the truth.

Run `python benchmarks/error_rates.py` (some twenty minutes of an idle core, one seed). It writes
`docs/results/error_rates.csv` and puts the rates into `docs/results/error_rates.md`; `--page` does the latter alone.
Nominal is 5 %. With 1,000 tables a rate of 5 % has a Monte-Carlo standard error of 0.7 %.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats
import torch
import typer
from null_models import fresh_model, heads_with_pairings, random_dictionary
from null_tables import (
    DEPTH,
    INDEPENDENT,
    LIKENESSES,
    SHAPES,
    VERY_ALIKE,
    Likeness,
    column,
    columns,
    flat,
    partial_correlations,
    resampled,
    student,
    within_layers,
    without_layers,
)
from tlspectral_studies.fingerprint.published import PUBLISHED_HEADS, published_heads
from tlspectral_studies.fingerprint.statistics import (
    class_test,
    hypergeometric_overlap,
    intraclass_correlation,
    mann_whitney,
    nested_r_squared,
    triage,
)
from tlspectral_studies.fingerprint.statistics.model_row import chance_of_percentile
from tlspectral_studies.fingerprint.statistics.placebos import placebo_attenuation
from tlspectral_studies.positional_symbolic.medians import median_tests

from tlspectral.heads.detectors import detect_heads
from tlspectral.hooks import ablation_sweep, edge_effects, qk_attribution, summarize_sweep
from tlspectral.hooks.sweeps.controls import head_sets
from tlspectral.models.reading import attention_view
from tlspectral.stats import benjamini_hochberg, model_permutation_test, top_head_percentile
from tlspectral.stats.jackknife import jackknife
from tlspectral.stats.ratio import ratio_interval, unseen_share
from tlspectral.tasks import induction
from tlspectral.tasks.control_tests import control_test
from tlspectral.tasks.repeated import repeated_sequences

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "error_rates.csv"
PAGE = ROOT / "docs" / "results" / "error_rates.md"
PLANTED = ROOT / "docs" / "results" / "sufficient" / "level.csv"
LEVEL = 0.05
TABLES = 1_000
DRAWS = 200
SEED = 0
SMALL = SHAPES[0]
CORRELATION = 0.4
SEQUENCES = 16
NOT_ON_PAGE = ", rank$|^triage|^placebo_attenuation|^intraclass_correlation"
"""Tests on ranks, and tests that `docs/statistics.md` does not name: their rates are in the file alone."""
Row = dict[str, str | int | float]


def row(test: str, heads: str, size: str, wrong: np.ndarray | list[bool]) -> Row:
    """One rate with its standard error; `wrong` says of each table whether the truth was rejected."""
    rate = float(np.mean(wrong))
    return {
        "test": test,
        "heads": heads,
        "size": size,
        "tables": len(wrong),
        "rate": round(rate, 4),
        "se": round(float(np.sqrt(rate * (1 - rate) / len(wrong))), 4),
    }


def size_of(shape: tuple[int, int]) -> str:
    """Layers and heads in words."""
    return f"{shape[0]} x {shape[1]}"


def correlations(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Partial correlations whose truth is 0, by every p and interval over the same tables."""
    x, y, control = columns(rng, tables, shape, likeness)
    where = likeness.name, size_of(shape)
    controls, freedom = [flat(control)], shape[0] * shape[1] - 3
    for method in ("hybrid", "rank"):
        pvalues = student(partial_correlations(flat(x), flat(y), controls, method), freedom)
        yield row(f"partial_spearman, {method}", *where, pvalues <= LEVEL)
        pvalues = within_layers(x, y, control, method)
        yield row(f"partial_spearman(layers=), {method}", *where, pvalues <= LEVEL)
    # x and y share the control, so the plain correlation is tested on columns that do not.
    own = column(rng, tables, shape, likeness)
    pvalues = student(partial_correlations(flat(own), flat(y), [], "rank"), freedom + 1)
    yield row("spearman_table", *where, pvalues <= LEVEL)
    yield from intervals(x, y, control, 0.0, *where, methods=("hybrid", "rank") if shape == SMALL else ("hybrid",))


def intervals(
    x: np.ndarray, y: np.ndarray, control: np.ndarray, truth: float, heads: str, size: str, methods: tuple[str, ...]
) -> Iterator[Row]:
    """Both intervals of `layer_bootstrap`; its p is below the level where the jackknife interval leaves out 0."""
    layers = x.shape[1]
    for method in methods:
        values = partial_correlations(flat(x), flat(y), [flat(control)], method)
        drawn = resampled(flat(x), flat(y), [flat(control)], method, layers, DRAWS)
        low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
        yield row(f"layer_bootstrap.interval, {method}", heads, size, (truth < low) | (truth > high))
        left_out = without_layers(flat(x), flat(y), [flat(control)], method, layers)
        ends = [jackknife(*one, 1 - LEVEL)[0] for one in zip(values, left_out, strict=True)]
        low, high = np.transpose(ends)
        yield row(
            f"layer_bootstrap.interval_jackknife and .pvalue, {method}", heads, size, (truth < low) | (truth > high)
        )


def true_correlations(shape: tuple[int, int], rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Intervals of a partial correlation that is not 0; the truth is that of a model of 20,000 layers."""
    x, y, control = columns(rng, 1, (20_000, shape[1]), VERY_ALIKE, CORRELATION)
    truth = float(partial_correlations(flat(x), flat(y), [flat(control)], "hybrid")[0])
    drawn = columns(rng, tables, shape, VERY_ALIKE, CORRELATION)
    yield from intervals(*drawn, truth, f"{VERY_ALIKE.name}, correlation {truth:.2f}", size_of(shape), ("hybrid",))


def shares(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """The interval of `attenuation` where the added control is what x and y share, so that the truth is 1."""
    carrier, control, x, y = (flat(column(rng, tables, shape, likeness)) for _ in range(4))
    x, y = x + carrier + 0.5 * control, y + carrier + 0.5 * control
    before, after = (resampled(x, y, used, "hybrid", shape[0], DRAWS) for used in ([control], [control, carrier]))
    low, high = np.quantile(before, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
    bounded = (low > 0) | (high < 0)  # elsewhere `attenuation` gives no interval
    low, high = np.quantile(1 - after / before, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
    yield row("attenuation.interval", likeness.name, size_of(shape), ((low > 1) | (high < 1))[bounded])


def frames(rng: np.random.Generator, shape: tuple[int, int], likeness: Likeness, tables: int) -> Iterator[pd.DataFrame]:
    """Head tables: `D_head`, `prev` and `dir_frac`, independent of each other."""
    layers, heads = shape
    drawn = {name: flat(column(rng, tables, shape, likeness)) for name in ("D_head", "prev", "dir_frac")}
    for table in range(tables):
        frame = pd.DataFrame({"layer": np.arange(layers).repeat(heads), "head": np.tile(np.arange(heads), layers)})
        yield frame.assign(**{name: values[table] for name, values in drawn.items()})


def tables_of_heads(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Tests over the heads of one model, by the functions themselves."""
    wrong: dict[str, list[bool]] = {}
    for heads in frames(rng, shape, likeness, tables):
        strong = float(np.sort(heads["prev"])[-12])  # eleven heads lie above
        area = triage(heads, scores=("D_head",), threshold=strong, ks=(5,)).iloc[0]
        early = median_tests(heads.rename(columns={"D_head": "s_pos", "dir_frac": "s_sym"}))
        chance, _ = chance_of_percentile(heads, top_head_percentile(heads, k=5), 5)
        for name, pvalue in {
            "class_test": class_test(heads, threshold=strong).pvalue,
            "tlspectral study statistics, p of the top-5 percentile": chance,
            "positional median tests of early and late layers": early["pvalue"].iloc[0],
        }.items():
            wrong.setdefault(name, []).append(pvalue <= LEVEL)
        if area["auc_low"] == area["auc_low"]:  # elsewhere there is no interval
            wrong.setdefault("triage, interval of the area", []).append(not area["auc_low"] <= 0.5 <= area["auc_high"])
        if likeness is INDEPENDENT:
            pvalue = intraclass_correlation(heads, "D_head").pvalue
            wrong.setdefault("intraclass_correlation", []).append(pvalue <= LEVEL)
    yield from (row(name, likeness.name, size_of(shape), found) for name, found in wrong.items())


def sweeps(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`summarize_sweep`: effects that have nothing to do with the columns, and a sum of effects that is known."""
    wrong: dict[str, list[bool]] = {"sum, interval": [], "detector_rank": [], "rank_correlation": []}
    for heads in frames(rng, shape, likeness, tables):
        effects = np.exp(flat(column(rng, 1, shape, likeness))[0])
        shared = rng.standard_t(3, SEQUENCES)  # what the same sequences do to all heads
        deltas = effects[:, None] + shared + rng.standard_t(3, (len(effects), SEQUENCES))
        sweep = heads[["layer", "head"]].assign(
            part="rope_phase",
            value=deltas.mean(1),
            delta=deltas.mean(1),
            delta_se=scipy.stats.sem(deltas, axis=1),
            score_rms=np.nan,
        )
        sweep.attrs = {"task": "t", "higher_is_better": False, "sums_per_sequence": {"delta": deltas.sum(0).tolist()}}
        found = summarize_sweep(sweep, heads[["layer", "head", "prev"]], small=0.1).set_index("statement")
        total = found.loc["sum"]
        wrong["sum, interval"].append(not total["low"] <= effects.sum() <= total["high"])
        wrong["detector_rank"].append(found.loc["detector_rank", "pvalue"] <= LEVEL)
        wrong["rank_correlation"].append(found.loc["rank_correlation", "pvalue"] <= LEVEL)
    yield from (row(f"summarize_sweep, {name}", likeness.name, size_of(shape), found) for name, found in wrong.items())


def differences(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Differences of mean 0: `normal`, `heavy tails` (t with 3 degrees of freedom) or `skewed` (exponential)."""
    draw = {"normal": rng.standard_normal, "heavy tails": lambda size: rng.standard_t(3, size)}
    return draw[kind](shape) if kind in draw else rng.standard_exponential(shape) - 1


def sign_flips(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`delta_p` of one head."""
    for kind in ("normal", "heavy tails", "skewed"):
        for count in (5, 8, 16, 64):
            drawn = differences(rng, kind, (count, tables))
            parts = np.array_split(drawn, 20, axis=1)  # for memory
            wrong = [all_sign_flips(part, np.random.default_rng(SEED)) <= LEVEL for part in parts]
            yield row("delta_p, paired_effect", f"{kind} differences", f"{count} sequences", np.concatenate(wrong))


def whole_sweeps(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Sign flips for all heads of a model on the same sequences, of which none has an effect."""
    heads = SMALL[0] * SMALL[1]
    for count in (8, 16):
        wrong: dict[str, list[bool]] = {"of all heads, smallest as it is": [], "of all heads, any q": []}
        for _ in range(tables):
            drawn = differences(rng, "heavy tails", (count, heads)) + differences(rng, "heavy tails", (count, 1))
            pvalues = all_sign_flips(drawn, np.random.default_rng(SEED))
            wrong["of all heads, smallest as it is"].append(pvalues.min() <= LEVEL)
            wrong["of all heads, any q"].append(benjamini_hochberg(pvalues).q.min() <= LEVEL)
        for name, found in wrong.items():
            yield row(f"delta_p {name}", f"{heads} heads", f"{count} sequences", found)


def all_sign_flips(drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`sign_flip_p` of every column of [sequences, heads], with the same flips for all."""
    count = len(drawn)
    if count <= 13:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        extra = 0
    else:
        signs, extra = rng.choice([-1, 1], size=(9_999, count)), 1
    observed = np.abs(drawn.sum(0)) * (1 - 1e-12)
    return (np.count_nonzero(np.abs(signs @ drawn) >= observed, axis=0) + extra) / (len(signs) + extra)


def models(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Tests over models, each with a head table whose heads are very alike."""
    percentiles = []
    for index in range(7):
        drawn = frames(rng, SHAPES[index % len(SHAPES)], VERY_ALIKE, tables)
        percentiles.append([top_head_percentile(heads) for heads in drawn])
    medians = np.array([[found.statistic_midrank for found in model] for model in percentiles])
    wrong = [model_permutation_test(of_table[:3], of_table[3:]).pvalue <= LEVEL for of_table in medians.T]
    yield row("model_permutation_test of top_head_percentile", VERY_ALIKE.name, "3 and 4 models", wrong)
    drawn = rng.standard_normal((tables, 9))
    wrong = [model_permutation_test(of_table[:5], of_table[5:]).pvalue <= LEVEL for of_table in drawn]
    yield row("model_permutation_test", "independent models", "5 and 4 models", wrong)
    wrong = []
    for table in range(tables):
        pooled = [np.array(of_model[table].percentiles) for of_model in percentiles]
        wrong.append(mann_whitney(np.concatenate(pooled[:3]), np.concatenate(pooled[3:])).pvalue <= LEVEL)
    yield row("mann_whitney of the top five heads, pooled", VERY_ALIKE.name, "3 and 4 models", wrong)
    steps = np.round(rng.normal(1000, 200, (tables, 10)), -2)  # evaluated every 100 steps: ties
    wrong = [mann_whitney(runs[:5], runs[5:]).pvalue <= LEVEL for runs in steps]
    yield row("mann_whitney of runs", "independent runs with ties", "5 and 5 runs", wrong)


def bands(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`compare_heads`: share of heads outside twice a standard deviation that 20 draws per model give."""
    change = rng.standard_normal((tables, 2)).sum(1)
    noise = rng.standard_normal((tables, 2, 20)).std(axis=2, ddof=1)
    yield row("compare_heads, outside of the band", "noise alone", "20 draws", np.abs(change) > 2 * np.hypot(*noise.T))


def circuits(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Whether a column explains effects that it has nothing to do with, and whether its top heads are a circuit's."""
    wrong: dict[str, list[bool]] = {"nested_r_squared": [], "hypergeometric_overlap": []}
    for heads in frames(rng, shape, likeness, tables):
        # The base column acts on what is explained, the added one does not.
        explained = heads.assign(effect=heads["prev"] + 0.5 * heads["dir_frac"])
        wrong["nested_r_squared"].append(nested_r_squared(explained, "effect", "dir_frac", "D_head").pvalue <= LEVEL)
        circuit, top = (set(heads[name].nlargest(23).index) for name in ("prev", "D_head"))  # a sixth of the heads each
        overlap = hypergeometric_overlap(len(heads), len(circuit), len(top), len(circuit & top))
        wrong["hypergeometric_overlap"].append(overlap.pvalue <= LEVEL)
    yield from (row(name, likeness.name, size_of(shape), found) for name, found in wrong.items())


def pairings(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`placebo_attenuation` of heads whose rotary columns are exchangeable."""
    wrong = [
        placebo_attenuation(*heads_with_pairings(rng, shape, likeness)).pvalue <= LEVEL for _ in range(tables // 4)
    ]
    yield row("placebo_attenuation", likeness.name, size_of(shape), wrong)


def edges(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`edge_effects(control="random")` of fresh models, whose heads write in random directions: eight edges a model."""
    found = []
    for seed in rng.integers(2**31, size=tables // 8):
        given = {"measure": "ind", "control": "random", "seed": int(seed)}
        found.append(edge_effects(fresh_model(int(seed)), ["L1H0.k", "L1H3.k"], **given))
    edges_of_all = pd.concat(found)
    for name in ("pvalue", "control_p"):
        wrong = edges_of_all[name] <= LEVEL
        yield row(f"edge_effects, {name}", "freshly initialised models", "8 edges a model", wrong.to_numpy())


def random_parts(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`control_p` of an effect from the law of its control effects, and of parts of the heads of fresh models."""
    for draws in (5, 19, 39):
        drawn = differences(rng, "heavy tails", (tables, draws + 1)) + rng.standard_t(3, (tables, 1))
        pvalues = control_test(drawn[:, 0], drawn[:, 1:])[1]
        yield row("control_p", "effect and control of one law", f"{draws} draws", pvalues <= LEVEL)
    for part in ("symmetric", "antisymmetric", "rope_phase"):
        found: list[float] = []
        for seed in rng.integers(2**31, size=max(1, tables // 24)):
            model = fresh_model(int(seed))
            tokens = repeated_sequences(attention_view(model), n_sequences=8, segment_length=16, seed=int(seed))
            given = {"task": induction(tokens), "control": "random", "draws": 19, "seed": int(seed)}
            found += list(ablation_sweep(model, part, **given)["control_p"])
        yield row(
            f"ablation_sweep, control_p, {part}", "freshly initialised models", "19 draws", np.array(found) <= LEVEL
        )


def random_heads(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`control_p` of four heads chosen at random beside random sets, where few heads have most of the effect."""
    layers, heads = shape
    wrong = []
    for _ in range(tables):
        effects = np.exp(3 * column(rng, 1, shape, likeness)[0])
        chosen: dict[int, list[int]] = {}
        for place in rng.choice(layers * heads, 4, replace=False):
            chosen.setdefault(int(place) // heads, []).append(int(place) % heads)
        own = [(layer, head) for layer in chosen for head in chosen[layer]]
        sets = head_sets(dict.fromkeys(chosen, heads), chosen, 19, rng)
        delta, *drawn = (sum(effects[layer, head] for layer, head in one) for one in [own, *sets])
        wrong.append(control_test(np.array([delta]), np.array([drawn]))[1].item() <= LEVEL)
    yield row("control_p of four heads, random sets", likeness.name, size_of(shape), wrong)


def random_groups(shape: tuple[int, int], likeness: Likeness, rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`excess_p` of `cache_prices`, of a random quarter of the key/value groups: a few have most of the price."""
    layers, groups = shape
    wrong = []
    for _ in range(tables):
        prices = np.exp(3 * column(rng, 1, shape, likeness)[0])
        chosen: dict[int, list[int]] = {}
        for place in rng.choice(layers * groups, layers * groups // 4, replace=False):
            chosen.setdefault(int(place) // groups, []).append(int(place) % groups)
        own = sum(prices[layer, group] for layer in chosen for group in chosen[layer])
        drawn = head_sets(dict.fromkeys(chosen, groups), chosen, 19, rng)
        others = [sum(prices[layer, group] for layer, group in one) for one in drawn]
        wrong.append((1 + np.sum(np.array(others) <= own)) / (1 + len(others)) <= LEVEL)
    yield row("cache_prices, excess_p of a random quarter of the groups", likeness.name, size_of(shape), wrong)


def planted_sets(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """P of `sufficient_heads`, from the file that `benchmarks/planted_sets.py level` writes; nothing is drawn here."""
    pvalues = pd.read_csv(PLANTED)["p"]
    name = "sufficient_heads, p of the set beside random sets"
    yield row(name, "models in which no set carries the task", f"{len(pvalues)} models", pvalues.to_numpy() <= LEVEL)


def detectors(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """P of `detect_heads` for the heads of fresh models: eight a model, which share sequences."""
    found = [
        detect_heads(fresh_model(int(seed)), n_sequences=16, null_draws=19, seed=int(seed))
        for seed in rng.integers(2**31, size=tables // 8)
    ]
    for score in ("prev", "dup", "ind"):
        pvalues = pd.concat(found)[f"{score}_p"].to_numpy()
        yield row(f"detect_heads, {score}_p", "freshly initialised models", "8 heads a model", pvalues <= LEVEL)


def dictionaries(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """`max_p` of `qk_attribution`: random features at a late query, and at an early one, whose norms differ."""
    for where, query in (("late query", 23), ("early query", 2)):
        for n in (1, 4):
            found = []
            for seed in rng.integers(2**31, size=tables if n == 1 else tables // 4):
                tokens = torch.randint(64, (n, 24), generator=torch.Generator().manual_seed(int(seed)))
                scores = [(prompt[None], query, int(rng.integers(query))) for prompt in tokens]
                table = qk_attribution(
                    fresh_model(int(seed)), scores, "L1H0", dictionary=random_dictionary(int(seed)), top=1
                )
                found.append(table.attrs["max_p"] <= LEVEL)
            size = "one score" if n == 1 else f"{n} scores"
            yield row("qk_attribution, max_p", f"random features, {where}", size, found)


def ratios(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """The interval of `faithfulness`, a ratio of means over pairs whose truth is .7, and a bootstrap's percentiles."""
    for n in (4, 8, 16, 32, 64):
        whole, ratio = rng.normal(5, 2, (tables, n)), rng.normal(0, 1, (tables, n))
        gaps = rng.lognormal(1, 0.7, (tables, n))
        laws = {
            "pairs: normal": (0.7 * whole + ratio, whole),
            "pairs: skewed": (0.7 * gaps * rng.lognormal(-0.18, 0.6, (tables, n)), gaps),
        }
        for law, (part, of) in laws.items():
            told_apart = np.abs(of.mean(1)) > scipy.stats.t.ppf(0.975, n - 1) * scipy.stats.sem(of, axis=1)
            wrong: dict[str, list[bool]] = {"faithfulness, interval": [], "faithfulness, bootstrap percentiles": []}
            for one, other in zip(part[told_apart], of[told_apart], strict=True):
                drawn = rng.integers(n, size=(2 * DRAWS, n))
                percentiles = np.quantile(one[drawn].mean(1) / other[drawn].mean(1), [LEVEL / 2, 1 - LEVEL / 2])
                for name, (low, high) in zip(wrong, (ratio_interval(one, other), percentiles), strict=True):
                    wrong[name].append(low > 0.7 or high < 0.7)  # no interval, as of some 4 pairs, is not wrong
            yield from (row(name, law, f"{n} pairs", found) for name, found in wrong.items())


def failing_pairs(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """The interval of `faithfulness` under other laws: pairs that fail, skewed additive noise, noise of several sizes.

    For each law and number of pairs: how often there is no interval, how often a given interval leaves out the truth,
    and how often `worst` is above the truth.
    """
    for n in (8, 16, 32):
        gaps = np.maximum(rng.normal(5, 1, (tables, n)), 0.5)
        laws = {
            f"{100 * share:.0f} % carry nothing": (
                np.where(rng.random((tables, n)) < share, 0.0, gaps) + rng.normal(0, 0.05, (tables, n)),
                1 - share,
            )
            for share in (0.05, 0.1, 0.2)
        }
        laws["lognormal noise added"] = (0.6 * gaps + rng.lognormal(0, 1, (tables, n)), 0.6 + np.exp(0.5) / 5)
        for noise in (0.02, 0.05, 0.1, 0.2, 0.4):
            laws[f"noise {noise:g} of the gap"] = (0.7 * gaps + 5 * noise * rng.standard_normal((tables, n)), 0.7)
        for law, (parts, truth) in laws.items():
            where = f"pairs: {law}", f"{n} pairs"
            ends = np.array([ratio_interval(part, gap) for part, gap in zip(parts, gaps, strict=True)])
            absent = np.isnan(ends[:, 0])
            least = (1 - unseen_share(n)) * np.where(absent, parts.mean(1) / gaps.mean(1), ends[:, 0])
            yield row("faithfulness, no interval", *where, absent)
            if law != "noise 0.02 of the gap":  # never has one
                given = ends[~absent]
                # A run of few tables, as tests make it, may have no interval.
                wrong = (given[:, 0] > truth) | (given[:, 1] < truth) if len(given) else [False]
                yield row("faithfulness, given interval", *where, wrong)
            yield row("faithfulness, worst", *where, least > truth)


def curved(rng: np.random.Generator, tables: int) -> Iterator[Row]:
    """Tests that take a control out by a line, where D_head depends on it by a curve and on prev not at all."""
    layers, heads = SMALL
    laws = {
        "a line": lambda c: c,
        "a square": lambda c: c**2 / np.sqrt(2),
        "a square of 1 + dir_frac": lambda c: (1 + c) ** 2 / np.sqrt(6),
        "a curve that saturates": lambda c: np.tanh(3 * c),
    }
    for r in (0.6, 0.9):
        for law, curve in laws.items():
            control, own, noise = (rng.standard_normal((tables, layers * heads)) for _ in range(3))
            x = curve(control) + 0.5 * noise
            y = np.exp(0.9 * (r * control + np.sqrt(1 - r**2) * own))
            where = f"D_head follows dir_frac by {law}, log prev by r {r:g}", size_of(SMALL)
            wrong = []
            for of_table in zip(x, y, control, strict=True):
                frame = pd.DataFrame(dict(zip(("D_head", "prev", "dir_frac"), of_table, strict=True)))
                strong = float(np.sort(frame["prev"])[-12])
                wrong.append(class_test(frame.assign(layer=0), threshold=strong).pvalue <= LEVEL)
            yield row("class_test", *where, wrong)
            for name, method, controls in (
                ("hybrid", "hybrid", [control]),
                ("rank", "rank", [control]),
                ("hybrid, its square too", "hybrid", [control, control**2]),
            ):
                pvalues = student(partial_correlations(x, y, controls, method), layers * heads - 2 - len(controls))
                yield row(f"partial_spearman, {name}", *where, pvalues <= LEVEL)
            for method in ("hybrid", "rank"):
                # `attenuation` gives an interval where the correlation before further controls is told apart from 0.
                low, high = np.quantile(
                    resampled(x, y, [control], method, layers, DRAWS), [LEVEL / 2, 1 - LEVEL / 2], axis=1
                )
                yield row(f"attenuation, any interval, {method}", *where, (low > 0) | (high < 0))


def blocks() -> list[Callable[[np.random.Generator, int], Iterator[Row]]]:
    """List what is measured; each takes a generator of its own and the number of tables."""
    found: list[Callable[[np.random.Generator, int], Iterator[Row]]] = []
    for shape in SHAPES:
        found += [partial(correlations, shape, likeness) for likeness in LIKENESSES]
        found.append(partial(true_correlations, shape))
    for likeness in (INDEPENDENT, VERY_ALIKE, DEPTH):
        found += [partial(measure, SMALL, likeness) for measure in (tables_of_heads, sweeps, shares)]
    found += [sign_flips, whole_sweeps, models, bands]
    # New measurements stand behind: the generators of those before keep their seeds.
    for likeness in (INDEPENDENT, VERY_ALIKE, DEPTH):
        found += [partial(measure, SMALL, likeness) for measure in (circuits, pairings)]
    found += [edges, random_parts]
    found += [partial(random_heads, SMALL, likeness) for likeness in (INDEPENDENT, VERY_ALIKE, DEPTH)]
    found += [detectors, ratios, dictionaries, failing_pairs, curved]
    return [
        *found,
        *(partial(random_groups, SMALL, likeness) for likeness in (INDEPENDENT, VERY_ALIKE, DEPTH)),
        planted_sets,
    ]


def measured(tables: int = TABLES, seed: int = SEED) -> pd.DataFrame:
    """Return all rates: `test, heads, size, tables, rate, se`."""
    to_measure = blocks()
    streams = np.random.default_rng(seed).spawn(len(to_measure))
    return pd.DataFrame([one for measure, rng in zip(to_measure, streams, strict=True) for one in measure(rng, tables)])


def percent(rates: pd.Series) -> str:
    """One rate, or the lowest and highest of several, in percent."""
    low, high = (f"{100 * rate:.1f}" for rate in (rates.min(), rates.max()))
    return low if low == high else f"{low} to {high}"


def published_likeness() -> str:
    """How much heads and layers resemble each other in the published tables, in a sentence."""
    layers, neighbours = [], []
    for name in PUBLISHED_HEADS:
        heads = published_heads(name)
        for variable in ("D_head", "dir_frac", "prev"):
            layers.append(intraclass_correlation(heads, variable).statistic)
            means = heads.assign(ranks=heads[variable].rank()).groupby("layer")["ranks"].mean().to_numpy()
            means = means - means.mean()
            neighbours.append((means[1:] * means[:-1]).sum() / (means**2).sum())
    of_layers, of_neighbours = (
        f"{round(min(found), 2) + 0:.2f} to {max(found):.2f} (median {np.median(found):.2f})"
        for found in (layers, neighbours)
    )
    return (
        f"In the {len(PUBLISHED_HEADS)} published tables `D_head`, `dir_frac` and `prev` have intra-class correlations "
        f"of {of_layers}; the mean ranks of neighbouring layers correlate by {of_neighbours}."
    )


def page_tables(results: pd.DataFrame) -> str:
    """The rates over heads as a Markdown table, for three likenesses; the others are in the file alone."""
    kinds = [likeness.name for likeness in (INDEPENDENT, VERY_ALIKE, DEPTH)]
    over_heads = results[results["heads"].isin(kinds) & results["size"].isin([size_of(shape) for shape in SHAPES])]
    over_heads = over_heads[~over_heads["test"].str.contains(NOT_ON_PAGE)]
    lines = ["| test | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for test, found in over_heads.groupby("test", sort=False):
        cells = [found.loc[found["heads"] == kind, "rate"] for kind in kinds]
        lines.append(f"| `{test}` | " + " | ".join(percent(cell) if len(cell) else "" for cell in cells) + " |")
    return "\n".join([*lines, "", published_likeness(), "", *faithfulness_table(results), "", *curved_table(results)])


def faithfulness_table(results: pd.DataFrame) -> list[str]:
    """Lines of a Markdown table: laws of pairs under which the interval of `faithfulness` was simulated."""
    of_laws = results[results["test"].isin(["faithfulness, no interval", "faithfulness, given interval"])]
    rates = of_laws.pivot(index="heads", columns=["size", "test"], values="rate")
    lines = ["| pairs | " + " | ".join(f"8, 16, 32 pairs: {said}" for said in ("no interval", "wrong interval")) + " |"]
    lines.append("|---|---|---|")
    for law in of_laws["heads"].unique():
        cells = []
        for test in ("faithfulness, no interval", "faithfulness, given interval"):
            found = [rates.loc[law, (f"{n} pairs", test)] for n in (8, 16, 32)]
            cells.append("" if np.isnan(found).any() else ", ".join(f"{100 * rate:.1f}" for rate in found))
        lines.append(f"| {law.removeprefix('pairs: ')} | {cells[0]} | {cells[1]} |")
    return lines


def curved_table(results: pd.DataFrame) -> list[str]:
    """Lines of a Markdown table: tests that take `dir_frac` out by a line, where D_head follows it by a curve."""
    of_curves = results[results["heads"].str.startswith("D_head follows dir_frac")]
    rates = of_curves.pivot(index="test", columns="heads", values="rate")
    laws = of_curves["heads"].str.extract(r"by (a .*), log prev")[0].unique()
    lines = ["| D_head follows `dir_frac` by | " + " | ".join(laws) + " |", "|---" * (len(laws) + 1) + "|"]
    for test in of_curves["test"].unique():
        cells = [
            " and ".join(
                f"{100 * rates.loc[test, f'D_head follows dir_frac by {law}, log prev by r {r:g}']:.1f}"
                for r in (0.6, 0.9)
            )
            for law in laws
        ]
        lines.append(f"| `{test}` | " + " | ".join(cells) + " |")
    return lines


def with_rates(page: str, results: pd.DataFrame) -> str:
    """The page with the rates between its two marks."""
    marks = "<!-- rates -->", "<!-- end of rates -->"
    between = f"{marks[0]}\n{page_tables(results)}\n{marks[1]}"
    return re.sub(f"{marks[0]}.*{marks[1]}", lambda _: between, page, flags=re.DOTALL)


def main(page: bool = False) -> None:
    """Measure, write and print all rates; `--page`: only put the file's rates into the page."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # BLAS reads its thread count when it is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    if not page:
        start = time.process_time()
        results = measured()
        results.to_csv(RESULTS, index=False)
        print(results.to_string(index=False))
        print(f"{time.process_time() - start:.0f} CPU seconds")
    PAGE.write_text(with_rates(PAGE.read_text(encoding="utf-8"), pd.read_csv(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
