"""Small transformers trained from scratch: the random-map task, a plain-torch model, its training loop.

`python -m tlspectral.training.package NAME` makes the packaged checkpoints with them.
"""

from tlspectral.training.evaluation import evaluate
from tlspectral.training.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral.training.random_map import RandomMapBatch, RandomMapTask
from tlspectral.training.trainer import TrainingRun, TrainingSettings, train

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
