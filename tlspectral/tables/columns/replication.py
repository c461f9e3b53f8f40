"""Columns of the tables around the published numbers of "Fingerprint, Not Blueprint" (FP), and of further models.

FP is Li (2026); its released tables are CC-BY-4.0.
"""

from dataclasses import replace

from tlspectral.tables.columns.constrained import CONSTRAINED_TABLES
from tlspectral.tables.columns.entry import Column, Table
from tlspectral.tables.columns.heads import COLUMNS
from tlspectral.tables.columns.history import HISTORY_TABLES
from tlspectral.tables.columns.statistics import REASON

_LAYER, _HEAD = COLUMNS["layer"], COLUMNS["head"]
_ONE_MODEL = "Anything about a positional scheme: one model is one model."

_ANOTHER = (
    Column(
        "statistic",
        "Which number: partial correlation (of D_head with prev given dir_frac), top-k percentile of D_head (of the k "
        "strongest previous-token heads), attenuation (share of the partial correlation that RoPE-phase controls "
        "take), attenuation by placebo (the same with a placebo's phase).",
        "label", "four kinds, the placebo by name", "FP Tables 2 and 3", "",
        "Nothing: a label.",
    ),
    Column(
        "method", "Estimator: hybrid (regress, then rank), rank (rank, then regress), or median.",
        "label", "hybrid, rank, median", "FP 6, 7", "",
        "Which of them is right where they differ.",
    ),
    Column(
        "value", "The number; for a placebo the mean of its draws.",
        "correlation, or share", "-1 .. 1 for a correlation, -inf .. inf for an attenuation", "FP Tables 2 and 3", "",
        _ONE_MODEL,
    ),
    Column(
        "low", "Lower end of a 95 % interval, layers resampled; for a placebo the smallest of its draws. NaN for a "
        "percentile.",
        "as value", "as value", "FP Table 2", "",
        "The spread over models or prompts.",
    ),
    Column(
        "high", "Upper end of that interval; for a placebo the largest of its draws.",
        "as value", "as value", "FP Table 2", "",
        "The spread over models or prompts.",
    ),
    Column(
        "pvalue", "p of what pvalue_of says. NaN for an attenuation by the model's own phase.",
        "probability", "0 .. 1", "this package", "",
        "An exact level for the percentile: heads of a layer depend on each other, so that it is too small where the "
        "top heads share layers.",
    ),
    Column(
        "pvalue_of", "What pvalue tests, in words; None without one.",
        "text", "any text, or None", "this package", "",
        "Nothing: a remark.",
    ),
    Column(
        "noise_sd", "Standard deviation of value when query and key weights move within the rounding they are stored "
        "with. NaN without the model, and for a placebo.",
        "as value", "0 .. inf", "this package", "",
        "An interval over models, prompts or heads: rounding is one source of uncertainty.",
    ),
    Column(
        "n", "Heads behind the number; for a placebo its draws.",
        "count", "0 .. inf", "this package", "",
        "An effective sample size: heads of a layer are not independent.",
    ),
    Column(
        "function", "Function of this package that computes the number.",
        "label", "a function", "this package", "",
        "Nothing: a label.",
    ),
    REASON,
)  # fmt: skip

