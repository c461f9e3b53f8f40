"""The columns of the head table and of what is joined to it: frequencies, positional and symbolic scores.

Makers, figures and reports on every floor read these; the texts of all other tables stand beside their makers.

M is a head's norm-folded query-key operator W_Q W_K^T, M_S and M_A its symmetric and antisymmetric parts, l its
non-zero eigenvalues, s its singular values, |.| a modulus and ||.|| a Frobenius norm. M_t is the complex rank-1 part of
M at rotary frequency t. FP is Li, "Fingerprint, Not Blueprint" (2026).
"""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from tlspectral.tables.column import Column, Table, columns_of

# fmt: off
_SHARE = "share"
_COUNT = "count"
_NAME = "label"

_IDENTITY = (
    Column("layer", "Index of the block, from 0.", "index", range="0 .. layers - 1", source="the model",
        also_known_as="block",
        does_not_establish="Heads of one layer share their input and their training: rows are not independent "
        "samples."),
    Column("head", "Index of the query head within its layer, from 0.", "index", range="0 .. heads - 1",
        source="the model", also_known_as="query head",
        does_not_establish="An index has no meaning across models, nor across seeds of one model."),
    Column("name", "The head in words: L16H0 is head 0 of layer 16.", _NAME, range="L<layer>H<head>",
        also_known_as="16.0 in circuit papers"),
    Column("kv_head", "Key/value head that this query head reads: head // (heads // key-value heads).", "index",
        range="0 .. key-value heads - 1", source="the model", also_known_as="KV group",
        does_not_establish="Heads that share a kv_head share W_K: they are not independent, so cluster intervals by "
        "kv_head or by layer."),
    Column("status",
        "ok; rank_deficient: fewer singular values than d_head above the rounding of the stored weights; defective: "
        "the eigenvalues are rounding (lam_mass near 0, or eigenvectors all but parallel); zero: M is 0.", _NAME,
        range="ok, rank_deficient, defective, zero",
        does_not_establish="ok says that the numbers are well defined, not that the head does anything."),
    Column("bilinear",
        "How far the scores are the bilinear form of M: exact; up_to_token_scale: query/key norm leaves a positive "
        "factor 1/rms per query and per key; softcapped: the score then passes through a tanh.", _NAME,
        range="exact, up_to_token_scale, softcapped",
        does_not_establish="exact speaks of the content terms: biases and ALiBi lie outside M whatever it says (see "
        "outside_m)."),
    Column("outside_m",
        "Share of the variance of the scores that comes from terms outside M (query and key biases, ALiBi): "
        "var(outside) / (var(inside) + var(outside)), over the unmasked entries of the check prompt and within each "
        "query's row, which is what the softmax can see.", _SHARE, range="0 .. 1",
        source="this package; FP limitation (vi)",
        does_not_establish="One prompt of random tokens: real text may load the biases otherwise. The covariance of "
        "the two parts is in neither variance, so this is not a share of explained variance. NaN in a table read "
        "from files."),
)

