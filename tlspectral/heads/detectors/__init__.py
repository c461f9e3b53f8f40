"""What heads do: attention to the previous token, the duplicate, the token after it (FP section 3), or any pattern.

`relative_position_kernel` gives mean scores by offset, beside what a mean query and key predict, and
`kernel_prediction` judges that per head. All take random sequences or prompts of one's own.
`top_pairs` lists the largest weights of each head on text, with the words around them, and `attention_sinks` the keys
that most later queries of a layer attend to.
"""

from tlspectral.heads.detectors.heads import detect_heads
from tlspectral.tables.detector_columns import DETECTORS

__all__ = ["DETECTORS", "detect_heads"]
