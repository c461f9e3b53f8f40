"""Attention of heads on a prompt, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tlspectral.heads.detectors.sinks import asked_for_sinks, found_sinks
from tlspectral.models.attention.prompt_patterns import prompt_patterns
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.plots.style import INK, PALE, colour_bar, dress, new_figure
from tlspectral.selection import Heads, head_name

_MOST_HEADS = 12
_LONGEST = 14  # letters of a token that are written
_COLUMNS = 4


def patterns(model: Any, prompt: Any, heads: Heads, *, sink: bool = False, sinks: str | None = None) -> Figure:
    """Draw the attention of several heads on one prompt, queries down and keys across, on one scale of colours.

        tls.plots.patterns(model, "When Mary and John went to the store, John gave a drink to", ["L5H1", "L6H9"])

    Args:
        model: a TransformerBridge or HookedTransformer. It runs once, under the hooks that are on it.
        prompt: text, or token ids [pos]; at most 128 tokens.
        heads: at most 12, in any form of `Heads`.
        sink: whether the first key is drawn. Most heads look at it most of the time; without it, the others can be
            told apart. Attention is drawn as it is, not scaled up.
        sinks: "found" draws the first key too, and leaves out every key that is a sink of the layer on this prompt
            (`tls.heads.attention_sinks`): its column is grey. Not with sink=True.

    Raises:
        BadHead: a head that does not exist, or none.
        ValueError: more than 12 heads, several prompts, more than 128 tokens, or one token without `sink`; `sinks` with
            sink=True, or where no key of a layer can be judged, as in prompts below 24 tokens.
        UnsupportedArchitecture: a layer does not return its attention.

    What it does not establish: what a head does elsewhere. One prompt is one example; `top_pairs` looks at many.
    """
    without_sinks = asked_for_sinks(sinks, sink=sink)
    with measured(model) as view:
        by_layer = heads_by_layer(view, heads)
        names = [head_name(layer, head) for layer in sorted(by_layer) for head in by_layer[layer]]
        if not 0 < len(names) <= _MOST_HEADS:
            raise ValueError(f"{len(names)} heads: give 1 to {_MOST_HEADS}, a panel each")
        prompt = given_prompts(prompt)  # a generator can be read once
        weights, tokens = prompt_patterns(view, by_layer, prompt)
        if without_sinks:
            weights = _without_sinks(view, by_layer, prompt, weights)
        first = 0 if sink or without_sinks else 1
        if len(tokens) == first:
            raise ValueError("the prompt is one token, and the first key is left out: give more tokens, or sink=True")
        columns = min(_COLUMNS, len(names))
        rows = -(-len(names) // columns)
        side = float(np.clip(0.17 * len(tokens), 2.0, 7.0))
        figure = new_figure(columns * side + 2.0, rows * (side + 0.4) + 1.0)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        shown = [one[:, first:] for one in weights]
        largest = max(float(np.nan_to_num(one).max(initial=0.0)) for one in shown)
        colours = ScalarMappable(Normalize(0.0, largest or 1.0), colormaps["Blues"].with_extremes(bad=PALE))
        labels = [_written(token) for token in tokens]
        # Every token has its label where letters of 8 points fit, else every second, third, ...
        every = max(1, -(-len(tokens) * 12 // int(72 * side)))
        for axes, name, one in zip(panels, names, shown, strict=False):
            axes.imshow(one, cmap=colours.cmap, norm=colours.norm, aspect="auto", gid=name, interpolation="none")
            axes.set_title(name, fontsize=10, color=INK, loc="left")
            axes.set_xticks(range(0, len(labels) - first, every), labels[first::every], rotation=90)
            axes.set_yticks(range(0, len(labels), every), labels[::every])
            dress(axes)
            axes.tick_params(labelsize=8, length=0)
            axes.label_outer()
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        said = "key, sinks of the layer in grey" if without_sinks else f"key, without the first, {labels[0]}"
        figure.supxlabel("key" if sink else said, fontsize=10, color=INK)
        figure.supylabel("query", fontsize=10, color=INK)
        colour_bar(figure, colours, panels, "attention", whole=False)
        return figure


def _without_sinks(
    view: AttentionView,
    by_layer: Mapping[int, list[int]],
    prompt: Any,
    weights: list[Float[np.ndarray, "query key"]],
) -> list[Float[np.ndarray, "query key"]]:
    """Return the attention of each head with NaN at the keys that are sinks of its layer. Raises as `patterns`."""
    sinks = found_sinks(view, packed_prompts(view, prompt), by_layer, 1)
    layers = [layer for layer in sorted(by_layer) for _ in by_layer[layer]]
    for layer in by_layer:
        sinks.require([layer])
    found = [sinks.found[layer][0].numpy() for layer in layers]
    return [np.where(at_key, np.nan, one) for at_key, one in zip(found, weights, strict=True)]


def _written(token: str) -> str:
    """Return a token for an axis: blanks are seen, long ones cut, and a dollar is no formula."""
    seen = token.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    return seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
