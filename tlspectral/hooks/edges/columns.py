"""Columns of the tables about wiring: edges between heads, and one score as a sum."""

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_ALONE = "That the edge matters with others cut: others can carry the same, and some edges matter only together."

EDGE_EFFECTS = Table("edge_effects", "`tls.edge_effects`", (
    Column("sender", "What writes: a head (L16H0), an MLP (L3MLP), or embedding (what enters the first layer, with "
        "positions).", "label", range="heads, MLPs, embedding"),
    Column("layer", "Layer of the sender; -1 for embedding.", "index", range="-1 .. layers - 2"),
    Column("head", "Head of the sender; -1 for an MLP and for embedding.", "index", range="-1 .. heads - 1"),
    Column("receiver", "What reads: queries, keys or values of a head (L18H6.q), or keys or values that heads share "
        "(L18KV2.k).", "label", range="receivers"),
    Column("receiver_layer", COLUMNS["layer"].meaning + " Of the receiver.", "index", range="1 .. layers - 1"),
    Column("receiver_head", COLUMNS["head"].meaning + " The one whose attention is measured; for the effect on a task "
        "the first that reads the receiver and was asked for.", "index", range="0 .. heads - 1"),
    Column("input", "What of the receiver is computed without the sender: queries (q), keys (k) or values (v).",
        "label", range="q, k, v"),
    Column("reached", "The heads whose input changes with the edge, by name: those that share keys or values, and all "
        "of a layer whose query/key norm runs over all heads (OLMo 2). An effect on a task is that of all of them, one "
        "on attention is that of receiver_head.", "label", range="heads, with commas between them"),
    Column("attention", "Attention of receiver_head that measure in df.attrs names, in the intact model, mean over "
        "queries and sequences. NaN for measure='task'.", "probability", range="0 .. 1",
        does_not_establish="That the head acts on it."),
    Column("delta", "Effect of the cut edge less the intact model: of the attention of receiver_head, or of the "
        "task's metric, the unit of which it has (measure='task').", "probability, or of the metric; nat for a "
        "loss", range="-1 .. 1, or by metric", source="path patching (Wang et al. 2023; Goldowsky-Dill et al. 2023)",
        also_known_as="direct edge effect", does_not_establish=_ALONE),
    Column("delta_se", "Standard error of delta over sequences, paired with the intact run. NaN for one sequence.",
        "as delta", range="0 .. inf", does_not_establish="Sampling of sequences only."),
    Column("control_delta", "As delta, with a random direction of equal norm in place of the sender's write; mean over "
        "draws. With control='random' only.", "as delta", range="-inf .. inf", also_known_as="random-write control",
        does_not_establish="What no edit would do: it says what any edit of that size costs."),
    Column("control_delta_se", "Standard error of control_delta, over draws and over sequences, in squares. NaN "
        "for one draw. With control='random' only.", "as delta", range="0 .. inf"),
    Column("control_excess", "|delta| less the mean over draws of |control effect|: positive where cutting the edge "
        "changes more, in either direction, than a random direction of equal norm. With control='random' only.",
        "as delta", range="-inf .. inf", does_not_establish="That it is beyond chance: see control_p."),
    Column("control_p", "Share of the sender's own control effects that are as large as delta in absolute value, "
        "(1 + those) / (1 + draws): the Monte-Carlo p of 'the write is one of the draws'. With control='random' only.",
        "probability", range="1 / (1 + draws) .. 1", also_known_as="Monte-Carlo test",
        does_not_establish="More than its draws can: no p is below 1 / (1 + draws). It is not corrected for the number "
        "of rows; qvalue corrects pvalue."),
    Column("pvalue", "Share of the control effects of all senders of the receiver that are as large in absolute value, "
        "(1 + those) / (1 + all). With control='random' only.", "probability", range="1 / (1 + draws) .. 1",
        does_not_establish="That the sender is special by its direction alone: the null holds writes of all senders, "
        "large and small, so a sender that writes little has to beat the noise of those that write much."),
    Column("qvalue", "pvalue corrected for the number of rows of the table (Benjamini-Hochberg). With control='random' "
        "only.", "probability", range="0 .. 1", also_known_as="false discovery rate"),
    Column("k_composition", "Weight-based composition score of the sender with the receiver (as k_composition), mean "
        "over the heads of a receiver that are measured together. NaN for MLPs and embedding.", "ratio", range="0 .. 1",
        source="Elhage et al. 2021; FP 4", does_not_establish="That the path is used: it reads weights alone."),
))
# fmt: on

_SUM = "A cause: the terms are a sum that is right by construction. `remove=` takes terms out and measures."
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
            range="-inf .. inf", source="FP 5", does_not_establish=_SUM),
        Column("antisymmetric", "(C(a, b) - C(b, a)) / 2: what M_A contributes.", "logit", range="-inf .. inf",
            source="FP 5", does_not_establish=_SUM),
        Column("phase", "The part of the score that is odd in the offset: what Im(M_t) contributes. 0 without rotary "
            "positions.", "logit", range="-inf .. inf", source="FP 5", does_not_establish=_SUM),
        Column("outside_m", "All of a pair with a bias, and ALiBi: what is no form of the two streams; else 0.",
            "logit", range="-inf .. inf", does_not_establish=_SUM),
        Column("total", "The four parts' sum. All rows sum to the model's score, scaled and before softcap and mask, "
            "with the norms' scales of the run.", "logit", range="-inf .. inf", also_known_as="QK attribution, "
            "pairwise direct contribution to an attention score", does_not_establish=_SUM),
        Column("measured",
            "S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b): the change of the score when the pair's "
            "interaction is taken out, x and y the streams of query and key token, a and b the sources, all norms "
            "taken again each time. With the norms held it is `total`. NaN for rows that are not removed; only with "
            "`remove=`.", "logit", range="-inf .. inf",
            does_not_establish="What later layers do: sources are taken out of what this head reads alone."),
        Column("attention_predicted", "Attention to the key if the score lost `total`, the query's other scores as "
            "they are. Only with `remove=`.", "attention probability", range="0 .. 1", does_not_establish=_SUM),
        Column("attention_measured", "Attention to the key if the score lost `measured`, the query's other scores as "
            "they are. Only with `remove=`.", "attention probability", range="0 .. 1",
            does_not_establish="The attention of a run: there, a source is taken out of all that reads it."),
    ),
)  # fmt: skip
TABLES = (EDGE_EFFECTS, QK_ATTRIBUTION)
