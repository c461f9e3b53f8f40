"""Columns of the tables about heads. Those of the head table are in `tables`.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.stats.columns import REASON
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
        "`tlspectral.heads.analyze_models`; `tlspectral analyze A B -o FOLDER` writes it, a file per model that failed",
        _FAILURE),
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

_RANDOM = "uniform in the space that the direction lies in"
HEAD_DIRECTIONS = Table("head_directions", "`tls.head_directions`", (
    *_HEAD,
    Column("kind", "Which operator: qk is M, ov is W_V W_O, qk contrast that of a task's pairs of query and key.",
        "label", range="qk, ov, qk contrast"),
    Column("direction", "Number of the singular direction, largest singular value first.", "index",
        range="1 .. n_directions"),
    Column("share", "Squared singular value over the sum of all squares.", "share", range="0 .. 1",
        does_not_establish="That text uses the direction: it is a share of weights (of a contrast: of these prompts)."),
    Column("side",
        "query or key of qk, read or written of ov. written is read against the unembedding, the others against the "
        "token embedding.", "label", range="query, key, read, written"),
    Column("strength", "Mean absolute loading of the side's n_words strongest tokens.", "cosine", range="0 .. 1",
        does_not_establish="That these words have a common meaning: all embeddings share some directions."),
    Column("random_strength", f"Mean of strength over random directions, {_RANDOM}.", "cosine", range="0 .. 1",
        does_not_establish="A threshold: see pvalue."),
    Column("pvalue", f"(1 + random directions, {_RANDOM}, whose strength is at least this) / (1 + draws).", "p",
        range="1 / (draws + 1) .. 1", does_not_establish="What the direction means."),
    Column("qvalue", "pvalue by Benjamini-Hochberg over the directions and sides of the table.", "q", range="0 .. 1",
        does_not_establish="Control over several tables that are looked through for words."),
    Column("rank", "Rank of the token by absolute loading; missing where there is no reading.", "index",
        range="1 .. n_words"),
    Column("token", "Id of the token; missing where there is no reading.", "token id", range="0 .. vocabulary - 1"),
    Column("word", 'The token as text, its id without a tokenizer; "no reading" where qvalue is not below .05.', "text",
        range="any token, or no reading",
        does_not_establish="A name of the direction: it is a list of tokens that load on it."),
    Column("loading",
        "Cosine of the token's vector with the direction. The sign is such that the largest loading of the first side "
        "is positive; loadings of equal sign on both sides raise the score (the logit).", "cosine", range="-1 .. 1",
        does_not_establish="That the residual stream holds the token's embedding at this layer."),
    Column("random_loading", f"Mean absolute loading of the token of that rank on random directions, {_RANDOM}.",
        "cosine", range="0 .. 1", does_not_establish="A threshold: see pvalue."),
))

_ONE_MODEL = "Anything about a positional scheme: one model is one model."

_ANOTHER = (
    Column("statistic",
        "Which number: partial correlation (of D_head with prev given dir_frac), partial correlation within layers "
        "(the same among the heads of a layer), top-k percentile of D_head (of the "
        "k strongest previous-token heads), attenuation (share of the partial correlation that RoPE-phase controls "
        "take), attenuation by placebo (the same with a placebo's phase).", "label",
        range="five kinds, the placebo by name", source="FP Tables 2 and 3"),
    Column("method", "Estimator: hybrid (regress, then rank), rank (rank, then regress), or median.", "label",
        range="hybrid, rank, median", source="FP 6, 7", does_not_establish="Which of them is right where they differ."),
    Column("value", "The number; for a placebo the mean of its draws.", "correlation, or share",
        range="-1 .. 1 for a correlation, -inf .. inf for an attenuation", source="FP Tables 2 and 3",
        does_not_establish=_ONE_MODEL),
    Column("low",
        "Lower end of a 95 % interval, layers resampled, percentiles; for a placebo the smallest of its draws. NaN for "
        "a percentile and within layers.", "as value", range="as value", source="FP Table 2",
        does_not_establish="The spread over models or prompts; nor 95 %: of simulated tables this interval leaves out "
        "the truth in 6.0 to 9.1 %, or 13.0 to 17.5 % if columns drift with depth."),
    Column("high", "Upper end of that interval; for a placebo the largest of its draws.", "as value", range="as value",
        source="FP Table 2", does_not_establish="The spread over models or prompts."),
    Column("pvalue", "p of what pvalue_of says. NaN for an attenuation by the model's own phase.", "probability",
        range="0 .. 1",
        does_not_establish="An exact level where columns drift with depth, but for the correlation within layers: that "
        "of the plain one then rejects 9.6 to 14.6 % at nominal 5 %. Nor for the percentile, where top heads share "
        "layers: 5.5 to 6.1 %."),
    Column("pvalue_of", "What pvalue tests, in words; None without one.", "text", range="any text, or None"),
    Column("noise_sd",
        "Standard deviation of value when query and key weights move within the rounding they are stored with. NaN "
        "without the model, and for a placebo.", "as value", range="0 .. inf",
        does_not_establish="An interval over models, prompts or heads: rounding is one source of uncertainty."),
    Column("n", "Heads behind the number; for a placebo its draws.", "count", range="0 .. inf",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("function", "Function of this package that computes the number.", "label", range="a function"),
    REASON,
)

ANOTHER_MODEL = Table("another_model",
    "`tlspectral.heads.model_statistics.another_model`; `tlspectral statistics TABLE -o FILE` writes it", _ANOTHER)

TABLES = (
    ANALYZE_HEADS, FREQUENCY_TABLE, WEIGHT_NOISE_BAND, WEIGHT_NOISE_DRAWS, STATISTIC_NOISE, COMPARE_HEADS,
    PERMUTED_PAIRING, HEAD_DIRECTIONS, ANOTHER_MODEL, *ANALYZE_MODELS.values(),
)
