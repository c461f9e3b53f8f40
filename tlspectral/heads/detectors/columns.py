"""The columns of `detect_heads`, `relative_position_kernel` and `kernel_prediction`."""

from tlspectral.tables import COLUMNS, Column, Table

DETECTORS = ("prev", "dup", "ind")
PROMPT_DETECTORS = ("prev", "dup", "self")


def _pvalue(name: str) -> Column:
    return Column(f"{name}_p",
        f"Share of draws of the null, the head itself counted as one, that reach the head's {name}, on the first 16 "
        "sequences. The null: W_K behind a Haar-random rotation of the residual stream. One-sided, not corrected for "
        "the number of heads. Only with `null_draws=`; NaN where none of these sequences counts.", "probability",
        range="1 / (null_draws + 1) .. 1", does_not_establish=f"A large {name}: see {name} itself.")  # fmt: skip


_FIRST_COPY = (
    Column("prev_first",
        "Mean attention from each query of the first copy, the first one left out, to the token before it. On the "
        "sequences of prev.", "attention probability", range="0 .. 1",
        also_known_as="previous-token score without repetition",
        does_not_establish="Its chance level differs from that of prev, since its queries see fewer keys."),
    Column("prev_first_se", "Standard error of prev_first over sequences.", "attention probability", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither another task nor another seed of the model."),
    _pvalue("prev_first"),
)  # fmt: skip


def _of_prompts(name: str, target: str, also_known_as: str) -> tuple[Column, Column, Column]:
    return (
        Column(name,
            f"Mean attention from a query to {target}, over sequences and the queries that count. NaN where no query "
            "counts. The chance level is in df.attrs.", "attention probability", range="0 .. 1",
            also_known_as=also_known_as,
            does_not_establish="That the head looks for this: attention follows content too, and it is not shown that "
            "the output depends on it."),
        Column(f"{name}_se", f"Standard error of {name} over sequences, NaN for fewer than two that count.",
            "attention probability", range="0 .. inf",
            does_not_establish="Sampling of sequences only: neither other prompts nor another seed of the model."),
        _pvalue(name),
    )  # fmt: skip


_PATTERN = (
    Column("pattern",
        "Mean over sequences, and over the queries that `pattern=` marks a key of, of the attention to the marked "
        "keys, each times its weight. Only with `pattern=`. The chance level is in df.attrs.", "attention probability",
        range="-inf .. inf; 0 .. 1 for weights of 0 and 1",
        does_not_establish="That the output depends on this attention."),
    Column("pattern_se", "Standard error of pattern over sequences, NaN for fewer than two that count.",
        "attention probability", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither other prompts nor another seed of the model."),
    _pvalue("pattern"),
)  # fmt: skip
_HEAD = (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"])
_DETECTOR_COLUMNS = tuple(
    column for name in DETECTORS for column in (COLUMNS[name], COLUMNS[f"{name}_se"], _pvalue(name))
)
_PROMPT_COLUMNS = (
    *_of_prompts("prev", "the token before it, from position 2 on", "previous-token score"),
    *_of_prompts("dup", "earlier tokens equal to its own, from position 2 on where there are any",
        "duplicate-token score"),
    *_of_prompts("self", "its own token, from position 2 on", "attention to the current token"),
)  # fmt: skip
DETECT_HEADS = Table("detect_heads", "`tls.detect_heads`", (*_HEAD, *_DETECTOR_COLUMNS, *_FIRST_COPY, *_PATTERN))
DETECT_HEADS_ON_PROMPTS = Table(
    "detect_heads.prompts",
    "`tls.detect_heads` with `prompts=` other than repeated segments",
    (*_HEAD, *_PROMPT_COLUMNS, *_PATTERN),
)
_KERNEL = (
    Column("offset", "Position of the key less that of the query; -1 is the previous token, 0 the query itself.",
        "token", range="-20 .. 0, or as far back as prompts reach, or as chosen", source="FP 7, figure 3",
        also_known_as="relative position"),
    Column("score",
        "Mean attention score at the offset, scaled and before the softmax, over sequences and all queries that have "
        "such a key unmasked. NaN where every such key is masked.", "logit", range="-inf .. inf",
        source="FP 7, figure 3", also_known_as="relative-position kernel",
        does_not_establish="That the head attends by position: contents contribute to the mean, and a softmax sees "
        "only differences within a query's row."),
    Column("predicted",
        "Score of the mean query with the mean key at the offset -D: Re sum_t q_t conj(k_t) exp(i theta_t D) over "
        "rotary pairs, plus the non-rotary columns, times the score scale, behind a softcap if there is one. "
        "Means are over the reference, half of the prompts if none is given. NaN where score is, in layers without "
        "rotary positions, beyond the length that frequencies hold for, and for one prompt without a reference.",
        "logit", range="-inf .. inf", also_known_as="preference by distance",
        does_not_establish="A mechanism: that it follows score is nearly an identity of means, and it needs "
        "activations."),
)  # fmt: skip
_PREDICTION = (
    Column("r",
        "Pearson's correlation over the offsets between the mean score, on prompts that gave no means, and predicted. "
        "NaN for fewer than three offsets, or where either does not vary.", "correlation", range="-1 .. 1",
        does_not_establish="A mechanism: a large r is nearly an identity of means. Offsets are no independent cases, "
        "so it has no p."),
    Column("peak", "Offset of the largest mean score on the prompts that r is judged on.", "token",
        range="-20 .. 0, or as chosen", does_not_establish="Where attention goes: one key of large norm, such as the "
        "first token, can take it."),
    Column("predicted_peak", "Offset of the largest prediction; missing where it does not vary.", "token",
        range="-20 .. 0, or as chosen", does_not_establish="Where attention goes."),
    *(
        Column(f"share_{band}",
            f"Covariance over the offsets of what {which} contributes to the prediction with the whole prediction "
            "(before a softcap), over the variance of the whole. The three sum to 1.", "share", range="-inf .. inf",
            does_not_establish="That the head needs the band: drop it (`ablate`, `tls.parts.Band`) to see.")
        for band, which in (("high", "the fastest third of the rotary pairs"), ("middle", "the middle third"),
            ("low", "the slowest third"))
    ),
    Column("band", "The band with the largest share.", "label", range="high, middle, low",
        does_not_establish="That the others do not matter: see their shares."),
    Column("first", "Index of the band's first frequency when the head's pairs are sorted from fast to slow.", "index",
        range="0 .. pairs - 1"),
    Column("last", "Index of the band's last frequency in that order.", "index", range="0 .. pairs - 1"),
)  # fmt: skip
RELATIVE_POSITION_KERNEL = Table("relative_position_kernel", "`tls.relative_position_kernel`", (*_HEAD, *_KERNEL))
KERNEL_PREDICTION = Table("kernel_prediction", "`tls.heads.kernel_prediction`", (*_HEAD, *_PREDICTION))
TABLES = (DETECT_HEADS, DETECT_HEADS_ON_PROMPTS, RELATIVE_POSITION_KERNEL, KERNEL_PREDICTION)