_AGREES = "That the tables are what the models are: it goes from published tables to published numbers."
_CLAIMS = (
    Column(
        "id", "Name of the row.",
        "label", "unique", "this package", "",
        "Nothing: a label.",
    ),
    Column(
        "where", "Paper, and section, table or figure.",
        "text", "any text", "FP; for exact heads PS", "",
        "Nothing: a place.",
    ),
    Column(
        "what", "What the number is.",
        "text", "any text", "FP; for exact heads PS", "",
        "Nothing: a remark.",
    ),
    Column(
        "published", "The number as printed, or as a sentence has it: +0.47, 2.5e-5, <= 0.02, ~0.61.",
        "text", "a number, with <, <=, >, >= or ~ in front", "FP; for exact heads PS", "",
        "That a claim follows from the number.",
    ),
    Column(
        "ours", "The number recomputed. NaN where the published tables do not suffice.",
        "of the number", "-inf .. inf", "this package", "",
        _AGREES,
    ),
    Column(
        "difference", "ours less the published number. NaN for bounds.",
        "of the number", "-inf .. inf", "this package", "",
        _AGREES,
    ),
    Column(
        "verdict",
        "reproduced: rounds to the printed digits, an approximate one within one unit of the last, a Monte-Carlo one "
        "within 0.01, a bound where it holds. Else differs; or cannot be checked without weights.",
        "label", "reproduced, differs, cannot be checked without weights", "this package", "",
        _AGREES,
    ),
    Column(
        "why", "Why a number differs, what has to be known about one that does not, what weights are needed for.",
        "text", "any text, or empty", "this package", "",
        "The authors' own account.",
    ),
    Column(
        "function", "Function that recomputes the number, or measures it on a model.",
        "label", "a function", "this package", "",
        "Nothing: a label.",
    ),
    Column(
        "seed", "Seed of a Monte-Carlo number; missing for others.",
        "index", "0 .. inf", "this package", "",
        "Nothing: a setting.",
    ),
)  # fmt: skip

_FAR = "How far apart heads are: it is a rank. Models share data and code, and differ in more than their positions."
_MODEL = Column(
    "model", "Name of the model.",
    "label", "any text", "the caller", "",
    "Nothing: a label.",
)  # fmt: skip
_SCHEME = Column(
    "scheme", "RoPE where rope_imag_frac is there and not all NaN, else not RoPE.",
    "label", "RoPE, not RoPE", "FP 6", "positional scheme",
    "That positions make a difference between models.",
)  # fmt: skip
_MODELS = (
    _MODEL, _SCHEME,
    Column(
        "n_heads", "Heads ranked.",
        "count", "1 .. heads", "this package", "",
        "An effective sample size: heads of a layer are not independent.",
    ),
    Column(
        "k", "Strongest previous-token heads taken.",
        "count", "1 .. heads", "FP Table 2", "",
        "Nothing: a setting.",
    ),
    Column(
        "percentile", "Median over those heads of the percentile of D_head within the model, rank / n.",
        "share", "1/n .. 1", "FP Table 2", "",
        _FAR,
    ),
    Column(
        "midrank", "The same with (rank - 1/2) / n, which is 1/2 on average for heads at random.",
        "share", "0 .. 1", "this package", "",
        _FAR,
    ),
)  # fmt: skip
_MEMBERS = (
    _MODEL, _SCHEME, _LAYER, _HEAD,
    Column(
        "percentile", "Percentile of the head's D_head within its model, rank / n.",
        "share", "1/n .. 1", "FP Fig. 2a", "",
        _FAR,
    ),
)  # fmt: skip

_FEW = "That a class is told apart by these scores: it has two to eight heads, found by their effect on one task."
_IOI = (
    Column(
        "heads_class", "Class of heads of GPT-2's circuit for indirect objects.",
        "label", "name mover, induction, ...", "Wang et al. 2022, figure 2", "",
        "That its heads do this and nothing else.",
    ),
    Column(
        "heads", "The heads, layer.head.",
        "text", "9.9, 10.0, ...", "Wang et al. 2022, figure 2", "",
        "Nothing: a label.",
    ),
    Column(
        "n", "Heads of the class.",
        "count", "2 .. 8", "Wang et al. 2022, figure 2", "",
        "Nothing: a count.",
    ),
    *(
        Column(
            f"{name}_pct", f"Median over the class of the percentile of {name} among all heads, rank / n.",
            "%", "0 .. 100", "this package", "",
            _FEW,
        )
        for name in ("dir_frac", "D_head", "content_pos_frac", "prev", "dup", "ind")
    ),
)  # fmt: skip

_OTHER_SIZE = "That steps of the two compare: a quick grid is smaller, learns faster and stops early. Ratios do."


