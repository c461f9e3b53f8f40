"""Heat maps, histograms and agreement of positional and symbolic scores show what the tables hold."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from matplotlib.collections import QuadMesh
from positional_tables import N_HEADS, N_LAYERS, by_query, head_scores, joined

from tlspectral import plots


def test_heat_maps_hold_each_score_at_its_layer_and_head():
    table = head_scores().drop(index=[4]).sample(frac=1, random_state=0)
    table.loc[7, "s_sym"] = np.nan
    figure = plots.score_heatmaps(table)
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
    figure = plots.score_histograms(table)
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
    figure = plots.score_agreement(table, statistics)
    for column in ("rope_imag_frac", "D_head", "prev"):
        kept = table.dropna(subset=column)
        np.testing.assert_array_equal(offsets(figure, column), kept[[column, "s_pos"]])
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles[0].startswith("Spearman 0.31\nnull \N{MINUS SIGN}0.12 to 0.13")
    assert titles[0].endswith("percentile 99")
    assert titles[1].startswith("Spearman \N{MINUS SIGN}0.42")
    assert titles[2] == ""
    assert "prev 1" in said(figure)
    assert [axes.get_title() for axes in plots.score_agreement(joined()).axes[:3]] == ["", "", ""]
    with pytest.raises(ValueError, match="table of statistics has no column spearman, null_pct"):
        plots.score_agreement(table, statistics.drop(columns=["spearman", "null_pct"]))


def test_the_exclusion_index_is_drawn_as_it_stands_in_the_tables():
    table, queries = head_scores(), by_query()
    dots = offsets(plots.exclusion_plane(table), "heads")
    np.testing.assert_array_equal(dots, table[["exclusion_index", "logit_std"]])
    (mesh,) = part(plots.exclusion_heatmap(table), "exclusion_index")
    values = mesh.get_array().reshape(N_HEADS, N_LAYERS)
    np.testing.assert_array_equal(values[table["head"], table["layer"]], table["exclusion_index"])
    for axes in plots.exclusion_histograms(queries).axes:
        (steps,) = part(axes, "exclusion_index")
        assert steps.get_data()[0].sum() == N_LAYERS * N_HEADS
    other = table.assign(exclusion_index=1 - table["exclusion_index"]).drop(index=[5])
    (cells,) = part(
        plots.heads_over_tasks({"one": table, "two": other.sample(frac=1, random_state=1)}), "exclusion_index"
    )
    rows = np.ma.filled(cells.get_array().reshape(2, -1), np.nan)
    np.testing.assert_array_equal(rows[0], table["exclusion_index"])
    np.testing.assert_array_equal(np.delete(rows[1], 5), np.delete(1 - table["exclusion_index"].to_numpy(), 5))
    assert np.isnan(rows[1, 5])