_SPECTRUM = (
    Column("rank", "Number of singular values above max(d_model, d_head) x eps(stored dtype) x the largest.", _COUNT,
        range="0 .. d_head", source="FP 3, with a tolerance tied to the stored dtype", also_known_as="numerical rank",
        does_not_establish="Full rank is what rounding alone gives: it says nothing about how many directions matter."),
    Column("dir_frac",
        "Norm of M's antisymmetric part over M's: ||M_A|| / ||M||. 0 is symmetric, 0.71 random, 1 antisymmetric.",
        _SHARE, range="0 .. 1", source="FP eq. 2",
        also_known_as="Saponati et al. (2025) symmetry score = 1 - 2 dir_frac^2 (their code returns 1 - dir_frac^2); "
        "Jamil & Kapadia (2026) routing/filtering ratio = ||M_A|| / ||M_S||, a monotone transform",
        does_not_establish="A share of M: norms of parts do not add up, their squares do. A random M of any "
        "d_head has sqrt((1 - 1/d_model) / 2), which is 0.70 at d_model 64 and 0.71 from 200 on: a high value is not a "
        "directional head until it is read against its null. Under RoPE, M is the content at offset 0 only."),
    Column("D_head",
        "Imaginary parts of the eigenvalues over their moduli: sum |Im l| / sum |l|. 0 is a real spectrum, about 0.61 "
        "random (d_head 64), 1 an imaginary one.",
        _SHARE, range="0 .. 1", source="FP eq. 3", also_known_as="complex / Schur directionality",
        does_not_establish="How many eigenvalues are complex. A random M has 0.51 to 0.56 at d_head 16, 0.56 to 0.60 "
        "at 32, 0.59 to 0.61 at 64, 0.61 to 0.62 at 128 and 0.62 to 0.63 at 256 where s is flat or falls by a factor "
        "of up to 30, less where few s dominate, so compare with D_head_null_mean. Meaningless where lam_mass is near "
        "0. A rotational spectrum does not show that the head uses position."),
    Column("lam_mass", "Reliability of D_head: sum |l| / sum s. Near 0 the core is nilpotent and D_head is rounding.",
        _SHARE, range="0 .. 1", source="this package (FP's code computes it, its tables leave it out)",
        does_not_establish="A healthy lam_mass does not make D_head unusual: that is what the null is for."),
    Column("imag_mass", "Imaginary mass of the spectrum per norm: sum |Im l| / ||M||.", "ratio",
        range="0 .. sqrt(d_head)", source="FP Table 1", also_known_as="not FP's im_mass, which divides by sum s",
        does_not_establish="Grows with the effective rank of M: compare it with its null, not across heads of other "
        "d_head."),
    Column("henrici", "Departure from normality: sqrt(||M||^2 - sum |l|^2) / ||M||. 0 for a normal operator.", _SHARE,
        range="0 .. 1", source="FP 3 (after Henrici 1962)", also_known_as="normalised Henrici number",
        does_not_establish="Random low-rank operators stand near 1. A small distance from that null is a large z: "
        "compare the ratio."),
    Column("content_pos_frac",
        "Positive share of the symmetric part's spectrum: sum l+ / sum |l| over the eigenvalues of M_S (those below "
        "1e-9 of the largest are left out). 1: like attends to like. NaN where ||M_S|| vanishes.", _SHARE,
        range="0 .. 1", source="FP eq. 4",
        also_known_as="content positivity, the query-key echo of the OV positivity ratio",
        does_not_establish="Balanced heads have about 0.5. It weighs directions by their eigenvalue, not by how "
        "often inputs use them."),
    Column("self_match",
        "Diagonal dominance of W_E M W_E^T over the vocabulary: (mean of the diagonal - mean off it) / rms. Raw "
        "embeddings.", "standardised score", range="about -sqrt(d_vocab) .. sqrt(d_vocab)", source="FP 3",
        also_known_as="token self-matching",
        does_not_establish="Embeddings enter raw, without norm or earlier layers: past the first layers it need not "
        "describe what a head sees. NaN in a table read from files."),
    Column("cond_eig", "Condition number (2-norm) of the matrix of unit eigenvectors of M's core.", "ratio",
        range="1 .. inf", source="FP 3", also_known_as="eigenvector condition number, a non-normality flag",
        does_not_establish="Depends on the normalisation of the eigenvectors. Large values say that eigenvalues are "
        "sensitive, not that they are wrong."),
    Column("spectral_radius", "Largest modulus of an eigenvalue: max |l|.",
        "score x attention scale, per unit of the normalised residual squared", range="0 .. inf", source="FP 3",
        does_not_establish="Carries the scale of the weights: not comparable across models."),
    Column("prin_angle_mean", "Mean principal angle between the column spaces of the folded, centred W_Q and W_K.",
        "degree", range="0 .. 90", source="FP 3, published GPT-2 table", also_known_as="mean subspace angle",
        does_not_establish="Random subspaces of a large d_model are far apart too. Angles ignore the singular values."),
    Column("prin_angle_max", "Largest principal angle between the column spaces of the folded, centred W_Q and W_K.",
        "degree", range="0 .. 90", source="FP 3, published GPT-2 table", also_known_as="largest subspace angle",
        does_not_establish="Close to 90 in almost every head: one orthogonal direction is enough."),
)

_NARROW_NULL = {
    "dir_frac": " dir_frac's null is so narrow (sd about 1/(2n), n = d_model, one less under LayerNorm) that nearly "
    "every trained head has a large |z|: z alone misleads, read the difference.",
    "D_head": " z is not comparable across heads of unlike spectra: the null widens where s is concentrated.",
    "imag_mass": " The null scales with the head's own effective rank.",
    "henrici": " henrici's null is very narrow (|z| of 10 to 1000 is usual): read the ratio to the null mean.",
}
_NULL = "M with its own singular values and independent random (Haar) left and right frames"
_NULL_SOURCE = "FP 3 (random-orientation null)"
_DRAWS = "Over the draws (see df.attrs for how many, and in which dtype)."
_SHARED = (
    " With null_blocks='shared' the Monte-Carlo error is common to all heads: claims on a population of z need 'fresh'."
)


