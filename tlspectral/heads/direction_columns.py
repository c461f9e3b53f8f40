"""The columns of `head_directions`."""

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
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
TABLES = (HEAD_DIRECTIONS,)
