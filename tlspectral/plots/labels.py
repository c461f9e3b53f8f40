"""Write names beside points of a figure."""

from itertools import product

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_DISTANCES = (13.0, 19.0, 26.0, 34.0, 44.0, 56.0, 76.0)  # points
_ANGLES = tuple((np.arange(12) + 0.5) * np.pi / 6)  # radians


def name_points(
    figure: Figure,
    axes: Axes,
    names: list[str],
    places: Float[np.ndarray, "named 2"],
    others: Float[np.ndarray, "points 2"],
    *,
    colours: list[str],
    gid: str,
    clear: Float[np.ndarray, "clear 2"] | None = None,
) -> None:
    """Write each of `names` near its point, inside the axes, where it covers few other names and points. The figure is
    changed.

    `places` are the named points [named, 2], `others` points [points, 2] that should stay visible, and `clear` points
    [clear, 2] that no name may cover, all in data coordinates. `colours` has a colour per name. `figure.findobj` finds
    the texts by `gid`.
    """
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())
    figure.draw_without_rendering()  # computes the layout; pixel coordinates are unknown before
    dots, targets = axes.transData.transform(others), axes.transData.transform(places)
    uncovered = np.empty((0, 2)) if clear is None else axes.transData.transform(clear)
    inside = axes.get_window_extent()
    occupied: list[Bbox] = []
    lines = np.empty((0, 2))
    for name, point, target, colour in zip(names, places, targets, colours, strict=True):
        label = axes.annotate(
            name,
            (float(point[0]), float(point[1])),
            (0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=colour,
            zorder=5,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4},
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            gid=gid,
            in_layout=False,  # otherwise the axes shrink to make room, and all pixel coordinates change
        )
        label.get_window_extent()  # this call anchors the text to its point
        tried: list[tuple[float, Bbox, np.ndarray, tuple[float, float]]] = []
        for distance, angle in product(_DISTANCES, _ANGLES):
            offset = (1.4 * distance * float(np.cos(angle)), distance * float(np.sin(angle)))
            label.set_position(offset)
            # The box of the text only, because an annotation's own extent includes its line.
            box = Text.get_window_extent(label).padded(2)
            line = target + np.linspace(0.0, 1.0, 12)[:, None] * (box.get_points().mean(axis=0) - target)
            outside = not (inside.contains(*box.min) and inside.contains(*box.max))
            cost = 1000.0 * outside + 1000.0 * sum(box.overlaps(other) for other in occupied)
            cost += 200.0 * box.padded(1).count_contains(uncovered)
            cost += 50.0 * box.padded(4).count_contains(targets) + 3.0 * box.count_contains(dots) + 0.1 * distance
            cost += 20.0 * (box.count_contains(lines) + sum(other.count_contains(line) for other in occupied))
            tried.append((cost, box, line, offset))
        _, box, line, offset = min(tried, key=lambda option: option[0])
        label.set_position(offset)
        occupied.append(box)
        lines = np.concatenate([lines, line])
