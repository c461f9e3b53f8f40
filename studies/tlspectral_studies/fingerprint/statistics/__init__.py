"""The statistics of "Fingerprint, Not Blueprint": tests and tables, placebos, rounding, rows for another model."""

from tlspectral_studies.fingerprint.statistics.intraclass import intraclass_correlation
from tlspectral_studies.fingerprint.statistics.model_groups import leave_one_model_out, top_k_sensitivity
from tlspectral_studies.fingerprint.statistics.model_row import another_model
from tlspectral_studies.fingerprint.statistics.placebos import permuted_pairing, placebo_attenuation, pseudo_rope
from tlspectral_studies.fingerprint.statistics.rank_correlations import spearman_table
from tlspectral_studies.fingerprint.statistics.rank_tests import class_test, hypergeometric_overlap, mann_whitney
from tlspectral_studies.fingerprint.statistics.regression import nested_r_squared
from tlspectral_studies.fingerprint.statistics.weight_noise import (
    statistic_noise,
    weight_noise_band,
    weight_noise_draws,
)
from tlspectral_studies.fingerprint.statistics.weight_triage import triage

__all__ = [
    "another_model",
    "class_test",
    "hypergeometric_overlap",
    "intraclass_correlation",
    "leave_one_model_out",
    "mann_whitney",
    "nested_r_squared",
    "permuted_pairing",
    "placebo_attenuation",
    "pseudo_rope",
    "spearman_table",
    "statistic_noise",
    "top_k_sensitivity",
    "triage",
    "weight_noise_band",
    "weight_noise_draws",
]
