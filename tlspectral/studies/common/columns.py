"""Columns of the history of a training on the random-map task. FP is Li, "Fingerprint, Not Blueprint" (2026)."""

from tlspectral.tables.column import Column, Table

# fmt: off
SEED = Column("seed", "Seed of the run's initial weights and training data; runs of one seed share both.", "index",
    range="0 .. seeds - 1", source="the caller",
    does_not_establish="The spread over anything else than initial weights and training data.")
STEP = Column("step", "Gradient steps done.", "step", range="0 .. steps",
    does_not_establish="That steps compare across schedules: batches and learning rates differ.")
_BEST = "That one and the same head does it on other sequences (see detect_heads)."
_RANDOM_MAP = (
    STEP,
    Column("loss", "Cross-entropy over all targets of held-out sequences of the random-map task.", "nat",
        range="0 .. inf", source="FP 10", does_not_establish="That the task is learned: noise is among the targets."),
    Column("loss_predictable", "Cross-entropy over the targets that the map decides.", "nat", range="0 .. inf",
        source="FP 10", also_known_as="ce_pred of a constrained run",
        does_not_establish="How far there is to go: a model that knows the map but not the noise has about -log(1 - "
        "noise)."),
    Column("prev_best",
        "Attention to the previous token, mean over queries from a quarter of the sequence on, of the head where it "
        "is largest.", "attention probability", range="0 .. 1", source="FP 10", does_not_establish=_BEST),
    Column("ind_best",
        "Attention to all keys that follow an earlier copy of the query's token, mean over the same queries, of the "
        "head where it is largest.", "attention probability", range="0 .. 1", source="FP 10", does_not_establish=_BEST),
    Column("penalty", "Value of the penalty on the loss, without its weight. With a penalty only.", "of the penalty",
        range="0 .. 1 for those of FP", source="FP 10",
        does_not_establish="That the constraint holds exactly: it is a soft one."),
)

TRAIN_HISTORY = Table("train.history", "`tlspectral.studies.common.train`", _RANDOM_MAP)
TABLES = (TRAIN_HISTORY,)
