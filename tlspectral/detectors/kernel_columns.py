"""The columns of `relative_position_kernel` and `kernel_prediction`."""

from tlspectral.tables import COLUMNS, Column, Table

_HEAD = (COLUMNS["layer"], COLUMNS["head"])
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
            does_not_establish="That the head needs the band: drop it (`ablate`, part rotary_band) to see.")
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
KERNEL_PREDICTION = Table("kernel_prediction", "`tls.detectors.kernel_prediction`", (*_HEAD, *_PREDICTION))
TABLES = (RELATIVE_POSITION_KERNEL, KERNEL_PREDICTION)
