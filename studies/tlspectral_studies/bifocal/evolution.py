"""Spectral Evolution: train a model with spectral rotary positions and record its frequencies.

BA (sections 3 and 4.1) starts from the geometric frequencies and lets gradient descent move them. Optimiser, rates and
batch are not given. Here: AdamW; gain and phase at the weights' rate; omega at a tenth of it, since an angle at
distance N moves N times as fast as its frequency; no weight decay on spectral parameters, since it would pull them
to 0, not to their start; linear warm-up, then a constant rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tlspectral.spectral_rope import SpectralRoPE
from tlspectral.spectral_rope.rates import OMEGA_SHARE, rated_groups
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.bifocal.schedule import BIFOCAL
from tlspectral_studies.common.gradient_steps import gradient_steps, warm_up

BATCH_LOSS = columns("loss | nat per scored token | Loss of the batch of the step, before the step was taken.")
LOSSES = Schema("evolve.losses", columns("step, loss", (*BATCH_LOSS, *BIFOCAL)))
TRAJECTORY = Schema("evolve.trajectory", columns("step, layer, head, name, frequency, omega, gain, phase", BIFOCAL))


@dataclass(frozen=True)
class EvolutionSettings:
    """How to train.

    Attributes:
        steps: gradient steps.
        learning_rate: of weights, gain and phase, after the warm-up.
        omega_share: rate of the frequencies as a share of `learning_rate`.
        weight_decay: AdamW's, on weights; spectral parameters have none.
        warmup_steps: steps of linear warm-up; the last of them has the full rate.
        clip: largest norm of the weights' gradient and, apart from it, of the spectral parameters'. Apart, because
            omega's gradient grows with the distance and would make the weights' steps small.
        log_every: steps between records of the spectral parameters; start and end are recorded too.
        cosine: whether the rates fall to 0 by a cosine over all steps; else they are constant after the warm-up.
    """

    steps: int = 400
    learning_rate: float = 1e-3
    omega_share: float = OMEGA_SHARE
    weight_decay: float = 0.0
    warmup_steps: int = 20
    clip: float = 1.0
    log_every: int = 10
    cosine: bool = False

    def rate_factor(self, step: int) -> float:
        """Factor on all rates in a step, counted from 0."""
        falling = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.cosine else 1.0
        return falling * warm_up(step + 1, self.warmup_steps)


@dataclass(frozen=True)
class Evolution:
    """Record of a training.

    Attributes:
        losses: a row per step.
        trajectory: a row per recorded step, query head and rotary pair. No rows without a spectral module.
    """

    losses: pd.DataFrame
    trajectory: pd.DataFrame


def evolve(
    model: nn.Module,
    batch_loss: Callable[[int], Float[Tensor, ""]],
    settings: EvolutionSettings,
    *,
    frozen_backbone: bool = False,
) -> Evolution:
    """Train the parameters that ask for a gradient, in place.

    Args:
        model: any module with `SpectralRoPE` modules in it, which are recorded, or without: a small Llama of this
            package, or a model of `to_spectral`.
        batch_loss: loss in nats of the batch of a step, counted from 0. Called once per step, in order.
        settings: how.
        frozen_backbone: train spectral parameters alone. Weights get no gradient and keep their flags, so that a model
            that shares them is not changed.

    Raises:
        ValueError: there is nothing to train.

    What it does not establish: that a parameter that moved did anything. Adam moves parameters with no effect too.
    """
    groups = parameter_groups(model, settings, frozen_backbone=frozen_backbone)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    rates = [group["lr"] for group in groups]
    trained = {group["name"]: list(group["params"]) for group in groups}
    weights = trained.pop("weights", [])
    spectral = [parameter for parameters in trained.values() for parameter in parameters]
    losses: list[dict[str, float]] = []
    records = [spectral_record(model, 0)]
    training = gradient_steps(
        optimizer,
        batch_loss,
        steps=settings.steps,
        rates_at=lambda step: [rate * settings.rate_factor(step) for rate in rates],
        clipped=[weights, spectral],
        clip=settings.clip,
    )
    for done, loss in enumerate(training, start=1):
        losses.append({"step": done, "loss": loss.item()})
        if done % settings.log_every == 0 or done == settings.steps:
            records.append(spectral_record(model, done))
    return Evolution(LOSSES.frame(losses), TRAJECTORY.frame(pd.concat(records, ignore_index=True)))


def spectral_modules(model: nn.Module) -> dict[int, SpectralRoPE]:
    """The model's spectral modules by layer, which is the last number in a module's name."""
    return {
        int(next(part for part in reversed(name.split(".")) if part.isdigit())): module
        for name, module in model.named_modules()
        if isinstance(module, SpectralRoPE)
    }


def parameter_groups(
    model: nn.Module, settings: EvolutionSettings, *, frozen_backbone: bool = False
) -> list[dict[str, Any]]:
    """AdamW's groups `weights`, `gain_phase` and `omega`, each with its rate and weight decay; empty ones left out.

    Raises:
        ValueError: there is nothing to train.
    """
    spectral = {id(parameter) for module in spectral_modules(model).values() for parameter in module.parameters()}
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in spectral and not frozen_backbone]
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = [{"name": "weights", "params": weights, "lr": rate, "weight_decay": decay}] if weights else []
    groups += rated_groups(model, rate, settings.omega_share)
    if not groups:
        raise ValueError("no parameter asks for a gradient: call requires_grad_() on what shall be trained")
    return groups


def spectral_record(model: nn.Module, step: int) -> pd.DataFrame:
    """Current omega, gain and phase of every layer, head and rotary pair, as rows of `Evolution.trajectory`."""
    tables = []
    for layer, module in spectral_modules(model).items():
        omega, gain = module.omega_by_head(), module.gain_by_head()  # heads pairs
        heads, pairs = omega.shape
        phase = module.phase_by_head()  # heads pairs
        if module.shared_phase:
            phase = module.phase.detach().cpu().double().repeat_interleave(heads // len(module.phase), dim=0)
        index = pd.MultiIndex.from_product([[step], [layer], range(heads), range(pairs)])
        table = index.to_frame(index=False, name=["step", "layer", "head", "frequency"])
        tables.append(table.assign(omega=omega.flatten(), gain=gain.flatten(), phase=phase.flatten()))
    return pd.concat(tables, ignore_index=True) if tables else TRAJECTORY.frame({})
