"""Figures as the paper has them: scores of a model's heads on a task, and the canonical tasks."""

from tlspectral_studies.positional_symbolic.figures.canonical import (
    accuracy_against_angle,
    accuracy_against_position,
    accuracy_while_learning,
    query_key_paths,
)
from tlspectral_studies.positional_symbolic.figures.frequencies import frequency_grid, frequency_norms, frequency_path
from tlspectral_studies.positional_symbolic.figures.profiles import frequency_profile
from tlspectral_studies.positional_symbolic.figures.scores import (
    exclusion_heatmap,
    exclusion_histograms,
    plane_by_query,
    score_agreement,
    score_heatmaps,
    score_histograms,
    task_figures,
)
from tlspectral_studies.positional_symbolic.figures.traces import attention_traces

__all__ = [
    "accuracy_against_angle",
    "accuracy_against_position",
    "accuracy_while_learning",
    "attention_traces",
    "exclusion_heatmap",
    "exclusion_histograms",
    "frequency_grid",
    "frequency_norms",
    "frequency_path",
    "frequency_profile",
    "plane_by_query",
    "query_key_paths",
    "score_agreement",
    "score_heatmaps",
    "score_histograms",
    "task_figures",
]
