"""Columns of the tables about ablations: the sweep, its summary, and bands of rotary frequencies.

FP is Li, "Fingerprint, Not Blueprint" (2026). The metric is that of the task; losses are mean next-token
cross-entropies in nats.
"""

from tlspectral.hooks.parts.named import PART
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"])
_METRIC = "of the metric; nat for a loss"
_STAND_IN = "That heads without effect do nothing: others can stand in for them, and parts differ in size."

_EXCESS = (
    "|delta| less the mean over draws of |control effect|: positive where removing this changes the score more, in "
    "either direction, than removing a random draw of the control does."
)
_EXCESS_NOT = "That the part helps: the sign of delta says that. Nor that it is beyond chance: see control_p."
_CONTROL_P = (
    "Share of control effects that are as large as delta in absolute value, (1 + those) / (1 + draws): the Monte-Carlo "
    "p of 'this is one of the control's draws'. Small where removing this changes the score more than the control does."
)
_CONTROL_P_NOT = "More than its draws can: no p is below 1 / (1 + draws). It is not corrected for the number of rows."

_SUMMARY = (
    PART,
    Column("size_control",
        "How parts of unlike size are made comparable: none (effects as they are), score_rms (effect over the RMS "
        "removed), random (effect less that of a random part of equal size).", "label", range="none, score_rms, random",
        does_not_establish="That the control is enough: effects need not be linear in the size."),
    Column("statement",
        "What value is: sum (of all heads' effects), share_small (heads with an absolute effect below small), "
        "detector_rank (rank by a detector of the head that does the most harm), effect_rank (rank by harm of the "
        "strongest head by a detector), rank_correlation (Spearman of the effect with a column of the head table).",
        "label", range="sum, share_small, detector_rank, effect_rank, rank_correlation", source="FP 5, 8"),
    Column("column",
        "Column of the head table that the statement is about: a detector for the ranks; dir_frac, D_head, "
        "rope_imag_frac or prev for rank_correlation. Missing for the others.", "label",
        range="a column of the head table, or missing"),
    Column("value", "The number of the statement.",
        "of the metric for sum (per logit under score_rms), share, rank from 1, or correlation", range="by statement",
        source="FP 5, 8",
        does_not_establish="That a column predicts which heads matter: one model is one observation of circuits."),
    Column("low",
        "Lower end of a 95 % interval: over sequences for sum, all effects moved by 1.96 standard errors for "
        "share_small, one layer after another left out for rank_correlation (by the ranks of the whole table). NaN for "
        "the ranks, and with fewer than three layers.", "as value", range="as value",
        does_not_establish="The spread over models or tasks. Where the sums per sequence no longer fit the table, "
        "the interval of sum is the widest that the heads' errors allow (see note)."),
    Column("high", "Upper end of the interval of low.", "as value", range="as value",
        does_not_establish="The spread over models or tasks."),
    Column("pvalue",
        "For the ranks rank / n, exact for a head chosen at random; for rank_correlation two-sided, Student's t "
        "from leaving out one layer after another. NaN for the others.", "probability", range="0 .. 1",
        source="FP 5, 8",
        does_not_establish="Significance where effects and column drift with depth: layers are taken as independent, "
        "and of simulated tables with neighbouring layers alike a correlation's p rejects "
        "10.4 % at nominal 5 %. The three detectors are not corrected for."),
    Column("qvalue",
        "pvalue of a rank_correlation, corrected for the number of correlations in the table (Benjamini-Hochberg). NaN "
        "for the others.", "q", range="0 .. 1",
        does_not_establish="More than the p behind it: what drifts with depth stays too small."),
    Column("n", "Heads behind the number; for the ranks the heads that are ranked.", "count", range="0 .. heads",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("note", "For sum what its interval is over; for the ranks the head. Missing for the others.", "text",
        range="any text, or missing"),
)

_BANDS = (
    Column("band", "Which third of the head's rotary frequencies was dropped: high (the fastest pairs), middle or low.",
        "label", range="high, middle, low",
        does_not_establish="That the border lies at the same wavelength in another model: thirds are by index, fast "
        "to slow."),
    Column("label",
        "Value of the task's label that df.attrs['by'] names, which the row's sequences have. With by= only.",
        "as the label", range="values of the label",
        does_not_establish="That the label is the cause of a difference between rows: other things may go with it."),
    Column("n_sequences", "Sequences of the task with that value. With by= only.", "count", range="1 .. sequences"),
    Column("first", "Index of the band's first frequency when the head's pairs are sorted from fast to slow.", "index",
        range="0 .. pairs - 1"),
    Column("last", "Index of the band's last frequency in that order.", "index", range="0 .. pairs - 1"),
    Column("delta",
        "Score of the model with the band's contribution to the head's scores dropped, less the intact one.", _METRIC,
        range="-inf .. inf",
        does_not_establish="That the head was trained to use the band. Effects of the three bands do not add up to "
        "that of the head."),
    Column("delta_se", "Standard error of delta over sequences, paired with the intact run.", _METRIC,
        range="0 .. inf", does_not_establish="Sampling of sequences only."),
    Column("score_rms",
        "Root mean square of the band's contribution to the scaled scores, over unmasked pairs of tokens.", "logit",
        range="0 .. inf", also_known_as="size of the edit",
        does_not_establish="That a large band matters: what is equal for all keys of a query is not seen by a "
        "softmax."),
    Column("random_delta",
        "As delta, for random sets of the head's frequencies whose RMS is within 10 % of the band's; mean over sets. "
        "NaN if none were found.", _METRIC, range="-inf .. inf", also_known_as="random-set control",
        does_not_establish="A control where random_overlap is near 1: the sets are then almost the band itself."),
    Column("random_delta_se",
        "Standard error of random_delta, over sets and over sequences, in squares. NaN for fewer than two sets.",
        _METRIC, range="0 .. inf", does_not_establish="A precise number: some five sets give a rough error."),
    Column("random_delta_min", "Smallest effect of a random set, mean over sequences.", _METRIC, range="-inf .. inf",
        does_not_establish="A bound: other sets may have less."),
    Column("random_delta_max", "Largest effect of a random set, mean over sequences.", _METRIC, range="-inf .. inf",
        does_not_establish="A bound: other sets may have more."),
    Column("control_excess", _EXCESS + " The draws are the random sets. NaN if none were found.", _METRIC,
        range="-inf .. inf", does_not_establish=_EXCESS_NOT),
    Column("control_p", _CONTROL_P + " The draws are the random sets, random_draws of them. NaN if none were found.",
        "probability", range="1 / (1 + random_draws) .. 1", also_known_as="Monte-Carlo test",
        does_not_establish=_CONTROL_P_NOT + " Nor that the band is unusual where random_overlap is near 1."),
    Column("random_score_rms",
        "Root mean square of the contribution of a random set to the scaled scores, mean over sets.", "logit",
        range="within 10 % of score_rms", does_not_establish="That the sets are alike in anything but their size."),
    Column("random_overlap",
        "RMS of the band's own frequencies that are in a random set, over the RMS of the band; mean over sets.",
        "share", range="0 .. 1, as a rule",
        does_not_establish="A share of frequencies: it is one of size, and contributions may cancel."),
    Column("random_draws", "Different random sets of equal RMS that were found.", "count", range="0 .. draws",
        does_not_establish="That the band is unusual where there are few: a head with one dominant frequency leaves "
        "no room for others."),
)

_KIND = Column("kind",
    "Why the head was chosen: previous-token (largest prev), symbolic (largest s_sym - s_pos), or both.", "label",
    range="previous-token, symbolic, or both with a comma",
    does_not_establish="That the head does this and nothing else: it is a rank within one table.")

SUMMARIZE_SWEEP = Table("summarize_sweep", "`tls.hooks.summarize_sweep`", _SUMMARY)
BAND_EFFECTS = Table("band_effects",
    "`tls.hooks.band_effects`; `tlspectral positional --bands N -o FOLDER` writes it as bands.parquet, with `kind`",
    (*_HEAD, *_BANDS, _KIND))
TABLES = (SUMMARIZE_SWEEP, BAND_EFFECTS)
