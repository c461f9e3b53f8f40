"""Functions about attention heads: spectra, detectors, composition, copying, directions, frequencies, comparison.

The query-key and output-value operators are in `operators`; functions that read attention are in `detectors`. A
function is imported when it is first used, because `analyze_heads` does not need the rest.
"""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.heads.analysis import analyze_heads
    from tlspectral.heads.comparison import compare_heads
    from tlspectral.heads.composition import k_composition
    from tlspectral.heads.copying import copying_scores
    from tlspectral.heads.detectors.attention_sinks import attention_sinks
    from tlspectral.heads.detectors.heads import detect_heads
    from tlspectral.heads.detectors.kernel import kernel_prediction, relative_position_kernel
    from tlspectral.heads.detectors.top_pairs import top_pairs
    from tlspectral.heads.detectors_beside import side_by_side
    from tlspectral.heads.directions import head_directions
    from tlspectral.heads.frequencies import frequency_table
    from tlspectral.heads.likeness import head_likeness
    from tlspectral.heads.many_models import analyze_models
    from tlspectral.heads.operators.factored import qk_operators
    from tlspectral.heads.operators.penalty import qk_penalty
    from tlspectral.heads.operators.verification import verify_scores

__all__ = [
    "analyze_heads",
    "analyze_models",
    "attention_sinks",
    "compare_heads",
    "copying_scores",
    "detect_heads",
    "frequency_table",
    "head_directions",
    "head_likeness",
    "k_composition",
    "kernel_prediction",
    "qk_operators",
    "qk_penalty",
    "relative_position_kernel",
    "side_by_side",
    "top_pairs",
    "verify_scores",
]

__getattr__, __dir__ = lazy_names(__name__)
