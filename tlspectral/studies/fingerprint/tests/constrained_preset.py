"""The preset of constrained training in tests: six steps of a tiny model."""

from tlspectral.studies.common import RandomMapTask, TrainingSettings, TransformerConfig
from tlspectral.studies.fingerprint.constrained import Preset

TINY = Preset(
    "tiny",
    TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16),
    RandomMapTask(vocabulary=8, length=16),
    TrainingSettings(steps=6, batch_size=4, warmup_steps=2, decay_share=0.0, evaluate_every=2, evaluation_sequences=8),
    stop_after=2,
)