def _null_columns(metric: str, unit: str) -> tuple[Column, ...]:
    mean_range = "0 .. sqrt(d_head)" if metric == "imag_mass" else "0 .. 1"
    closed = metric == "dir_frac"
    how = "From closed moments, without draws." if closed else _DRAWS
    sampling = "" if closed else " With R draws z itself has sd of about sqrt((1 + z^2/2) / R)." + _SHARED
    return (
        Column(f"{metric}_null_mean", f"Mean of {metric} under the null: {_NULL}. {how}", unit, range=mean_range,
            source=_NULL_SOURCE, also_known_as="Ginibre baseline",
            does_not_establish="The null keeps the singular values and nothing else of training: leaving it shows "
            "orientation, not function." + ("" if closed else _SHARED)),
        Column(f"{metric}_null_std", f"Standard deviation (ddof 0) of {metric} under the null: {_NULL}. {how}", unit,
            range="0 .. inf", source=_NULL_SOURCE,
            does_not_establish="The spread of random operators, not a standard error of the head's own number."
            + _NARROW_NULL[metric]),
        Column(f"{metric}_z", f"({metric} - {metric}_null_mean) / {metric}_null_std.", "null standard deviations",
            range="-inf .. inf", source=_NULL_SOURCE,
            does_not_establish="Not a p-value: the null need not be normal." + _NARROW_NULL[metric] + sampling),
        Column(f"{metric}_null_pct", f"Share of the null's raw draws that are at or below the head's {metric}.", _SHARE,
            range="0 .. 1", source=_NULL_SOURCE, also_known_as="empirical percentile against the null",
            does_not_establish="With R draws it is no finer than 1/(R+1): 0 and 1 mean beyond every draw, "
            "not a probability of 0." + _SHARED),
    )


_ROTARY_LIMIT = " NaN on layers without RoPE."
_ROTARY = (
    Column("rope_imag_frac",
        "Directional share of the rotary content: sum_t ||Im M_t|| / sum_t (||Re M_t|| + ||Im M_t||)." + _ROTARY_LIMIT,
        _SHARE, range="0 .. 1", source="FP 7", also_known_as="share of norms, not of squared norms",
        does_not_establish="Random pairs have about 0.5. Built from the same weights as D_head: agreement between "
        "them is shared variance, not a mechanism."),
    Column("freq_centroid",
        "Mean frequency of the directional content: sum_t theta_t ||Im M_t|| / sum_t ||Im M_t||." + _ROTARY_LIMIT,
        "rad/token", range="0 .. largest theta", source="FP 7",
        does_not_establish="Depends on the model's base, scaling and rotary width: compare within a model only."),
    Column("hi_freq_dir",
        "Share of sum_t ||Im M_t|| in the first half (rounded down) of the frequency pairs." + _ROTARY_LIMIT, _SHARE,
        range="0 .. 1", source="FP 7", also_known_as="high-frequency directional share",
        does_not_establish="Evenly spread content has about 0.5. 'High' is by index: where the border lies in "
        "tokens differs between models."),
    Column("rotary_fraction", "Share of the head's dimensions that rotate: rotary_dim / d_head." + _ROTARY_LIMIT,
        _SHARE, range="0 .. 1", source="the model", also_known_as="partial rotary factor",
        does_not_establish="A property of the architecture, the same for all heads of a layer."),
)

_DETECTOR_MEANING = {
    "prev": ("the token before it", "previous-token score"),
    "dup": ("the same token in the first copy", "duplicate-token score"),
    "ind": (
        "the token after the same token in the first copy",
        "induction score, prefix matching (Olsson et al. 2022)",
    ),
}


def _detector_columns(name: str) -> tuple[Column, Column]:
    target, other = _DETECTOR_MEANING[name]
    return (
        Column(name,
            f"Mean attention from each query of the second copy to {target}, on random sequences [BOS, r, r]. The "
            "chance level is in df.attrs.", "attention probability", range="0 .. 1", source="FP 3 (detectors)",
            also_known_as=other,
            does_not_establish="Behaviour on random repeated tokens: not on text, not in a circuit, and not that "
            "the output depends on it."),
        Column(f"{name}_se", f"Standard error of {name} over sequences.", "attention probability", range="0 .. inf",
            does_not_establish="Sampling of sequences only: neither another task nor another seed of the model."),
    )


