"""Columns of the tables published with "Fingerprint, Not Blueprint" (FP), some shared with tables measured here.

FP is Li (2026); its released tables are CC-BY-4.0.
"""

from dataclasses import replace

from tlspectral.history.result import CHECKPOINT_STEP, ICL_SCORE, N_HEADS, median_column, percentile_column
from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])

ARM = Column("arm",
    "Kind of model: rope or ape (learned absolute positions), then free (no constraint), sym (symmetric M) or imag "
    "(no Im M_t).", "label", range="ape_free, ape_sym, rope_free, rope_sym, rope_imag, or one's own", source="FP 10",
    does_not_establish="That the constraint holds exactly: penalties are soft.")
RUN = (ARM, SEED, STEP)
NEEDED = "That this head is what the loss depends on."

EVALUATIONS = (
    Column("loss", "Cross-entropy over all targets of the held-out sequences.", "nat", range="0 .. inf", source="FP 10",
        does_not_establish="That the task is learned: noise is among the targets."),
    Column("ce_pred", "Cross-entropy over the targets that the map decides.", "nat", range="0 .. inf", source="FP 10",
        does_not_establish="That an induction circuit is there: rotary models rest for long just above the "
        "threshold of formation."),
    Column("ce_unpred", "Cross-entropy over the noise targets.", "nat", range="0 .. inf", source="FP 10",
        does_not_establish="That the task is learned: noise cannot be predicted, whatever a model knows."),
    Column("prev_best", "prev of the head where it is largest.", "attention probability", range="0 .. 1",
        source="FP 10", does_not_establish=NEEDED),
    Column("ind_best", "ind of the head where it is largest.", "attention probability", range="0 .. 1", source="FP 10",
        does_not_establish=NEEDED),
    Column("penalty", "Value of the arm's penalty, without its weight; NaN in a free arm.", "of the penalty",
        range="0 .. 1 for those of FP", source="FP 10",
        does_not_establish="Anything of the other channel: a symmetric M says nothing of Im M_t."),
)

SPECTRA = tuple(
    replace(COLUMNS[name], meaning=f"{formula} Of the operator with the norm's gain folded in, and centred.")
    for name, formula in (
        ("dir_frac", "||M_A|| / ||M||."),
        ("D_head", "sum |Im l| / sum |l|."),
        ("rope_imag_frac", "sum_t ||Im M_t|| / sum_t (||Re M_t|| + ||Im M_t||); NaN without rotary positions."),
    )
)
RAW = tuple(
    replace(
        column,
        name=f"{column.name}_raw",
        meaning=f"{column.name} of the weights as they are stored, without the norm's gain.",
        source="FP 10, which reports these",
        does_not_establish="The operator that the model applies, which has the norm's gain in it: " + column.name + ".",
    )
    for column in SPECTRA
)
BEHAVIOUR = (
    Column("prev",
        "Attention to the previous token on the random-map task, mean over sequences and queries from a quarter of "
        "the sequence on.", "attention probability", range="0 .. 1", source="FP 10", does_not_establish=NEEDED),
    Column("ind",
        "Attention to all keys that follow an earlier copy of the query's token, mean over the same; a query whose "
        "token is new counts as 0.", "attention probability", range="0 .. 1", source="FP 10",
        does_not_establish=NEEDED),
)

KERNELS = (
    Column("offset", "Position of the key less that of the query; -1 is the previous token.", "token", range="-8 .. 0",
        source="FP 10"),
    Column("score",
        "Mean attention score at the offset before the softmax, over sequences and queries from a quarter of the "
        "sequence on.", "logit", range="-inf .. inf", source="FP 10, Fig. 5", also_known_as="relative-position kernel",
        does_not_establish="That the head attends by position: contents contribute to the mean."),
)

_STRENGTH = Column("strength", "Weight of the arm's penalty; 0 for a free arm.", "ratio", range="0, 1, 10",
    source="FP 10", does_not_establish="That the constraint holds exactly: penalties are soft.")
