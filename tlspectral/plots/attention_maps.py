"""Attention of several heads on a prompt, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tlspectral.errors import shown as shown_value
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.heads.detectors.sinks import asked_for_sinks, found_sinks
from tlspectral.models.attention.prompt_patterns import MOST_TOKENS, patterns_of
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.plots.style import INK, PALE, colour_bar, dress, new_figure
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import head_name

_MOST_HEADS = 12
_LONGEST = 14  # letters of a token that are written
_WIDTH = 8.4  # inches; letters of 8 points are then 9 pixels high in a page column of 688 pixels


@checked_settings
def patterns(
    model: Any,
    prompt: Any,
    heads: Heads,
    *,
    queries: slice | None = None,
    keys: slice | None = None,
    sink: bool = False,
    sinks: str | None = None,
) -> Figure:
    """Draw the attention of several heads on one prompt: a panel per head, queries down, keys across, one colour scale.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> figure = tls.plots.patterns(model, tokens, ["L0H3", "L1H0"])
    >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
    ['L0H3', 'L1H0']

    Use it to see where heads look on a sentence. `queries` chooses rows of a long prompt.

    Args:
        model: a TransformerBridge or HookedTransformer. It runs once, with the hooks that are placed on it.
        prompt: text, or token ids [pos]; more than 128 tokens need `queries`.
        heads: 1 to 12 heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a list of these, or a table
            with layer and head.
        queries: slice of at most 128 rows: `slice(7900, 8000)` draws positions 7900 to 7999, `slice(-100, None)` the
            last 100. Default: all.
        keys: slice of the keys to draw. Default: all up to the last drawn row. With more than 128 keys, a column stands
            for 2, 4, 8, ... adjacent keys, and shows the largest attention to one of these.
        sink: True draws the first key too. Most heads look at it most of the time, so without it differences are easier
            to see. Default: False. Attention is not rescaled.
        sinks: "found" draws the first key too, and leaves out every attention sink of the layer: a key whose mean
            attention from later queries, over the layer's heads, exceeds .15 and four times an even share. A column
            that holds only sinks is grey. Default: None. Not together with sink=True.

    Returns:
        matplotlib Figure. Colour is the attention probability after the softmax, from 0 to the largest drawn value.
        `figure.savefig("patterns.png")` writes it.

    Raises:
        BadHead: a head does not exist.
        ValueError: no head or more than 12, several prompts, more than 128 rows, rows or keys that the prompt lacks,
            no key to draw, both `sinks` and sink=True, or a prompt below 24 tokens with `sinks`.
        UnsupportedArchitecture: a layer does not return its attention, or it needs all rows of a long prompt at once.

    Not established: where a head looks on other prompts. One prompt is one example; `tls.top_pairs` looks at many.
    """
    without_sinks = asked_for_sinks(sinks, sink=sink)
    with measured(model) as view:
        by_layer = heads_by_layer(view, heads)
        names = [head_name(layer, head) for layer in sorted(by_layer) for head in by_layer[layer]]
        if not 0 < len(names) <= _MOST_HEADS:
            raise ValueError(f"{len(names)} heads given: give 1 to {_MOST_HEADS} heads, each has a panel")
        prompt = given_prompts(prompt)  # a generator can be read only once
        tokens = packed_prompts(view, prompt).tokens
        shown_rows = _asked_rows(queries, *tokens.shape)
        seen = shown_rows.stop if view.causal else tokens.shape[1]
        shown_keys = _asked_keys(keys, seen, tokens.shape[1], without_first=not (sink or without_sinks))
        weights = patterns_of(view, by_layer, tokens, shown_rows)
        if without_sinks:
            weights = _without_sinks(view, by_layer, prompt, weights)
        starts, size = _columns(shown_keys)
        shown = [_pooled(pattern[:, shown_keys], starts - shown_keys.start) for pattern in weights]
        panel_columns = min(2 if len(names) <= 4 else 3, len(names))
        panel_rows = -(-len(names) // panel_columns)
        height, width = (float(np.clip(0.17 * count, 2.0, (_WIDTH - 2.0) / panel_columns)) for count in shown[0].shape)
        figure = new_figure(panel_columns * width + 2.0, panel_rows * (height + 0.4) + 1.0)
        grid = figure.subplots(panel_rows, panel_columns, sharex=True, sharey=True, squeeze=False)
        panels = grid.flatten().tolist()
        largest = max(float(np.nan_to_num(pattern).max(initial=0.0)) for pattern in shown)
        colours = ScalarMappable(Normalize(0.0, largest or 1.0), colormaps["Blues"].with_extremes(bad=PALE))
        in_part = queries is not None or keys is not None
        row_labels, key_labels = (
            [_written(token_text(view, int(tokens[0, place])), place if in_part else None) for place in places]
            for places in (range(shown_rows.start, shown_rows.stop), starts.tolist())
        )
        if size > 1:
            key_labels = [str(place) for place in starts.tolist()]
        for axes, name, pattern in zip(panels, names, shown, strict=False):
            axes.imshow(pattern, cmap=colours.cmap, norm=colours.norm, aspect="auto", gid=name, interpolation="none")
            axes.set_title(name, fontsize=10, color=INK, loc="left")
            every = _every(len(key_labels), width)
            axes.set_xticks(range(0, len(key_labels), every), key_labels[::every], rotation=90)
            every = _every(len(row_labels), height)
            axes.set_yticks(range(0, len(row_labels), every), row_labels[::every])
            dress(axes)
            axes.tick_params(labelsize=8, length=0)
            axes.label_outer()
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        first = _written(token_text(view, int(tokens[0, 0])))
        notes = [
            f"a column is the largest of {size} keys" if size > 1 else "",
            f"without the first, {first}" if shown_keys.start == 1 and not (sink or without_sinks) else "",
            f"sinks of the layer {'left out' if size > 1 else 'in grey'}" if without_sinks else "",
        ]
        figure.supxlabel(", ".join(["key", *filter(None, notes)]), fontsize=10, color=INK)
        figure.supylabel("query", fontsize=10, color=INK)
        colour_bar(figure, colours, panels, "attention", whole=False)
        return figure


def _asked_rows(queries: Any, n_prompts: int, length: int) -> slice:
    """Return the queries to draw of a prompt of `length` tokens, as a slice of positions; all if `queries` is None.

    Raises ValueError for several prompts, more queries than can be drawn, or queries that the prompt does not have.
    """
    if n_prompts != 1:
        raise ValueError(
            f"found {n_prompts} prompts of {length} tokens, and one prompt of up to {MOST_TOKENS} tokens can be drawn: "
            "give one prompt"
        )
    asked = slice(0, length) if queries is None else _window("queries", queries, length)
    count = asked.stop - asked.start
    if count > MOST_TOKENS:
        raise ValueError(
            f"found {count:,} queries, and a row for each of up to {MOST_TOKENS} can be drawn: choose some, in Python "
            f"by queries=slice({length - 100}, {length})"
        )
    return asked


def _asked_keys(keys: Any, seen: int, length: int, *, without_first: bool) -> slice:
    """Return the keys to draw of a prompt of `length` tokens, as a slice of positions; the first `seen`, which the
    drawn queries see, if `keys` is None. `without_first`: True leaves out key 0.

    Raises ValueError if no key is left, or if no drawn query sees them.
    """
    asked = slice(0, seen) if keys is None else _window("keys", keys, length)
    asked = slice(max(asked.start, int(without_first)), asked.stop)
    if asked.start >= asked.stop:
        raise ValueError("the only key is the first, which is left out: give more tokens or keys, or sink=True")
    if asked.start >= seen:
        raise ValueError(f"keys= begins at {asked.start}, after the last query, {seen - 1}: give earlier keys")
    return asked


def _window(name: str, given: Any, length: int) -> slice:
    """Return a part of a prompt that a user asked for by a slice, with start and stop counted from 0.

    `name`: the argument, for the message. Raises ValueError for another type, steps, no token, or tokens that a prompt
    of `length` tokens does not have.
    """
    example = f"give {name}=slice(start, stop), whose last token is stop - 1"
    if not isinstance(given, slice):
        pair = isinstance(given, tuple | list) and len(given) == 2
        readings = ", which can be two tokens or all between them" if pair else ""
        raise ValueError(f"{name}= must be a slice of positions; found {shown_value(given)}{readings}: {example}")
    edges = [None if edge is None else whole_number(edge) for edge in (given.start, given.stop)]
    if given.step not in (None, 1) or [given.start, given.stop].count(None) != edges.count(None):
        raise ValueError(f"{name}={given}: steps and other numbers than whole ones are not read: {example}")
    if any(edge is not None and not -length <= edge <= length for edge in edges):
        raise ValueError(f"{name}={given}: the prompt has {length:,} tokens, 0 to {length - 1}: {example}")
    start, stop, _ = slice(*edges).indices(length)
    if start >= stop:
        raise ValueError(f"{name}={given} holds no token: {example}")
    return slice(start, stop)


def _columns(keys: slice) -> tuple[Int[np.ndarray, "columns"], int]:
    """Return the first key of each column to draw, and the number of keys of a column: 1, 2, 4, ..., so that no more
    than 128 columns are drawn. Columns begin at multiples of this number.
    """
    size = 1
    while -(-keys.stop // size) - keys.start // size > MOST_TOKENS:
        size *= 2
    starts = np.arange(keys.start // size * size, keys.stop, size)
    starts[0] = keys.start
    return starts, size


def _pooled(
    pattern: Float[np.ndarray, "query key"], starts: Int[np.ndarray, "columns"]
) -> Float[np.ndarray, "query columns"]:
    """Return the largest attention of each query in each column of keys; NaN only where all its keys are NaN.

    `starts`: the first key of each column, as an index of `pattern`.
    """
    return pattern if len(starts) == pattern.shape[1] else np.fmax.reduceat(pattern, starts, axis=1)


def _every(count: int, inches: float) -> int:
    """Return n, so that letters of 8 points fit if every n-th of `count` labels is written along `inches`."""
    return max(1, -(-count * 12 // int(72 * inches)))


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


def _written(token: str, place: int | None = None) -> str:
    """Return a token as an axis label, behind its position `place` unless that is None.

    A token has at most 14 letters. Blanks become visible marks, and a dollar sign is escaped so that matplotlib does
    not read a formula.
    """
    seen = token.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    seen = seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
    return seen if place is None else f"{place}: {seen}"
