"""The positional-symbolic plane shows what the tables hold: heads, errors, names, correlation, queried blocks."""

import numpy as np
import pytest
from figure_parts import offsets, part, said
from matplotlib.colors import to_hex
from matplotlib.text import Text
from positional_tables import N_LAYERS, by_query, head_scores

from tlspectral import plots
from tlspectral.studies.positional_symbolic import figures


def test_the_plane_shows_every_head_coloured_by_its_layer_or_another_column():
    table = head_scores()
    figure = plots.positional_symbolic_plane(table)
    np.testing.assert_array_equal(offsets(figure, "heads"), table[["s_pos", "s_sym"]])
    colours = part(figure, "heads")[0].get_facecolors()
    by_layer = {layer: {tuple(colour) for colour in colours[table["layer"] == layer]} for layer in range(N_LAYERS)}
    assert all(len(found) == 1 for found in by_layer.values())
    assert len(set.union(*by_layer.values())) == N_LAYERS
    # Lighter with every layer, so that the order survives a grey print.
    light = [float(np.dot(next(iter(by_layer[layer]))[:3], [0.2126, 0.7152, 0.0722])) for layer in range(N_LAYERS)]
    assert light == sorted(light)
    assert light[-1] < 0.8
    figure = plots.positional_symbolic_plane(table, color="exclusion_index")
    colours = part(figure, "heads")[0].get_facecolors()
    order = np.argsort(table["exclusion_index"].to_numpy())
    assert (np.diff((colours @ [0.2126, 0.7152, 0.0722, 0])[order]) >= 0).all()
    assert "exclusion_index" in {text.get_text() for text in figure.findobj(Text)}


def test_the_arc_is_the_unit_circle():
    (arc,) = part(plots.positional_symbolic_plane(head_scores()), "unit circle")
    x, y = arc.get_data()
    np.testing.assert_allclose(np.hypot(x, y), 1, atol=1e-12)
    assert (x.min(), x.max()) == pytest.approx((0, 1))


def test_errors_of_a_profile_are_drawn_where_it_has_them():
    table = head_scores(s_pos_se=0.02, s_sym_se=0.05)
    table.loc[3, ["s_pos_se", "s_sym_se"]] = np.nan
    across, up = part(plots.positional_symbolic_plane(table), "standard errors")
    for lines, score, error in ((across, "s_pos", "s_pos_se"), (up, "s_sym", "s_sym_se")):
        spans = np.array([segment[:, 0 if score == "s_pos" else 1] for segment in lines.get_segments()])
        expected = np.stack([table[score] - table[error].fillna(0), table[score] + table[error].fillna(0)], axis=1)
        np.testing.assert_allclose(spans, expected)
    assert part(plots.positional_symbolic_plane(head_scores()), "standard errors") == []


@pytest.mark.parametrize("how", ["names and pairs", "table"])
def test_heads_are_named_on_request(how):
    table = head_scores()
    chosen = table.nlargest(2, "s_sym")
    pairs = list(zip(chosen["layer"].tolist(), chosen["head"].tolist(), strict=True))
    names = [f"L{layer}H{head}" for layer, head in pairs]
    highlight = chosen if how == "table" else [names[0], pairs[1]]
    figure = plots.positional_symbolic_plane(table, highlight=highlight)
    labels = part(figure, "named head")
    assert {label.get_text() for label in labels} == set(names)
    places = {label.get_text(): label.xy for label in labels}
    for name, place in zip(names, chosen[["s_pos", "s_sym"]].to_numpy(), strict=True):
        assert places[name] == pytest.approx(tuple(place))
    assert part(plots.positional_symbolic_plane(table), "named head") == []
    assert part(plots.positional_symbolic_plane(table, highlight=table.iloc[:0]), "named head") == []


def test_the_correlation_is_said_with_its_null_and_only_where_the_table_has_it():
    table = head_scores()
    table.attrs["correlation"] = {"pearson": -0.803, "null_mean": -0.88, "null_sd": 0.021, "null_pct": 0.994}
    text = said(plots.positional_symbolic_plane(table))
    assert "r of the two scores: \N{MINUS SIGN}0.80" in text
    assert "\N{MINUS SIGN}0.88 ± 0.021 (1 sd); r at percentile 99.4" in text
    table.attrs["correlation"] |= {"null_mean": None, "null_sd": None, "null_pct": None}
    text = said(plots.positional_symbolic_plane(table))
    assert "\N{MINUS SIGN}0.80" in text
    assert "null" not in text
    table.attrs["correlation"]["pearson"] = None
    assert "Pearson" not in said(plots.positional_symbolic_plane(table))
    assert "Pearson" not in said(plots.positional_symbolic_plane(head_scores()))


def test_each_queried_block_has_its_plane():
    table = by_query()
    figure = figures.plane_by_query(table)
    panels = figure.axes[:5]
    for query, axes in zip((0, 8, 16, 24, 32), panels, strict=True):
        rows = table[table["query"] == query]
        np.testing.assert_array_equal(offsets(axes, "heads"), rows[["s_pos", "s_sym"]])
        assert len(part(axes, "unit circle")) == 1
    colours = {}
    for axes in panels:
        dots = part(axes, "heads")[0]
        rows = table[table["query"] == int(axes.get_title().split()[1])]
        for layer, colour in zip(rows["layer"], dots.get_facecolors(), strict=True):
            colours.setdefault(layer, set()).add(to_hex(colour))
    assert all(len(found) == 1 for found in colours.values())  # one scale for all panels


def test_the_exclusion_index_is_drawn_against_the_spread_of_the_logits():
    table = head_scores()
    dots = offsets(plots.exclusion_plane(table), "heads")
    np.testing.assert_array_equal(dots, table[["exclusion_index", "logit_std"]])
