"""The map of heads: every value at its layer and head, signs and NaN seen, the largest named."""

import numpy as np
import plotted_tables
import pytest
from figure_parts import part, said

from tlspectral import plots

pytestmark = pytest.mark.lowest


def table():
    made = plotted_tables.heads().sample(frac=1, random_state=0)
    return made.assign(signed=np.linspace(-1.0, 0.5, len(made)))


@pytest.mark.fast(1)
@pytest.mark.parametrize(("column", "ends"), [("D_head", None), ("signed", (-1.0, 1.0))])
def test_each_value_stands_at_its_layer_and_head(column, ends):
    made = table()
    without = made.drop(index=[4, 9])  # heads without a row are blank
    figure = plots.heads(without, column)
    (mesh,) = part(figure, column)
    values = np.ma.filled(mesh.get_array(), np.nan).reshape(4, 6)
    expected = np.full((4, 6), np.nan)
    expected[without["layer"], without["head"]] = without[column]
    np.testing.assert_array_equal(values, expected)
    (axes,) = (axes for axes in figure.axes if axes.get_xlabel() == "head")
    assert axes.get_ylim() == (3.5, -0.5)  # layer 0 on top
    found = (mesh.norm.vmin, mesh.norm.vmax)
    assert found == (ends or (without[column].min(), without[column].max()))
    named = [text.get_text() for text in part(figure, "largest")]
    assert named == without.sort_values(column, key=np.abs if ends else None, ascending=False)["name"].iloc[:3].tolist()


def test_nan_is_grey_and_counted_and_never_named():
    made = table()
    made["D_head"] = np.nan
    made.loc[made["name"] == "L2H3", "D_head"] = 0.5
    figure = plots.heads(made, "D_head")
    (grey,) = part(figure, "NaN")
    assert len(grey.get_offsets()) == len(made) - 1
    assert [3, 2] not in np.asarray(grey.get_offsets()).tolist()
    assert said(figure) == f"\nNaN ({len(made) - 1} of {len(made)})"
    assert [text.get_text() for text in part(figure, "largest")] == ["L2H3"]


def test_an_infinite_number_is_grey_and_of_one_sign_the_largest_are_named():
    made = table().sort_values(["layer", "head"], ignore_index=True)
    made["x"] = [-np.inf, *np.linspace(-1.0, -2.0, len(made) - 1)]
    figure = plots.heads(made, "x")
    assert said(figure) == f"\nNaN or infinite (1 of {len(made)})"
    assert [text.get_text() for text in part(figure, "largest")] == ["L0H1", "L0H2", "L0H3"]


def test_limits_are_those_that_are_given_and_what_is_no_number_is_refused():
    (mesh,) = part(plots.heads(table(), "D_head", limits=(0.0, 1.0)), "D_head")
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.0, 1.0)
    with pytest.raises(ValueError, match="column name has values of type"):
        plots.heads(table(), "name")
