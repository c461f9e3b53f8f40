"""What figures refuse: tables that lack a column or rows, hold a head twice, or are too many for one figure."""

from functools import partial

import pandas as pd
import plotted_tables
import pytest
from plotted_tables import terms
from positional_tables import by_query, head_scores, joined, norms, per_frequency, traces
from tlspectral_studies.positional_symbolic import figures

from tlspectral import plots
from tlspectral.errors import BadHead

pytestmark = pytest.mark.lowest

profile = partial(figures.frequency_profile, heads=[(0, 0)])


@pytest.mark.parametrize(
    ("draw", "table", "column"),
    [
        (plots.plane, plotted_tables.heads, "D_head"),
        (plots.qk_attribution, terms, "antisymmetric"),
        (plots.positional_symbolic_plane, head_scores, "s_sym"),
        (plots.exclusion_plane, head_scores, "logit_std"),
        (profile, per_frequency, "frequency"),
        (figures.score_heatmaps, head_scores, "s_pos"),
        (figures.score_histograms, by_query, "query"),
        (figures.plane_by_query, by_query, "query"),
        (figures.frequency_grid, per_frequency, "head"),
        (partial(figures.frequency_path, head=(0, 0)), per_frequency, "s_pos"),
        (partial(figures.frequency_norms, head=(0, 0)), norms, "key_norm"),
        (figures.attention_traces, traces, "swap_j"),
        (figures.score_agreement, joined, "D_head"),
        (figures.exclusion_heatmap, head_scores, "exclusion_index"),
        (figures.exclusion_histograms, by_query, "exclusion_index"),
    ],
)
def test_a_missing_column_or_an_empty_table_is_refused(draw, table, column):
    with pytest.raises(ValueError, match=f"the table has no column {column}: give a table of"):
        draw(table().drop(columns=column))
    with pytest.raises(ValueError, match="the table has no rows"):
        draw(table().iloc[:0])


def many_swaps():
    one = traces()[lambda t: t["swap_i"] == 1]
    return pd.concat([one.assign(swap_j=j) for j in range(3, 10)])


plane = plots.positional_symbolic_plane
REFUSED = {
    "a head twice": (lambda: plane(by_query().sort_values(["layer", "head"])), ValueError, "several rows for layer 0"),
    "a head to name": (lambda: plane(head_scores(), highlight=[(9, 9)]), ValueError, "L9H9 has no row in the table"),
    "no name": (lambda: plane(head_scores(), highlight=["head 3"]), BadHead, "'head 3' is text, .* not a head"),
    "negative": (
        lambda: plots.plane(plotted_tables.heads(), highlight_previous_token=-1),
        ValueError,
        "highlight_previous_token is -1",
    ),
    "ten planes": (lambda: figures.plane_by_query(by_query(range(10))), ValueError, "10 queried .* at most 9"),
    "ten histograms": (lambda: figures.score_histograms(by_query(range(10))), ValueError, "10 queried blocks"),
    "a sweep from CSV": (
        lambda: plots.ablation_effects(
            plotted_tables.SWEEP.assign(control_draws="[0.1, 0.2]", control_p=0.5), detectors=plotted_tables.HEADS
        ),
        ValueError, r"control_draws holds text \('\[0\.1, 0\.2\]'\), because CSV cannot store lists",
    ),
    "no heads": (lambda: figures.frequency_profile(per_frequency(), []), ValueError, "no heads are named"),
    "another head": (lambda: figures.frequency_path(per_frequency(), "L7H0"), ValueError, "L7H0 has no row"),
    "a frequency twice": (
        lambda: profile(pd.concat([per_frequency()] * 2)), ValueError, "several rows .* one row per head and frequency",
    ),
    "two heads": (
        lambda: figures.attention_traces(pd.concat([traces(), traces().assign(head=0)])), ValueError, "of 2 heads",
    ),
    "seven swaps": (lambda: figures.attention_traces(many_swaps()), ValueError, "7 swaps: give the rows of at most 6"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused(what):
    call, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        call()
