"""Columns of the smaller tables about a model's heads: detectors, kernels, composition, rounding, comparison, placebos.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.tables.columns.entry import Column, Table
from tlspectral.tables.columns.heads import COLUMNS

_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_DETECTORS = tuple(COLUMNS[f"{name}{end}"] for name in ("prev", "dup", "ind") for end in ("", "_se"))

_FIRST_COPY = (
    Column(
        "prev_first",
        "Mean attention from each query of the first copy, the first one left out, to the token before it. "
        "On the sequences of prev.",
        "attention probability", "0 .. 1", "this package", "previous-token score without repetition",
        "Its chance level is another one than that of prev, since its queries see fewer keys.",
    ),
    Column(
        "prev_first_se",
        "Standard error of prev_first over sequences.",
        "attention probability", "0 .. inf", "this package", "",
        "Sampling of sequences only: neither another task nor another seed of the model.",
    ),
)  # fmt: skip

_KERNEL = (
    Column(
        "offset",
        "Position of the key less that of the query; -1 is the previous token, 0 the query itself.",
        "token", "-20 .. 0, or as far back as prompts reach", "FP 7, figure 3", "relative position",
        "Nothing: a place.",
    ),
    Column(
        "score",
        "Mean attention score at the offset, scaled and before the softmax, over sequences and all queries that have "
        "such a key unmasked. NaN where every such key is masked.",
        "logit", "-inf .. inf", "FP 7, figure 3", "relative-position kernel",
        "That the head attends by position: contents contribute to the mean, and a softmax sees only differences "
        "within a query's row.",
    ),
)  # fmt: skip

_PATH = "That the path is used: it reads weights, not what is on the residual stream."
COMPOSITION = (
    Column(
        "score",
        "||M OV^T|| / (||M|| ||OV||), M of the target and OV of this earlier head, for the target's keys; with M^T for "
        "its queries, with the target's OV for its values. Frobenius norms.",
        "ratio", "0 .. 1", "Elhage et al. 2021; FP 4", "K-, Q- or V-composition",
        _PATH,
    ),
    Column(
        "chance",
        "1 / sqrt(d_model): the score of operators with random frames.",
        "ratio", "0 .. 1", "Elhage et al. 2021", "baseline of composition",
        "A threshold: it is a typical value of random operators, without their spread.",
    ),
    Column(
        "rank",
        "Place of the score among all heads of all earlier layers; 1 is the strongest.",
        "index", "1 .. heads of earlier layers", "FP 4", "",
        "That ranks of two targets compare: the number of heads to be ranked among grows with the layer.",
    ),
)  # fmt: skip
"""`score, chance, rank` of `k_composition`."""

_SPECTRAL = (
    "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "spectral_radius", "prin_angle_mean",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir",
)  # fmt: skip
_ROUNDING = (
    "How far the unquantised model's numbers lie from these: quantising is no independent noise, and weights elsewhere "
    "moved too."
)


def _noise_columns(name: str) -> tuple[Column, Column]:
    unit = COLUMNS[name].unit
    return (
        Column(
            f"{name}_sd",
            f"Standard deviation (ddof 1) of {name} over draws in which query and key weights move within half a step "
            "of the grid they are stored on. NaN where a draw has no value.",
            unit, "0 .. inf", "this package", "rounding noise",
            _ROUNDING,
        ),
        Column(
            f"{name}_shift",
            f"Mean of {name} over those draws less its value for the weights as they are.",
            unit, "-inf .. inf", "this package", "",
            _ROUNDING,
        ),
    )  # fmt: skip


_DRAW = Column(
    "draw",
    "Number of the perturbed copy of the weights, from 0; -1 is the weights as they are.",
    "index", "-1 .. draws - 1", "this package", "",
    "Nothing: a label.",
)  # fmt: skip

_MOVED = "An interval over models, prompts or heads: rounding is one source of uncertainty."
_STATISTIC = (
    Column(
        "statistic", "Name of the statistic, as it was given.",
        "label", "any text", "the caller", "",
        "Nothing: a label.",
    ),
    Column(
        "value", "The statistic of the head table as it is.",
        "of the statistic", "-inf .. inf", "the caller's function", "",
        "That it lies within low and high: rounding moves all draws away from the stored weights alike.",
    ),
    Column(
        "mean", "Mean of the statistic over draws, each with its spectral columns in place of the table's.",
        "of the statistic", "-inf .. inf", "this package", "",
        _MOVED,
    ),
    Column(
        "sd", "Standard deviation (ddof 1) of the statistic over draws.",
        "of the statistic", "0 .. inf", "this package", "",
        _MOVED,
    ),
    Column(
        "low", "2.5 % quantile of the statistic over draws.",
        "of the statistic", "-inf .. inf", "this package", "",
        _MOVED,
    ),
    Column(
        "high", "97.5 % quantile of the statistic over draws.",
        "of the statistic", "-inf .. inf", "this package", "",
        _MOVED,
    ),
    Column(
        "draws", "Number of draws.",
        "count", "2 .. inf", "the caller", "",
        "Nothing: a setting.",
    ),
)  # fmt: skip

_COMPARED = (
    "outside_m", "rank", "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "self_match",
    "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "dir_frac_z", "D_head_z", "imag_mass_z",
    "henrici_z", "rope_imag_frac", "freq_centroid", "hi_freq_dir", "prev", "dup", "ind", "copying", "positivity",
    "D_head_pct",
)  # fmt: skip


def _compared_columns(name: str) -> tuple[Column, ...]:
    unit = COLUMNS[name].unit
    difference = Column(
        f"{name}_diff",
        f"{name} of the head in table b less that in table a. NaN where one of them has no value.",
        unit, "-inf .. inf", "this package", "",
        "That the head works otherwise, or what training did to it: two runs of the same fine-tuning may move other "
        "heads.",
    )  # fmt: skip
    if name not in _SPECTRAL:
        return (difference,)
    return (
        difference,
        Column(
            f"{name}_band",
            f"Twice the standard deviation that rounding gives {name}_diff, both models taken as independent. With a "
            "noise table only.",
            unit, "0 .. inf", "this package", "",
            "That a larger difference comes from training: one head in twenty is outside where rounding is all there "
            "is.",
        ),
        Column(
            f"{name}_outside",
            f"Whether |{name}_diff| exceeds {name}_band; missing where either is NaN. With a noise table only.",
            "flag", "False, True", "this package", "",
            "That a larger difference comes from training: one head in twenty is outside where rounding is all there "
            "is.",
        ),
    )  # fmt: skip


_PLACEBO_LIMIT = (
    "Anything about the model's positions: it is what the recipe finds where pairs or frequencies are not the model's."
)


def _placebo_column(name: str) -> Column:
    own = COLUMNS[name]
    return replace(
        own,
        meaning=f"{name} as the head table has it, with the placebo's pairs of columns or its frequencies in place of "
        "the model's own. NaN on layers that have none.",
        source="FP 7 (placebo controls)",
        does_not_establish=_PLACEBO_LIMIT,
    )


MODEL_TABLES = (
    Table("detect_heads", "`tls.detect_heads`", (*_HEAD, *_DETECTORS, *_FIRST_COPY)),
    Table("copying_scores", "`tls.copying_scores`", (*_HEAD, COLUMNS["copying"], COLUMNS["positivity"])),
    Table("relative_position_kernel", "`tls.relative_position_kernel`", (*_HEAD, *_KERNEL)),
    Table("k_composition", "`tls.k_composition`; layer and head are those of the earlier head", (*_HEAD, *COMPOSITION)),
    Table(
        "weight_noise_band",
        "`tls.weight_noise_band`",
        (*_HEAD, *(column for name in _SPECTRAL for column in _noise_columns(name))),
    ),
    Table(
        "weight_noise_draws",
        "`tlspectral.heads.weight_noise_draws`",
        (_DRAW, *_HEAD, *(COLUMNS[name] for name in _SPECTRAL)),
    ),
    Table("statistic_noise", "`tlspectral.heads.statistic_noise`", _STATISTIC),
    Table(
        "compare_heads",
        "`tls.compare_heads`",
        (*_HEAD, *(column for name in _COMPARED for column in _compared_columns(name))),
    ),
    Table(
        "permuted_pairing",
        "`tlspectral.heads.placebos.permuted_pairing` and, with one draw, `tlspectral.heads.placebos.pseudo_rope`",
        (
            replace(_DRAW, meaning="Number of the permutation of rotary columns, from 0.", range="0 .. draws - 1"),
            *_HEAD,
            *map(_placebo_column, ("rope_imag_frac", "freq_centroid", "hi_freq_dir")),
        ),
    ),
)
"""Tables about the heads of one model, beside the head table."""
