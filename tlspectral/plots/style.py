"""Style of the figures: colours that survive print and colour blindness, plain axes, notes below the panels.

Red is what is removed or asked for, and grey is chance: a null, a control, or other heads. Blue and orange are the two
signs of an effect, or two things that are compared. A page shows a figure 688 pixels wide, and no letter of it is
smaller than 9 pixels there: letters of 8 points need a figure of at most 8.4 inches, letters of 9 points 9.5 inches.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#22262b"
GREY = "#6b7480"
PALE = "#d5d9df"
BLUE = "#1b5e9b"
ORANGE = "#e07b00"
"""Blue and orange differ in lightness and hue, so they can be told apart in grey print and with colour blindness."""
RED = "#c8102e"
GREEN = "#5b8f5a"
PURPLE = "#7b4fa3"

_SAVED_DPI = 150


class _ShownFigure(Figure):
    """A matplotlib Figure outside pyplot: a notebook shows it if it is the last line of a cell, and `savefig` uses 150
    dpi.
    """

    def savefig(self, fname: Any, **look: Any) -> None:
        super().savefig(fname, **{"dpi": _SAVED_DPI, **look})

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi="figure")
        return stream.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white matplotlib Figure of this width and height in inches, outside pyplot, with constrained
    layout.
    """
    return _ShownFigure(figsize=(width, height), layout="constrained", facecolor="white")


def one_panel(ax: Any, width: float, height: float) -> tuple[Figure, Axes]:
    """Return (figure, axes) to draw one panel into: `ax` and its figure, or, if `ax` is None, new axes in a new figure.

    `width` and `height` are the new figure's size in inches. Raises TypeError if `ax` is not a matplotlib Axes.
    """
    if ax is None:
        figure = new_figure(width, height)
        return figure, figure.add_subplot()
    if not isinstance(ax, Axes):
        raise TypeError(f"ax= is a {type(ax).__name__}: give a matplotlib Axes, such as plt.subplots()[1]")
    return ax.figure.figure, ax  # .figure twice, because ax may stand in a subfigure


def sequential_colours(values: pd.Series) -> ScalarMappable:
    """Return a ScalarMappable, the Viridis colour map scaled from the smallest to the largest finite value, without its
    palest end, which vanishes on paper.
    """
    palette = ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.9, 256)))
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return ScalarMappable(Normalize(low, high if high > low else low + 1), palette)


def two_sided_colours(reach: float) -> ScalarMappable:
    """Return a colour map from -reach (blue) over 0 (white) to reach (orange); small values differ clearly from 0."""
    shades = [(0.0, BLUE), (0.3, "#74a0c8"), (0.48, "#dbe7f2"), (0.5, "#ffffff")]
    shades += [(0.52, "#fce9d3"), (0.7, "#f0b062"), (1.0, ORANGE)]
    return ScalarMappable(Normalize(-reach, reach), LinearSegmentedColormap.from_list("two_sided", shades))


def draw_dots(
    axes: Axes,
    points: Float64[np.ndarray, "points 2"],
    size: Any,
    colours: Any,
    gid: str,
    *,
    rim: float = 0.4,
    **look: Any,
) -> None:
    """Draw points [points, 2] into `axes` as dots with a white rim; `figure.findobj` finds them by `gid`.

    `size` is the area of a dot in square points, `colours` a colour or one per point, `rim` the width of the rim in
    points. `look` has further arguments of matplotlib's scatter.
    """
    look = {"edgecolors": "white", "linewidths": rim, "zorder": 3, **look}
    axes.scatter(points[:, 0], points[:, 1], s=size, color=colours, gid=gid, **look)


def draw_heads(
    figure: Figure, axes: Axes, points: Float64[np.ndarray, "points 2"], shown: pd.DataFrame, table: pd.DataFrame
) -> float:
    """Draw a dot per head into `axes`, coloured by layer, with a colour bar, the model's name and the number of heads.

    `shown` are the rows of the drawn heads, `points` their places [points, 2]. `table` is the whole table, whose layers
    set the colour scale. Return the area of a dot in square points.
    """
    colours = sequential_colours(table["layer"])
    area = float(np.clip(9000 / max(len(shown), 1), 14, 42))
    draw_dots(axes, points, area, colours.to_rgba(shown["layer"].to_numpy(float)), "heads")
    colour_bar(figure, colours, axes, "layer", whole=True)
    axes.set_title(str(table.attrs.get("model", "attention heads")), fontsize=11, color=INK, loc="left")
    axes.set_title(f"{len(shown)} heads", fontsize=9, color=GREY, loc="right")
    return area


def dress(axes: Axes) -> None:
    """Change `axes` in place: hide the upper and right spine, and make labels and ticks dark, in 9 and 10 points."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=10)


def colour_bar(figure: Figure, colours: ScalarMappable, axes: Axes | list[Axes], label: str, *, whole: bool) -> Axes:
    """Draw a thin colour bar into `figure` next to one or several axes, and return the bar's own axes.

    `colours` is the scale that it shows, `label` its title. `whole=True` keeps ticks at whole numbers.
    """
    if isinstance(axes, Axes):
        bar = figure.colorbar(colours, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    else:
        bar = figure.colorbar(colours, ax=axes, fraction=0.045, pad=0.02, aspect=30)
    bar.set_label(label, color=INK, fontsize=10)
    bar.locator = MaxNLocator(nbins=7, integer=whole, steps=[1, 2, 5, 10])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, color=GREY, labelcolor=INK, labelsize=9)
    return bar.ax


def legend_below(
    figure: Figure,
    entries: Sequence[tuple[Artist | tuple[Artist, ...], str]],
    notes: Sequence[str | None],
    *,
    columns: int = 1,
    ax: Axes | None = None,
) -> None:
    """Draw notes and a legend below all panels of the figure, or below `ax`; draw nothing without notes and legend.

    `entries` are (artist, text) pairs of the legend in `columns` columns. `notes` are lines above the legend; None is
    skipped.
    """
    text = "\n".join(note for note in notes if note)
    if not text and not entries:
        return
    # Below the caller's axes the distance is 4.5 font sizes, enough for tick labels and the axis name.
    place: dict[str, Any] = {"loc": "outside lower center"}
    if ax is not None:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}
    handles: list[Any] = [handle for handle, _ in entries]  # matplotlib also accepts tuples of artists
    legend = (figure if ax is None else ax).legend(
        handles,
        [label for _, label in entries],
        **place,
        ncols=columns,
        columnspacing=1.4,
        borderpad=0.1,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=text or None,
        title_fontsize=9,
    )
    legend.get_title().set(color=INK, multialignment="center")


def two_decimals(value: float) -> str:
    """Return a number as text with two decimals and a true minus sign."""
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
