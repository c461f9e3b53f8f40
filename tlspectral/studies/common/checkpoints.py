"""Weights that a training run kept, as checkpoints for `head_history`."""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlspectral.history.sources import LazyCheckpoint
from tlspectral.models.attention import digest_of_named
from tlspectral.models.loading.packaged import bridge_from_weights
from tlspectral.studies.common.trainer import TrainingRun


def training_checkpoints(run: TrainingRun) -> list[tuple[int, LazyCheckpoint]]:
    """Return the weights that a run kept as TransformerLens models, `(step, checkpoint)` by step.

    Args:
        run: of `train(..., keep_steps=...)`.

    Raises:
        ValueError: the run kept no steps.
    """
    if not run.checkpoints:
        raise ValueError("the run kept no checkpoints: name the steps to train(..., keep_steps=...)")
    config = asdict(run.model.config)
    return [
        (step, LazyCheckpoint(partial(_trained_model, config, weights, step), partial(digest_of_named, weights)))
        for step, weights in sorted(run.checkpoints.items())
    ]


def _trained_model(config: dict[str, Any], weights: dict[str, Tensor], step: int) -> Any:
    model = bridge_from_weights({**config, "model_name": "own training"}, weights, torch.device("cpu"), torch.float32)
    model.tlspectral_source = {"model": "own training", "revision": f"step{step}"}
    return model
