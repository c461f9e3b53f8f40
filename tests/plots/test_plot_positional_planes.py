"""Figures of positional and symbolic scores show what the tables hold, and count the rows left out."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import colours_by_layer, offsets, part, said
from positional_tables import N_FREQUENCIES, N_LAYERS, by_query, head_scores, per_frequency
from tlspectral_studies.positional_symbolic import figures

from tlspectral import plots

pytestmark = pytest.mark.lowest

GREYS = [0.2126, 0.7152, 0.0722]  # luminance of red, green and blue


def test_the_plane_shows_every_head_coloured_by_its_layer():
    table = head_scores(s_pos_se=0.02, s_sym_se=0.05)
    table.loc[3, ["s_pos_se", "s_sym_se"]] = np.nan
    before = table.copy()
    figure = plots.positional_symbolic_plane(table)
    pd.testing.assert_frame_equal(table, before)
    np.testing.assert_array_equal(offsets(figure, "heads"), table[["s_pos", "s_sym"]])
    by_layer = colours_by_layer(figure, table["layer"])
    assert list(by_layer) == list(range(N_LAYERS))
    assert all(len(found) == 1 for found in by_layer.values())
    # Lighter with every layer, so that the order survives a grey print.
    light = [float(np.dot(next(iter(by_layer[layer]))[:3], GREYS)) for layer in range(N_LAYERS)]
    assert light == sorted(set(light))
    assert light[-1] < 0.8
    words = {text.get_text(): text.get_position() for text in part(figure, "what decides")}
    (left, up), (right, down) = words["the content\ndecides"], words["the position\ndecides"]
    assert left < 0.5 < right
    assert down < 0.5 < up
    (arc,) = part(figure, "unit circle")
    np.testing.assert_allclose(np.hypot(*arc.get_data()), 1, atol=1e-12)
    across, up = part(figure, "standard errors")
    for axis, (lines, score) in enumerate(((across, "s_pos"), (up, "s_sym"))):
        spans = np.array([segment[:, axis] for segment in lines.get_segments()])
        error = table[f"{score}_se"].fillna(0)
        np.testing.assert_allclose(spans, np.stack([table[score] - error, table[score] + error], axis=1))
    assert part(plots.positional_symbolic_plane(head_scores()), "standard errors") == []
    assert figure.axes[0].child_axes[0].get_ylabel() == "layer"


@pytest.mark.fast(1)
@pytest.mark.parametrize("how", ["names and pairs", "table"])
def test_heads_are_named_on_request(how):
    table = head_scores()
    chosen = table.nlargest(2, "s_sym")
    pairs = list(zip(chosen["layer"].tolist(), chosen["head"].tolist(), strict=True))
    names = [f"L{layer}H{head}" for layer, head in pairs]
    figure = plots.positional_symbolic_plane(table, highlight=chosen if how == "table" else [names[0], pairs[1]])
    places = {label.get_text(): label.xy for label in part(figure, "named head")}
    assert set(places) == set(names)
    for name, place in zip(names, chosen[["s_pos", "s_sym"]].to_numpy(), strict=True):
        assert places[name] == pytest.approx(tuple(place))
    assert part(plots.positional_symbolic_plane(table, highlight=table.iloc[:0]), "named head") == []


def test_the_correlation_is_said_with_its_null_and_only_where_the_table_has_it():
    table = head_scores()
    assert "Pearson" not in said(plots.positional_symbolic_plane(table))
    table.attrs["correlation"] = {"pearson": -0.803, "null_mean": -0.88, "null_sd": 0.021, "null_share": 0.994}
    text = said(plots.positional_symbolic_plane(table))
    assert "r of the two scores: \N{MINUS SIGN}0.80" in text
    assert "\N{MINUS SIGN}0.88 ± 0.021 (1 sd); r at percentile 99.4" in text
    table.attrs["correlation"] |= {"null_mean": None, "null_sd": None, "null_share": None}
    text = said(plots.positional_symbolic_plane(table))
    assert "\N{MINUS SIGN}0.80" in text
    assert "null" not in text


def test_each_queried_block_has_its_plane_on_one_scale_of_colours():
    table = by_query()
    panels = figures.plane_by_query(table).axes[:5]
    colours = []
    for query, axes in zip((0, 8, 16, 24, 32), panels, strict=True):
        rows = table[table["query"] == query]
        np.testing.assert_array_equal(offsets(axes, "heads"), rows[["s_pos", "s_sym"]])
        colours.append(colours_by_layer(axes, rows["layer"]))
    assert all(found == colours[0] for found in colours)
    assert all(len(found) == 1 for found in colours[0].values())


def test_the_exclusion_index_is_drawn_against_the_spread_of_the_logits():
    table = head_scores()
    np.testing.assert_array_equal(
        offsets(plots.exclusion_plane(table), "heads"), table[["exclusion_index", "logit_std"]]
    )
    table.loc[2, "logit_std"] = 0.0
    assert "not drawn: 1 row with NaN in logit_std" in said(plots.exclusion_plane(table))


@pytest.mark.slow
def test_rows_with_nan_are_left_out_and_counted():
    table = head_scores()
    assert "not drawn" not in said(plots.positional_symbolic_plane(table))
    table.loc[[1, 5], "s_pos"] = np.nan
    figure = plots.positional_symbolic_plane(table, highlight=[(0, 1), (0, 2)])
    assert len(offsets(figure, "heads")) == len(table) - 2
    assert [label.get_text() for label in part(figure, "named head")] == ["L0H2"]
    assert "not drawn: 2 rows with NaN in s_pos" in said(figure)
    table = per_frequency()
    table["s_sym"] = table["s_sym"].where(table["frequency"] != 2)
    assert len(offsets(figures.frequency_path(table, (0, 0)), "frequencies")) == N_FREQUENCIES - 1
    assert "not drawn: 2 rows with NaN in s_sym" in said(figures.frequency_profile(table, [(0, 0), (1, 1)]))
    # Drawn, though nothing is left to draw.
    assert "12 rows" in said(plots.positional_symbolic_plane(head_scores(s_pos=np.nan)))
