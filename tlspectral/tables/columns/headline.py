"""Columns of the tables of one head whose one rotary frequency is learned.

PS is Urrutia et al., "Decoupling Positional and Symbolic Attention Behavior in Transformers"; BA is "Bifocal
Attention". `tlspectral study learn learned-frequency -o FOLDER` writes them.
"""

from tlspectral.tables.columns.canonical import SEED, STEP
from tlspectral.tables.columns.entry import Column, Table

_SMALL = "That larger models do this: the head has one frequency and nothing else to use."
_UNIT = "pi/33 rad/token"
_TASK = Column(
    "task", "Canonical task: retrieval wants no rotation, index about one turn over the places.",
    "label", "retrieval, index", "PS 4", "",
    "Nothing: a label.",
)  # fmt: skip
_START = Column(
    "start", "The head's frequency before training.",
    _UNIT, "0 .. inf; 0 .. 2 by default", "PS D.1", "",
    "Nothing: a setting.",
)  # fmt: skip
_HEADLINE_RUNS = (
    _TASK, _START, SEED,
    Column(
        "learned", "The frequency after training, as it is.",
        _UNIT, "-inf .. inf", "BA 3", "Omega",
        "Which frequency the head has: integer positions tell frequencies apart modulo 2 pi and without sign (folded).",
    ),
    Column(
        "accuracy", "Share of the validation prompts that are answered rightly after training.",
        "share", "0 .. 1", "PS D.1", "",
        "That the frequency is what made it: the weights were trained with it.",
    ),
    Column(
        "folded", "learned modulo 2 pi (66 units), without sign: what integer positions tell apart.",
        _UNIT, "0 .. 33", "this package", "",
        _SMALL,
    ),
    Column(
        "success",
        "Retrieval: folded below .05 and accuracy above .9. Index: folded from 1.8 to 2.1. Fixed before the runs.",
        "flag", "False, True", "this package", "",
        _SMALL,
    ),
)  # fmt: skip
_OMEGA = Column(
    "omega", "The frequency after that many steps, as it is.",
    _UNIT, "-inf .. inf", "BA 3", "Omega",
    "That moving did anything: Adam moves parameters with no effect too.",
)  # fmt: skip
_HEADLINE_SHARES = (
    _TASK,
    Column(
        "starts", "Which starting frequencies are counted: all, or those from .1 on.",
        "label", "all, from .1", "this package", "",
        "Nothing: a label.",
    ),
    Column(
        "runs", "Runs counted.",
        "count", "1 .. inf", "this package", "",
        "Independent runs: those of one seed share weights and prompts.",
    ),
    Column(
        "successes", "Runs with success.",
        "count", "0 .. runs", "this package", "",
        _SMALL,
    ),
    Column(
        "share", "successes / runs.",
        "share", "0 .. 1", "this package", "",
        _SMALL,
    ),
    Column(
        "low", "Lower end of Wilson's 95 % interval of share.",
        "share", "0 .. 1", "this package", "",
        "An exact level: runs of one seed are not independent, as it takes them.",
    ),
    Column(
        "high", "Upper end of Wilson's 95 % interval of share.",
        "share", "0 .. 1", "this package", "",
        "An exact level: runs of one seed are not independent, as it takes them.",
    ),
)  # fmt: skip


def experiment_table(experiment: str, name: str, *columns: Column) -> Table:
    """A table that an experiment on learnable rotary positions writes."""
    command = f"`tlspectral study learn {experiment} -o FOLDER`"
    return Table(f"experiments.{name}", f"{command} writes it as {name}.parquet", columns)


HEADLINE_TABLES = (
    experiment_table("learned-frequency", "headline_runs", *_HEADLINE_RUNS),
    experiment_table("learned-frequency", "headline_paths", _TASK, _START, SEED, STEP, _OMEGA),
    experiment_table("learned-frequency", "headline_shares", *_HEADLINE_SHARES),
)
"""Tables of the experiment `learned-frequency`."""
