"""Columns of the tables of statistics over head tables, of one model or of several.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from tlspectral.tables.columns.entry import Column, Table

_INDEPENDENT = "Significance: p takes heads as independent, and those of a layer are not (see layer_bootstrap)."

REASON = Column(
    "reason", "Why a number of the row is NaN; None where none is.",
    "text", "any text, or None", "this package", "",
    "Nothing: a remark.",
)  # fmt: skip
_N_DROPPED = Column(
    "n_dropped", "Heads left out because a value is NaN.",
    "count", "0 .. heads", "this package", "",
    "That those heads are like the others: values may be NaN for a reason.",
)  # fmt: skip

_SPEARMAN = (
    Column(
        "column", "One column of the head table.",
        "label", "a column of the head table", "FP Table 1", "",
        "Nothing: a label.",
    ),
    Column(
        "against", "The other column.",
        "label", "a column of the head table", "FP Table 1", "",
        "Nothing: a label.",
    ),
    Column(
        "statistic", "Spearman's rank correlation of the two over heads. NaN for a constant or fewer than three heads.",
        "correlation", "-1 .. 1", "FP Table 1", "rho",
        "That one makes the other: both may follow a third, such as depth or the size of the weights.",
    ),
    Column(
        "pvalue", "Two-sided p of no correlation, scipy's.",
        "probability", "0 .. 1", "FP Table 1", "",
        _INDEPENDENT,
    ),
    Column(
        "q", "pvalue after Benjamini and Hochberg, over all pairs of the table.",
        "probability", "0 .. 1", "FP Table 1", "false discovery rate",
        _INDEPENDENT,
    ),
    Column(
        "significant", "Whether q is at or below alpha (default .05).",
        "flag", "False, True", "FP Table 1", "",
        _INDEPENDENT,
    ),
    Column(
        "n", "Heads that have both values.",
        "count", "0 .. heads", "this package", "",
        "An effective sample size: heads of a layer are not independent.",
    ),
    _N_DROPPED, REASON,
)  # fmt: skip

_OTHER_MODEL = "That the score works on another model: without rotary positions the same columns mislead."
_AUC_END = "A precise end: with a handful of positives the interval is a rough one."


def _precision(k: int) -> Column:
    return Column(
        f"precision_at_{k}",
        f"Share of positives among the {k} heads with the highest score, equal scores by layer, then head. One such "
        "column for each k that was asked for.",
        "share", "0 .. 1", "FP 11", "",
        _OTHER_MODEL,
    )  # fmt: skip


_TRIAGE = (
    Column(
        "score", "Column of the head table that is to point at heads with a behaviour: the higher, the more likely.",
        "label", "a column of the head table", "FP 11", "",
        "Nothing: a label.",
    ),
    Column(
        "direction", "higher where heads with the behaviour score higher (auc above 1/2), lower, or none.",
        "label", "higher, lower, none", "this package", "",
        _OTHER_MODEL,
    ),
    Column(
        "auc", "Share of pairs of a positive and another head in which the positive scores higher, ties counted half.",
        "share", "0 .. 1", "FP 11", "area under the ROC curve",
        _OTHER_MODEL + " A positive is a head above a threshold, which is a choice.",
    ),
    Column(
        "auc_low", "Lower end of its 95 % interval: DeLong's variance with layers as clusters, on the logit scale.",
        "share", "0 .. 1", "DeLong 1988; Obuchowski 1997", "",
        _AUC_END,
    ),
    Column(
        "auc_high", "Upper end of that interval.",
        "share", "0 .. 1", "DeLong 1988; Obuchowski 1997", "",
        _AUC_END,
    ),
    *map(_precision, (5, 10, 20)),
    Column(
        "base_rate", "Share of positives among the heads: the precision of picking at random.",
        "share", "0 .. 1", "this package", "",
        "What the threshold ought to be.",
    ),
    Column(
        "n", "Heads that have both score and behaviour.",
        "count", "0 .. heads", "this package", "",
        "An effective sample size: heads of a layer are not independent.",
    ),
    Column(
        "n_positive", "Heads whose behaviour exceeds the threshold.",
        "count", "0 .. n", "this package", "",
        "What the threshold ought to be.",
    ),
    _N_DROPPED, REASON,
)  # fmt: skip

_FEW_MODELS = "That the groups differ for the reason they are named after: models that share a scheme share more."
_FLOOR = "A small p where floor is high: with few models even perfect separation has a p near its floor."
_NESTED = "Independent confirmation: the sets of heads are nested."

_GAP = Column(
    "gap", "Lowest value of the upper group less the highest of the other; above 0 where the groups do not overlap.",
    "of the values", "-inf .. inf", "FP 6", "",
    _FEW_MODELS,
)  # fmt: skip
_SEPARATED = Column(
    "separated", "Whether gap is above 0.",
    "flag", "False, True", "FP 6", "",
    _FEW_MODELS,
)  # fmt: skip
_PVALUE = Column(
    "pvalue",
    "Two-sided share of all labelings of the models whose difference of means is at least as large in absolute value.",
    "probability", "0 .. 1", "FP 6", "exact permutation test",
    _FLOOR,
)  # fmt: skip
_FLOOR_COLUMN = Column(
    "floor", "Smallest pvalue that any labeling of these values could have.",
    "probability", "0 .. 1", "this package", "",
    "Nothing: a property of the number of models.",
)  # fmt: skip
_LEFT_OUT = (
    Column(
        "left_out", "The model that is left out of the test.",
        "label", "a model", "FP 6", "",
        "Robustness to models that were never in.",
    ),
    _SEPARATED, _GAP, _PVALUE, _FLOOR_COLUMN,
    Column(
        "n_permutations", "Labelings of the models that are left.",
        "count", "0 .. 200,000", "FP 6", "",
        "Nothing: a count.",
    ),
    REASON,
)  # fmt: skip
_BY_K = (
    Column(
        "k", "Strongest heads per model whose median percentile is compared.",
        "count", "1 .. heads", "FP 6", "",
        _NESTED,
    ),
    _GAP, _SEPARATED,
    Column(
        "upper", "Group of models that is above.",
        "label", "a group", "this package", "",
        "That it is above as a whole: see separated.",
    ),
    _PVALUE, _FLOOR_COLUMN,
)  # fmt: skip

STATISTICS_TABLES = (
    Table("spearman_table", "`tlspectral.stats.spearman_table`", _SPEARMAN),
    Table("triage", "`tlspectral.stats.triage`", _TRIAGE),
    Table("leave_one_model_out", "`tlspectral.stats.leave_one_model_out`", _LEFT_OUT),
    Table("top_k_sensitivity", "`tlspectral.stats.top_k_sensitivity`", _BY_K),
)
"""Tables of statistics."""
