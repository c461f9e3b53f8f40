"""Functions that read the attention of heads, on random sequences or on prompts.

`detect_heads` scores attention to the previous token, an earlier copy, its successor, or any marked keys.
`relative_position_kernel` gives mean scores by distance, and `kernel_prediction` compares them with a prediction.
`top_pairs` lists the largest weights on text with the words around them. `attention_sinks` lists keys that many later
queries attend to.
"""

from tlspectral.heads.detectors.heads import detect_heads
from tlspectral.tables.detector_columns import DETECTORS

__all__ = ["DETECTORS", "detect_heads"]
