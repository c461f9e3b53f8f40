"""Columns of the tables of rounding, comparison and placebos. Those of the head table are in `tables`.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import ANALYZE_HEADS, COLUMNS, FREQUENCY_COLUMNS, HEAD_COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])

NOISE_COLUMNS = (
    "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "spectral_radius", "prin_angle_mean",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir",
)
"""The columns that `weight_noise_band` perturbs."""

_ROUNDING = (
    "How far the unquantised model's numbers lie from these: quantising is no independent noise, and weights elsewhere "
    "moved too."
)


def _noise_columns(name: str) -> tuple[Column, Column]:
    unit = COLUMNS[name].unit
    return (
        Column(f"{name}_sd",
            f"Standard deviation (ddof 1) of {name} over draws in which query and key weights move within half a step "
            "of the grid they are stored on. NaN where a draw has no value.", unit, range="0 .. inf",
            also_known_as="rounding noise", does_not_establish=_ROUNDING),
        Column(f"{name}_shift", f"Mean of {name} over those draws less its value for the weights as they are.", unit,
            range="-inf .. inf", does_not_establish=_ROUNDING),
    )


_DRAW = Column("draw", "Number of the perturbed copy of the weights, from 0; -1 is the weights as they are.", "index",
    range="-1 .. draws - 1")

_MOVED = "An interval over models, prompts or heads: rounding is one source of uncertainty."
_STATISTIC = (
    Column("statistic", "Name of the statistic, as it was given.", "label", range="any text", source="the caller"),
    Column("value", "The statistic of the head table as it is.", "of the statistic", range="-inf .. inf",
        source="the caller's function",
        does_not_establish="That it lies within low and high: rounding moves all draws away from the stored weights "
        "alike."),
    Column("mean", "Mean of the statistic over draws, each with its spectral columns in place of the table's.",
        "of the statistic", range="-inf .. inf", does_not_establish=_MOVED),
    Column("sd", "Standard deviation (ddof 1) of the statistic over draws.", "of the statistic", range="0 .. inf",
        does_not_establish=_MOVED),
    Column("low", "2.5 % quantile of the statistic over draws.", "of the statistic", range="-inf .. inf",
        does_not_establish=_MOVED),
    Column("high", "97.5 % quantile of the statistic over draws.", "of the statistic", range="-inf .. inf",
        does_not_establish=_MOVED),
    Column("draws", "Number of draws.", "count", range="2 .. inf", source="the caller"),
)

COMPARED_COLUMNS = (
    "outside_m", "rank", "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "self_match",
    "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "dir_frac_z", "D_head_z", "imag_mass_z",
    "henrici_z", "rope_imag_frac", "freq_centroid", "hi_freq_dir", "prev", "dup", "ind", "copying", "positivity",
    "D_head_pct",
)
"""The columns of which `compare_heads` gives the difference."""

_BANDED = (*NOISE_COLUMNS, "prev", "dup", "ind")
_ONE_IN_TWENTY = (
    "That a larger difference comes from training: one head in twenty is outside where rounding is all there is."
)
_CHANGE = (
    COLUMNS["name"],
    Column("change_rank", "Rank of the head by change, 1 for the largest; missing where change is NaN.", "count",
        range="1 .. heads"),
    Column("change", "Largest |difference| / band of the head over the columns that have a band; inf for a change "
        "where the band is 0, NaN without a band.", "bands", range="0 .. inf",
        does_not_establish="That the head works otherwise. Bands of different columns may come from different noise "
        "(attrs['bands'])."),
    Column("change_of", "Column that change is of.", "label", range="any column with a band"),
)


def _compared_columns(name: str) -> tuple[Column, ...]:
    unit = COLUMNS[name].unit
    values = tuple(
        replace(COLUMNS[name], name=f"{name}_{which}", meaning=f"{name} of the head in table {which}.")
        for which in ("a", "b")
    )
    difference = Column(f"{name}_diff",
        f"{name} of the head in table b less that in table a. NaN where one of them has no value.", unit,
        range="-inf .. inf",
        does_not_establish="That the head works otherwise, or what training did to it: two runs of the same "
        "fine-tuning may move other heads.")
    if name not in _BANDED:
        return (*values, difference)
    return (
        *values,
        difference,
        Column(f"{name}_band",
            f"Twice the standard deviation that noise gives {name}_diff, both models taken as independent: rounding "
            "where a noise table has the column, else the spread of its null, else its standard error over sequences "
            "(attrs['bands']). Absent where none is known.", unit, range="0 .. inf",
            does_not_establish=_ONE_IN_TWENTY),
        Column(f"{name}_outside",
            f"Whether |{name}_diff| exceeds {name}_band; missing where either is NaN. Absent without a band.",
            "flag", range="False, True",
            does_not_establish=_ONE_IN_TWENTY),
    )


_PLACEBO_LIMIT = (
    "Anything about the model's positions: it is what the recipe finds where pairs or frequencies are not the model's."
)


def _placebo_column(name: str) -> Column:
    column = COLUMNS[name]
    return replace(
        column,
        meaning=f"{name} as the head table has it, with the placebo's pairs of columns or its frequencies in place of "
        "the model's own. NaN on layers that have none.",
        source="FP 7 (placebo controls)",
        does_not_establish=_PLACEBO_LIMIT,
    )


_MODEL = Column("model", "Name of the model: hub id, absolute path, or name of a packaged model.", "label",
    range="any text", source="the caller",
    does_not_establish="Which weights these were: weights_sha256 in the attrs of the model's file does.")
_ORIGIN = (
    _MODEL,
    Column("revision", "Branch, tag or commit that was asked for; missing where none was.", "label", range="any text",
        source="the caller"),
    Column("commit", "Commit of the hub that the files are of; missing for other models.", "label",
        range="40 hexadecimal digits", source="the hub"),
)
_FAILURE = (
    _MODEL,
    Column("error", "Type of the error that the model ended with.", "label", range="any name"),
    Column("message", "What the error said.", "label", range="any text"),
    Column("raised_in", "File, line and function that raised the error.", "label", range="any text"),
)

ANALYZE_MODELS = {
    "heads": Table("analyze_models.heads",
        "`tlspectral.heads.analyze_models`; `tlspectral analyze A B -o FOLDER` writes it, a file per model",
        (*_ORIGIN, *HEAD_COLUMNS)),
    "failures": Table("analyze_models.failures",
        "`tlspectral.heads.analyze_models`; `tlspectral analyze A B -o FOLDER` writes it if a model failed", _FAILURE),
}
FREQUENCY_TABLE = Table("frequency_table", "`tls.frequency_table`", FREQUENCY_COLUMNS)
WEIGHT_NOISE_BAND = Table("weight_noise_band", "`tls.weight_noise_band`",
    (*_HEAD, *(column for name in NOISE_COLUMNS for column in _noise_columns(name))))
WEIGHT_NOISE_DRAWS = Table("weight_noise_draws", "`tlspectral.heads.weight_noise_draws`",
    (_DRAW, *_HEAD, *(COLUMNS[name] for name in NOISE_COLUMNS)))
STATISTIC_NOISE = Table("statistic_noise", "`tlspectral.heads.statistic_noise`", _STATISTIC)
COMPARE_HEADS = Table("compare_heads", "`tls.compare_heads`",
    (*_HEAD, *_CHANGE, *(column for name in COMPARED_COLUMNS for column in _compared_columns(name))))
PERMUTED_PAIRING = Table("permuted_pairing",
    "`tlspectral.heads.placebos.permuted_pairing` and, with one draw, `tlspectral.heads.placebos.pseudo_rope`",
    (replace(_DRAW, meaning="Number of the permutation of rotary columns, from 0.", range="0 .. draws - 1"), *_HEAD,
     *map(_placebo_column, ("rope_imag_frac", "freq_centroid", "hi_freq_dir"))))

TABLES = (
    ANALYZE_HEADS, FREQUENCY_TABLE, WEIGHT_NOISE_BAND, WEIGHT_NOISE_DRAWS, STATISTIC_NOISE, COMPARE_HEADS,
    PERMUTED_PAIRING, *ANALYZE_MODELS.values(),
)