_RELEASED = "How it came about: weights, prompts and versions are not in the release's tables."


def _effect(name: str, meaning: str, where: str) -> Column:
    return Column(name, f"{meaning}, as published. {where} only.", "nat", range="-inf .. inf", source="FP 5, 8",
        does_not_establish=_RELEASED)


def _share(name: str, operator: str) -> Column:
    return Column(name,
        f"||P^T {operator} P|| / ||{operator}||, P the 64 leading right singular vectors of W_pos, as published. GPT-2 "
        "only.", "share", range="0 .. 1", source="FP's published GPT-2 table",
        also_known_as="position_share" if operator == "M" else "", does_not_establish=_RELEASED)


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
)

def _eventual(name: str) -> Column:
    return replace(
        percentile_column("rope_imag_frac") if name == "rope_imag_frac_pct" else COLUMNS[name],
        meaning=f"{name} of the eventual previous-token head, as published.",
        does_not_establish="Which head it is in pythia-160m: the release does not say.",
    )


def _composition(pair: str) -> Column:
    layer, head = pair.split("_")
    return Column(f"kcomp_{pair}",
        f"K-composition score of the eventual previous-token head with induction head {layer}.{head}, as published.",
        "ratio", range="0 .. 1", source="FP 9", also_known_as="score of k_composition",
        does_not_establish="That the path is used: it reads weights, not what is on the residual stream.")


_CHECKPOINTS = (
    CHECKPOINT_STEP,
    Column("tokens", "Tokens read in training: step x 1024 x 2048.", "token", range="0 .. inf", source="FP 9"),
    ICL_SCORE,
    *map(_composition, ("8_6", "10_9", "11_14", "4_6", "8_2", "4_10")),
    *map(_eventual, ("dir_frac", "D_head", "rope_imag_frac", "ind", "prev", "rope_imag_frac_pct", "D_head_pct")),
    replace(
        COLUMNS["ind"], name="ind_of_8_6", meaning="ind of head 8.6 of pythia-410m, as published. In no other history.",
    ),
    median_column("rope_imag_frac"), median_column("D_head"), N_HEADS,
)

_CURVES = (
    *_HEAD,
    Column("offset", "Position of the key less that of the query.", "token", range="-20 .. 0", source="FP Fig. 3"),
    Column("score", "Mean attention score before the softmax at the offset, on text, as published.", "logit",
        range="-inf .. inf", source="FP Fig. 3", also_known_as="relative-position kernel",
        does_not_establish="That the head attends by position: contents contribute to the mean."),
    Column("ablated", "Whether the rope phase of the head is removed; there for head 5.2 alone.", "flag",
        range="False, True", source="FP Fig. 3", does_not_establish="What other heads do without it."),
)


_CONSTRAINED = "`tlspectral.studies.fingerprint.published.published_constrained`: "

PUBLISHED_HEADS = Table("published_heads",
    "`tlspectral.studies.fingerprint.published.published_heads`; models have some of them", _PUBLISHED)
PUBLISHED_CHECKPOINTS = Table("published_checkpoints",
    "`tlspectral.studies.fingerprint.published.published_checkpoints`", _CHECKPOINTS)
PUBLISHED_KERNELS = Table("published_kernels", "`tlspectral.studies.fingerprint.published.published_kernels`", _CURVES)
PUBLISHED_CONSTRAINED = {
    name: Table(f"published_constrained.{name}", f"{_CONSTRAINED}`.{name}`", (ARM, _STRENGTH, SEED, STEP, *columns))
    for name, columns in (
        ("evaluations", EVALUATIONS[1:]), ("heads", (*_HEAD, *BEHAVIOUR, *RAW)), ("kernels", (*_HEAD, *KERNELS)),
    )
}
TABLES = (PUBLISHED_HEADS, PUBLISHED_CHECKPOINTS, PUBLISHED_KERNELS, *PUBLISHED_CONSTRAINED.values())
