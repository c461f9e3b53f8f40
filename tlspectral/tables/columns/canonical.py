"""Columns of the tables about small models trained on the canonical tasks and on the random-map task.

PS is Urrutia et al., "Decoupling Positional and Symbolic Attention Behavior in Transformers"; FP is Li, "Fingerprint,
Not Blueprint" (2026).
"""

from tlspectral.tables.columns.entry import Column, Table

_SCHEDULE = "That a task cannot be learned at an angle where it was not: one architecture under one schedule."

SEED = Column(
    "seed", "Seed of the run's initial weights and training data; runs of one seed share both.",
    "index", "0 .. seeds - 1", "the caller", "",
    "The spread over anything else than initial weights and training data.",
)  # fmt: skip
STEP = Column(
    "step", "Gradient steps done.",
    "step", "0 .. steps", "this package", "",
    "That steps compare across schedules: batches and learning rates differ.",
)  # fmt: skip

_HEADS = (
    Column(
        "task", "Canonical task: index needs positions, retrieval symbols, partial_induction both.",
        "label", "index, retrieval, partial_induction", "PS 4", "",
        "That the head uses what the task is about: there may be another way to be right.",
    ),
    Column(
        "n_frequencies", "Rotary frequencies of the head: 1 is the angle alone, 2 is 0 and the angle.",
        "count", "1, 2", "PS 5", "",
        "Nothing: a setting.",
    ),
    Column(
        "angle", "The head's rotary frequency in units of pi/33; 2 turns once in the 33 tokens of a prompt.",
        "pi/33 rad/token", "0 .. inf; 0 .. 2 by default", "PS D.1", "base angle",
        _SCHEDULE,
    ),
    Column(
        "theta", "The same frequency in radians per token.",
        "rad/token", "0 .. inf", "PS D.1", "",
        _SCHEDULE,
    ),
    SEED,
)  # fmt: skip
_N = Column(
    "n", "Validation prompts behind the row; the same prompts for every run.",
    "count", "0 .. validation prompts", "PS D.1", "",
    "The spread over prompts of runs: all runs share them.",
)  # fmt: skip
_POSITION = Column(
    "position", "Where in the context the answer stands, from 0.",
    "index", "0 .. length - 1", "PS 5", "",
    "Nothing: a place.",
)  # fmt: skip
_CORRECT = Column(
    "correct", "How many of the n prompts are answered rightly: the right class has the largest logit.",
    "count", "0 .. n", "PS D.1", "",
    "Where the head looks: a right answer can come from several keys together.",
)  # fmt: skip
_ACCURACY = Column(
    "accuracy", "Share of the prompts that are answered rightly: correct / n. NaN where n is 0.",
    "share", "0 .. 1", "PS 5, D.1", "",
    _SCHEDULE,
)  # fmt: skip
_CHANCE = Column(
    "chance", "1 over the number of classes of the task.",
    "share", "0 .. 1", "PS 5", "",
    "What a head reaches with a part of the prompt: it is the guess that looks at nothing.",
)  # fmt: skip

_PLANE = (
    "That other seeds arrange their vectors at the same angles: a common turn of all queries and keys changes no score."
)
_TRAJECTORIES = (
    _HEADS[2], SEED, STEP,
    Column(
        "kind", "query for the index queries, key for the pairs of symbol and integer.",
        "label", "query, key", "PS figure 3B", "",
        "Nothing: a label.",
    ),
    Column(
        "token", "Id of the token.",
        "index", "0 .. n_tokens - 1", "this package", "",
        "Nothing: a label.",
    ),
    Column(
        "label", "Of a query the position that it asks for, of a key its symbol.",
        "index", "0 .. length - 1 for queries, 0 .. n_symbols - 1 for keys", "PS figure 3B", "",
        "Nothing: a label.",
    ),
    Column(
        "x", "First column of the token's q or k, before rotation.",
        "units of the head", "-inf .. inf", "PS figure 3B", "",
        _PLANE,
    ),
    Column(
        "y",
        "Second column of the same. The score at distance d is the scalar product of q and k after the query was "
        "turned by d x angle x pi/33.",
        "units of the head", "-inf .. inf", "PS figure 3B", "",
        _PLANE,
    ),
)  # fmt: skip