_OUTPUT = (
    Column("copying",
        "Share (a count) of the eigenvalues above rounding of the OV circuit W_O W_U W_E W_V with a positive real "
        "part: of the r largest, r the smaller one of the ranks of W_V and W_O (as `rank`), those above max(d_model, "
        "d_head) x eps(float64) x the largest singular value. All d_head of them in a head of full rank.",
        _SHARE, range="0 .. 1 in steps of 1/r", source="FP Table 1, which counts all d_head eigenvalues",
        also_known_as="not Elhage et al.'s positivity ratio, which is `positivity`",
        does_not_establish="Quantised to 1/r, blind to the size of eigenvalues; raw embeddings and no layers "
        "between: a head can copy without it, and have it without copying. W_U is taken as the model holds it: "
        "TransformerLens' center_unembed, which changes no probability, moves this by up to 0.08 in SmolLM2-135M, so "
        "compare models that were loaded alike (load_model does not centre). NaN in a table read from files."),
    Column("positivity", "Signed mass of all eigenvalues of the same: sum Re l / sum |l|.", "ratio", range="-1 .. 1",
        source="Elhage et al. 2021 (copying statistic)", also_known_as="OV eigenvalue positivity",
        does_not_establish="The embedding-to-logit path of one head alone: not the effect on the logits in the "
        "model. W_U is taken as the model holds it: TransformerLens' center_unembed, which changes no probability, "
        "moves this by up to 1.06 (median 0.09) in SmolLM2-135M, so compare models that were loaded alike (load_model "
        "does not centre). NaN in a table read from files."),
    Column("D_head_pct", "Percentile of D_head within this table: rank / n over the rows computed, average ties.",
        _SHARE, range="1/n .. 1", source="FP 6", also_known_as="within-model percentile",
        does_not_establish="Relative to the rows computed: a table of some layers has other percentiles. Too high "
        "by 1/(2n) on average. Not a percentile of the null (D_head_null_pct is)."),
)

HEAD_COLUMNS: tuple[Column, ...] = (
    *_IDENTITY,
    *_SPECTRUM,
    *_null_columns("dir_frac", _SHARE),
    *_null_columns("D_head", _SHARE),
    *_null_columns("imag_mass", "ratio"),
    *_null_columns("henrici", _SHARE),
    *_ROTARY,
    *_detector_columns("prev"),
    *_detector_columns("dup"),
    *_detector_columns("ind"),
    *_OUTPUT,
)
"""The columns of `analyze_heads`, in their order."""

EXTRA_COLUMNS: tuple[Column, ...] = (
    Column("score_asym",
        "Asymmetry of the content scores on real inputs: mean ||S - S^T|| / mean ||S|| over sequences, S = n M n^T / "
        "attention scale before any mask, without biases.", "ratio", range="0 .. 2", source="FP 4",
        also_known_as="empirical score asymmetry",
        does_not_establish="Depends on the tokens used. Without rotation: under RoPE it is the content at offset 0, "
        "not the model's scores."),
    Column("position_share",
        "Share of M in the span P of the leading right singular vectors of W_pos: ||P^T M P|| / ||M||. "
        "Learned-absolute models only.", _SHARE, range="0 .. 1",
        source="FP's published GPT-2 table (pos_frac_M, 64 vectors)", also_known_as="pos_frac_M",
        does_not_establish="A random M has about (vectors / d_model). Later layers carry position in other "
        "directions than W_pos."),
)
"""What `analyze_heads(extras=...)` adds."""

_NORM_UNIT = "score x attention scale, per unit of the normalised residual squared"
FREQUENCY_COLUMNS: tuple[Column, ...] = (
    *_IDENTITY[:3],
    Column("frequency", "Index t of the rotary pair; 0 is the model's first pair.", "index", range="0 .. pairs - 1",
        source="the model", does_not_establish="Pairs of one index have other angles in other models: compare theta."),
    Column("theta", "Angle by which the pair rotates per token, as the model's own rotary module has it.", "rad/token",
        range="0 .. pi, as a rule", source="FP 7", also_known_as="inverse frequency (inv_freq)",
        does_not_establish="Scalings that multiply the scores (attention_scaling) are not in it."),
    Column("wavelength", "Tokens per full rotation: 2 pi / theta; inf at theta 0.", "token",
        range="2 .. inf, as a rule", source="FP 7; Barbero et al. 2025",
        does_not_establish="A long wavelength does not make a pair position-blind: the angle within the context "
        "decides."),
    Column("re_norm", "||Re M_t||: the content of the pair that is even in the offset.", _NORM_UNIT, range="0 .. inf",
        source="FP 7", does_not_establish="Weights alone: how much of it the inputs use is not in it."),
    Column("im_norm", "||Im M_t||: the content of the pair that is odd in the offset.", _NORM_UNIT, range="0 .. inf",
        source="FP 7 (eq. 5)",
        does_not_establish="Weights alone: how much of it the inputs use is not in it. It acts through sin(offset x "
        "theta): small for a slow pair."),
    Column("im_share", "im_norm / (re_norm + im_norm).", _SHARE, range="0 .. 1", source="FP 7",
        also_known_as="rope_imag_frac of one pair", does_not_establish="Random pairs have about 0.5."),
)
"""The columns of `frequency_table`, in their order."""