def _of_runs(name: str, whose: str) -> tuple[Column, ...]:
    return (
        Column(
            f"{name}_mean", f"Mean step of formation over the runs that formed, {whose}.",
            "step", "0 .. inf", "FP 10", "",
            _OTHER_SIZE + " Where runs did not form it is too low.",
        ),
        Column(
            f"{name}_sd", f"Standard deviation of the same over seeds (ddof 1), {whose}.",
            "step", "0 .. inf", "FP 10", "",
            _OTHER_SIZE,
        ),
        Column(
            f"{name}_ratio", f"{name}_mean over that of the free arm with the same positions.",
            "ratio", "0 .. inf", "FP 10", "delay",
            "The same experiment: sizes and schedules differ. Where runs did not form it is too low.",
        ),
    )  # fmt: skip


_EVALUATIONS, _CONSTRAINED_HEADS, _KERNELS, *_ = (table.columns for table in CONSTRAINED_TABLES)
_ARM = _EVALUATIONS[0]
_SIDE = (
    _ARM,
    Column(
        "seeds", "Runs of the arm in the grid.",
        "count", "1 .. inf", "this package", "",
        "Nothing: a count.",
    ),
    Column(
        "unformed", "Runs of the grid that did not form, by both criteria.",
        "count", "0 .. seeds", "this package", "",
        "That they never would: they had so many steps.",
    ),
    *_of_runs("published", "published runs by the loss"),
    *_of_runs("loss", "the grid's by the loss"),
    *_of_runs("both", "the grid's by loss and induction score"),
)  # fmt: skip

_STRENGTH = Column(
    "strength", "Weight of the arm's penalty; 0 for a free arm.",
    "ratio", "0, 1, 10", "FP 10", "",
    "That the constraint holds exactly: penalties are soft.",
)  # fmt: skip
_RELEASED = "How it came about: weights, prompts and versions are not in the release's tables."


def _effect(name: str, meaning: str, where: str) -> Column:
    return Column(name, f"{meaning}, as published. {where} only.", "nat", "-inf .. inf", "FP 5, 8", "", _RELEASED)


def _share(name: str, operator: str) -> Column:
    return Column(
        name,
        f"||P^T {operator} P|| / ||{operator}||, P the 64 leading right singular vectors of W_pos, as published. GPT-2 "
        "only.",
        "share", "0 .. 1", "FP's published GPT-2 table", "position_share" if operator == "M" else "",
        _RELEASED,
    )  # fmt: skip


_NULL_ENDS = ("null_mean", "null_std", "z")
_PUBLISHED = (
    *(
        COLUMNS[name]
        for name in (
            "layer", "head", "rank", "dir_frac", "D_head", "imag_mass", "henrici", "cond_eig", "spectral_radius",
            "content_pos_frac", "prin_angle_mean", "prin_angle_max",
            *(f"{metric}_{end}" for metric in ("dir_frac", "D_head", "imag_mass", "henrici") for end in _NULL_ENDS),
            "prev", "dup", "ind", "copying", "self_match", "score_asym", "rope_imag_frac", "freq_centroid",
            "hi_freq_dir",
        )
    ),
    _effect("dCE_sym", "Change of the corpus loss when M_A is removed", "GPT-2"),
    _effect("dCE_anti", "Change of the corpus loss when M_S is removed", "GPT-2"),
    _effect("dICL_sym", "Change of the induction loss when M_A is removed", "GPT-2"),
    _effect("dInd_rope", "Change of the induction loss when the rope phase is removed", "Models with RoPE"),
    _effect("dCE_rope", "Change of the corpus loss when the rope phase is removed", "Pythia"),
    _share("pos_frac_M", "M"),
    _share("pos_frac_MA", "M_A"),
)  # fmt: skip

_HISTORY = {column.name: column for table in HISTORY_TABLES for column in table.columns}


def _eventual(name: str) -> Column:
    return replace(
        _HISTORY[name],
        meaning=f"{name} of the eventual previous-token head, as published.",
        does_not_establish="Which head it is in pythia-160m: the release does not say.",
    )


