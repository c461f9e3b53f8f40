"""Small transformers trained from scratch: the random-map task, a plain-torch model, its training loop.

`python -m tlspectral_studies.fingerprint.packaged_models NAME` makes the packaged checkpoints with them.
"""

from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.random_map import RandomMapBatch, RandomMapTask, evaluate
from tlspectral_studies.common.trainer import TrainingRun, TrainingSettings, train

__all__ = [
    "AttentionOnlyTransformer",
    "RandomMapBatch",
    "RandomMapTask",
    "TrainingRun",
    "TrainingSettings",
    "TransformerConfig",
    "evaluate",
    "train",
]
