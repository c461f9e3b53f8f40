"""FP section 10, Table 4 and Fig. 5: formation, dissociation and kernels of the constrained two-layer runs."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.stats import benjamini_hochberg
from tlspectral.tables.schema import Schema, columns, require
from tlspectral_studies.fingerprint.constrained import formation, formation_tests, previous_token_heads, rerouting
from tlspectral_studies.fingerprint.published import CONSTRAINED, published_constrained
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables
from tlspectral_studies.fingerprint.statistics import mann_whitney

VOCABULARY = 64
"""Tokens of the published runs' task."""

ARMS_BESIDE_PUBLISHED = Schema(
    "arms_beside_published",
    (
        *columns(
            """
            arm
            seeds    | count | Runs of the arm in the grid.
            unformed | count | Runs of the grid that did not form, by both criteria.
            """,
            CONSTRAINED,
        ),
        *(
            column
            for name, whose in (
                ("published", "published runs by the loss"),
                ("loss", "the grid's by the loss"),
                ("both", "the grid's by loss and induction score"),
            )
            for column in columns(f"""
                {name}_mean  | step  | Mean step of formation over the runs that formed, {whose}.
                {name}_sd    | step  | Standard deviation of the same over seeds (ddof 1).
                {name}_ratio | ratio | {name}_mean over that of the free arm with the same positions.
            """)
        ),
    ),
    "`arms_beside_published` of `tlspectral_studies.fingerprint`; `tlspectral study replicate --grid TABLE` prints it",
)

_SYMMETRIC = ("ape_sym", "rope_sym")
_SECTION, _TABLE = "FP, section 10", "FP, Table 4"
_FORMATION, _DISSOCIATION, _KERNELS = (f"FP, section 10 and Fig. 5{panel}" for panel in "bcd")


def formation_steps(tables: PublishedTables) -> Iterator[Claim]:
    """Steps until formation by the loss, mean and standard deviation over seeds (Fig. 5b)."""
    steps = formation(tables.constrained.evaluations, vocabulary=VOCABULARY)
    mean, deviation = (_over_seeds(steps, "formed_loss", statistic) for statistic in ("mean", "std"))
    means = {"ape_free": ("600", "0"), "rope_free": ("940", "55"), "ape_sym": ("1740", "241")}
    for arm, (of_mean, of_deviation) in means.items():
        yield Claim(f"section10/{arm}/mean", _FORMATION, f"{arm}: mean formation, steps", of_mean, mean[arm])
        yield Claim(
            f"section10/{arm}/sd",
            _FORMATION,
            f"{arm}: standard deviation over seeds, steps",
            of_deviation,
            deviation[arm],
            remark="evaluations are 100 steps apart" if arm == "ape_free" else "",
        )
    ratios = (("ape_sym", "ape_free", "2.9"), ("rope_sym", "rope_free", "1.66"), ("rope_imag", "rope_free", "~1.4"))
    for arm, free, text in ratios:
        what = f"{arm}: mean formation over that of {free}"
        yield Claim(f"section10/{arm}/ratio", _FORMATION, what, text, float(np.divide(mean[arm], mean[free])))
    formed = float(steps["formed_loss"].notna().sum())
    yield Claim("section10/formed", _SECTION, "runs that form the circuit, of 25", "25", formed)


