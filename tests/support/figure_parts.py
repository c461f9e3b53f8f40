"""Parts of a figure, to read back what was drawn."""

import numpy as np
from matplotlib.figure import Figure


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
