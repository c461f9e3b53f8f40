"""Columns of the tables on Dyck-3 with twenty seeds, on held-out sums modulo 7, on frequencies beside rope settings.

BA is "Bifocal Attention".
"""

from dataclasses import replace

from tlspectral.studies.bifocal.columns import intervals
from tlspectral.studies.bifocal.learned_frequency_columns import experiment_table
from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.tables.column import Column
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_RATE = Column("learning_rate", "AdamW's rate of the weights.", "per step", range="0 .. inf",
    source="this package; BA gives none", does_not_establish="That it is the best: it is the best of a few.")
_LEVEL = "That there is no difference where the interval holds 0."


def _difference(what: str, unit: str) -> tuple[Column, ...]:
    """Columns of a paired difference to the reference arm, with its 95 % t interval; NaN for the reference itself."""
    mean = Column("difference_mean", f"Mean over seeds of {what}, on the same seed. NaN for that arm itself.", unit,
        range="-inf .. inf", does_not_establish=_LEVEL)
    return (
        mean,
        replace(mean, name="difference_low", meaning="Lower end of the 95 % t interval of difference_mean."),
        replace(mean, name="difference_high", meaning="Upper end of that interval."),
    )


_ARM = Column("arm",
    "What of the rotary positions is learned: nothing (standard), frequencies (omega), frequencies, gain and phase per "
    "head (full), the same to the letter of BA (literal), in half of the heads (bifocal), gain and phase (placebo).",
    "label", range="standard, omega, full, literal, bifocal, placebo", source="BA 3",
    does_not_establish="That a learned parameter can change the model: gain and phase of trained queries are gauge.")
_TUNED = Column("loss", "Mean held-out loss over the tuning seeds.", "nat per token that is scored", range="0 .. inf",
    does_not_establish="The loss of the reported seeds.")
_LOSS = Column("loss", "Mean cross-entropy over the scored tokens of fresh sequences.", "nat per scored token",
    range="0 .. inf", source="BA 4.2, Table 1", does_not_establish="Anything about other sizes or longer training.")
_VIEW = Column("view", "Which rates: one for all arms (equal), or each arm's own best (best).", "label",
    range="equal, best")
_TEST = (
    Column("pvalue", "p of two one-sided paired t tests that the difference lies within the margin (0.09 nats).",
        "probability", range="0 .. 1", also_known_as="TOST",
        does_not_establish="Equality below the margin. One test per arm and view, not corrected."),
    Column("bound", "Smallest margin that the test would pass at the 5 % level.", "nat per scored token",
        range="0 .. inf", does_not_establish="A margin that was fixed beforehand."),
)
_DEPTHS = (
    _ARM,
    *intervals("a cosine between the mean outputs of a head at two depths, mean over heads", "cosine"),
    Column("depths", "Which depths are compared.", "label", range="10 and 11, neighbours, all", source="BA 3.3",
        does_not_establish="Depth apart from position: they are one here."),
    Column("measure", "Of the means as they are (cosine), or less their mean over depths (centred).", "label",
        range="cosine, centred"),
)

_HELD_OUT = "The same task with fewer trained expressions, or other sizes."
_MODULO = (
    Column("loss", "Mean cross-entropy of the sum over held-out expressions.", "nat per answer", range="0 .. inf",
        does_not_establish=_HELD_OUT),
    Column("accuracy", "Share of held-out expressions whose sum has the largest logit; chance is 1/7.", "share",
        range="0 .. 1", does_not_establish=_HELD_OUT),
    Column("trained_loss", "The loss on the trained expressions.", "nat per answer", range="0 .. inf",
        does_not_establish="That anything but these expressions was learned."),
)

_BYTE = "nat per byte"
_SMALL = "Anything about larger models, longer training or other lengths."
_READ = Column("arm",
    "Frequencies: fixed; fixed and read with a rope setting of transformers, factor 2 (linear, dynamic, yarn); learned "
    "at a tenth of the weights' rate (learned) or at that rate (learned_fast).", "label",
    range="fixed, linear, dynamic, yarn, learned, learned_fast", does_not_establish=_SMALL)
_ADAPTED = Column("adapted", "Whether the model was then trained for a few steps at twice the length.", "flag",
    range="False, True")
_POSITION = Column("position", "First position of the bin of predicted bytes.", "token", range="0 .. 224",
    does_not_establish="What a model does with the same bytes at another position.")
_BIN_LOSS = Column("loss", "Mean next-byte cross-entropy on held-out files.", _BYTE, range="0 .. inf",
    does_not_establish=_SMALL)
