"""Every figure of positional and symbolic scores is saved, is legible, and says what its axes show."""

import io
import sys
import warnings

import pytest
from matplotlib.text import Annotation, Text
from positional_tables import by_query, head_scores, joined, norms, per_frequency, traces

from tlspectral import plots
from tlspectral.studies.positional_symbolic import figures

FIGURES = {
    "positional_symbolic_plane": lambda: plots.positional_symbolic_plane(head_scores(), highlight=["L1H2"]),
    "score_heatmaps": lambda: figures.score_heatmaps(head_scores()),
    "score_histograms": lambda: figures.score_histograms(by_query()),
    "plane_by_query": lambda: figures.plane_by_query(by_query()),
    "frequency_profile": lambda: plots.frequency_profile(per_frequency(), [(0, 0), (1, 2), (3, 1), (2, 0)]),
    "frequency_grid": lambda: figures.frequency_grid(per_frequency()),
    "frequency_path": lambda: figures.frequency_path(per_frequency(), (1, 1)),
    "frequency_norms": lambda: figures.frequency_norms(norms(), "L0H1"),
    "attention_traces": lambda: figures.attention_traces(traces()),
    "score_agreement": lambda: figures.score_agreement(joined()),
    "exclusion_plane": lambda: plots.exclusion_plane(head_scores()),
    "exclusion_heatmap": lambda: figures.exclusion_heatmap(head_scores()),
    "exclusion_histograms": lambda: figures.exclusion_histograms(by_query()),
}


WORDS = {
    "frequency_norms": "rms over keys",
    "attention_traces": "mean attention per token",
    "frequency_grid": "score 0 to 1 up",
    **dict.fromkeys(("exclusion_plane", "exclusion_heatmap", "exclusion_histograms"), "0 symbolic"),
}


def saved(figure):
    """The figure, after it was written without a warning and without a figure of pyplot."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # matplotlib 3.9 calls what pyparsing 3.3 deprecates.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(matplotlib|pyparsing)\.")
        figure.savefig(stream, format="pdf")
    assert stream.getvalue().startswith(b"%PDF")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_texts_are_large_enough_inside_the_figure_and_not_on_one_another(name):
    figure = saved(FIGURES[name]())
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert WORDS.get(name, "(cosine)") in " ".join(text.get_text() for text in texts)
    assert min(text.get_fontsize() for text in texts if not isinstance(text, Annotation)) >= 8
    frame = figure.bbox.padded(1)
    names = [axes.xaxis.label for axes in figure.axes] + [axes.yaxis.label for axes in figure.axes]
    names += [axes.title for axes in figure.axes] + list(figure.texts)
    for legend in figure.legends:
        names += [legend.get_title(), *legend.get_texts()]
    names = [text for text in names if text.get_text().strip() and text.get_visible()]
    boxes = [text.get_window_extent() for text in names]
    for text, box in zip(names, boxes, strict=True):
        assert frame.contains(*box.min), text
        assert frame.contains(*box.max), text
    for number, box in enumerate(boxes):
        for other in range(number):
            assert not box.padded(-1).overlaps(boxes[other].padded(-1)), (names[number], names[other])
