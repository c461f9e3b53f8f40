"""Columns of the tables of head histories over a training, and of the question who could have told.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.tables.columns.entry import Column, Table
from tlspectral.tables.columns.heads import COLUMNS, HEAD_COLUMNS
from tlspectral.tables.columns.model import COMPOSITION

_STEP = Column(
    "step",
    "Training step of the checkpoint.",
    "step", "0 .. inf", "the caller", "",
    "That steps compare across models: batches differ.",
)  # fmt: skip

_COPIES = (
    "That copying got better: it falls as well when the first copy gets worse, which it does late in training. Read "
    "second_copy_loss by itself."
)


def _percentile(name: str) -> Column:
    return Column(
        f"{name}_pct",
        f"Percentile of {name} within the model of that step: rank / n, average ties.",
        "share", "1/n .. 1", "FP 9", "within-model percentile",
        "Distance: in a model without any structure some head stands at 1 as well.",
    )  # fmt: skip


def _median(name: str, *, null: bool) -> tuple[Column, ...]:
    limit = "An exact level: heads that share keys, or were trained together, are not independent."
    drawn = "every head drawn independently from a normal distribution with the mean and deviation of its own null"
    unit = COLUMNS[name].unit
    median = Column(
        f"{name}_median",
        f"Median of {name} over the heads of the model.",
        unit, "0 .. 1", "FP 9", "population median",
        "What single heads do: half of them can leave the null before a median moves.",
    )  # fmt: skip
    if not null:
        half = Column(
            f"{name}_null_median",
            "1/2: turning the pairs of a random W_K by a quarter swaps Re M_t and Im M_t. NaN without rotary layers.",
            unit, "0.5", "this package", "",
            "A spread: how far from 1/2 chance would take the median is not in it.",
        )  # fmt: skip
        return median, half
    return (
        median,
        Column(
            f"{name}_null_low",
            f"2.5 % quantile of such medians under the null: {drawn}.",
            unit, "0 .. 1", "FP 3, 9", "",
            limit,
        ),
        Column(
            f"{name}_null_median",
            f"Median of such medians under the null: {drawn}.",
            unit, "0 .. 1", "FP 3, 9", "",
            limit,
        ),
        Column(
            f"{name}_null_high",
            f"97.5 % quantile of such medians under the null: {drawn}.",
            unit, "0 .. 1", "FP 3, 9", "",
            limit,
        ),
    )  # fmt: skip


_SUMMARY = (
    _STEP,
    Column(
        "n_heads", "Heads of the model.",
        "count", "1 .. inf", "the model", "",
        "An effective sample size: heads of a layer are not independent.",
    ),
    Column(
        "icl_score",
        "Loss on the second copy of repeated random segments less that on the first; negative where the copy is "
        "easier. NaN without detectors.",
        "nat per token", "-inf .. inf", "FP 9", "in-context learning score",
        _COPIES,
    ),
    Column(
        "icl_score_se", "Standard error of icl_score over sequences, paired.",
        "nat per token", "0 .. inf", "this package", "",
        "Sampling of sequences only: neither text nor another seed of the model.",
    ),
    Column(
        "first_copy_loss", "Loss on the first copy, positions 1 .. L - 1.",
        "nat per token", "0 .. inf", "this package", "",
        "A loss on text: tokens are random, and a model that has learned text finds them ever less likely.",
    ),
    Column(
        "second_copy_loss", "Loss on the second copy, positions L + 1 .. 2L - 1.",
        "nat per token", "0 .. inf", "this package", "induction loss",
        "That a certain head does it: whatever the copy needs shows.",
    ),
    *_median("D_head", null=True),
    *_median("dir_frac", null=True),
    *_median("rope_imag_frac", null=False),
)  # fmt: skip

_PAIR = tuple(
    Column(
        f"{end}_{part}",
        f"{part.capitalize()} of the {'earlier head, whose output is read' if end == 'source' else 'head that reads'}.",
        "index", f"0 .. {part}s - 1", "the caller", "",
        "Nothing: a label.",
    )
    for end in ("source", "target")
    for part in ("layer", "head")
)  # fmt: skip

_AFTERWARDS = (
    "A prediction, if the best of many steps and columns is picked afterwards: weights at neighbouring steps are all "
    "but equal."
)
_RANKS = (
    _STEP,
    Column(
        "column", "Which percentile is looked at.",
        "label", "a column of a percentile, such as prev_pct", "FP 9, Q3", "",
        "Nothing: a label.",
    ),
    Column(
        "percentile", "Percentile of the eventual head within the model of that step.",
        "share", "1/n .. 1", "FP 9, Q3", "",
        _AFTERWARDS,
    ),
    Column(
        "rank", "Place of the eventual head among all heads; 1 has the largest value, ties stand in the middle.",
        "index", "1 .. n_heads, halves for ties", "FP 9, Q3", "",
        _AFTERWARDS + " The last step is no test of the behaviour by which the head was chosen.",
    ),
    _SUMMARY[1],
    Column(
        "top_share", "rank / n_heads: how often a head picked at random stands as high.",
        "share", "1/n .. 1", "FP 9, Q3", "",
        _AFTERWARDS,
    ),
    Column(
        "chance", "1 / n_heads: how often a head picked at random is the first.",
        "share", "0 .. 1", "FP 9, Q3", "",
        "A level for the best of several columns: it is that of one.",
    ),
)  # fmt: skip

_HISTORY = "`tls.head_history`: "

HISTORY_TABLES = (
    Table(
        "head_history.heads",
        f"{_HISTORY}`.heads`",
        (_STEP, *HEAD_COLUMNS, *map(_percentile, ("prev", "rope_imag_frac", "dir_frac"))),
    ),
    Table("head_history.summary", f"{_HISTORY}`.summary`; `.track()` sets it beside a head's own rows", _SUMMARY),
    Table(
        "head_history.composition",
        f"{_HISTORY}`.composition`",
        (
            _STEP,
            *_PAIR,
            replace(COMPOSITION[0], meaning="||M OV^T|| / (||M|| ||OV||), M of the target and OV of the source."),
            *COMPOSITION[1:],
        ),
    ),
    Table("eventual_head_rank", "`tlspectral.history.eventual_head_rank`", _RANKS),
)
"""Tables about heads over a training."""
