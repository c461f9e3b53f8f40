"""Heat maps, histograms and agreement of positional and symbolic scores show what the tables hold."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from matplotlib.collections import QuadMesh
from positional_tables import N_HEADS, N_LAYERS, by_query, head_scores, joined

from tlspectral.studies.positional_symbolic import figures


def test_heat_maps_hold_each_score_at_its_layer_and_head():
    table = head_scores().drop(index=[4]).sample(frac=1, random_state=0)
    table.loc[7, "s_sym"] = np.nan
    figure = figures.score_heatmaps(table)
    for score in ("s_pos", "s_sym"):
        (mesh,) = part(figure, score)
        assert isinstance(mesh, QuadMesh)
        values = np.ma.filled(mesh.get_array().reshape(N_HEADS, N_LAYERS), np.nan)
        expected = np.full((N_HEADS, N_LAYERS), np.nan)
        expected[table["head"], table["layer"]] = table[score]
        np.testing.assert_array_equal(values, expected)
        assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 1)
    assert "blank: 1 row with NaN in s_sym" in said(figure)


def test_histograms_count_the_heads_of_each_queried_block():
    table = by_query()
    figure = figures.score_histograms(table)
    assert [axes.get_title() for axes in figure.axes] == [f"block {query} queried" for query in (0, 8, 16, 24, 32)]
    for query, axes in zip((0, 8, 16, 24, 32), figure.axes, strict=True):
        for score in ("s_pos", "s_sym"):
            (steps,) = part(axes, score)
            counts, edges, _ = steps.get_data()
            expected, _ = np.histogram(table.loc[table["query"] == query, score], edges)
            np.testing.assert_array_equal(counts, expected)
            assert counts.sum() == N_LAYERS * N_HEADS
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_agreement_shows_three_columns_and_the_statistics_it_is_given():
    table = joined()
    table.loc[2, "prev"] = np.nan
    statistics = pd.DataFrame(
        {
            "score": ["s_sym", "s_pos", "s_pos", "s_pos"],
            "column": ["D_head", "rope_imag_frac", "D_head", "dup"],
            "spearman": [0.9, 0.31, -0.42, 0.1],
            "null_low": -0.12,
            "null_high": 0.13,
            "null_pct": [0.5, 0.99, 0.001, 0.4],
        }
    )
    figure = figures.score_agreement(table, statistics)
    for column in ("rope_imag_frac", "D_head", "prev"):
        kept = table.dropna(subset=column)
        np.testing.assert_array_equal(offsets(figure, column), kept[[column, "s_pos"]])
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles[0].startswith("Spearman 0.31\nnull \N{MINUS SIGN}0.12 to 0.13")
    assert titles[0].endswith("percentile 99")
    assert titles[1].startswith("Spearman \N{MINUS SIGN}0.42")
    assert titles[2] == ""
    assert "prev 1" in said(figure)
    assert [axes.get_title() for axes in figures.score_agreement(joined()).axes[:3]] == ["", "", ""]
    with pytest.raises(ValueError, match="table of statistics has no column spearman, null_pct"):
        figures.score_agreement(table, statistics.drop(columns=["spearman", "null_pct"]))


def test_the_exclusion_index_is_drawn_as_it_stands_in_the_tables():
    table, queries = head_scores(), by_query()
    (mesh,) = part(figures.exclusion_heatmap(table), "exclusion_index")
    values = mesh.get_array().reshape(N_HEADS, N_LAYERS)
    np.testing.assert_array_equal(values[table["head"], table["layer"]], table["exclusion_index"])
    for axes in figures.exclusion_histograms(queries).axes:
        (steps,) = part(axes, "exclusion_index")
        assert steps.get_data()[0].sum() == N_LAYERS * N_HEADS
