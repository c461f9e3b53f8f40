"""All figures of the paper about the heads of a model on one block task."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from tlspectral.studies.positional_symbolic.figures.frequencies import frequency_grid
from tlspectral.studies.positional_symbolic.figures.scores import (
    exclusion_heatmap,
    exclusion_histograms,
    plane_by_query,
    score_agreement,
    score_heatmaps,
    score_histograms,
)


def task_figures(tables: Mapping[str, pd.DataFrame], heads: pd.DataFrame | None = None) -> dict[str, Figure]:
    """Return the paper's figures of one task, by name.

    Args:
        tables: of `positional_symbolic` on a task `heads` and, with `by="query"`, `queries`; where there, `frequencies`
            (with `per_frequency=True`), and `agreement`, the table of `score_agreement`.
        heads: table of `analyze_heads` of the same model, against whose columns the scores are drawn; None: they are
            not.

    Raises:
        ValueError: as the single figures.
    """
    figures = {
        "heatmaps": score_heatmaps(tables["heads"]),
        "plane_by_query": plane_by_query(tables["queries"]),
        "histograms": score_histograms(tables["queries"]),
        "exclusion_heatmap": exclusion_heatmap(tables["heads"]),
        "exclusion_histograms": exclusion_histograms(tables["queries"]),
    }
    if "frequencies" in tables:
        figures["frequencies"] = frequency_grid(tables["frequencies"])
    if heads is not None:
        columns = ["layer", "head", "rope_imag_frac", "D_head", "prev"]
        joined = tables["heads"].merge(heads[columns], on=["layer", "head"])
        figures["agreement"] = score_agreement(joined, statistics=tables.get("agreement"))
    return figures
