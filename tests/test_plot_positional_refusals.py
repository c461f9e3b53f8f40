"""Figures of positional and symbolic scores count the rows left out, leave tables alone, and refuse the rest."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from positional_tables import N_FREQUENCIES, by_query, head_scores, joined, norms, per_frequency, traces

from tlspectral import plots
from tlspectral.errors import BadHead
from tlspectral.studies.positional_symbolic import figures


def test_rows_with_nan_are_left_out_and_counted():
    table = head_scores()
    table.loc[[1, 5], "s_pos"] = np.nan
    figure = plots.positional_symbolic_plane(table, highlight=[(0, 1), (0, 2)])
    assert len(offsets(figure, "heads")) == len(table) - 2
    assert [label.get_text() for label in part(figure, "named head")] == ["L0H2"]
    assert "not drawn: 2 rows with NaN in s_pos" in said(figure)
    table = by_query()
    table.loc[3, "s_sym"] = np.nan
    for draw in (figures.plane_by_query, figures.score_histograms):
        assert "not drawn: 1 row with NaN in s_sym" in said(draw(table))
    table = per_frequency()
    table["s_sym"] = table["s_sym"].where(table["frequency"] != 2)
    assert "not drawn: 1 row with NaN in s_sym" in said(figures.frequency_path(table, (0, 0)))
    assert len(offsets(figures.frequency_path(table, (0, 0)), "frequencies")) == N_FREQUENCIES - 1
    assert "2 rows" in said(plots.frequency_profile(table, [(0, 0), (1, 1)]))
    assert "not drawn" not in said(plots.positional_symbolic_plane(head_scores()))
    empty = head_scores(s_pos=np.nan)
    assert "12 rows" in said(plots.positional_symbolic_plane(empty))  # drawn, though nothing is left to draw
    figures.score_heatmaps(empty)
    flat = head_scores()
    flat.loc[2, "logit_std"] = 0.0
    assert "not drawn: 1 row with NaN in logit_std" in said(plots.exclusion_plane(flat))


def test_tables_are_left_as_they_are():
    for make, draw in ((head_scores, plots.positional_symbolic_plane), (by_query, figures.plane_by_query)):
        table = make()
        before = table.copy()
        draw(table)
        pd.testing.assert_frame_equal(table, before)


@pytest.mark.parametrize(
    ("draw", "table", "column"),
    [
        (plots.positional_symbolic_plane, head_scores, "s_sym"),
        (figures.score_heatmaps, head_scores, "s_pos"),
        (figures.score_histograms, by_query, "query"),
        (figures.plane_by_query, by_query, "query"),
        (lambda table: plots.frequency_profile(table, [(0, 0)]), per_frequency, "frequency"),
        (figures.frequency_grid, per_frequency, "head"),
        (lambda table: figures.frequency_path(table, (0, 0)), per_frequency, "s_pos"),
        (lambda table: figures.frequency_norms(table, (0, 0)), norms, "key_norm"),
        (figures.attention_traces, traces, "swap_j"),
        (figures.score_agreement, joined, "D_head"),
        (plots.exclusion_plane, head_scores, "logit_std"),
        (figures.exclusion_heatmap, head_scores, "exclusion_index"),
        (figures.exclusion_histograms, by_query, "exclusion_index"),
    ],
)
def test_a_missing_column_or_an_empty_table_is_refused(draw, table, column):
    with pytest.raises(ValueError, match=f"the table has no column {column}: give a table of"):
        draw(table().drop(columns=column))
    with pytest.raises(ValueError, match="the table has no rows"):
        draw(table().iloc[:0])


def test_what_cannot_be_drawn_is_refused():
    scores, frequencies = head_scores(), per_frequency()
    with pytest.raises(ValueError, match="no column depth"):
        plots.positional_symbolic_plane(scores, color="depth")
    with pytest.raises(ValueError, match="several rows for layer 0, head 0: give one row per head"):
        plots.positional_symbolic_plane(by_query().sort_values(["layer", "head"]))
    with pytest.raises(ValueError, match="L9H9 has no row in the table"):
        plots.positional_symbolic_plane(scores, highlight=[(9, 9)])
    with pytest.raises(BadHead, match="'head 3' names no head"):
        plots.positional_symbolic_plane(scores, highlight=["head 3"])
    with pytest.raises(ValueError, match="10 queried blocks: give a table with at most 9"):
        figures.plane_by_query(by_query(range(10)))
    with pytest.raises(ValueError, match="10 queried blocks"):
        figures.score_histograms(by_query(range(10)))
    with pytest.raises(ValueError, match="no heads are named"):
        plots.frequency_profile(frequencies, [])
    with pytest.raises(ValueError, match="L7H0 has no row"):
        figures.frequency_path(frequencies, "L7H0")
    with pytest.raises(ValueError, match=r"several rows for layer .* give one row per head and frequency"):
        figures.frequency_grid(pd.concat([frequencies, frequencies]))
    with pytest.raises(ValueError, match=r"the traces are of 2 heads .*L1H2"):
        figures.attention_traces(pd.concat([traces(), traces().assign(head=0)]))
    with pytest.raises(ValueError, match="7 swaps: give the rows of at most 6"):
        figures.attention_traces(
            pd.concat([traces()[lambda t: t["swap_i"] == 1].assign(swap_j=j) for j in range(3, 10)])
        )