_COMPARED = (
    replace(_BIN_LOSS, meaning="Mean over seeds of the mean next-byte cross-entropy on held-out files."),
    replace(_BIN_LOSS, name="low", meaning="Lower end of the 95 % t interval of loss."),
    replace(_BIN_LOSS, name="high", meaning="Upper end of that interval."),
    Column("n", "Seeds.", "count", range="1 .. inf"),
    *(replace(column, name=column.name.removesuffix("_mean"))
      for column in _difference("loss less that of the arm fixed", _BYTE)),
)
_POSITIONS = Column("positions", "Which bins: all, within the trained length, or beyond it.", "label",
    range="all, trained, beyond", does_not_establish=_SMALL)
_MOVES = (
    Column("omega_shift", "Root mean square, over the head's pairs, of the change of omega.", "rad/token",
        range="0 .. inf", does_not_establish="That the move did anything."),
    Column("log_shift", "The same of the change of log omega.", "log ratio", range="0 .. inf",
        does_not_establish="That the move did anything."),
)
_S_POS = Column("s_pos", "Positional score of the head, mean over held-out prompts of four blocks of 16 bytes.",
    "score", range="0 .. 1", source="PS Definition 2", does_not_establish="How the model solves anything.")
_JOINED = (
    _READ,
    Column("move", "Which move of a head's frequencies.", "label", range="omega_shift, log_shift"),
    Column("measure", "Whose absolute change over training is compared.", "label",
        range="rope_imag_frac, D_head, s_pos"),
    *intervals("Spearman's correlation of move and change over the heads of a layer", "correlation"),
    Column("pvalue", "Two-sided p that the mean is 0, by flipping the signs of layers and seeds.", "probability",
        range="0 .. 1", does_not_establish="That one moves the other."),
    Column("control", "mean, with the change of the same head in the arm fixed.", "correlation", range="-1 .. 1"),
    Column("q", "pvalue with the false discovery rate over all rows.", "probability", range="0 .. 1",
        source="Benjamini and Hochberg", does_not_establish="That one moves the other."),
)

TABLES = (
    experiment_table("equivalence", "equivalence_rates", _ARM, _RATE, _TUNED,
        Column("best", "Whether the rate has the lowest loss of its arm.", "flag", range="False, True"),
        Column("common", "Whether it is the rate with the lowest mean over arms.", "flag", range="False, True")),
    experiment_table("equivalence", "equivalence_runs", _ARM, _RATE, SEED, _LOSS,
        Column("accuracy", "Share of the scored tokens that have the largest logit.", "share", range="0 .. 1")),
    experiment_table("equivalence", "equivalence", _VIEW, _ARM, _RATE,
        *intervals("held-out loss", "nat per scored token"),
        *_difference("the loss less that of the arm standard", "nat per scored token"), *_TEST),
    experiment_table("equivalence", "equivalence_beyond", _VIEW, _ARM, _RATE,
        *intervals("accuracy at depths beyond training", "share"),
        *_difference("that accuracy less that of the arm standard", "share")),
    experiment_table("equivalence", "depth_cosines", *_DEPTHS),
    experiment_table("modulo", "modulo_pilot", _RATE,
        Column("weight_decay", "AdamW's, on the weights; spectral parameters have none.", "1", range="0 .. inf"),
        *_MODULO, Column("chosen", "Whether it has the highest held-out accuracy.", "flag", range="False, True")),
    experiment_table("modulo", "modulo_runs", _ARM, SEED, *_MODULO,
        Column("learned_at", "First measured step with a held-out accuracy of .9. NaN: none.", "step",
            range="0 .. steps", does_not_establish="That it stayed there.")),
    experiment_table("modulo", "modulo", _ARM, *intervals("accuracy on held-out expressions", "share"),
        *_difference("that accuracy less that of the arm standard", "share")),
    experiment_table("longer-context", "extension_rates", _READ, _RATE, replace(_TUNED, unit=_BYTE),
        Column("chosen", "Whether the rate has the lowest loss of its arm.", "flag", range="False, True")),
    experiment_table("longer-context", "extension_runs", SEED, _READ, _ADAPTED, _POSITION, _BIN_LOSS),
    experiment_table("longer-context", "extension", _ADAPTED, _READ, *_COMPARED, _POSITIONS),
    experiment_table("longer-context", "extension_positions", _ADAPTED, _POSITION, _READ, *_COMPARED),
    experiment_table("longer-context", "extension_heads", *_HEAD, COLUMNS["rope_imag_frac"], COLUMNS["D_head"], _S_POS,
        STEP, *_MOVES, _READ, SEED),
    experiment_table("longer-context", "extension_joined", *_JOINED),
)
