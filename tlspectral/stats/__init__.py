"""Statistics of head tables: partial rank correlations, intervals over layers, and permutation tests over models."""

from tlspectral.stats.bootstrap import attenuation, layer_bootstrap
from tlspectral.stats.correlations import PartialCorrelation, benjamini_hochberg, partial_spearman
from tlspectral.stats.permutation import model_permutation_test
from tlspectral.stats.top_heads import top_head_percentile

__all__ = [
    "PartialCorrelation",
    "attenuation",
    "benjamini_hochberg",
    "layer_bootstrap",
    "model_permutation_test",
    "partial_spearman",
    "top_head_percentile",
]
