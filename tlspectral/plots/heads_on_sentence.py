"""A figure of all heads of a model on a sentence, with the answer's loss without each head."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from tlspectral.errors import earlier_calls
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.detectors.heads import detect_heads
from tlspectral.hooks.head_wall import wall as measured_wall
from tlspectral.hooks.measured_wall import FEWEST_PROMPTS, Removal, Wall
from tlspectral.plots.style import BLUE, GREY, INK, PALE, RED, colour_bar, legend_below, new_figure, two_decimals
from tlspectral.selection.heads_as_written import head_pairs
from tlspectral.tables.detector_columns import DETECTORS, FRAMED, framed_kind
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require
from tlspectral.tasks import Task

FRAMES = {"prev": ("#0072b2", "-"), "dup": ("#009e73", (0, (3, 1.5))), "ind": ("#d55e00", (0, (1, 1)))}
"""Colour and line style of each detector's frame."""

_WIDTH = 9.0  # inches; letters of 9 points are then 9.5 pixels high in a page column of 688 pixels
_FULL = 0.5  # attention weights from here on have the full colour
_PAPER, _FAINT = "#f6f7f9", "#b0b6be"
_ACROSS = 40  # layers of one band, at most
_LEAST_SIDE, _MOST_SIDE = 24, 48  # pixels of a square
_GAP, _BAR = 1 / 7, 1 / 6  # gap beside a square and room for a bar under it, as shares of its side


@earlier_calls(heads="table")
@checked_settings
def wall(
    model: Any,
    prompt: Any = None,
    *,
    task: Task | None = None,
    table: pd.DataFrame | None = None,
    removal: bool = True,
) -> Figure:
    """Draw the attention of all heads of a model on one sentence, and how removing each head changes the model's
    answer.

    >>> import tlspectral as tls, torch
    >>> tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> figure = tls.plots.wall(tls.load_model("tiny-rope"), tokens, removal=False)
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('layer', 'head')

    Use it for a first look at a model. Each square is one head: queries down, keys across, first token left out. A
    coloured frame names the head's kind on random repeated tokens, if a detector score is .3 or more. The bar under a
    square is the change when the head's output is set to zero: filled if the answer loses, outlined if it gains. The
    answer is the model's own next token (change of its probability) or, with `task`, the task's metric.

    Args:
        model: TransformerBridge or HookedTransformer; or a result of `tls.hooks.wall`, drawn without a new run.
        prompt: text, or token ids [pos], 2 to 128 tokens. Default: a sentence about Mary and John; without a tokenizer
            random ids.
        task: a `Task` that measures the next token after each prompt, such as `tls.logit_difference(...)`, in place of
            `prompt`. Attention is drawn for its first prompt, changes are means over its prompts.
        table: table of `analyze_heads` or `detect_heads` of this model, for the frames. Default: measured.
        removal: False leaves the bars out, which saves one run per head. Default: True.

    Returns:
        matplotlib Figure. Colour is attention probability, full from .5 on; the legend gives the size of a full bar.

    Raises:
        ValueError: both prompt and task, several prompts, fewer than 2 or more than 128 tokens, a task that does not
            measure the next token, a table of other weights, or a prompt with a measured wall.
        UnsupportedArchitecture: a layer does not return its attention, or a task is given for an encoder.
        EditNotHonored: the model discards the edit.

    Not established: why a head looks where it does, or where it looks on other sentences. Other heads may replace a
    removed head. One sentence has no standard error, and some of many bars are long by chance.
    """
    if isinstance(model, Wall):
        if prompt is not None or task is not None:
            raise ValueError("a measured wall has its prompt already: leave prompt= and task= out, or give a model")
        shown = model
    else:
        shown = measured_wall(model, prompt, task=task, removal=removal)
        table = detect_heads(model) if table is None else table
    if table is not None:
        require(table, ("layer", "head"), "analyze_heads", name="table of heads")
        require_same_model(table, shown.origin, "the wall")
    rows = [] if table is None else zip(head_pairs(table), table.to_dict("records"), strict=True)
    return _drawn(shown, {pair: kind for pair, row in rows if (kind := framed_kind(row))})