_RUN = Column(
    "run", "Number of the model in its stack, from 0, in the order in which runs were given.",
    "index", "0 .. runs - 1", "this package", "",
    "Nothing: a label.",
)  # fmt: skip
_LOSS = Column(
    "loss", "Mean cross-entropy of the answers in training, over the steps since the row before.",
    "nat", "0 .. inf", "this package", "",
    "A held-out loss: with a fixed set of training prompts they come again.",
)  # fmt: skip
_PAIR = Column(
    "pair", "Index of the head's rotary pair.",
    "index", "0 .. n_frequencies - 1", "this package", "",
    "Nothing: a label.",
)  # fmt: skip
_LEARNED = Column(
    "theta", "The pair's frequency after that many steps; it moves only if frequencies are learned.",
    "rad/token", "-inf .. inf", "this package", "",
    "That a frequency that moved did anything. Integer positions tell frequencies apart modulo 2 pi only.",
)  # fmt: skip

_BEST = "That one and the same head does it on other sequences (see detect_heads)."
_RANDOM_MAP = (
    STEP,
    Column(
        "loss", "Cross-entropy over all targets of held-out sequences of the random-map task.",
        "nat", "0 .. inf", "FP 10", "",
        "That the task is learned: noise is among the targets.",
    ),
    Column(
        "loss_predictable", "Cross-entropy over the targets that the map decides.",
        "nat", "0 .. inf", "FP 10", "ce_pred of a constrained run",
        "How far there is to go: a model that knows the map but not the noise has about -log(1 - noise).",
    ),
    Column(
        "prev_best",
        "Attention to the previous token, mean over queries from a quarter of the sequence on, of the head where it is "
        "largest.",
        "attention probability", "0 .. 1", "FP 10", "",
        _BEST,
    ),
    Column(
        "ind_best",
        "Attention to all keys that follow an earlier copy of the query's token, mean over the same queries, of the "
        "head where it is largest.",
        "attention probability", "0 .. 1", "FP 10", "",
        _BEST,
    ),
    Column(
        "penalty", "Value of the penalty on the loss, without its weight. With a penalty only.",
        "of the penalty", "0 .. 1 for those of FP", "FP 10", "",
        "That the constraint holds exactly: it is a soft one.",
    ),
)  # fmt: skip

_SWEEP = (
    "`tlspectral.studies.positional_symbolic.canonical.canonical_sweep`; `tlspectral study canonical -o FOLDER` writes "
    "it as "
)

CANONICAL_TABLES = (
    Table("canonical_sweep.accuracy", f"{_SWEEP}accuracy.parquet", (*_HEADS, _N, _ACCURACY, _CHANCE)),
    Table("canonical_sweep.by_position", f"{_SWEEP}by_position.parquet", (*_HEADS, _POSITION, _N, _CORRECT, _ACCURACY)),
    Table(
        "query_key_trajectories",
        "`tlspectral.studies.positional_symbolic.canonical.query_key_trajectories`; `tlspectral study canonical -o "
        "FOLDER` writes it as "
        "trajectories.parquet",
        _TRAJECTORIES,
    ),
    Table(
        "train_canonical.history",
        "`tlspectral.studies.positional_symbolic.canonical.train_canonical`",
        (_RUN, SEED, STEP, _LOSS),
    ),
    Table(
        "train_canonical.frequencies",
        "`tlspectral.studies.positional_symbolic.canonical.train_canonical`",
        (_RUN, SEED, STEP, _PAIR, _LEARNED),
    ),
    Table(
        "accuracy_by_position",
        "`tlspectral.studies.positional_symbolic.canonical.accuracy_by_position`",
        (_RUN, SEED, _POSITION, _N, _CORRECT),
    ),
    Table("train.history", "`tlspectral.studies.common.train`", _RANDOM_MAP),
)
"""Tables about small models trained from scratch."""
