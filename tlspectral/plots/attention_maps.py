"""Attention of several heads on a prompt, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tlspectral.errors.settings import checked_settings
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
_WIDTH = 8.4  # inches; letters of 8 points are then 9 pixels high in a page column of 688 pixels


@checked_settings
def patterns(model: Any, prompt: Any, heads: Heads, *, sink: bool = False, sinks: str | None = None) -> Figure:
    """Draw the attention of several heads on one prompt: a panel per head, queries down, keys across, one colour scale.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> figure = tls.plots.patterns(model, tokens, ["L0H3", "L1H0"])
    >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
    ['L0H3', 'L1H0']

    Use it to see where heads look on a sentence.

    Args:
        model: a TransformerBridge or HookedTransformer. It runs once, with the hooks that are placed on it.
        prompt: text, or token ids [pos]; at most 128 tokens.
        heads: 1 to 12 heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a list of these, or a table
            with layer and head.
        sink: True draws the first key too. Most heads look at it most of the time, so without it differences are easier
            to see. Default: False. Attention is not rescaled.
        sinks: "found" draws the first key too, and greys out every attention sink of the layer: a key whose mean
            attention from later queries, over the layer's heads, exceeds .15 and four times an even share. Default:
            None. It excludes sink=True.

    Returns:
        matplotlib Figure. Colour is the attention probability after the softmax, from 0 to the largest drawn value.
        `figure.savefig("patterns.png")` writes it.

    Raises:
        BadHead: a head does not exist, or no head is given.
        ValueError: more than 12 heads, several prompts, more than 128 tokens, one token without `sink`, both `sinks`
            and sink=True, or a prompt below 24 tokens with `sinks`, which cannot be judged.
        UnsupportedArchitecture: a layer does not return its attention.

    Not established: where a head looks on other prompts. One prompt is one example; `tls.top_pairs` looks at many.
    """
    without_sinks = asked_for_sinks(sinks, sink=sink)
    with measured(model) as view:
        by_layer = heads_by_layer(view, heads)
        names = [head_name(layer, head) for layer in sorted(by_layer) for head in by_layer[layer]]
        if not 0 < len(names) <= _MOST_HEADS:
            raise ValueError(f"{len(names)} heads given: give 1 to {_MOST_HEADS} heads, each has a panel")
        prompt = given_prompts(prompt)  # a generator can be read only once
        weights, tokens = prompt_patterns(view, by_layer, prompt)
        if without_sinks:
            weights = _without_sinks(view, by_layer, prompt, weights)
        first = 0 if sink or without_sinks else 1
        if len(tokens) == first:
            raise ValueError("the prompt is one token, whose key is left out: give more tokens, or sink=True")
        columns = min(2 if len(names) <= 4 else 3, len(names))
        rows = -(-len(names) // columns)
        side = float(np.clip(0.17 * len(tokens), 2.0, (_WIDTH - 2.0) / columns))
        figure = new_figure(columns * side + 2.0, rows * (side + 0.4) + 1.0)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        shown = [pattern[:, first:] for pattern in weights]
        largest = max(float(np.nan_to_num(pattern).max(initial=0.0)) for pattern in shown)
        colours = ScalarMappable(Normalize(0.0, largest or 1.0), colormaps["Blues"].with_extremes(bad=PALE))
        labels = [_written(token) for token in tokens]
        # Each token is labelled if letters of 8 points fit, otherwise every second, third, ... token.
        every = max(1, -(-len(tokens) * 12 // int(72 * side)))
        for axes, name, pattern in zip(panels, names, shown, strict=False):
            axes.imshow(pattern, cmap=colours.cmap, norm=colours.norm, aspect="auto", gid=name, interpolation="none")
            axes.set_title(name, fontsize=10, color=INK, loc="left")
            axes.set_xticks(range(0, len(labels) - first, every), labels[first::every], rotation=90)
            axes.set_yticks(range(0, len(labels), every), labels[::every])
            dress(axes)
            axes.tick_params(labelsize=8, length=0)
            axes.label_outer()
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        axis_label = "key, sinks of the layer in grey" if without_sinks else f"key, without the first, {labels[0]}"
        figure.supxlabel("key" if sink else axis_label, fontsize=10, color=INK)
        figure.supylabel("query", fontsize=10, color=INK)
        colour_bar(figure, colours, panels, "attention", whole=False)
        return figure


def _without_sinks(
    view: AttentionView,
    by_layer: Mapping[int, list[int]],
    prompt: Any,
    weights: list[Float[np.ndarray, "query key"]],
) -> list[Float[np.ndarray, "query key"]]:
    """Return copies of the attention arrays [query, key] in which each key that is an attention sink of its layer is
    NaN.

    `view` and `prompt` are the model and the prompt on which sinks are judged. `weights` has one array per head, in the
    order of `by_layer`, a dict from layer to head numbers. Raises ValueError for a prompt on which sinks cannot be
    judged, such as a short one.
    """
    sinks = found_sinks(view, packed_prompts(view, prompt), by_layer, 1)
    layers = [layer for layer in sorted(by_layer) for _ in by_layer[layer]]
    for layer in by_layer:
        sinks.require([layer])
    is_sink = [sinks.found[layer][0].numpy() for layer in layers]
    return [np.where(at_key, np.nan, pattern) for at_key, pattern in zip(is_sink, weights, strict=True)]


def _written(token: str) -> str:
    """Return a token as an axis label of at most 14 letters: blanks become visible marks, and a dollar sign is escaped
    so that matplotlib does not read a formula.
    """
    seen = token.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    return seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
