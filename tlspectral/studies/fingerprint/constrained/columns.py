"""Columns of the tables of constrained training: evaluations, heads, kernels, formation, contrasts, rerouting.

FP is Li, "Fingerprint, Not Blueprint" (2026), section 10. `tlspectral study constrained -o FOLDER` writes all of them.
"""

from tlspectral.studies.common.columns import SEED
from tlspectral.studies.fingerprint.published_columns import (
    ARM,
    BEHAVIOUR,
    EVALUATIONS,
    KERNELS,
    NEEDED,
    RAW,
    RUN,
    SPECTRA,
)
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_COARSE = "That nothing of the circuit was there before. Steps are as coarse as the evaluations."
_FORMATION = (
    Column("formed_loss",
        "First evaluation with ce_pred below half of ln V + 0.15 nats. NaN where the run ended before.", "step",
        range="0 .. steps", source="FP 10",
        does_not_establish="That an induction head works: a rotary model may dip below the threshold without one."),
    Column("formed_both",
        "First evaluation at which the loss is below that threshold and ind_best above 0.5. NaN where the run ended "
        "before.", "step", range="0 .. steps", does_not_establish=_COARSE),
    Column("crossing_loss",
        "Where the line between two evaluations meets the threshold of formed_loss. NaN where formed_loss is.", "step",
        range="0 .. steps", does_not_establish="The step itself: losses do not fall along lines."),
    Column("ind_at_formed_loss", "ind_best at formed_loss.", "attention probability", range="0 .. 1",
        does_not_establish=NEEDED),
    Column("last_step", "Step of the run's last evaluation.", "step", range="0 .. steps",
        does_not_establish="That the run went on as long as others: runs stop some steps after formation where the "
        "preset says so."),
)

_FEW = "More than an order of these arms at these sizes; with five seeds no p-value is below 1/252."
_LOWER = "A mean where runs had not formed: they count at their last step, so that it is a lower bound."


def _of_both(name: str, meaning: str, unit: str, span: str, limit: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{name}_{side}", meaning.format(side), unit, range=span, source="FP Table 4", does_not_establish=limit)
        for side in ("slower", "faster")
    )


_CONTRASTS = (
    Column("criterion", "Which criterion of formation the steps are by: loss is formed_loss, both is formed_both.",
        "label", range="both, loss", source="this package; FP has loss"),
    Column("prediction", "Number of the prediction.", "label", range="P1, P2, P3, P4", source="FP 10"),
    Column("slower", "Arm that is said to form later, not at all, or just as early.", "label", range="an arm",
        source="FP 10", does_not_establish="That it is slower: see verdict."),
    Column("faster", "Arm that it is compared with.", "label", range="an arm", source="FP 10",
        does_not_establish="That it is faster: see verdict."),
    *_of_both("n", "Seeds of the {} arm.", "count", "1 .. seeds", ""),
    *_of_both("not_formed", "Runs of the {} arm that had not formed.", "count", "0 .. seeds",
              "That they never would: they had so many steps."),
    *_of_both("mean", "Mean step of formation of the {} arm, runs that had not formed at their last step.", "step",
              "0 .. steps", _LOWER),
    *_of_both("sd", "Standard deviation of the same (ddof 1) over seeds of the {} arm; NaN for one seed.", "step",
              "0 .. inf", _LOWER),
    Column("ratio", "mean_slower / mean_faster.", "ratio", range="0 .. inf", source="FP Table 4", also_known_as="delay",
        does_not_establish=_LOWER),
    Column("statistic", "Mann-Whitney U of the slower arm: pairs of runs in which it is later, ties counted half.",
        "count", range="0 .. n_slower x n_faster", source="FP Table 4", also_known_as="U", does_not_establish=_FEW),
    Column("pvalue",
        "One-sided p of later formation, exact with ties. NaN, as all of the test, where an arm has one seed.",
        "probability", range="0 .. 1", does_not_establish=_FEW),
    Column("q", "pvalue after Benjamini and Hochberg, over the contrasts of the criterion.", "probability",
        range="0 .. 1", also_known_as="false discovery rate", does_not_establish=_FEW),
    Column("pvalue_paper", "The same p as if there were no ties.", "probability", range="0 .. 1", source="FP Table 4",
        does_not_establish="A correct level: formation steps have ties."),
    Column("q_paper", "pvalue_paper adjusted without the cumulative minimum.", "probability", range="0 .. 1",
        source="FP Table 4", does_not_establish="A correct level: it is how FP's own came about."),
    Column("rank_biserial", "2 U / (n_slower n_faster) - 1: how much more often the slower arm is the later one.",
        "ratio", range="-1 .. 1", source="FP Table 4", does_not_establish=_FEW),
    Column("hodges_lehmann", "Median of all differences of steps, slower less faster.", "step", range="-inf .. inf",
        source="FP Table 4", also_known_as="Hodges-Lehmann shift",
        does_not_establish="A shift where runs had not formed: it is then a lower bound."),
    Column("predicted", "What was predicted of the slower arm.", "label", range="delay, no delay, no formation",
        source="FP 10"),
    Column("verdict",
        "At q < 0.05: a delay holds or is not shown, no delay is falsified or not falsified; no formation holds "
        "where no run formed, is falsified where all did, else some formed. Before the runs have ended it is open.",
        "label", range="holds, not shown, falsified, not falsified, some formed, open, one seed", source="FP 10",
        does_not_establish="That not falsified is true: few seeds show large delays only."),
)

_MEAN_SCORE = (
    "That the kernel is what the head attends by: it is a mean of scores over nine offsets, to which contents "
    "contribute."
)
_REROUTING = (
    Column("peak_offset",
        "Offset with the largest score of the previous-token head's kernel; -1 is the previous token.", "token",
        range="-8 .. 0", source="FP 10, Fig. 5", does_not_establish=_MEAN_SCORE),
    Column("kernel_distance",
        "Root mean square over offsets of the difference to a free run's kernel, each less its mean; mean over the "
        "free runs with the same positions, itself left out. NaN for fewer than two free runs.", "logit",
        range="0 .. inf", source="FP 10",
        does_not_establish=_MEAN_SCORE
        + " Runs that stopped soon after formation differ in how far training had gone."),
    Column("free_spread", "Mean of kernel_distance over the free runs with the same positions: what seeds alone do.",
        "logit", range="0 .. inf", source="FP 10", does_not_establish="A precise number with few seeds."),
    Column("distance_ratio", "kernel_distance / free_spread.", "ratio", range="0 .. inf", source="FP 10",
        does_not_establish=_MEAN_SCORE),
)

_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_GRID = "`tlspectral.studies.fingerprint.constrained.constrained_grid`; "
_WRITES = "`tlspectral study constrained -o FOLDER` writes "

GRID = {
    name: Table(f"constrained_grid.{name}", f"{_GRID}{_WRITES}{name}.parquet{also}", columns)
    for name, also, columns in (
        ("evaluations", "", (*RUN, *EVALUATIONS)),
        ("heads", "; `previous_token_heads` takes rows of it", (*RUN, *_HEAD, *BEHAVIOUR, *SPECTRA, *RAW)),
        ("kernels", "", (*RUN, *_HEAD, *KERNELS)),
        ("formation", "", (ARM, SEED, *_FORMATION)),
        ("table4", "; `formation_tests` returns it", _CONTRASTS),
        ("rerouting", "", (*RUN, *_HEAD, BEHAVIOUR[0], *SPECTRA, *RAW, *_REROUTING)),
    )
}
TABLES = tuple(GRID.values())
