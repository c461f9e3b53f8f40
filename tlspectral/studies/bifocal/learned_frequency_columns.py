"""Columns of the tables of one head whose one rotary frequency is learned.

PS is Urrutia et al., "Decoupling Positional and Symbolic Attention Behavior in Transformers"; BA is "Bifocal
Attention". `tlspectral study learn learned-frequency -o FOLDER` writes them.
"""

from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.tables.column import Column, Table

# fmt: off
_SMALL = "That larger models do this: the head has one frequency and nothing else to use."
_UNIT = "pi/33 rad/token"
_TASK = Column("task",
    "Canonical task: the solution of retrieval is no rotation, that of index about one over the context.", "label",
    range="retrieval, index", source="PS 4")
_START = Column("start", "The head's frequency before training.", _UNIT, range="0 .. inf; 0 .. 2 by default",
    source="PS D.1")
_HEADLINE_RUNS = (
    _TASK, _START, SEED,
    Column("learned", "The frequency after training, as it is.", _UNIT, range="-inf .. inf", source="BA 3",
        also_known_as="Omega",
        does_not_establish="Which frequency the head has: integer positions tell frequencies apart modulo 2 pi and "
        "without sign (folded)."),
    Column("accuracy", "Share of the validation prompts that are answered rightly after training.", "share",
        range="0 .. 1", source="PS D.1",
        does_not_establish="That the frequency is what made it: the weights were trained with it."),
    Column("folded", "learned modulo 2 pi (66 units), without sign: what integer positions tell apart.", _UNIT,
        range="0 .. 33", does_not_establish=_SMALL),
    Column("success",
        "Retrieval: folded below .05 and accuracy above .9. Index: folded from 1.8 to 2.1. Fixed before the runs.",
        "flag", range="False, True", does_not_establish=_SMALL),
)
_OMEGA = Column("omega", "The frequency after that many steps, as it is.", _UNIT, range="-inf .. inf", source="BA 3",
    also_known_as="Omega", does_not_establish="That moving did anything: Adam moves parameters with no effect too.")
_HEADLINE_SHARES = (
    _TASK,
    Column("starts", "Which starting frequencies are counted: all, or those from .1 on.", "label",
        range="all, from .1"),
    Column("runs", "Runs counted.", "count", range="1 .. inf",
        does_not_establish="Independent runs: those of one seed share weights and prompts."),
    Column("successes", "Runs with success.", "count", range="0 .. runs", does_not_establish=_SMALL),
    Column("share", "successes / runs.", "share", range="0 .. 1", does_not_establish=_SMALL),
    Column("low", "Lower end of Wilson's 95 % interval of share.", "share", range="0 .. 1",
        does_not_establish="An exact level: runs of one seed are not independent, as it takes them."),
    Column("high", "Upper end of Wilson's 95 % interval of share.", "share", range="0 .. 1",
        does_not_establish="An exact level: runs of one seed are not independent, as it takes them."),
)


def experiment_table(experiment: str, name: str, *columns: Column) -> Table:
    """A table that an experiment on learnable rotary positions writes."""
    command = f"`tlspectral study learn {experiment} -o FOLDER`"
    return Table(f"experiments.{name}", f"{command} writes it as {name}.parquet", columns)


TABLES = (
    experiment_table("learned-frequency", "headline_runs", *_HEADLINE_RUNS),
    experiment_table("learned-frequency", "headline_paths", _TASK, _START, SEED, STEP, _OMEGA),
    experiment_table("learned-frequency", "headline_shares", *_HEADLINE_SHARES),
)
