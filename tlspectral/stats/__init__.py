"""Statistics of head tables: partial rank correlations, intervals over layers, permutations of models, triage."""

from tlspectral.stats.attenuated import Attenuation, attenuation
from tlspectral.stats.bootstrap import LayerBootstrap, layer_bootstrap
from tlspectral.stats.classes import ClassTest, class_test
from tlspectral.stats.clusters import IntraclassCorrelation, intraclass_correlation
from tlspectral.stats.correlations import PartialCorrelation, partial_spearman, spearman_table
from tlspectral.stats.false_discovery import FalseDiscovery, benjamini_hochberg
from tlspectral.stats.overlap import HypergeometricOverlap, hypergeometric_overlap
from tlspectral.stats.permutation import ModelPermutation, leave_one_model_out, model_permutation_test
from tlspectral.stats.rank_tests import MannWhitney, hodges_lehmann, mann_whitney, rank_biserial
from tlspectral.stats.regression import NestedRSquared, nested_r_squared
from tlspectral.stats.top_heads import TopHeadPercentile, top_head_percentile, top_k_sensitivity
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
