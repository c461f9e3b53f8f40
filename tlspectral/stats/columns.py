"""Columns of the tables of statistics over head tables, of one model or of several.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from tlspectral.tables.column import Column, Table

# fmt: off
_INDEPENDENT = (
    "Significance: p takes heads as independent, and those of a layer are not. At nominal 5 % it rejects "
    "17.4 to 26.6 % of simulated tables with an intra-class correlation of 0.4; partial_spearman with layers "
    "does not."
)

REASON = Column("reason", "Why a number of the row is NaN; None where none is.", "text", range="any text, or None")
_N_DROPPED = Column("n_dropped", "Heads left out because a value is NaN.", "count", range="0 .. heads",
    does_not_establish="That those heads are like the others: values may be NaN for a reason.")

_SPEARMAN = (
    Column("column", "One column of the head table.", "label", range="a column of the head table", source="FP Table 1"),
    Column("against", "The other column.", "label", range="a column of the head table", source="FP Table 1"),
    Column("statistic",
        "Spearman's rank correlation of the two over heads. NaN for a constant or fewer than three heads.",
        "correlation", range="-1 .. 1", source="FP Table 1", also_known_as="rho",
        does_not_establish="That one makes the other: both may follow a third, such as depth or the size of the "
        "weights."),
    Column("pvalue", "Two-sided p of no correlation, scipy's.", "probability", range="0 .. 1", source="FP Table 1",
        does_not_establish=_INDEPENDENT),
    Column("q", "pvalue after Benjamini and Hochberg, over all pairs of the table.", "probability", range="0 .. 1",
        source="FP Table 1", also_known_as="false discovery rate", does_not_establish=_INDEPENDENT),
    Column("significant", "Whether q is at or below alpha (default .05).", "flag", range="False, True",
        source="FP Table 1", does_not_establish=_INDEPENDENT),
    Column("n", "Heads that have both values.", "count", range="0 .. heads",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    _N_DROPPED, REASON,
)

_OTHER_MODEL = "That the score works on another model: without rotary positions the same columns mislead."
_AUC_END = "A precise end: with a handful of positives the interval is a rough one."


def _precision(k: int) -> Column:
    return Column(f"precision_at_{k}",
        f"Share of positives among the {k} heads with the highest score, equal scores by layer, then head. One such "
        "column for each k that was asked for.", "share", range="0 .. 1", source="FP 11",
        does_not_establish=_OTHER_MODEL)


_TRIAGE = (
    Column("score", "Column of the head table that is to point at heads with a behaviour: the higher, the more likely.",
        "label", range="a column of the head table", source="FP 11"),
    Column("direction", "higher where heads with the behaviour score higher (auc above 1/2), lower, or none.", "label",
        range="higher, lower, none", does_not_establish=_OTHER_MODEL),
    Column("auc",
        "Share of pairs of a positive and another head in which the positive scores higher, ties counted half.",
        "share", range="0 .. 1", source="FP 11", also_known_as="area under the ROC curve",
        does_not_establish=_OTHER_MODEL + " A positive is a head above a threshold, which is a choice."),
    Column("auc_low", "Lower end of its 95 % interval: DeLong's variance with layers as clusters, on the logit scale, "
        "Student's t over the layers that have positives.", "share", range="0 .. 1",
        source="DeLong 1988; Obuchowski 1997", does_not_establish=_AUC_END),
    Column("auc_high", "Upper end of that interval.", "share", range="0 .. 1", source="DeLong 1988; Obuchowski 1997",
        does_not_establish=_AUC_END),
    *map(_precision, (5, 10, 20)),
    Column("base_rate", "Share of positives among the heads: the precision of picking at random.", "share",
        range="0 .. 1", does_not_establish="What the threshold ought to be."),
    Column("n", "Heads that have both score and behaviour.", "count", range="0 .. heads",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("n_positive", "Heads whose behaviour exceeds the threshold.", "count", range="0 .. n",
        does_not_establish="What the threshold ought to be."),
    _N_DROPPED, REASON,
)

_FEW_MODELS = "That the groups differ for the reason they are named after: models that share a scheme share more."
_FLOOR = "A small p where floor is high: with few models even perfect separation has a p near its floor."
_NESTED = "Independent confirmation: the sets of heads are nested."

_GAP = Column("gap",
    "Lowest value of the upper group less the highest of the other; above 0 where the groups do not overlap.",
    "of the values", range="-inf .. inf", source="FP 6", does_not_establish=_FEW_MODELS)
_SEPARATED = Column("separated", "Whether gap is above 0.", "flag", range="False, True", source="FP 6",
    does_not_establish=_FEW_MODELS)
_PVALUE = Column("pvalue",
    "Two-sided share of all labelings of the models whose difference of means is at least as large in absolute value.",
    "probability", range="0 .. 1", source="FP 6", also_known_as="exact permutation test", does_not_establish=_FLOOR)
_FLOOR_COLUMN = Column("floor", "Smallest pvalue that any labeling of these values could have.", "probability",
    range="0 .. 1")
_LEFT_OUT = (
    Column("left_out", "The model that is left out of the test.", "label", range="a model", source="FP 6",
        does_not_establish="Robustness to models that were never in."),
    _SEPARATED, _GAP, _PVALUE, _FLOOR_COLUMN,
    Column("n_permutations", "Labelings of the models that are left.", "count", range="0 .. 200,000", source="FP 6"),
    REASON,
)
_BY_K = (
    Column("k", "Strongest heads per model whose median percentile is compared.", "count", range="1 .. heads",
        source="FP 6", does_not_establish=_NESTED),
    _GAP, _SEPARATED,
    Column("upper", "Group of models that is above.", "label", range="a group",
        does_not_establish="That it is above as a whole: see separated."),
    _PVALUE, _FLOOR_COLUMN,
)

SPEARMAN_TABLE = Table("spearman_table", "`tlspectral.stats.spearman_table`", _SPEARMAN)
TRIAGE = Table("triage", "`tlspectral.stats.triage`", _TRIAGE)
LEAVE_ONE_MODEL_OUT = Table("leave_one_model_out", "`tlspectral.stats.leave_one_model_out`", _LEFT_OUT)
TOP_K_SENSITIVITY = Table("top_k_sensitivity", "`tlspectral.stats.top_k_sensitivity`", _BY_K)
TABLES = (SPEARMAN_TABLE, TRIAGE, LEAVE_ONE_MODEL_OUT, TOP_K_SENSITIVITY)
