"""Statistics of head tables: partial rank correlations, intervals over layers, permutations of models."""

from tlspectral.stats.bootstrap import Attenuation, LayerBootstrap, attenuation, layer_bootstrap
from tlspectral.stats.correlations import FalseDiscovery, PartialCorrelation, benjamini_hochberg, partial_spearman
from tlspectral.stats.permutation import ModelPermutation, model_permutation_test
from tlspectral.stats.top_heads import TopHeadPercentile, top_head_percentile

__all__ = [
    "Attenuation",
    "FalseDiscovery",
    "LayerBootstrap",
    "ModelPermutation",
    "PartialCorrelation",
    "TopHeadPercentile",
    "attenuation",
    "benjamini_hochberg",
    "layer_bootstrap",
    "model_permutation_test",
    "partial_spearman",
    "top_head_percentile",
]