def _drawn(shown: Wall, framed: dict[tuple[int, int], str]) -> Figure:
    """Return a new figure of the wall `shown` (attention of all heads on one sentence, and effects of removing each
    head).

    `framed` is a dict from (layer, head) to the detector that frames the head, such as "prev".
    """
    layers, rows = sorted(set(shown.heads["layer"])), sorted(set(shown.heads["head"]))
    n_bands = -(-len(layers) // _ACROSS)
    across = -(-len(layers) // n_bands)
    bands = [layers[first : first + across] for first in range(0, len(layers), across)]
    largest = 0.0 if shown.removal is None else float(np.abs(shown.removal.deltas).max())
    # Inches. Squares fill the width of the figure, but are at most 0.8 wide; a band is as high as its squares.
    side = min(0.8, (_WIDTH - 1.5) / max(across, 4))
    height = n_bands * (len(rows) * side * (1 + _GAP + _BAR) / (1 + _GAP) + 0.5)
    figure = new_figure(_WIDTH, height + 1.9)
    figure.set_layout_engine("compressed")  # squares keep their shape, which leaves unused room beside the panels
    panels: list[Axes] = figure.subplots(n_bands, 1, squeeze=False).flatten().tolist()
    colours = ScalarMappable(Normalize(0.0, _FULL), LinearSegmentedColormap.from_list("shade", [_PAPER, BLUE]))
    for axes, band in zip(panels, bands, strict=True):
        _draw_band(axes, shown, band, rows, framed, largest, colours, across)
    bar = colour_bar(figure, colours, panels, "attention", whole=False)
    bar.set_yticks([0.0, 0.25, _FULL], ["0", ".25", f"{two_decimals(_FULL)[1:]} +"])
    _caption(figure, shown, framed, largest)
    return figure


def _draw_band(
    axes: Axes,
    shown: Wall,
    band: list[int],
    rows: list[int],
    framed: dict[tuple[int, int], str],
    largest: float,
    colours: ScalarMappable,
    across: int,
) -> None:
    """Draw the heads of the layers in `band` into `axes` as one image, with frames and bars over it.

    `shown` is the wall, `rows` all head numbers, `framed` a dict from (layer, head) to a detector, `largest` the effect
    of a full bar, `colours` the scale of attention, and `across` the number of layers in a full band. Coordinates are
    pixels of the image.
    """
    inner = shown.attention[:, 1:, 1:]
    n = inner.shape[1]
    side = n * -(-_LEAST_SIDE // n) if n < _LEAST_SIDE else min(n, _MOST_SIDE)
    gap, bar = round(_GAP * side), round(_BAR * side)
    pitch, rise = side + gap, side + gap + bar
    image = np.ones((rise * len(rows), pitch * across, 3), dtype=np.float32)
    before: tuple[int, int] | None = None  # layer and key/value head of the head above
    for index, row in enumerate(shown.heads.to_dict("records")):
        if row["layer"] not in band:
            continue
        x, y = pitch * band.index(row["layer"]), rise * rows.index(row["head"])
        image[y : y + side, x : x + side] = _square(inner[index], row["second_sink"], colours, side)
        if before == (row["layer"], row["kv_head"]):
            for end in (x - 0.5, x + side - 0.5):
                axes.plot([end, end], [y - 0.5, y - rise + side - 0.5], color=_FAINT, linewidth=0.8, gid="joined")
        before = (row["layer"], row["kv_head"])
        kind = framed.get((row["layer"], row["head"]), "")
        colour, dashes = FRAMES.get(kind, (PALE, "-"))
        name, corner = row["name"], (x - 0.5, y - 0.5)
        frame = {"edgecolor": colour, "linestyle": dashes, "linewidth": 1.6 if kind else 0.5, "fill": False}
        axes.add_patch(Rectangle(corner, side, side, gid=f"frame-{name}-{kind or 'none'}", **frame))
        share = 0.0 if shown.removal is None or not largest else shown.removal.deltas[index] / largest
        if abs(share) * side >= 0.5:
            look = {"facecolor": RED if share < 0 else "white", "edgecolor": RED, "linewidth": 0.5}
            place = (x - 0.5, y + side + 0.3 * bar)
            axes.add_patch(Rectangle(place, abs(share) * side, 0.7 * bar, gid=f"bar-{name}", **look))
    axes.imshow(image, interpolation="nearest", gid="squares")
    every = max(1, -(-len(band) // 20))
    axes.set_xticks([pitch * place + side / 2 for place in range(0, len(band), every)], list(map(str, band[::every])))
    every = max(1, -(-len(rows) // 24))
    axes.set_yticks([rise * place + side / 2 for place in range(0, len(rows), every)], list(map(str, rows[::every])))
    axes.tick_params(length=0, labelsize=9, labelcolor=INK, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("layer", fontsize=9, color=INK)
    axes.set_ylabel("head", fontsize=9, color=INK)


def _square(
    attention: Float[np.ndarray, "query key"], sink: int, colours: ScalarMappable, side: int
) -> Float[np.ndarray, "side side 3"]:
    """Return an RGB image [side, side, 3] of one head's attention, given without the first query and key.

    `sink` is the position of a second attention sink in the sentence, whose key is drawn in grey; below 1 there is
    none. `colours` is the colour scale, `side` the size in pixels. If a pixel covers several weights, it shows the
    largest.
    """
    n, keys = len(attention), np.arange(1, len(attention) + 1)
    if n > side:
        edges = np.arange(side) * n // side
        attention = np.maximum.reduceat(np.maximum.reduceat(attention, edges, 0), edges, 1)
        keys = np.searchsorted(edges, keys - 1, side="right")  # column of each key, counted from 1
    picture = np.asarray(colours.to_rgba(attention))[..., :3]
    if sink > 0:
        column = int(keys[sink - 1]) - 1
        share = np.clip(attention[:, column] / _FULL, 0.0, 1.0)[:, None]
        picture[:, column] = (1 - share) * np.array(to_rgb(_PAPER)) + share * np.array(to_rgb(GREY))
    return picture.repeat(side // len(picture), 0).repeat(side // len(picture), 1)


def _caption(figure: Figure, shown: Wall, framed: dict[tuple[int, int], str], largest: float) -> None:
    """Write the sentence of the wall `shown` above the figure, and a legend and notes below it.

    `framed` is a dict from (layer, head) to a detector, `largest` the effect of a full bar (0: no bars).
    """
    model, removal = shown.origin.get("model") or "attention heads", shown.removal
    title = fill(f"{model}: {shown.sentence}", 88)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", parse_math=False)
    entries: list[tuple[Any, str]] = []
    for kind, (colour, dashes) in FRAMES.items():
        n = sum(detector == kind for detector in framed.values())
        patch = Patch(fill=False, edgecolor=colour, linestyle=dashes, linewidth=1.6)
        if framed:
            entries.append((patch, f"{DETECTORS[kind].kind}: {n} of {len(shown.heads)}"))
    if largest and removal is not None:
        full = f"{largest:#.2g}".rstrip(".")
        entries.append((Patch(facecolor=RED, edgecolor=RED), f"the answer loses: a full bar is {full}"))
        if float(removal.deltas.max()) > 0.02 * largest:
            entries.append((Patch(facecolor="white", edgecolor=RED), "the answer gains"))
    if shown.heads.duplicated(["layer", "kv_head"]).any():
        entries.append((Line2D([], [], color=_FAINT, linewidth=0.8), "joined squares share keys and values"))
    if (shown.heads["second_sink"] > 0).any():
        entries.append((Patch(facecolor=GREY), "attention to a second sink of the layer"))
    notes = [
        "Each square is one head: queries down, keys across, the first token left out.",
        f"Frame: what a head does on random repeated tokens, if a score is {str(FRAMED)[1:]} or more."
        if framed
        else None,
        shown.why_not if removal is None else _answer(removal),
    ]
    legend_below(figure, entries, [None if note is None else _plain(fill(note, 108)) for note in notes], columns=3)


def _answer(removal: Removal) -> str:
    """Return the sentence of the caption that explains the bars, from `removal`, the effects of removing each head: the
    quantity that changes, its value with all heads and its standard error.
    """
    if not removal.of_task:
        return (
            f"Bar: change of the probability of the model's answer “{removal.watched[0].strip()}”, "
            f"{two_decimals(removal.value)} with all heads, when the head writes nothing. "
            "One sentence has no standard error."
        )
    error = "" if np.isnan(removal.value_se) else f" ± {two_decimals(removal.value_se)}"
    return (
        f"Bar: change of {removal.measure}, {two_decimals(removal.value)}{error} with all heads, when the head writes "
        f"nothing; mean over {removal.n_prompts} prompts"
        + ("." if error else f", fewer than the {FEWEST_PROMPTS} of a standard error.")
    )


def _plain(text: str) -> str:
    """Return text with escaped dollar signs, so that matplotlib does not read a formula."""
    return text.replace("$", r"\$")
