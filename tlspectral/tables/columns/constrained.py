"""Columns of the tables of constrained training: evaluations, heads, kernels, formation, contrasts, rerouting.

FP is Li, "Fingerprint, Not Blueprint" (2026), section 10. `tlspectral study constrained -o FOLDER`
writes all of them.
"""

from dataclasses import replace

from tlspectral.tables.columns.canonical import SEED, STEP
from tlspectral.tables.columns.entry import Column, Table
from tlspectral.tables.columns.heads import COLUMNS

_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_ARM = Column(
    "arm",
    "Kind of model: rope or ape (learned absolute positions), then free (no constraint), sym (symmetric M) or imag (no "
    "Im M_t).",
    "label", "ape_free, ape_sym, rope_free, rope_sym, rope_imag, or one's own", "FP 10", "",
    "That the constraint holds exactly: penalties are soft.",
)  # fmt: skip
_RUN = (_ARM, SEED, STEP)
_NEEDED = "That this head is what the loss depends on."

_EVALUATIONS = (
    Column(
        "loss", "Cross-entropy over all targets of the held-out sequences.",
        "nat", "0 .. inf", "FP 10", "",
        "That the task is learned: noise is among the targets.",
    ),
    Column(
        "ce_pred", "Cross-entropy over the targets that the map decides.",
        "nat", "0 .. inf", "FP 10", "",
        "That an induction circuit is there: rotary models rest for long just above the threshold of formation.",
    ),
    Column(
        "ce_unpred", "Cross-entropy over the noise targets.",
        "nat", "0 .. inf", "FP 10", "",
        "That the task is learned: noise cannot be predicted, whatever a model knows.",
    ),
    Column(
        "prev_best", "prev of the head where it is largest.",
        "attention probability", "0 .. 1", "FP 10", "",
        _NEEDED,
    ),
    Column(
        "ind_best", "ind of the head where it is largest.",
        "attention probability", "0 .. 1", "FP 10", "",
        _NEEDED,
    ),
    Column(
        "penalty", "Value of the arm's penalty, without its weight; NaN in a free arm.",
        "of the penalty", "0 .. 1 for those of FP", "FP 10", "",
        "Anything of the other channel: a symmetric M says nothing of Im M_t.",
    ),
)  # fmt: skip

_SPECTRA = tuple(
    replace(COLUMNS[name], meaning=f"{said} Of the operator with the norm's gain folded in, and centred.")
    for name, said in (
        ("dir_frac", "||M_A|| / ||M||."),
        ("D_head", "sum |Im l| / sum |l|."),
        ("rope_imag_frac", "sum_t ||Im M_t|| / sum_t (||Re M_t|| + ||Im M_t||); NaN without rotary positions."),
    )
)
_RAW = tuple(
    replace(
        own,
        name=f"{own.name}_raw",
        meaning=f"{own.name} of the weights as they are stored, without the norm's gain.",
        source="FP 10, which reports these",
        does_not_establish="The operator that the model applies, which has the norm's gain in it: " + own.name + ".",
    )
    for own in _SPECTRA
)
_BEHAVIOUR = (
    Column(
        "prev",
        "Attention to the previous token on the random-map task, mean over sequences and queries from a quarter of the "
        "sequence on.",
        "attention probability", "0 .. 1", "FP 10", "",
        _NEEDED,
    ),
    Column(
        "ind",
        "Attention to all keys that follow an earlier copy of the query's token, mean over the same; a query whose "
        "token is new counts as 0.",
        "attention probability", "0 .. 1", "FP 10", "",
        _NEEDED,
    ),
)  # fmt: skip

_KERNELS = (
    Column(
        "offset", "Position of the key less that of the query; -1 is the previous token.",
        "token", "-8 .. 0", "FP 10", "",
        "Nothing: a place.",
    ),
    Column(
        "score",
        "Mean attention score at the offset before the softmax, over sequences and queries from a quarter of the "
        "sequence on.",
        "logit", "-inf .. inf", "FP 10, Fig. 5", "relative-position kernel",
        "That the head attends by position: contents contribute to the mean.",
    ),
)  # fmt: skip

_COARSE = "That nothing of the circuit was there before. Steps are as coarse as the evaluations."
_FORMATION = (
    Column(
        "formed_loss",
        "First evaluation with ce_pred below half of ln V + 0.15 nats. NaN where the run ended before.",
        "step", "0 .. steps", "FP 10", "",
        "That an induction head works: a rotary model may dip below the threshold without one.",
    ),
    Column(
        "formed_both",
        "First evaluation at which the loss is below that threshold and ind_best above 0.5. NaN where the run ended "
        "before.",
        "step", "0 .. steps", "this package", "",
        _COARSE,
    ),
    Column(
        "crossing_loss",
        "Where the line between two evaluations meets the threshold of formed_loss. NaN where formed_loss is.",
        "step", "0 .. steps", "this package", "",
        "The step itself: losses do not fall along lines.",
    ),
    Column(
        "ind_at_formed_loss", "ind_best at formed_loss.",
        "attention probability", "0 .. 1", "this package", "",
        _NEEDED,
    ),
    Column(
        "last_step", "Step of the run's last evaluation.",
        "step", "0 .. steps", "this package", "",
        "That the run went on as long as others: runs stop some steps after formation where the preset says so.",
    ),
)  # fmt: skip

_FEW = "More than an order of these arms at these sizes; with five seeds no p-value is below 1/252."
_LOWER = "A mean where runs had not formed: they count at their last step, so that it is a lower bound."


def _of_both(name: str, meaning: str, unit: str, span: str, limit: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{name}_{side}", meaning.format(side), unit, span, "FP Table 4", "", limit)
        for side in ("slower", "faster")
    )