# d_b is the mean attention of the prompt's last query over the tokens of block b. A swap exchanges blocks i and j;
# v = (d_i, d_j) before it and v' after it, at the same positions. PS is Urrutia et al., "Decoupling Positional and
# Symbolic Attention Behavior in Transformers".
_COSINES = "weighted mean of cosines"
_ONE_PROMPT = (
    "It describes one prompt. Whether the model does the task the prompt poses is not in it: look at the answer's "
    "probability before calling it a mechanism. "
)

POSITIONAL_COLUMNS: tuple[Column, ...] = (
    Column("s_pos", "Positional score: sum over swaps of alpha cos(v', v); 1 where attention stays at its positions.",
        _COSINES, range="0 .. 1", source="PS 3.3, B.3", also_known_as="positional score",
        does_not_establish=_ONE_PROMPT + "Flat attention has both scores near 1: read it beside logit_std."),
    Column("s_sym",
        "Symbolic score: sum over swaps of alpha cos(v', (d_j, d_i)); 1 where attention moves with the blocks.",
        _COSINES, range="0 .. 1", source="PS 3.3, B.3", also_known_as="symbolic score",
        does_not_establish=_ONE_PROMPT + "Per swap s_pos^2 + s_sym^2 = 1 + sin 2f sin 2f' with f, f' the "
        "angles of v and v': a negative correlation of the two scores over heads is largely geometry."),
    Column("exclusion_index",
        "sym / (pos + sym) of Theorem 1, over all tokens before the query: 0 where logits depend on the key's "
        "content alone, 1 where they depend on its position alone.", "share", range="0 .. 1",
        source="PS 3.2, Theorem 1",
        does_not_establish="It needs no swaps and no tau, but keys of one pass: what a position adds to a key in "
        "earlier layers counts as content. Learned absolute positions live there, so such heads have 0."),
    Column("logit_std", "Standard deviation of the query's logits over the tokens before it.", "logit",
        range="0 .. inf", source="PS 3.2, Theorem 1", also_known_as="sqrt of Var(lambda)",
        does_not_establish="Nothing by itself: where it is small attention is flat, and both scores are high for "
        "that reason."),
    Column("tau", "Temperature of the weights alpha = softmax(|d_i - d_j| / tau) over swaps. PS gives no value.",
        "attention", range="0 .. inf", source="PS B.3; the default is this package's: 0.1 of the largest |d_i - d_j|",
        does_not_establish="Scores at different tau are not comparable: with a large one every swap counts alike."),
    Column("alpha_ess", "Effective number of swaps behind a score: 1 / sum of alpha^2.", "swaps", range="1 .. swaps",
        also_known_as="effective sample size", does_not_establish="Near 1 the score is that of one swap."),
)
"""What `positional_symbolic` adds to `layer`, `head`, `name` and `frequency`."""



HEAD = HEAD_COLUMNS[:3]
"""Layer, head and name: what a table about heads begins with."""

COLUMNS: Mapping[str, Column] = MappingProxyType(
    {column.name: column for column in (*HEAD_COLUMNS, *EXTRA_COLUMNS, *FREQUENCY_COLUMNS, *POSITIONAL_COLUMNS)}
)
"""Every documented column by its name."""


ANALYZE_HEADS = Table("analyze_heads",
    "`tls.analyze_heads`, the last two with `extras`; `tlspectral analyze -o FILE` writes it",
    (*HEAD_COLUMNS, *EXTRA_COLUMNS))


def describe_columns(table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the documentation of columns as a table, one row per column.

    Args:
        table: a frame made or read by this package, such as one of `join`; None is all columns of heads.

    Returns:
        DataFrame with string columns `name, meaning, unit, range, source, also_known_as, does_not_establish`: those of
        the table in their order, empty for a column that is not documented; without a table the head table's columns
        in their order, then its extras, then what is new in `frequency_table` and in `positional_symbolic`.
    """
    if table is None:
        return pd.DataFrame([column.texts() for column in COLUMNS.values()])
    known = columns_of(table.attrs)
    return pd.DataFrame([known.get(name, Column(str(name), "", source="")).texts() for name in table])
