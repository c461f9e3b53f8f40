"""Columns of the tables of statistics over head tables, of one model or of several.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.heads.comparison import NOISE_COLUMNS
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
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
    Column("significant", "Whether q is at or below .05.", "flag", range="False, True",
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

_MOVED = "An interval over models, prompts or heads: rounding is one source of uncertainty."
_STATISTIC = (
    Column("statistic", "Name of the statistic, as it was given.", "label", range="any text", source="the caller"),
    Column("value", "The statistic of the head table as it is.", "of the statistic", range="-inf .. inf",
        source="the caller's function",
        does_not_establish="That it lies within low and high: rounding moves all draws away from the stored weights "
        "alike."),
    Column("mean", "Mean of the statistic over draws, each with its spectral columns in place of the table's.",
        "of the statistic", range="-inf .. inf", does_not_establish=_MOVED),
    Column("sd", "Standard deviation (ddof 1) of the statistic over draws.", "of the statistic", range="0 .. inf",
        does_not_establish=_MOVED),
    Column("low", "2.5 % quantile of the statistic over draws.", "of the statistic", range="-inf .. inf",
        does_not_establish=_MOVED),
    Column("high", "97.5 % quantile of the statistic over draws.", "of the statistic", range="-inf .. inf",
        does_not_establish=_MOVED),
    Column("draws", "Number of draws.", "count", range="2 .. inf", source="the caller"),
)

_PLACEBO_LIMIT = (
    "Anything about the model's positions: it is what the recipe finds where pairs or frequencies are not the model's."
)


def _placebo_column(name: str) -> Column:
    column = COLUMNS[name]
    return replace(
        column,
        meaning=f"{name} as the head table has it, with the placebo's pairs of columns or its frequencies in place of "
        "the model's own. NaN on layers that have none.",
        source="FP 7 (placebo controls)",
        does_not_establish=_PLACEBO_LIMIT,
    )


_ONE_MODEL = "Anything about a positional scheme: one model is one model."

_ANOTHER = (
    Column("statistic",
        "Which number: partial correlation (of D_head with prev given dir_frac), partial correlation within layers "
        "(the same among the heads of a layer), top-k percentile of D_head (of the "
        "k strongest previous-token heads), attenuation (share of the partial correlation that RoPE-phase controls "
        "take), attenuation by placebo (the same with a placebo's phase).", "label",
        range="five kinds, the placebo by name", source="FP Tables 2 and 3"),
    Column("method", "Estimator: hybrid (regress, then rank), rank (rank, then regress), or median.", "label",
        range="hybrid, rank, median", source="FP 6, 7", does_not_establish="Which of them is right where they differ."),
    Column("value", "The number; for a placebo the mean of its draws.", "correlation, or share",
        range="-1 .. 1 for a correlation, -inf .. inf for an attenuation", source="FP Tables 2 and 3",
        does_not_establish=_ONE_MODEL),
    Column("low",
        "Lower end of a 95 % interval, layers resampled, percentiles; for a placebo the smallest of its draws. NaN for "
        "a percentile and within layers.", "as value", range="as value", source="FP Table 2",
        does_not_establish="The spread over models or prompts; nor 95 %: of simulated tables this interval leaves out "
        "the truth in 6.0 to 9.1 %, or 13.0 to 17.5 % if columns drift with depth."),
    Column("high", "Upper end of that interval; for a placebo the largest of its draws.", "as value", range="as value",
        source="FP Table 2", does_not_establish="The spread over models or prompts."),
    Column("pvalue", "p of what pvalue_of says. NaN for an attenuation by the model's own phase.", "probability",
        range="0 .. 1",
        does_not_establish="An exact level where columns drift with depth, but for the correlation within layers: that "
        "of the plain one then rejects 9.6 to 14.6 % at nominal 5 %. Nor for the percentile, where top heads share "
        "layers: 5.5 to 6.1 %."),
    Column("pvalue_of", "What pvalue tests, in words; None without one.", "text", range="any text, or None"),
    Column("noise_sd",
        "Standard deviation of value when query and key weights move within the rounding they are stored with. NaN "
        "without the model, and for a placebo.", "as value", range="0 .. inf",
        does_not_establish="An interval over models, prompts or heads: rounding is one source of uncertainty."),
    Column("n", "Heads behind the number; for a placebo its draws.", "count", range="0 .. inf",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("function", "Function of this package that computes the number.", "label", range="a function"),
    REASON,
)

_ROUNDING = (
    "How far the unquantised model's numbers lie from these: quantising is no independent noise, and weights elsewhere "
    "moved too."
)


def _noise_columns(name: str) -> tuple[Column, Column]:
    unit = COLUMNS[name].unit
    return (
        Column(f"{name}_sd",
            f"Standard deviation (ddof 1) of {name} over draws in which query and key weights move within half a step "
            "of the grid they are stored on. NaN where a draw has no value.", unit, range="0 .. inf",
            also_known_as="rounding noise", does_not_establish=_ROUNDING),
        Column(f"{name}_shift", f"Mean of {name} over those draws less its value for the weights as they are.", unit,
            range="-inf .. inf", does_not_establish=_ROUNDING),
    )


_PERTURBED = Column("draw", "Number of the perturbed copy of the weights, from 0; -1 is the weights as they are.",
    "index", range="-1 .. draws - 1")

SPEARMAN_TABLE = Table("spearman_table", "`tlspectral.studies.fingerprint.statistics.spearman_table`", _SPEARMAN)
TRIAGE = Table("triage", "`tlspectral.studies.fingerprint.statistics.triage`", _TRIAGE)
LEAVE_ONE_MODEL_OUT = Table("leave_one_model_out",
    "`tlspectral.studies.fingerprint.statistics.leave_one_model_out`", _LEFT_OUT)
TOP_K_SENSITIVITY = Table("top_k_sensitivity", "`tlspectral.studies.fingerprint.statistics.top_k_sensitivity`", _BY_K)
STATISTIC_NOISE = Table("statistic_noise", "`tlspectral.studies.fingerprint.statistics.statistic_noise`", _STATISTIC)
PERMUTED_PAIRING = Table("permuted_pairing",
    "`permuted_pairing` and, with one draw, `pseudo_rope` of `tlspectral.studies.fingerprint.statistics`",
    (Column("draw", "Number of the permutation of rotary columns, from 0.", "index", range="0 .. draws - 1"), *_HEAD,
     *map(_placebo_column, ("rope_imag_frac", "freq_centroid", "hi_freq_dir"))))

WEIGHT_NOISE_BAND = Table("weight_noise_band", "`tlspectral.studies.fingerprint.statistics.weight_noise_band`",
    (*_HEAD, *(column for name in NOISE_COLUMNS for column in _noise_columns(name))))
WEIGHT_NOISE_DRAWS = Table("weight_noise_draws", "`tlspectral.studies.fingerprint.statistics.weight_noise_draws`",
    (_PERTURBED, *_HEAD, *(COLUMNS[name] for name in NOISE_COLUMNS)))
ANOTHER_MODEL = Table("another_model",
    "`another_model`, and `tlspectral study statistics TABLE -o FILE`, which writes it", _ANOTHER)
TABLES = (
    SPEARMAN_TABLE, TRIAGE, LEAVE_ONE_MODEL_OUT, TOP_K_SENSITIVITY, STATISTIC_NOISE, PERMUTED_PAIRING,
    WEIGHT_NOISE_BAND, WEIGHT_NOISE_DRAWS, ANOTHER_MODEL,
)