_CONTRASTS = (
    Column(
        "criterion", "Which criterion of formation the steps are by: loss is formed_loss, both is formed_both.",
        "label", "both, loss", "this package; FP has loss", "",
        "Nothing: a label.",
    ),
    Column(
        "prediction", "Number of the prediction.",
        "label", "P1, P2, P3, P4", "FP 10", "",
        "Nothing: a label.",
    ),
    Column(
        "slower", "Arm that is said to form later, not at all, or just as early.",
        "label", "an arm", "FP 10", "",
        "That it is slower: see verdict.",
    ),
    Column(
        "faster", "Arm that it is compared with.",
        "label", "an arm", "FP 10", "",
        "That it is faster: see verdict.",
    ),
    *_of_both("n", "Seeds of the {} arm.", "count", "2 .. seeds", "Nothing: a count."),
    *_of_both("not_formed", "Runs of the {} arm that had not formed.", "count", "0 .. seeds",
              "That they never would: they had so many steps."),
    *_of_both("mean", "Mean step of formation of the {} arm, runs that had not formed at their last step.", "step",
              "0 .. steps", _LOWER),
    *_of_both("sd", "Standard deviation of the same (ddof 1) over seeds of the {} arm.", "step", "0 .. inf", _LOWER),
    Column(
        "ratio", "mean_slower / mean_faster.",
        "ratio", "0 .. inf", "FP Table 4", "delay",
        _LOWER,
    ),
    Column(
        "statistic", "Mann-Whitney U of the slower arm: pairs of runs in which it is later, ties counted half.",
        "count", "0 .. n_slower x n_faster", "FP Table 4", "U",
        _FEW,
    ),
    Column(
        "pvalue", "One-sided p of later formation, exact with ties.",
        "probability", "0 .. 1", "this package", "",
        _FEW,
    ),
    Column(
        "q", "pvalue after Benjamini and Hochberg, over the contrasts of the criterion.",
        "probability", "0 .. 1", "this package", "false discovery rate",
        _FEW,
    ),
    Column(
        "pvalue_paper", "The same p as if there were no ties.",
        "probability", "0 .. 1", "FP Table 4", "",
        "A correct level: formation steps have ties.",
    ),
    Column(
        "q_paper", "pvalue_paper adjusted without the cumulative minimum.",
        "probability", "0 .. 1", "FP Table 4", "",
        "A correct level: it is how FP's own came about.",
    ),
    Column(
        "rank_biserial", "2 U / (n_slower n_faster) - 1: how much more often the slower arm is the later one.",
        "ratio", "-1 .. 1", "FP Table 4", "",
        _FEW,
    ),
    Column(
        "hodges_lehmann", "Median of all differences of steps, slower less faster.",
        "step", "-inf .. inf", "FP Table 4", "Hodges-Lehmann shift",
        "A shift where runs had not formed: it is then a lower bound.",
    ),
    Column(
        "predicted", "What was predicted of the slower arm.",
        "label", "delay, no delay, no formation", "FP 10", "",
        "Nothing: a label.",
    ),
    Column(
        "verdict",
        "At q < 0.05: a delay holds or is not shown, no delay is falsified or not falsified; no formation holds where "
        "no run formed, is falsified where all did, else some formed.",
        "label", "holds, not shown, falsified, not falsified, some formed", "FP 10", "",
        "That not falsified is true: few seeds show large delays only.",
    ),
)  # fmt: skip

_MEAN_SCORE = (
    "That the kernel is what the head attends by: it is a mean of scores over nine offsets, to which contents "
    "contribute."
)
_REROUTING = (
    Column(
        "peak_offset", "Offset with the largest score of the previous-token head's kernel; -1 is the previous token.",
        "token", "-8 .. 0", "FP 10, Fig. 5", "",
        _MEAN_SCORE,
    ),
    Column(
        "kernel_distance",
        "Root mean square over offsets of the difference to a free run's kernel, each less its mean; mean over the "
        "free runs with the same positions, itself left out. NaN for fewer than two free runs.",
        "logit", "0 .. inf", "FP 10", "",
        _MEAN_SCORE + " Runs that stopped soon after formation differ in how far training had gone.",
    ),
    Column(
        "free_spread", "Mean of kernel_distance over the free runs with the same positions: what seeds alone do.",
        "logit", "0 .. inf", "FP 10", "",
        "A precise number with few seeds.",
    ),
    Column(
        "distance_ratio", "kernel_distance / free_spread.",
        "ratio", "0 .. inf", "FP 10", "",
        _MEAN_SCORE,
    ),
)  # fmt: skip

_HEADS = (*_RUN, *_HEAD, *_BEHAVIOUR, *_SPECTRA, *_RAW)
_GRID = (
    "`tlspectral.studies.fingerprint.constrained.constrained_grid`; `tlspectral study constrained -o FOLDER` writes "
)

CONSTRAINED_TABLES = (
    Table("constrained_grid.evaluations", f"{_GRID}evaluations.parquet", (*_RUN, *_EVALUATIONS)),
    Table(
        "constrained_grid.heads",
        f"{_GRID}heads.parquet; `previous_token_heads` takes rows of it",
        _HEADS,
    ),
    Table("constrained_grid.kernels", f"{_GRID}kernels.parquet", (*_RUN, *_HEAD, *_KERNELS)),
    Table("constrained_grid.formation", f"{_GRID}formation.parquet", (_ARM, SEED, *_FORMATION)),
    Table("constrained_grid.table4", f"{_GRID}table4.parquet; `formation_tests` returns it", _CONTRASTS),
    Table(
        "constrained_grid.rerouting",
        f"{_GRID}rerouting.parquet",
        (*_RUN, *_HEAD, _BEHAVIOUR[0], *_SPECTRA, *_RAW, *_REROUTING),
    ),
)
"""Tables of constrained training."""
