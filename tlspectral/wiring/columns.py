"""Columns of the table of edges between heads."""

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_ALONE = "That the edge matters with others cut: others can carry the same, and some edges matter only together."

EDGE_EFFECTS = Table("edge_effects", "`tls.edge_effects`", (
    Column("source", "What writes: a head (L16H0), an MLP (L3MLP), or embedding (what enters the first layer, with "
        "positions).", "label", range="heads, MLPs, embedding"),
    Column("layer", "Layer of the source; -1 for embedding.", "index", range="-1 .. layers - 2"),
    Column("head", "Head of the source; -1 for an MLP and for embedding.", "index", range="-1 .. heads - 1"),
    Column("target", "The head that reads.", "label", range="heads"),
    Column("target_layer", COLUMNS["layer"].meaning + " Of the target.", "index", range="1 .. layers - 1"),
    Column("target_head", COLUMNS["head"].meaning + " Of the target.", "index", range="0 .. heads - 1"),
    Column("input", "What of the target is computed without the source: its queries (q), keys (k) or values (v). Heads "
        "that share the target's keys and values get the same edit: read_together in df.attrs.", "label",
        range="q, k, v"),
    Column("attention", "Attention of the target to what score in df.attrs names, in the intact model, mean over "
        "queries and sequences. NaN where the sequences have no such keys.", "probability", range="0 .. 1",
        does_not_establish="That the target acts on it."),
    Column("delta", "Effect of the cut edge less the intact model: of the target's attention (effect='attention'), or "
        "of the task's metric, the unit of which it has (effect='task').", "probability, or of the metric; nat for a "
        "loss", range="-1 .. 1, or by metric", source="path patching (Wang et al. 2023; Goldowsky-Dill et al. 2023)",
        also_known_as="direct edge effect", does_not_establish=_ALONE),
    Column("delta_stderr", "Standard error of delta over sequences, paired with the intact run. NaN for one sequence.",
        "as delta", range="0 .. inf", does_not_establish="Sampling of sequences only."),
    Column("control_delta", "As delta, with a random direction of equal norm in place of the source's write; mean over "
        "draws. With control='random' only.", "as delta", range="-inf .. inf", also_known_as="random-write control",
        does_not_establish="What no edit would do: it says what any edit of that size costs."),
    Column("control_delta_stderr", "Standard error of control_delta, over draws and over sequences, in squares. With "
        "control='random' only.", "as delta", range="0 .. inf"),
    Column("pvalue", "Share of the control effects of all sources of the target that are as large in absolute value, "
        "(1 + those) / (1 + all). With control='random' only.", "probability", range="1 / (1 + draws) .. 1",
        does_not_establish="That the source is special by its direction alone: the null holds writes of all sources, "
        "large and small, so a source that writes little has to beat the noise of those that write much."),
    Column("qvalue", "pvalue corrected for the number of rows of the table (Benjamini-Hochberg). With control='random' "
        "only.", "probability", range="0 .. 1", also_known_as="false discovery rate"),
    Column("k_composition", "Weight-based composition score of the source with this input of the target (as "
        "k_composition of kind input). NaN for MLPs and embedding.", "ratio", range="0 .. 1",
        source="Elhage et al. 2021; FP 4", does_not_establish="That the path is used: it reads weights alone."),
))
# fmt: on
TABLES = (EDGE_EFFECTS,)
