"""The columns of `qk_attribution`."""

from tlspectral.tables import Column, Table

_ALONE = "A cause: the terms are a sum that is right by construction. `remove=` takes terms out and measures."
_SOURCE = (
    "embedding, positions (learned ones), L3H2 (an earlier head), L3MLP, attention biases (what attention adds that "
    "belongs to no head), bias ({bias}), alibi, or rest: all rows that `top=` leaves out"
)
QK_ATTRIBUTION = Table(
    "qk_attribution",
    "`tls.qk_attribution`; one score of one head as a sum",
    (
        Column("query_source", "What wrote the part of the query token's residual stream that the query reads.",
            "label", range=_SOURCE.format(bias="b_Q and the bias of the norm before it")),
        Column("key_source", "What wrote the part of the key token's residual stream that the key reads.",
            "label", range=_SOURCE.format(bias="b_K and the bias of the norm before it")),
        Column("frequency", "Rotary pair, 0 being the model's first; -1 for columns that do not rotate, and for alibi. "
            "Only with `by_frequency=True`.", "index", range="-1 .. pairs - 1"),
        Column("symmetric",
            "(C(a, b) + C(b, a)) / 2, C being the part of the score that is even in the offset: what M_S contributes. "
            "C(b, a) exchanges the vectors of the two tokens; a query/key norm keeps its factors.", "logit",
            range="-inf .. inf", source="FP 5", does_not_establish=_ALONE),
        Column("antisymmetric", "(C(a, b) - C(b, a)) / 2: what M_A contributes.", "logit", range="-inf .. inf",
            source="FP 5", does_not_establish=_ALONE),
        Column("phase", "The part of the score that is odd in the offset: what Im(M_t) contributes. 0 without rotary "
            "positions.", "logit", range="-inf .. inf", source="FP 5", does_not_establish=_ALONE),
        Column("outside_m", "All of a pair with a bias, and ALiBi: what is no form of the two streams; else 0.",
            "logit", range="-inf .. inf", does_not_establish=_ALONE),
        Column("total", "The four parts' sum. All rows sum to the model's score, scaled and before softcap and mask, "
            "with the norms' scales of the run.", "logit", range="-inf .. inf", also_known_as="QK attribution, "
            "pairwise direct contribution to an attention score", does_not_establish=_ALONE),
        Column("measured",
            "S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b): the change of the score when the pair's "
            "interaction is taken out, x and y the streams of query and key token, a and b the sources, all norms "
            "taken again each time. With the norms held it is `total`. NaN for rows that are not removed; only with "
            "`remove=`.", "logit", range="-inf .. inf",
            does_not_establish="What later layers do: sources are taken out of what this head reads alone."),
        Column("attention_predicted", "Attention to the key if the score lost `total`, the query's other scores as "
            "they are. Only with `remove=`.", "attention probability", range="0 .. 1", does_not_establish=_ALONE),
        Column("attention_measured", "Attention to the key if the score lost `measured`, the query's other scores as "
            "they are. Only with `remove=`.", "attention probability", range="0 .. 1",
            does_not_establish="The attention of a run: there, a source is taken out of all that reads it."),
    ),
)  # fmt: skip
TABLES = (QK_ATTRIBUTION,)
