"""Every figure shows itself in a notebook, and one of a single panel draws into axes that are given."""

import numpy as np
import pandas as pd
import pytest
import test_comparison_changes
import test_plot_effects
import test_plots
from matplotlib.figure import Figure
from positional_tables import head_scores, per_frequency
from test_plot_attribution import terms
from test_plot_positional_layout import FIGURES as POSITIONAL

from tlspectral import plots
from tlspectral.heads import compare_heads
from tlspectral.plots.style import one_panel
from tlspectral.studies.positional_symbolic import figures

OFFSETS = pd.DataFrame({"layer": 2, "head": np.repeat([1, 5], 4), "offset": [*range(-3, 1)] * 2, "score": range(8)})
ONE_PANEL = {
    "ablation_effects": lambda **ax: plots.ablation_effects(test_plot_effects.SWEEP, test_plot_effects.HEADS, **ax),
    "content_direction_plane": lambda **ax: plots.content_direction_plane(test_plots.heads(), **ax),
    "frequency_grid": lambda **ax: figures.frequency_grid(per_frequency(), **ax),
    "frequency_path": lambda **ax: figures.frequency_path(per_frequency(), (1, 1), **ax),
    "head_changes": lambda **ax: plots.head_changes(compare_heads(*test_comparison_changes.tables()), **ax),
    "qk_attribution": lambda **ax: plots.qk_attribution(terms(), **ax),
    "kernel": lambda **ax: plots.kernel(OFFSETS.iloc[:4], **ax),
    "positional_symbolic_plane": lambda **ax: plots.positional_symbolic_plane(head_scores(), highlight="L1H2", **ax),
}


@pytest.mark.parametrize("name", {**dict.fromkeys(plots.__all__), **POSITIONAL})
def test_a_notebook_shows_the_figure(name):
    figure = {**POSITIONAL, **ONE_PANEL}[name]()
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ONE_PANEL)
def test_given_axes_hold_what_a_figure_alone_holds(name):
    figure = Figure(figsize=(12, 6), layout="constrained")
    ax, neighbour = figure.subplots(1, 2)
    untouched = len(neighbour.findobj())
    alone = ONE_PANEL[name]()
    assert ONE_PANEL[name](ax=ax) is figure
    # Alone the figure's own patch and legend stand outside of the axes; a colour bar may be axes of its own.
    assert len(figure.findobj()) - untouched == len(alone.findobj())
    assert [len(list_) for list_ in (ax.lines, ax.collections, ax.patches, ax.texts)] == [
        len(list_)
        for list_ in (alone.axes[0].lines, alone.axes[0].collections, alone.axes[0].patches, alone.axes[0].texts)
    ]
    assert ax.has_data()
    assert figure.legends == []
    assert len(neighbour.findobj()) == untouched


def test_axes_of_a_subfigure_serve_too():
    figure = Figure(layout="constrained")
    left, _ = figure.subfigures(1, 2)
    assert ONE_PANEL["positional_symbolic_plane"](ax=left.subplots()) is figure


def test_what_is_no_axes_is_refused():
    grid = Figure().subplots(1, 2)
    with pytest.raises(TypeError, match="ax is a ndarray: give one matplotlib Axes"):
        one_panel(grid, 1.0, 1.0)
    with pytest.raises(ValueError, match="the kernels are of 2 heads, a panel each"):
        plots.kernel(OFFSETS, ax=grid[0])
