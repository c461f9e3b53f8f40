"""The columns of `head_types`."""

from tlspectral.heads.types.kinds import TYPES
from tlspectral.tables import COLUMNS, Column, Table

# fmt: off
_MIXED = "attention probability; logits for copy_suppression"
_TYPES = (
    Column("type", "Type of head that the row measures. A head has a row for each.", "label",
        range=", ".join(kind.name for kind in TYPES),
        source="see docs/what_heads_do.md"),
    Column("score",
        "How far the head does what the type says, mean over sequences of both texts. Patterns of attention: the "
        "attention to the pattern's keys, averaged over queries. copy_suppression: what the head takes directly from "
        "the logit of the earlier token predicted most, by attending to it. retrieval: attention to what the fact "
        "that is asked for says, 0 where the head writes another. NaN where the model has no such measurement.",
        _MIXED, range="-inf .. inf; 0 .. 1 for attention",
        does_not_establish="That the model needs the head for it: check_head_types removes heads."),
    Column("stderr", "Standard error of score over sequences.", _MIXED, range="0 .. inf",
        does_not_establish="Sampling of sequences of these two texts only."),
    Column("chance",
        "Mean score under the null: keys read from random directions (patterns of attention), values read from random "
        "directions (copy_suppression), another of the planted facts (retrieval).", _MIXED, range="-inf .. inf",
        also_known_as="null mean",
        does_not_establish="What uniform attention would score: keys of equal size in random directions can be sharp."),
    Column("pvalue", "Share of draws of the null, the head itself counted as one, that reach its score. One-sided; no "
        "finer than 1 / (draws + 1).", "probability", range="0 .. 1",
        does_not_establish="The size of what the head does: floors are for that."),
    Column("qvalue", "Benjamini-Hochberg rate of pvalue over all rows of the table.", "probability", range="0 .. 1",
        does_not_establish="Control under negative dependence: attention to one key is none to another."),
    Column("claimed",
        "Whether qvalue is below .05, score less chance reaches the type's floor, and heads rank alike on both texts "
        "(attrs['reliability'] of the type above .9).", "flag", range="False, True",
        does_not_establish="That the model needs this head for it: attrs['causal_check'] is of a type's strongest "
        "heads together, in one model. That the head has no other type, or that an unclaimed head does nothing."),
)

HEAD_TYPES = Table("head_types", "`tls.head_types`",
    (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"], *_TYPES))
TABLES = (HEAD_TYPES,)
