"""Columns of the tables about small models trained on the canonical tasks.

PS is Urrutia et al., "Decoupling Positional and Symbolic Attention Behavior in Transformers".
"""

from dataclasses import replace

from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS, POSITIONAL_COLUMNS

# fmt: off
_SCHEDULE = "That a task cannot be learned at an angle where it was not: one architecture under one schedule."

_HEADS = (
    Column("task", "Canonical task: index needs positions, retrieval symbols, partial_induction both.", "label",
        range="index, retrieval, partial_induction", source="PS 4",
        does_not_establish="That the head uses what the task is about: there may be another way to be right."),
    Column("n_frequencies", "Rotary frequencies of the head: 1 is the angle alone, 2 is 0 and the angle.", "count",
        range="1, 2", source="PS 5"),
    Column("angle",
        "The head's rotary frequency in units of pi/33; 2 is one full rotation over the 33 tokens of a prompt.",
        "pi/33 rad/token", range="0 .. inf; 0 .. 2 by default", source="PS D.1", also_known_as="base angle",
        does_not_establish=_SCHEDULE),
    Column("theta", "The same frequency in radians per token.", "rad/token", range="0 .. inf", source="PS D.1",
        does_not_establish=_SCHEDULE),
    SEED,
)
_N = Column("n", "Validation prompts behind the row; the same prompts for every run.", "count",
    range="0 .. validation prompts", source="PS D.1",
    does_not_establish="The spread over prompts of runs: all runs share them.")
_POSITION = Column("position", "Where in the context the answer stands, from 0.", "index", range="0 .. length - 1",
    source="PS 5")
_CORRECT = Column("correct", "How many of the n prompts are answered rightly: the right class has the largest logit.",
    "count", range="0 .. n", source="PS D.1",
    does_not_establish="Where the head looks: a right answer can come from several keys together.")
_ACCURACY = Column("accuracy", "Share of the prompts that are answered rightly: correct / n. NaN where n is 0.",
    "share", range="0 .. 1", source="PS 5, D.1", does_not_establish=_SCHEDULE)
_CHANCE = Column("chance", "1 over the number of classes of the task.", "share", range="0 .. 1", source="PS 5",
    does_not_establish="What a head reaches with a part of the prompt, see most_frequent: it is the guess that looks "
    "at nothing.")

_MOST_FREQUENT = Column("most_frequent",
    "Share of the context that has its most frequent answer, mean over the validation prompts: the accuracy of "
    "answering what the context has most of. For index the most that a head without positions can reach, for retrieval "
    "the most of one that sees neither symbols nor positions.", "share", range="0 .. 1",
    does_not_establish="That a head above it uses positions for partial induction, where a symbol alone leaves two "
    "answers.")
_TOY = "What a head of a language model does: one layer, and tokens that hold no position."
_BEHAVIOUR = tuple(
    replace(column, meaning=f"{column.meaning} Mean over 128 prompts, every pair of the context a block of its own.",
        does_not_establish=_TOY)
    for column in POSITIONAL_COLUMNS if column.name in ("exclusion_index", "s_pos", "s_sym", "logit_std")
)

_PLANE = (
    "That other seeds arrange their vectors at the same angles: a common rotation of all queries and keys changes no "
    "score."
)
_TRAJECTORIES = (
    _HEADS[2], SEED, STEP,
    Column("kind", "query for the index queries, key for the pairs of symbol and integer.", "label", range="query, key",
        source="PS figure 3B"),
    Column("token", "Id of the token.", "index", range="0 .. n_tokens - 1"),
    Column("label", "Of a query the position that it asks for, of a key its symbol.", "index",
        range="0 .. length - 1 for queries, 0 .. n_symbols - 1 for keys", source="PS figure 3B"),
    Column("x", "First column of the token's q or k, before rotation.", "units of the head", range="-inf .. inf",
        source="PS figure 3B", does_not_establish=_PLANE),
    Column("y",
        "Second column of the same. The score at distance d is the scalar product of q and k after the query was "
        "rotated by d x angle x pi/33.", "units of the head", range="-inf .. inf", source="PS figure 3B",
        does_not_establish=_PLANE),
)

_RUN = Column("run", "Number of the model in its stack, from 0, in the order in which runs were given.", "index",
    range="0 .. runs - 1")
_LOSS = Column("loss", "Mean cross-entropy of the answers in training, over the steps since the row before.", "nat",
    range="0 .. inf", does_not_establish="A held-out loss: with a fixed set of training prompts they come again.")
_PAIR = Column("pair", "Index of the head's rotary pair.", "index", range="0 .. n_frequencies - 1")
_LEARNED = Column("theta", "The pair's frequency after that many steps; it moves only if frequencies are learned.",
    "rad/token", range="-inf .. inf",
    does_not_establish="That a frequency that moved did anything. Integer positions tell frequencies apart modulo 2 "
    "pi only.")

_CANONICAL = "`tlspectral.studies.positional_symbolic.canonical."
_WRITTEN = "`; `tlspectral study canonical -o FOLDER` writes it as "

