"""Weights that a training kept, in memory or in files, as checkpoints for `head_history`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.saved_training import saved_model, saved_steps
from tlspectral_studies.common.trainer import TrainingRun


def training_checkpoints(run: TrainingRun) -> list[tuple[int, Callable[[], Any]]]:
    """Return the weights that a run kept, as functions that make TransformerLens models, by step.

    Args:
        run: of `train(..., keep_steps=...)`.

    Raises:
        ValueError: the run kept no steps.
    """
    if not run.checkpoints:
        raise ValueError("the run kept no checkpoints: name the steps to train(..., keep_steps=...)")
    config = run.model.config
    return [(step, partial(_from_memory, config, weights, step)) for step, weights in sorted(run.checkpoints.items())]


def saved_checkpoints(folder: Path, name: str) -> list[tuple[int, Callable[[], Any]]]:
    """Return the weights in the folder of a `SavedTraining`, as functions that make TransformerLens models, by step.

    Args:
        folder: with files of weights; none gives no checkpoints.
        name: of the model, in tables that are made of it.
    """
    return [(step, partial(_from_file, file, name, step)) for step, file in saved_steps(folder).items()]


def _from_memory(config: TransformerConfig, weights: dict[str, Tensor], step: int) -> Any:
    model = AttentionOnlyTransformer(config)
    model.load_state_dict(weights)
    return _at_step(model, "own training", step)


def _from_file(file: Path, name: str, step: int) -> Any:
    return _at_step(saved_model(file), name, step)


def _at_step(model: AttentionOnlyTransformer, name: str, step: int) -> Any:
    bridge = model.to_model()
    bridge.tlspectral_source = {"model": name, "revision": f"step{step}"}
    return bridge
