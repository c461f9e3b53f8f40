"""Columns of the tables about heads. Those of the head table are in `tables`.

FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from dataclasses import replace

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import ANALYZE_HEADS, COLUMNS, FREQUENCY_COLUMNS, HEAD_COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"])

NOISE_COLUMNS = (
    "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "spectral_radius", "prin_angle_mean",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir",
)
"""The columns that rounding of the weights moves."""

COMPARED_COLUMNS = (
    "outside_m", "rank", "dir_frac", "D_head", "lam_mass", "imag_mass", "henrici", "content_pos_frac", "self_match",
    "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "dir_frac_z", "D_head_z", "imag_mass_z",
    "henrici_z", "rope_imag_frac", "freq_centroid", "hi_freq_dir", "prev", "dup", "ind", "copying", "positivity",
    "D_head_pct",
)
"""The columns of which `compare_heads` gives the difference."""

RANKED_COLUMNS = {
    "behaviour": ("prev", "dup", "ind"),
    "spectrum": (
        "dir_frac", "D_head", "lam_mass", "henrici", "content_pos_frac", "rope_imag_frac", "hi_freq_dir",
    ),
}
"""The columns by which `compare_heads` ranks heads, by family: those with a band, all of which run from 0 to 1."""

CHANGE_FLOOR = 0.02
"""The least difference by which `compare_heads` ranks a head, in attention or in the share that a column is."""

_BANDED = (*NOISE_COLUMNS, "prev", "dup", "ind")
_ONE_IN_TWENTY = (
    "That a larger difference comes from training: one head in twenty is outside where rounding is all there is."
)
_CHANGE = (
    Column("change_rank", "Rank of the head by the better of behaviour_rank and spectrum_rank, then by the other; "
        "missing where both are. Rows are in this order.", "count", range="1 .. heads",
        does_not_establish="That a change of behaviour and one of the spectrum are of equal weight."),
    *(column for family, unit in (("behaviour", "attention probability"), ("spectrum", "share")) for column in (
        Column(f"{family}_of", f"Column of {family} with the largest difference of the head, of those that exceed "
            f"their band and are at least {CHANGE_FLOOR}; missing where none does.", "label",
            range=", ".join(RANKED_COLUMNS[family])),
        Column(f"{family}_change", f"That difference, table b less table a; NaN where {family}_of is missing.", unit,
            range="-1 .. 1", does_not_establish="That the head works otherwise. A head without a change may differ in "
            "what was not measured, or in columns without a band."),
    )),
    *(Column(f"{family}_rank", f"Rank of the head by |{family}_change|, 1 for the largest; missing where it is NaN.",
        "count", range="1 .. heads") for family in RANKED_COLUMNS),
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
    noise = (
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
    return (*values, difference, *noise) if name in _BANDED else (*values, difference)


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
COMPARE_HEADS = Table("compare_heads", "`tls.compare_heads`",
    (*_HEAD, *_CHANGE, *(column for name in COMPARED_COLUMNS for column in _compared_columns(name))))
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

TABLES = (
    ANALYZE_HEADS, FREQUENCY_TABLE, COMPARE_HEADS,
    HEAD_DIRECTIONS, *ANALYZE_MODELS.values(),
)