def _composition(pair: str) -> Column:
    layer, head = pair.split("_")
    return Column(
        f"kcomp_{pair}",
        f"K-composition score of the eventual previous-token head with induction head {layer}.{head}, as published.",
        "ratio", "0 .. 1", "FP 9", "score of k_composition",
        "That the path is used: it reads weights, not what is on the residual stream.",
    )  # fmt: skip


_CHECKPOINTS = (
    _HISTORY["step"],
    Column(
        "tokens", "Tokens read in training: step x 1024 x 2048.",
        "token", "0 .. inf", "FP 9", "",
        "Nothing: a count.",
    ),
    _HISTORY["icl_score"],
    *map(_composition, ("8_6", "10_9", "11_14", "4_6", "8_2", "4_10")),
    *map(_eventual, ("dir_frac", "D_head", "rope_imag_frac", "ind", "prev", "rope_imag_frac_pct", "D_head_pct")),
    replace(
        COLUMNS["ind"], name="ind_of_8_6", meaning="ind of head 8.6 of pythia-410m, as published. In no other history.",
    ),
    _HISTORY["rope_imag_frac_median"], _HISTORY["D_head_median"], _HISTORY["n_heads"],
)  # fmt: skip

_CURVES = (
    _LAYER, _HEAD,
    Column(
        "offset", "Position of the key less that of the query.",
        "token", "-20 .. 0", "FP Fig. 3", "",
        "Nothing: a place.",
    ),
    Column(
        "score", "Mean attention score before the softmax at the offset, on text, as published.",
        "logit", "-inf .. inf", "FP Fig. 3", "relative-position kernel",
        "That the head attends by position: contents contribute to the mean.",
    ),
    Column(
        "ablated", "Whether the rope phase of the head is removed; there for head 5.2 alone.",
        "flag", "False, True", "FP Fig. 3", "",
        "What other heads do without it.",
    ),
)  # fmt: skip


def _published_run(columns: tuple[Column, ...], left_out: tuple[str, ...] = ()) -> tuple[Column, ...]:
    kept = tuple(column for column in columns if column.name not in left_out)
    return (kept[0], _STRENGTH, *kept[1:])


_CONSTRAINED = "`tlspectral.tables.published.published_constrained`: "

REPLICATION_TABLES = (
    Table(
        "another_model",
        "`tlspectral.heads.model_statistics`; `tlspectral statistics TABLE -o FILE` writes it",
        _ANOTHER,
    ),
    Table(
        "replicate",
        "`tlspectral.studies.fingerprint.replication.replicate`; `tlspectral study replicate -o FOLDER` writes it as "
        "replication.parquet",
        _CLAIMS,
    ),
    Table(
        "scheme_contrast.models",
        "`tlspectral.studies.fingerprint.replication.scheme_contrast`: `.models`; `tlspectral study schemes` prints it "
        "without k",
        _MODELS,
    ),
    Table("scheme_contrast.heads", "`tlspectral.studies.fingerprint.replication.scheme_contrast`: `.heads`", _MEMBERS),
    Table("ioi_classes", "`tlspectral.studies.fingerprint.replication.ioi_classes`", _IOI),
    Table(
        "side_by_side",
        "`tlspectral.studies.fingerprint.replication.side_by_side`; `tlspectral study replicate --grid TABLE` prints "
        "it",
        _SIDE,
    ),
    Table(
        "published_heads",
        "`tlspectral.tables.published.published_heads`; models have some of them",
        _PUBLISHED,
    ),
    Table("published_checkpoints", "`tlspectral.tables.published.published_checkpoints`", _CHECKPOINTS),
    Table("published_kernels", "`tlspectral.tables.published.published_kernels`", _CURVES),
    Table(
        "published_constrained.evaluations", f"{_CONSTRAINED}`.evaluations`", _published_run(_EVALUATIONS, ("loss",))
    ),
    Table(
        "published_constrained.heads",
        f"{_CONSTRAINED}`.heads`",
        _published_run(_CONSTRAINED_HEADS, ("dir_frac", "D_head", "rope_imag_frac")),
    ),
    Table("published_constrained.kernels", f"{_CONSTRAINED}`.kernels`", _published_run(_KERNELS)),
)
"""Tables around published numbers."""