CANONICAL_SWEEP = {
    name: Table(f"canonical_sweep.{name}", f"{_CANONICAL}canonical_sweep{_WRITTEN}{name}.parquet", columns)
    for name, columns in (
        ("accuracy", (*_HEADS, _N, _ACCURACY, _CHANCE, _MOST_FREQUENT, *_BEHAVIOUR)),
        ("by_position", (*_HEADS, _POSITION, _N, _CORRECT, _ACCURACY)),
        ("progress", (*_HEADS, STEP, _POSITION, _N, _CORRECT, _ACCURACY)),
    )
}
QUERY_KEY_TRAJECTORIES = Table("query_key_trajectories",
    f"{_CANONICAL}query_key_trajectories{_WRITTEN}trajectories.parquet", _TRAJECTORIES)
HISTORY = Table("train_canonical.history", f"{_CANONICAL}train_canonical`", (_RUN, SEED, STEP, _LOSS))
FREQUENCIES = Table("train_canonical.frequencies", f"{_CANONICAL}train_canonical`", (_RUN, SEED, STEP, _PAIR, _LEARNED))
ACCURACY_BY_POSITION = Table("accuracy_by_position", f"{_CANONICAL}accuracy_by_position`",
    (_RUN, SEED, _POSITION, _N, _CORRECT))
PROGRESS = Table("train_canonical.progress", f"{_CANONICAL}train_canonical`",
    (_RUN, SEED, STEP, _POSITION, _N, _CORRECT))
HEAD_BEHAVIOUR = Table("head_behaviour", f"{_CANONICAL}head_behaviour`", (_RUN, SEED, *_BEHAVIOUR))
_SEEDS = "Other schedules or models. Few seeds show large differences only."
ANSWER_SHAPE = Table("answer_shape",
    f"{_CANONICAL}answer_shape`; `tlspectral study canonical -o FOLDER` writes it as answer_shape.parquet", (
    *_HEADS[:3],
    Column("mean", "Accuracy with the answer among the first and last positions less that with it in the middle, mean "
        "over seeds: positive is a U, negative an inverted U.", "share", range="-1 .. 1", source="PS 5, figure 3A",
        does_not_establish=_SEEDS),
    Column("low", "Lower end of Student's 95 % interval over seeds. NaN for one seed.", "share", range="-inf .. 1",
        does_not_establish=_SEEDS),
    Column("high", "Upper end of that interval.", "share", range="-1 .. inf", does_not_establish=_SEEDS),
    Column("n", "Seeds.", "count", range="1 .. inf"),
))
_HEAD_OF_MODEL = (COLUMNS["layer"], COLUMNS["head"])
_FREQUENCY = COLUMNS["frequency"]
_OTHER_SWAPS = "How the head behaves under other swaps: the scores are means over many."
_TRACES = (
    replace(
        _FREQUENCY, meaning="Index of the rotary pair that is shown alone; missing (NA) for the whole head.",
    ),
    Column("swap_i", "Index of the first of the two swapped blocks.", "index", range="0 .. blocks - 1",
        source="PS 3.3"),
    Column("swap_j", "Index of the second of them, above swap_i.", "index", range="1 .. blocks - 1", source="PS 3.3"),
    Column("block", "Index of a slot for a block in the prompt, from 0, whichever block is in it.", "index",
        range="0 .. blocks - 1", source="PS figure 1E"),
    Column("before", "Mean attention weight of the last query to a token in that slot, before the swap.",
        "attention probability", range="0 .. 1", source="PS figure 1E", also_known_as="d",
        does_not_establish=_OTHER_SWAPS),
    Column("after",
        "The same after the swap, with the block that is then in the slot. A positional head has it equal to before; "
        "with a symbolic one the two slots have exchanged their weights.", "attention probability", range="0 .. 1",
        source="PS figure 1E", also_known_as="d'", does_not_establish=_OTHER_SWAPS),
)

_ONE_SINK = "That the frequency decides where the head looks: a logit that is large for all keys alike changes nothing."
_NORMS = (
    Column("logit_norm",
        "Root mean square, over visible tokens before the last query, of what the rotary pair adds to its score, "
        "before the model's score scale.", "logit x attention scale", range="0 .. inf",
        source="PS figure 1D, which does not define it", does_not_establish=_ONE_SINK),
    Column("key_norm",
        "Root mean square, over the same tokens, of the length of the key's two coordinates of the pair, after key "
        "norm and with the model's attention scaling.", "units of the model's keys", range="0 .. inf",
        source="PS figure 1D, which does not define it",
        does_not_establish=_ONE_SINK + " One attention sink can make up most of it."),
)

_MADE = "`tlspectral.studies.positional_symbolic.traces."
ATTENTION_TRACES = Table("attention_traces", f"{_MADE}attention_traces`", (*_HEAD_OF_MODEL, *_TRACES))
FREQUENCY_NORMS = Table("frequency_norms", f"{_MADE}frequency_norms`", (*_HEAD_OF_MODEL, _FREQUENCY, *_NORMS))
TABLES = (
    ATTENTION_TRACES, FREQUENCY_NORMS,
    *CANONICAL_SWEEP.values(), QUERY_KEY_TRAJECTORIES, HISTORY, FREQUENCIES, ACCURACY_BY_POSITION, PROGRESS,
    HEAD_BEHAVIOUR, ANSWER_SHAPE,
)
