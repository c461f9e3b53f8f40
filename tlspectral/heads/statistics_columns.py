"""Columns of the statistics of one model's head table. FP is Li, "Fingerprint, Not Blueprint" (2026)."""

from tlspectral.stats.columns import REASON
from tlspectral.tables.column import Column, Table

# fmt: off
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

ANOTHER_MODEL = Table("another_model",
    "`tlspectral.heads.model_statistics.another_model`; `tlspectral statistics TABLE -o FILE` writes it", _ANOTHER)
TABLES = (ANOTHER_MODEL,)