def delays(tables: PublishedTables) -> Iterator[Claim]:
    """Table 4: one-sided tests of the four pre-registered contrasts on formation by the loss."""
    steps = formation(tables.constrained.evaluations, vocabulary=VOCABULARY)
    tests = formation_tests(steps)
    of_loss = [test for _, test in tests.loc[tests["criterion"] == "loss"].iterrows()]
    printed = {
        "P1": ("0.0040", "0.016", "+1.00", "+300"),
        "P3": ("0.0040", "0.008", "+1.00", "+1200"),
        "P4": ("0.0040", "0.005", "+1.00", "+600"),
        "P2": ("0.0079", "0.008", "+0.92", "+400"),
    }
    of_paper = benjamini_hochberg(np.array([test["pvalue_paper"] for test in of_loss])).q
    for test, q_of_paper in zip(of_loss, of_paper, strict=True):
        prediction = test["prediction"]
        p, q, effect, shift = printed[prediction]
        what = f"{prediction} {test['slower']} > {test['faster']}"
        row = f"table4/{prediction}"
        yield Claim(
            f"{row}/p",
            _TABLE,
            f"{what}: exact Mann-Whitney p",
            p,
            test["pvalue"],
            if_differs=f"{test['pvalue_paper']:.4f} is exact as if there were no ties; runs that form at the same "
            "evaluation are tied",
        )
        yield Claim(
            f"{row}/q",
            _TABLE,
            f"{what}: q (BH over four)",
            q,
            test["q"],
            if_differs=f"{test['q_paper']:.4f} is p n / rank without the cumulative minimum of BH"
            if test["q_paper"] > q_of_paper
            else f"{test['q_paper']:.4f} goes with the p that takes no account of ties",
        )
        yield Claim(f"{row}/effect", _TABLE, f"{what}: rank-biserial", effect, test["rank_biserial"])
        yield Claim(f"{row}/shift", _TABLE, f"{what}: Hodges-Lehmann shift, steps", shift, test["hodges_lehmann"])
    worst = max(test["q"] for test in of_loss)
    yield Claim("table4/q", "FP, abstract", "largest q of the four contrasts", "<= 0.016", worst)


def penalties(tables: PublishedTables) -> Iterator[Claim]:
    """Values of both penalties at the end: the section says that they are enforced."""
    last = last_evaluations(tables.constrained.evaluations)
    share = of_arm(last, "rope_imag", "penalty").max()
    heads, every = previous_token_heads(tables.constrained.heads), last_evaluations(tables.constrained.heads)
    shares = [of_arm(heads, arm, "dir_frac_raw") for arm in _SYMMETRIC]
    medians = [float(np.median(values)) for values in shares]
    largest = max(of_arm(every, arm, "dir_frac_raw").max() for arm in _SYMMETRIC)
    least, most = min(values.min() for values in shares), max(values.max() for values in shares)
    remark = f"median over seeds; single runs {least:.4f} to {most:.4f}, all eight heads up to {largest:.3f}"
    what = "symmetric arms: dir_frac of the previous-token head at the end, {} of two arms"
    yield Claim("section10/phase_share", _SECTION, "rope_imag: largest phase share at the end", "0.000", float(share))
    yield Claim("section10/dir/low", _SECTION, what.format("lower"), "0.004", min(medians), remark=remark)
    yield Claim("section10/dir/high", _SECTION, what.format("higher"), "0.006", max(medians), remark=remark)


def dissociation(tables: PublishedTables) -> Iterator[Claim]:
    """Static antisymmetry and phase dissociate: rope_sym keeps the phase, rope_imag forms without it (Fig. 5c)."""
    heads = previous_token_heads(tables.constrained.heads)
    without, symmetric_phase = (of_arm(heads, arm, "rope_imag_frac_raw") for arm in ("rope_imag", "rope_sym"))
    symmetric = of_arm(heads, "rope_sym", "dir_frac_raw")
    seed = int(of_arm(heads, "rope_sym", "seed")[symmetric.argmin()])
    yield Claim(
        "section10/rope_imag/phase",
        _DISSOCIATION,
        "rope_imag: rope_imag_frac of the previous-token head",
        "0.005",
        float(without.mean()),
        remark=f"mean of the previous-token heads, single runs {without.min():.4f} to {without.max():.4f}",
    )
    what = "rope_sym: {} of the previous-token head{}"
    for row, measure, seeds, text, value, reason in (
        ("phase", "rope_imag_frac", "", "0.52", symmetric_phase.mean(), ""),
        (
            "dir/low",
            "smallest dir_frac",
            " among seeds",
            "0.004",
            symmetric.min(),
            f"seed {seed} is at {symmetric.min():.4f}",
        ),
        ("dir/high", "largest dir_frac", " among seeds", "0.005", symmetric.max(), ""),
    ):
        row = f"section10/rope_sym/{row}"
        yield Claim(row, _DISSOCIATION, what.format(measure, seeds), text, float(value), if_differs=reason)


