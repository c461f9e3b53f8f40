"""A figure of a head's queries and keys in the plane of one rotary pair, before and after rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tlspectral.errors import UnsupportedArchitecture, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.hooks.attribution.asked_positions import asked_positions
from tlspectral.hooks.attribution.score_matrix import checked_scores
from tlspectral.models.attention.head_scores import HeadScores, ScoreSide
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.running.text import token_text
from tlspectral.plots.style import (
    BLUE,
    INK,
    ORANGE,
    PALE,
    RED,
    colour_bar,
    draw_dots,
    dress,
    legend_below,
    new_figure,
    two_decimals,
)
from tlspectral.selection.heads_as_written import Head
from tlspectral.selection.node_names import head_name

_COLOURS = {"queries": ("#b9cfe4", BLUE, "#0b2340"), "keys": ("#f8d9ae", ORANGE, "#5c2f00")}
"""Colours of the first, a middle and the last position."""


@checked_settings
def rotary_plane(
    model: Any, head: Head, frequency: int, prompt: Any, *, query: int | str = -1, key: int | str | None = None
) -> Figure:
    """Draw a head's queries and keys of one prompt in the plane of one rotary pair, before and after rotation.

    >>> import tlspectral as tls, torch
    >>> tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> figure = tls.plots.rotary_plane(tls.load_model("tiny-rope"), "L0H3", 0, tokens, key=-2)
    >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
    ['before rotation', 'after rotation']

    Use it to see how a head uses a frequency ("Decoupling Positional and Symbolic Attention Behavior", Figure 3C). The
    left panel has queries (blue) and keys (orange) before rotation, with biases and norms. If the keys lie close
    together there, the rotary pair cannot tell words apart, and only positions decide. In the right panel every query
    and key is rotated by its position times the frequency. The dot product of a query and a key there is the amount
    this pair adds to their score.

    Args:
        model: a TransformerBridge or HookedTransformer. It runs once, with the hooks that are placed on it.
        head: "L5H1", (5, 1) or a table row: one head.
        frequency: index of the rotary pair (not radians), from 0, the model's first and usually fastest.
        prompt: one prompt: text, or token ids [pos].
        query: position of a query to mark, negative from the end, or a token's text. Default: the last.
        key: position or text of a key to mark in red, such as that of the answer. Default: no key.

    Returns:
        matplotlib Figure of two panels. Dark points are late in the prompt. Queries and keys are each scaled by the
            square root of the model's score scale (1 / sqrt(d_head)), so a dot product is part of the score before
            softcap, mask and softmax. The sum over all pairs is the score, if the head rotates all its dimensions and
            the model has no ALiBi.

    Raises:
        BadHead: the head does not exist.
        UnsupportedArchitecture: the layer has no rotary positions, or cannot be read.
        ScoreMismatch: the model's attention is not the softmax of these scores.
        ValueError: the pair, the query or the key does not exist, the key comes after the query, or several prompts.

    Not established: that the head depends on this pair. Other pairs add to the score too; `tls.parts.Band` removes one.
    """
    with measured(model) as view:
        layer, index = one_head(view, head)
        asked = asked_positions(view, prompt, query, key, every_key=True).places
        if len(asked) != 1:
            raise ValueError(f"the figure is of one prompt; found {len(asked)} prompts: give one of them")
        place = asked[0]
        rotary = view.rotary(layer)
        if rotary is None:
            raise UnsupportedArchitecture(
                f"layer {layer} has no rotary positions, so its queries and keys are not rotated: give a head of a "
                "layer with rotary positions; tls.frequency_table lists them"
            )
        if not 0 <= frequency < rotary.n_pairs:
            raise ValueError(
                f"frequency={shown(frequency)} does not exist: layer {layer} has the pairs 0 to {rotary.n_pairs - 1}"
            )
        scores, whole, _ = checked_scores(view, layer, index, place.tokens[0])
        points = {
            name: _points(scores, side, frequency) for name, side in (("queries", scores.query), ("keys", scores.key))
        }
        theta = float(rotary.of_heads([index]).theta.reshape(-1, rotary.n_pairs)[0, frequency])
        notes = [f"{head_name(layer, index)}, pair {frequency}: {theta:.3g} radians a token"]
        if place.key is not None:
            added = float(points["queries"][1][place.query] @ points["keys"][1][place.key])
            text = token_text(view, int(place.tokens[0, place.key]))
            total = float(whole[place.query, place.key])
            notes.append(
                f"adds {two_decimals(added)} to the score {two_decimals(total)} of query "
                f"{place.query} and key {place.key} ({text.strip() or repr(text)})"
            )

    figure = new_figure(8.4, 4.3)
    panels = figure.subplots(1, 2).tolist()
    colours = _colours(len(place.tokens[0]))
    for number, (axes, state) in enumerate(zip(panels, ("before", "after"), strict=True)):
        axes.set_title(f"{state} rotation", fontsize=10, color=INK, loc="left")
        _draw(axes, {name: both[number] for name, both in points.items()}, colours, place.query, place.key)
    panels[0].set_ylabel("second coordinate")
    for name, scale in colours.items():
        colour_bar(figure, scale, panels, f"position of {name}", whole=True)
    legend_below(figure, _entries(place.query, place.key), notes, columns=4)
    return figure


def _points(
    scores: HeadScores, side: ScoreSide, frequency: int
) -> tuple[Float64[np.ndarray, "pos 2"], Float64[np.ndarray, "pos 2"]]:
    """Return the points [pos, 2] of a head's queries or keys in the plane of a rotary pair, before and after rotation.

    `scores` are the head's scores, `side` their queries or keys. A product of two points after rotation is what the
    pair adds to the scaled score.
    """
    assert side.rotation is not None
    unit = scores.layer.score_scale**0.5
    pairs = torch.tensor([frequency])
    after = unit * side.rotation.turned(side.whole, 1, pairs)[0, 0]
    real, imag = (
        columns[frequency] for columns in (side.rotation.geometry.real_index, side.rotation.geometry.imag_index)
    )
    # cos and sin also have the model's attention scaling, which both panels show.
    cos, sin = (
        table.reshape(-1, table.shape[-2], table.shape[-1])[0, :, frequency]
        for table in (side.rotation.cos, side.rotation.sin)
    )
    before = unit * torch.hypot(cos, sin)[:, None].to(after) * side.whole[0, 0][:, [int(real), int(imag)]]
    return before.detach().cpu().numpy(), after.detach().cpu().numpy()


def _colours(length: int) -> dict[str, ScalarMappable]:
    """Return a colour scale for queries and one for keys, from the first position (pale) to the last (dark)."""
    norm = Normalize(0, max(length - 1, 1))
    return {
        name: ScalarMappable(norm, LinearSegmentedColormap.from_list(name, shades)) for name, shades in _COLOURS.items()
    }


def _draw(
    axes: Axes,
    points: dict[str, Float64[np.ndarray, "pos 2"]],
    colours: dict[str, ScalarMappable],
    query: int,
    key: int | None,
) -> None:
    """Draw queries and keys into `axes` with equal scales around the origin, an arrow to the named query, and one to
    the marked key.
    """
    for line in (axes.axhline, axes.axvline):
        line(0.0, color=PALE, linewidth=0.8, zorder=0)
    area = float(np.clip(9000 / len(points["keys"]), 12, 30))
    for name, places in points.items():
        draw_dots(axes, places, area, colours[name].to_rgba(np.arange(len(places))), name)
    arrows = [("queries", query, BLUE)] if key is None else [("queries", query, BLUE), ("keys", key, RED)]
    for name, position, colour in arrows:
        look = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}
        x, y = points[name][position]
        axes.annotate("", (x, y), (0.0, 0.0), arrowprops=look, zorder=4)
        axes.plot(
            [x], [y], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour, gid=f"named {name}", zorder=5
        )
    reach = 1.08 * max(float(np.abs(places).max()) for places in points.values()) or 1.0
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="first coordinate")
    dress(axes)


def _entries(query: int, key: int | None) -> list[tuple[Artist, str]]:
    """Return the legend's entries as (artist, text): queries, keys, the named query and, if there is one, the key."""

    def dot(colour: str, **look: Any) -> Line2D:
        return Line2D([], [], color=colour, marker="o", linestyle="none", **look)

    entries: list[tuple[Artist, str]] = [(dot(BLUE), "queries"), (dot(ORANGE), "keys")]
    entries.append((dot(BLUE, markerfacecolor="none", markersize=8), f"query {query}"))
    if key is not None:
        entries.append((dot(RED, markerfacecolor="none", markersize=8), f"key {key}"))
    return entries
