"""Training on another device than the CPU."""

import pytest
import torch

from tlspectral.studies.common import RandomMapTask, TrainingSettings, TransformerConfig, train

SMALL = TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16)
TASK = RandomMapTask(vocabulary=8, length=16)
SHORT = TrainingSettings(steps=30, batch_size=8, warmup_steps=5, evaluate_every=10, evaluation_sequences=16)


@pytest.mark.slow
def test_training_on_another_device_is_the_same_training(device):
    here = train(SMALL, TASK, SHORT)
    there = train(SMALL, TASK, SHORT, keep_steps=[30], device=device)
    assert str(there.model.embed.W_E.device) == device
    assert here.history.equals(there.history)
    weights = here.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in there.checkpoints[30].items())