def kernels(tables: PublishedTables) -> Iterator[Claim]:
    """The previous-token head's kernel: same as free under symmetry, another one without phase (Fig. 5d)."""
    constrained = tables.constrained
    heads = rerouting(constrained.heads, constrained.kernels)
    distance = _over_seeds(heads, "distance_ratio", "mean")
    peaks = float((of_arm(heads, "rope_imag", "peak_offset") == -1).sum())
    what = "smallest q (BH over 9 offsets) of Mann-Whitney tests of its kernels against those of rope_free"
    times = "root-mean-square distance from the free kernels over that among them: {:.1f}"
    yield Claim("section10/peaks", _KERNELS, "rope_imag: runs, of 5, whose kernel peaks at offset -1", "5", peaks)
    for arm, seen, text in (("rope_sym", "indistinguishable", "> 0.05"), ("rope_imag", "different", "< 0.05")):
        least = least_kernel_q(tables, arm)
        remark = times.format(distance[arm])
        yield Claim(f"section10/{arm}/kernel", _KERNELS, f"{arm}: {what}, {seen}", text, least, remark=remark)


def arms_beside_published(steps: pd.DataFrame) -> pd.DataFrame:
    """Compare formation in the published runs and in a grid of one's own.

    Args:
        steps: `formation.parquet` of `tlspectral_studies.fingerprint.constrained`: `arm, seed, formed_loss,
            formed_both`, in steps.

    Returns:
        DataFrame, an arm a row. Columns: `arm, seeds, unformed, published_mean, published_sd, published_ratio,
        loss_mean, loss_sd, loss_ratio, both_mean, both_sd, both_ratio`. Means are over the runs that formed: with
        `unformed` above 0 they are too low.

    Raises:
        ValueError: a column is missing.

    What it does not establish: the same experiment. A quick grid is smaller, learns faster and stops early; steps of
    the two cannot be compared, quotients can.
    """
    require(steps, ("arm", "seed", "formed_loss", "formed_both"), "a constrained grid, formation.parquet")
    published = formation(published_constrained().evaluations, vocabulary=VOCABULARY)
    over_seeds = {
        name: [_over_seeds(table, column, statistic) for statistic in ("mean", "std")]
        for name, table, column in (
            ("published", published, "formed_loss"),
            ("loss", steps, "formed_loss"),
            ("both", steps, "formed_both"),
        )
    }
    rows = []
    for arm in pd.unique(steps["arm"]):
        runs = of_arm(steps, arm, "formed_both")
        row: dict[str, object] = {"arm": arm, "seeds": len(runs), "unformed": int(np.isnan(runs).sum())}
        for name, (mean, deviation) in over_seeds.items():
            free = mean.get(f"{str(arm).split('_')[0]}_free", np.nan)
            row[f"{name}_mean"] = mean.get(arm, np.nan)
            row[f"{name}_sd"] = deviation.get(arm, np.nan)
            row[f"{name}_ratio"] = mean.get(arm, np.nan) / free
        rows.append(row)
    return ARMS_BESIDE_PUBLISHED.frame(rows)


def least_kernel_q(tables: PublishedTables, arm: str) -> float:
    """Smallest q (BH over offsets) of tests of an arm's kernels against those of rope_free."""
    constrained = tables.constrained
    chosen = previous_token_heads(constrained.heads)[["arm", "seed", "step", "layer", "head"]]
    curves = constrained.kernels.merge(chosen, on=list(chosen))
    return float(_offset_tests(curves, arm, "rope_free").min())


def _offset_tests(curves: pd.DataFrame, arm: str, other: str) -> Float64[np.ndarray, "offsets"]:
    """q-values of the two arms' scores at each offset."""
    pvalues = [
        mann_whitney(of_arm(at_offset, arm, "score"), of_arm(at_offset, other, "score")).pvalue
        for _, at_offset in curves.groupby("offset")
    ]
    return benjamini_hochberg(np.array(pvalues)).q


def of_arm(table: pd.DataFrame, arm: str, column: str) -> Float64[np.ndarray, "rows"]:
    """A column's numbers in the rows of an arm."""
    return np.asarray(table.loc[table["arm"] == arm, column], dtype=np.float64)


def _over_seeds(table: pd.DataFrame, column: str, statistic: str) -> dict[str, float]:
    """Mean or standard deviation (ddof 1) by arm."""
    return table.groupby("arm")[column].agg(statistic).to_dict()


def last_evaluations(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of each run's last evaluation."""
    return table.loc[table["step"] == table.groupby(["arm", "seed"])["step"].transform("max")]
