"""Style of the figures: colours that survive print and colour blindness, plain axes, notes under the panels."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#22262b"
GREY = "#6b7480"
PALE = "#d5d9df"
BLUE = "#1b5e9b"
ORANGE = "#e07b00"
"""Blue and orange differ in lightness as well as in hue: they stay apart in grey print and to the colour-blind."""


def new_figure(width: float, height: float) -> Figure:
    """A white figure of this size in inches, outside pyplot, with room for what is around its axes."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def sequential_colours(values: pd.Series) -> ScalarMappable:
    """Viridis without its palest end, which vanishes on paper, scaled to the finite values."""
    palette = ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.9, 256)))
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return ScalarMappable(Normalize(low, high if high > low else low + 1), palette)


def places_around(place: int, count: int, reach: float) -> Float64[np.ndarray, " points"]:
    """`count` coordinates spread around one, so that no point hides another; a single one lies at the centre."""
    return place + (np.linspace(-reach, reach, count) if count > 1 else np.zeros(count))


def dress(axes: Axes) -> None:
    """Keep two grey spines, and set dark labels that are legible at the width of a column."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=10)


def colour_bar(figure: Figure, colours: ScalarMappable, axes: Axes | list[Axes], label: str, *, whole: bool) -> None:
    """Draw a thin colour bar beside one axes or several; `whole` for values that are indices."""
    if isinstance(axes, Axes):
        bar = figure.colorbar(colours, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    else:
        bar = figure.colorbar(colours, ax=axes, fraction=0.045, pad=0.02, aspect=30)
    bar.set_label(label, color=INK, fontsize=10)
    bar.locator = MaxNLocator(nbins=7, integer=whole, steps=[1, 2, 5, 10])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, color=GREY, labelcolor=INK, labelsize=9)


def legend_below(
    figure: Figure, entries: Sequence[tuple[Artist, str]], notes: Sequence[str | None], *, columns: int = 1
) -> None:
    """Draw notes and legend under all panels; without either, nothing."""
    text = "\n".join(note for note in notes if note)
    if not text and not entries:
        return
    legend = figure.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="outside lower center",
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
    """A number as it is written in a text, with a minus sign instead of a hyphen."""
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
