"""FP section 10: what the constrained two-layer runs say about necessity and cost."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral_studies.common.seed_intervals import t_interval
from tlspectral_studies.fingerprint.constrained import formation, formation_tests, previous_token_heads, rerouting
from tlspectral_studies.fingerprint.constrained.presets import loss_threshold
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.constrained_training import (
    VOCABULARY,
    last_evaluations,
    least_kernel_q,
    of_arm,
)
from tlspectral_studies.fingerprint.replication.sentences.power import detectable_shift, shifts_power, significant
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, Choice, Power, Reading, Sentence
from tlspectral_studies.fingerprint.statistics import mann_whitney

_WHERE = "FP, section 10"
_FREE = {"ape_sym": "ape_free", "rope_sym": "rope_free", "rope_imag": "rope_free"}
_SCORES = {"ce_pred": -1, "prev_best": 1, "ind_best": 1}
_STRONG = 0.5
_RANDOM = float(np.sqrt(0.5))  # dir_frac of a random M
_SYMMETRIC = 0.01  # dir_frac that counts as symmetric
_CONSTRAINTS = ("P2", "P3", "P4")


def capability_is_intact(tables: PublishedTables) -> Iterator[Sentence]:
    """No arm loses final capability: final scores of all arms against the free ones."""
    last = last_evaluations(tables.constrained.evaluations)
    rows = [
        (arm, score, of_arm(last, arm, score), of_arm(last, free, score), sign)
        for arm, free in _FREE.items()
        for score, sign in _SCORES.items()
    ]
    pvalues = [mann_whitney(sign * free, sign * own, alternative="greater").pvalue for _, _, own, free, sign in rows]
    worse = significant(np.array(pvalues))
    below = last["ce_pred"] < loss_threshold(VOCABULARY)
    good = below & (last[["prev_best", "ind_best"]] > _STRONG).all(axis=1)
    listed = ", ".join(
        f"{score} of {arm} {own.mean():.3f} against {free.mean():.3f} (p = {p:.2g})"
        for (arm, score, own, free, _), p, lost in zip(rows, pvalues, worse, strict=True)
        if lost
    )
    lowest = {arm: group[["prev_best", "ind_best"]].to_numpy().min() for arm, group in last.groupby("arm")}
    yield Sentence(
        "sentence/capability",
        "FP, abstract and section 10",
        "reroutes around every ban with capability intact; no arm loses final capability (all reach the task floor "
        "with strong prev and induction heads)",
        "final loss of predictable tokens and best prev and ind of each constrained arm against the free arm with "
        "the same positions, one-sided exact Mann-Whitney, Holm over 9",
        len(last),
        shifts_power(5, 5, len(rows)),
        Reading(
            "none of the nine is worse, and every run has strong heads; how many are worse",
            float(worse.sum()),
            not worse.any() and bool(good.all()),
        ),
        Reading.every(
            f"every run ends below the loss of formation with prev and ind above {_STRONG}; runs",
            good,
            "intact: the final loss",
        ),
        f"worse: {listed or 'none'}; lowest final prev or ind "
        + ", ".join(f"{arm} {value:.2f}" for arm, value in lowest.items()),
        choices=(
            Choice(
                "level",
                f"prev and ind above {_STRONG}",
                Reading.every(
                    f"every run ends below the loss of formation with prev and ind above {1.5 * _STRONG}; runs",
                    below & (last[["prev_best", "ind_best"]] > 1.5 * _STRONG).all(axis=1),
                ),
            ),
        ),
    )


def every_constraint_delays(tables: PublishedTables) -> Iterator[Sentence]:
    """Every constraint delays formation significantly; none blocks it."""
    steps = formation(tables.constrained.evaluations, vocabulary=VOCABULARY)
    tests = formation_tests(steps)
    constraints = tests.loc[tests["prediction"].isin(_CONSTRAINTS)]
    both = constraints["pvalue"].to_numpy()
    formed = bool(steps["formed_both"].notna().all())
    listed = ", ".join(
        f"{row['slower']} by {row['criterion']} {row['pvalue']:.4f}" for _, row in constraints.iterrows()
    )
    yield Sentence(
        "sentence/every_delay",
        "FP, abstract and Table 4",
        "Every constraint delays formation significantly; none blocks it",
        "steps of formation of the three constrained arms against the free arm, one-sided exact Mann-Whitney with "
        "ties, by the loss and by loss and induction score, Holm over 6",
        len(steps),
        shifts_power(5, 5, len(both)),
        Reading(
            "all six are significant and all runs form by both criteria; largest p",
            float(both.max()),
            formed and bool(significant(both).all()),
        ),
        None,
        f"p: {listed}",
        choices=(
            Choice(
                "test",
                "one-sided",
                Reading(
                    "all six are significant by two-sided tests; largest p",
                    float(2 * both.max()),
                    formed and bool(significant(2 * both).all()),
                ),
            ),
        ),
    )


def kernel_is_indistinguishable(tables: PublishedTables) -> Iterator[Sentence]:
    """The symmetric RoPE arm's kernel is indistinguishable from the free arm's: five runs against five."""
    heads = rerouting(tables.constrained.heads, tables.constrained.kernels)
    ratios = of_arm(heads, "rope_sym", "distance_ratio")
    ratio, interval = float(ratios.mean()), t_interval(pd.Series(ratios))
    least = least_kernel_q(tables, "rope_sym")
    offsets = tables.constrained.kernels["offset"].nunique()
    floor = 2 / math.comb(10, 5)
    apart = math.ceil(floor * offsets / LEVEL)
    yield Sentence(
        "sentence/kernel",
        _WHERE,
        "its positional kernel is indistinguishable from the free arm's",
        "rope_sym's kernels against rope_free's at 9 offsets (BH), and their root-mean-square distance over that "
        "among free runs",
        10,
        Power(
            f"five runs against five have a two-sided p of {floor:.4f} at best: at least {apart} of {offsets} offsets "
            f"have to be apart in all runs for a q of {LEVEL}",
            floor,
            detectable_shift(5, 5, 2 * offsets // apart),
            f"shift at {apart} offsets, in sd of the runs",
        ),
        Reading(
            "they are no further from free kernels than these from each other, and no offset differs; the ratio",
            ratio,
            ratio <= 1 and least > LEVEL,
        ),
        Reading("no offset differs significantly; smallest q", least, least > LEVEL, "the distance over all offsets"),
        "no difference that is found is no proof that there is none; the ratio has a 95 % interval over seeds of "
        f"{interval['low']:.2f} to {interval['high']:.2f}",
        within=interval["high"] <= 1,
    )


def ape_is_antisymmetric(tables: PublishedTables) -> Iterator[Sentence]:
    """The fast learned-absolute solution is antisymmetric."""
    heads = previous_token_heads(tables.constrained.heads)
    ape, rope = (of_arm(heads, arm, "dir_frac_raw") for arm in ("ape_free", "rope_free"))
    pvalue = mann_whitney(ape, rope, alternative="greater").pvalue
    yield Sentence(
        "sentence/ape_antisymmetric",
        _WHERE,
        "the fast APE solution is antisymmetric embedding-matching",
        "dir_frac of the previous-token head of ape_free, against sqrt(1/2) of a random M and against rope_free's",
        len(ape) + len(rope),
        shifts_power(len(ape), len(rope)),
        Reading.every(f"above {_RANDOM:.3f} in every run, so that M_A outweighs M_S; runs", ape > _RANDOM),
        Reading(
            "larger than under RoPE, one-sided exact Mann-Whitney; p",
            pvalue,
            pvalue <= LEVEL,
            "all of it: M_A is a part",
        ),
        f"dir_frac {_range(ape)} against {_range(rope)} of rope_free: M_A has {float(np.min(ape)) ** 2:.0%} to "
        f"{float(np.max(ape)) ** 2:.0%} of the squared norm of M; a random M and a pure shift have one half",
    )


def impossible_without_phase(tables: PublishedTables) -> Iterator[Sentence]:
    """Directional attention through a symmetric M: impossible under absolute positions, says the abstract."""
    heads = previous_token_heads(tables.constrained.heads)
    ape, rope = (of_arm(heads, arm, "prev") for arm in ("ape_sym", "rope_sym"))
    symmetric = of_arm(heads, "ape_sym", "dir_frac_raw")
    does = (ape > _STRONG) & (symmetric < _SYMMETRIC)
    pvalue = mann_whitney(rope, ape, alternative="greater").pvalue
    yield Sentence(
        "sentence/impossible",
        "FP, abstract and section 10",
        "directional attention through a symmetric M, which is impossible under absolute positions",
        f"runs of ape_sym whose best head has prev > {_STRONG} with dir_frac < {_SYMMETRIC}; its prev against "
        "rope_sym's",
        len(ape) + len(rope),
        shifts_power(len(ape), len(rope)),
        None,
        Reading("no run does; how many do", float(does.sum()), not does.any(), "direction: prev through a causal mask"),
        f"needs the weights of the runs: a causal mask lets a symmetric score look back, as FP says, so prev is no "
        f"directional score, and scores at later positions are not in the tables. prev {_range(ape)} with dir_frac "
        f"{_range(symmetric, 4)}, under RoPE {_range(rope)} (less well than there: p = {pvalue:.2g})",
    )


def _range(values: Float64[np.ndarray, "runs"], digits: int = 2) -> str:
    return f"{float(np.min(values)):.{digits}f} to {float(np.max(values)):.{digits}f}"
