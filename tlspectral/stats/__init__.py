"""Statistics of head tables: partial rank correlations, intervals over layers, permutations of models, triage."""

from tlspectral.stats.bootstrap import Attenuation, LayerBootstrap, attenuation, layer_bootstrap
from tlspectral.stats.clusters import IntraclassCorrelation, intraclass_correlation
from tlspectral.stats.correlations import (
    FalseDiscovery,
    PartialCorrelation,
    benjamini_hochberg,
    partial_spearman,
    spearman_table,
)
from tlspectral.stats.model_groups import leave_one_model_out, top_k_sensitivity
from tlspectral.stats.permutation import ModelPermutation, model_permutation_test
from tlspectral.stats.rank_tests import (
    ClassTest,
    MannWhitney,
    class_test,
    hodges_lehmann,
    mann_whitney,
    rank_biserial,
)
from tlspectral.stats.regression import NestedRSquared, nested_r_squared
from tlspectral.stats.top_heads import (
    HypergeometricOverlap,
    TopHeadPercentile,
    hypergeometric_overlap,
    top_head_percentile,
)
from tlspectral.stats.weight_triage import triage

__all__ = [
    "Attenuation",
    "ClassTest",
    "FalseDiscovery",
    "HypergeometricOverlap",
    "IntraclassCorrelation",
    "LayerBootstrap",
    "MannWhitney",
    "ModelPermutation",
    "NestedRSquared",
    "PartialCorrelation",
    "TopHeadPercentile",
    "attenuation",
    "benjamini_hochberg",
    "class_test",
    "hodges_lehmann",
    "hypergeometric_overlap",
    "intraclass_correlation",
    "layer_bootstrap",
    "leave_one_model_out",
    "mann_whitney",
    "model_permutation_test",
    "nested_r_squared",
    "partial_spearman",
    "rank_biserial",
    "spearman_table",
    "top_head_percentile",
    "top_k_sensitivity",
    "triage",
]
