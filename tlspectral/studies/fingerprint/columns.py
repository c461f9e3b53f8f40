"""Columns of the tables around the published numbers of Li, "Fingerprint, Not Blueprint" (FP, 2026)."""

from dataclasses import replace

from tlspectral.history.result import CHECKPOINT_STEP, N_HEADS
from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.studies.fingerprint.published_columns import ARM, BEHAVIOUR, RAW
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_LAYER, _HEAD = COLUMNS["layer"], COLUMNS["head"]
_AGREES = "That the tables are what the models are: it goes from published tables to published numbers."
_MEANT = "What the authors meant: readings are this package's."
_OF_SENTENCES = " Of sentences alone."
_CLAIMS = (
    Column("id", "Name of the row.", "label", range="unique"),
    Column("kind", "number: a published number, recomputed. sentence: a claim in words, decided by two readings.",
        "label", range="number, sentence"),
    Column("where", "Paper, and section, table or figure.", "text", range="any text", source="FP, PS or BA"),
    Column("what", "What the number is; of a sentence what is tested, with the family of tests.", "text",
        range="any text", source="FP, PS or BA"),
    Column("published", "A number as printed, or as a sentence has it: +0.47, 2.5e-5, <= 0.02, ~0.61. A sentence as "
        "quoted in short.", "text", range="a number, with <, <=, >, >= or ~ in front; or words",
        source="FP, PS or BA", does_not_establish="That a claim follows from the number."),
    Column("ours", "The number recomputed. NaN where the published tables do not suffice, and for sentences.",
        "of the number",
        range="-inf .. inf", does_not_establish=_AGREES),
    Column("difference", "ours less the published number. NaN for bounds and sentences.", "of the number",
        range="-inf .. inf", does_not_establish=_AGREES),
    Column("verdict",
        "Of a number: reproduced, if it rounds to the printed digits, an approximate one within one unit of the last, "
        "a Monte-Carlo one within 0.01, a bound where it holds; else differs; or cannot be checked without weights. Of "
        "a sentence: holds as it stands; holds only kindly; does not hold in either reading; or not decidable from the "
        "tables, where they have not what the strict reading is about.", "label",
        range="reproduced, differs, cannot be checked without weights; holds, holds only kindly, does not hold, not "
        "decidable from the tables", does_not_establish=_AGREES),
    Column("why", "Why a number differs, by how much one that is reproduced misses its literal reading, what weights "
        "are needed for; the figures behind a sentence, or what it needs.",
        "text", range="any text, or empty", does_not_establish="The authors' own account."),
    Column("function", "Function that recomputes the number, measures it on a model, or decides the sentence.", "label",
        range="a function"),
    Column("seed", "Seed of a Monte-Carlo number; missing for others.", "index", range="0 .. inf"),
    Column("n", "Units of the test: heads of the smallest model, models, runs or checkpoints. Missing for numbers.",
        "count", range="0 .. inf",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("power", "What the test could have seen at this n: the smallest |rho| found with power 0.8, the power of a "
        "rank test, the smallest p." + _OF_SENTENCES, "text", range="any text, or empty",
        does_not_establish="That a difference that was not found is not there."),
    *(
        column
        for name, which in (("strict", "the words as they stand"), ("kindest", "the weakest claim they can mean"))
        for column in (
            Column(name, f"What a reading asks for, {which}, and what its value is." + _OF_SENTENCES, "text",
                range="any text; empty where the tables hold nothing for it", does_not_establish=_MEANT),
            Column(f"{name}_value", f"The number that decides {name}." + _OF_SENTENCES, f"as {name} says",
                range="-inf .. inf", does_not_establish=_AGREES),
            Column(f"{name}_holds", f"Whether the condition of {name} is met." + _OF_SENTENCES, "flag",
                range="true, false, missing", does_not_establish=_MEANT),
        )
    ),
)

_FAR = "How far apart heads are: it is a rank. Models share data and code, and differ in more than their positions."
_MODEL = Column("model", "Name of the model.", "label", range="any text", source="the caller")
_SCHEME = Column("scheme", "RoPE where rope_imag_frac is there and not all NaN, else not RoPE.", "label",
    range="RoPE, not RoPE", source="FP 6", also_known_as="positional scheme",
    does_not_establish="That positions make a difference between models.")
_MODELS = (
    _MODEL, _SCHEME,
    Column("n_heads", "Heads ranked.", "count", range="1 .. heads",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("k", "Strongest previous-token heads taken.", "count", range="1 .. heads", source="FP Table 2"),
    Column("percentile", "Median over those heads of the percentile of D_head within the model, rank / n.", "share",
        range="1/n .. 1", source="FP Table 2", does_not_establish=_FAR),
    Column("midrank", "The same with (rank - 1/2) / n, which is 1/2 on average for heads at random.", "share",
        range="0 .. 1", does_not_establish=_FAR),
)
_MEMBERS = (
    _MODEL, _SCHEME, _LAYER, _HEAD,
    Column("percentile", "Percentile of the head's D_head within its model, rank / n.", "share", range="1/n .. 1",
        source="FP Fig. 2a", does_not_establish=_FAR),
)

_FEW = "That a class is told apart by these scores: it has two to eight heads, found by their effect on one task."
_IOI = (
    Column("heads_class", "Class of heads of GPT-2's circuit for indirect objects.", "label",
        range="name mover, induction, ...", source="Wang et al. 2022, figure 2",
        does_not_establish="That its heads do this and nothing else."),
    Column("heads", "The heads, layer.head.", "text", range="9.9, 10.0, ...", source="Wang et al. 2022, figure 2"),
    Column("n", "Heads of the class.", "count", range="2 .. 8", source="Wang et al. 2022, figure 2"),
    *(
        Column(f"{name}_pct", f"Median over the class of the percentile of {name} among all heads, rank / n.", "%",
            range="0 .. 100", does_not_establish=_FEW)
        for name in ("dir_frac", "D_head", "content_pos_frac", "prev", "dup", "ind")
    ),
)

_OTHER_SIZE = "That steps of the two compare: a quick grid is smaller, learns faster and stops early. Ratios do."


def _of_runs(name: str, whose: str) -> tuple[Column, ...]:
    return (
        Column(f"{name}_mean", f"Mean step of formation over the runs that formed, {whose}.", "step", range="0 .. inf",
            source="FP 10", does_not_establish=_OTHER_SIZE + " Where runs did not form it is too low."),
        Column(f"{name}_sd", f"Standard deviation of the same over seeds (ddof 1), {whose}.", "step", range="0 .. inf",
            source="FP 10", does_not_establish=_OTHER_SIZE),
        Column(f"{name}_ratio", f"{name}_mean over that of the free arm with the same positions.", "ratio",
            range="0 .. inf", source="FP 10", also_known_as="delay",
            does_not_establish="The same experiment: sizes and schedules differ. Where runs did not form it is too "
            "low."),
    )


_SIDE = (
    ARM,
    Column("seeds", "Runs of the arm in the grid.", "count", range="1 .. inf"),
    Column("unformed", "Runs of the grid that did not form, by both criteria.", "count", range="0 .. seeds",
        does_not_establish="That they never would: they had so many steps."),
    *_of_runs("published", "published runs by the loss"),
    *_of_runs("loss", "the grid's by the loss"),
    *_of_runs("both", "the grid's by loss and induction score"),
)

_ROUNDING = (
    "That the two were trained differently: another version or processor rounds sums in another order, and training "
    "amplifies that. See published_sd."
)
_PARTING = (
    ARM, SEED, STEP,
    Column("measure", "Which column of the evaluations.", "label",
        range="ce_pred, ce_unpred, prev_best, ind_best, penalty", source="FP 10"),
    Column("here", "Its value in the grid.", "of the measure", range="-inf .. inf", source="the grid"),
    Column("published", "Its value in the published run of the same arm and seed.", "of the measure",
        range="-inf .. inf", source="FP 10"),
    Column("difference", "here less published.", "of the measure", range="-inf .. inf", does_not_establish=_ROUNDING),
    Column("published_sd", "Standard deviation (ddof 1) over the five published seeds of the arm at that step.",
        "of the measure", range="0 .. inf", source="FP 10", does_not_establish="A precise spread: seeds are five."),
)


def _formed(name: str, rule: str) -> tuple[Column, ...]:
    return (
        Column(name, f"First evaluation of the grid's run with {rule}; NaN where there is none so far.", "step",
            range="0 .. steps", source="FP 10", does_not_establish="That it never forms: the run may go on."),
        Column(f"{name}_published", "The same of the published run.", "step", range="0 .. steps", source="FP 10"),
    )


_PARTED = (
    ARM, SEED,
    Column("last_step", "Last step that both runs have an evaluation of.", "step", range="0 .. steps"),
    Column("same_until",
        "Last step up to which ce_pred is within 1e-5 nats of the published at all evaluations; NaN where at none.",
        "step", range="0 .. steps", does_not_establish="That all weights are the same up to there."),
    Column("largest_difference", "Largest absolute difference of ce_pred over the steps.", "nat", range="0 .. inf",
        does_not_establish=_ROUNDING),
    Column("largest_at", "Step of largest_difference.", "step", range="0 .. steps"),
    *_formed("formed_loss", "ce_pred below half of ln V + 0.15 nats"),
    *_formed("formed_both", "ce_pred below that and ind_best above 0.5"),
)
_PARTED_HEADS = (
    ARM, SEED, STEP,
    *(
        entry
        for column in (_LAYER, _HEAD, BEHAVIOUR[0], *RAW)
        for entry in (
            column,
            replace(column, name=f"{column.name}_published",
                meaning=f"{column.name} of the published run's previous-token head at that step.", source="FP 10"),
        )
    ),
)

_AFTERWARDS = (
    "A prediction, if the best of many steps and columns is picked afterwards: weights at neighbouring steps are all "
    "but equal."
)
_RANKS = (
    CHECKPOINT_STEP,
    Column("column", "Which percentile is looked at.", "label", range="a column of a percentile, such as prev_pct",
        source="FP 9, Q3"),
    Column("percentile", "Percentile of the eventual head within the model of that step.", "share", range="1/n .. 1",
        source="FP 9, Q3", does_not_establish=_AFTERWARDS),
    Column("rank", "Rank of the eventual head among all heads; 1 has the largest value, ties have their mean rank.",
        "index", range="1 .. n_heads, halves for ties", source="FP 9, Q3",
        does_not_establish=_AFTERWARDS + " The last step is no test of the behaviour by which the head was chosen."),
    N_HEADS,
    Column("top_share", "rank / n_heads: how often a random head ranks as high.", "share", range="1/n .. 1",
        source="FP 9, Q3", does_not_establish=_AFTERWARDS),
    Column("chance", "1 / n_heads: how often a random head has rank 1.", "share", range="0 .. 1",
        source="FP 9, Q3", does_not_establish="A level for the best of several columns: it is that of one."),
)

_REPLICATION = "`tlspectral.studies.fingerprint.replication."

REPLICATE = Table("replicate",
    f"{_REPLICATION}replicate`; `tlspectral study replicate -o FOLDER` writes it as replication.parquet", _CLAIMS)
SCHEME_MODELS = Table("scheme_contrast.models",
    f"{_REPLICATION}scheme_contrast`: `.models`; `tlspectral study schemes` prints it without k", _MODELS)
SCHEME_HEADS = Table("scheme_contrast.heads", f"{_REPLICATION}scheme_contrast`: `.heads`", _MEMBERS)
IOI_CLASSES = Table("ioi_classes", f"{_REPLICATION}ioi_classes`", _IOI)
SIDE_BY_SIDE = Table("side_by_side",
    f"{_REPLICATION}side_by_side`; `tlspectral study replicate --grid TABLE` prints it", _SIDE)
BESIDE_PUBLISHED = {
    name: Table(f"beside_published.{name}",
        f"{_REPLICATION}published_runs.beside_published`: `.{name}`; `tlspectral study beside-published FOLDER -o "
        f"FOLDER` writes {name}.parquet", columns)
    for name, columns in (("steps", _PARTING), ("runs", _PARTED), ("heads", _PARTED_HEADS))
}
EVENTUAL_HEAD_RANK = Table("eventual_head_rank",
    "`tlspectral.studies.fingerprint.history_questions.eventual_head_rank`", _RANKS)
TABLES = (
    REPLICATE, SCHEME_MODELS, SCHEME_HEADS, IOI_CLASSES, SIDE_BY_SIDE, *BESIDE_PUBLISHED.values(), EVENTUAL_HEAD_RANK,
)
