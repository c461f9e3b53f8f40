"""Parts of a figure, to read back what was drawn."""

import re

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

COLUMN = 688  # pixels of a page's column
SAVED_DPI = 150
INDEX = 0.7  # size of the letters of an index or exponent, of those around it


def part(within, gid: str) -> list:
    """Artists of a figure or of axes that the library named so."""
    return within.findobj(lambda artist: artist.get_gid() == gid)


def offsets(within, gid: str) -> np.ndarray:
    """Where the points of a scatter lie, `[points, 2]`."""
    (found,) = part(within, gid)
    return np.asarray(found.get_offsets())


def colours_by_layer(within, layers) -> dict:
    """The colours of the points of heads, by the layer of each."""
    colours = part(within, "heads")[0].get_facecolors()
    return {layer: {tuple(colour) for colour in colours[layers == layer]} for layer in sorted(set(layers))}


def said(figure: Figure) -> str:
    """Notes and legend under the panels."""
    texts = [text.get_text() for legend in figure.legends for text in (legend.get_title(), *legend.get_texts())]
    return "\n".join(texts)


def small_texts(figure: Figure, least: float = 9.0) -> dict[str, float]:
    """Texts whose letters are smaller than `least` pixels where a page shows the figure, with their pixels."""
    figure.draw_without_rendering()
    width = figure.get_size_inches()[0]
    scale = min(COLUMN, SAVED_DPI * width) / width / 72
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return {
        text.get_text(): round(pixels, 2)
        for text in texts
        if (pixels := text.get_fontsize() * scale * (INDEX if has_index(text.get_text()) else 1)) < least
    }


def has_index(text: str) -> bool:
    """Whether a formula of the text has an index or an exponent."""
    return any("_" in formula or "^" in formula for formula in re.findall(r"(?<!\\)\$(.*?)(?<!\\)\$", text))
