"""Columns of the tables of head histories over a training.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.heads.composition import COMPOSITION
from tlspectral.positional.measure import SCORE_COLUMNS
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS, HEAD_COLUMNS

# fmt: off
CHECKPOINT_STEP = Column("step", "Training step of the checkpoint.", "step", range="0 .. inf", source="the caller",
    does_not_establish="That steps compare across models: batches differ.")
N_HEADS = Column("n_heads", "Heads of the model.", "count", range="1 .. inf", source="the model",
    does_not_establish="An effective sample size: heads of a layer are not independent.")
_COPIES = (
    "That copying got better: it falls as well when the first copy gets worse, which it does late in training. Read "
    "second_copy_loss by itself."
)
ICL_SCORE = Column("icl_score",
    "Loss on the second copy of repeated random segments less that on the first; negative where the copy is "
    "easier. NaN without detectors.", "nat per token", range="-inf .. inf", source="FP 9",
    also_known_as="in-context learning score", does_not_establish=_COPIES)


def percentile_column(name: str) -> Column:
    """Describe the percentile of a head table's column at one step of a training."""
    return Column(f"{name}_pct", f"Percentile of {name} within the model of that step: rank / n, average ties.",
        "share", range="1/n .. 1", source="FP 9", also_known_as="within-model percentile",
        does_not_establish="Distance: in a model without any structure some head stands at 1 as well.")


def median_column(name: str) -> Column:
    """Describe the median of a head table's column over the heads of a model."""
    return Column(f"{name}_median", f"Median of {name} over the heads of the model.", COLUMNS[name].unit,
        range="0 .. 1", source="FP 9", also_known_as="population median",
        does_not_establish="What single heads do: half of them can leave the null before a median moves.")


def _median(name: str, *, null: bool) -> tuple[Column, ...]:
    limit = "An exact level: heads that share keys, or were trained together, are not independent."
    drawn = "every head drawn independently from a normal distribution with the mean and deviation of its own null"
    unit = COLUMNS[name].unit
    median = median_column(name)
    if not null:
        half = Column(f"{name}_null_median",
            "1/2: rotating the pairs of a random W_K by 90 degrees swaps Re M_t and Im M_t. NaN without rotary layers.",
            unit, range="0.5",
            does_not_establish="A spread: how far from 1/2 chance would take the median is not in it.")
        return median, half
    quantiles = (("low", "2.5 % quantile"), ("median", "Median"), ("high", "97.5 % quantile"))
    return median, *(
        Column(f"{name}_null_{end}", f"{quantile} of such medians under the null: {drawn}.", unit, range="0 .. 1",
            source="FP 3, 9", does_not_establish=limit)
        for end, quantile in quantiles
    )


_SUMMARY = (
    N_HEADS,
    ICL_SCORE,
    Column("icl_score_se", "Standard error of icl_score over sequences, paired.", "nat per token", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither text nor another seed of the model."),
    Column("first_copy_loss", "Loss on the first copy, positions 1 .. L - 1.", "nat per token", range="0 .. inf",
        does_not_establish="A loss on text: tokens are random, and a model that has learned text finds them ever "
        "less likely."),
    Column("second_copy_loss", "Loss on the second copy, positions L + 1 .. 2L - 1.", "nat per token", range="0 .. inf",
        also_known_as="induction loss",
        does_not_establish="That a certain head does it: every head that the copy needs lowers it."),
    Column("value", "Score of the model on the task, mean over its sequences. NaN without task=.", "of the metric",
        range="by metric", does_not_establish="That heads caused it: a history shows an order."),
    Column("value_se", "Standard error of value over sequences. NaN without task=.", "of the metric", range="0 .. inf",
        does_not_establish="Sampling of sequences only."),
    *_median("D_head", null=True),
    *_median("dir_frac", null=True),
    *_median("rope_imag_frac", null=False),
)

_PAIR = tuple(
    Column(f"{end}_{part}",
        f"{part.capitalize()} of the {'earlier head, whose output is read' if end == 'sender' else 'head that reads'}.",
        "index", range=f"0 .. {part}s - 1", source="the caller")
    for end in ("sender", "receiver")
    for part in ("layer", "head")
)

_STEP = replace(
    CHECKPOINT_STEP,
    meaning="Training step of the checkpoint; where checkpoints have names instead, the name, in the order given.",
)

_SCORED = (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"])
HEAD_HISTORY = {
    name: Table(f"head_history.{name}", f"`tls.head_history`: `.{name}`{also}", (_STEP, *columns))
    for name, also, columns in (
        ("heads", "", (*HEAD_COLUMNS, *map(percentile_column, ("prev", "rope_imag_frac", "dir_frac")))),
        ("summary", "; `.track()` sets it beside a head's own rows", _SUMMARY),
        ("composition", "", (*_PAIR, replace(COMPOSITION[0],
            meaning="||M OV^T|| / (||M|| ||OV||), M of the receiver and OV of the sender."), *COMPOSITION[1:])),
        ("positional", ", with `blocks=`", (*_SCORED, *SCORE_COLUMNS)),
        ("frequencies", ", with `blocks=`", (*_SCORED, COLUMNS["frequency"], *SCORE_COLUMNS)),
    )
}
TABLES = tuple(HEAD_HISTORY.values())
