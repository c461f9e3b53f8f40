"""Arms and sizes of constrained training: which models are trained, under which constraint, for how many steps."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from tlspectral.errors.settings import whole_number
from tlspectral.tasks.identity import content_digest
from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.random_map import RandomMapTask
from tlspectral_studies.common.trainer import Penalty, TrainingSettings
from tlspectral_studies.fingerprint.constrained.penalties import phase_penalty, symmetric_penalty

INDUCTION_THRESHOLD = 0.5
_FLOOR_LOSS = 0.15  # nats, about what a finished model reaches on predictable targets; half-way to it is "formed"


@dataclass(frozen=True)
class Arm:
    """One kind of model of the grid.

    Attributes:
        name: in the tables.
        positional_embedding_type: `"rotary"` or `"standard"` (learned absolute positions).
        penalty: added to the loss of every step, a function of the model; None trains freely.
        penalty_weight: factor on it.
        penalty_until: steps that have the penalty, the first ones; training is free from there on. None: all steps.
        initial_weights: changes the initial weights of the seed, in place; None leaves them.
    """

    name: str
    positional_embedding_type: str
    penalty: Penalty | None = None
    penalty_weight: float = 0.0
    penalty_until: int | None = None
    initial_weights: Callable[[AttentionOnlyTransformer], None] | None = None

    def __post_init__(self) -> None:
        if (self.penalty is None) != (self.penalty_weight == 0):
            raise ValueError(
                f"arm {self.name!r} has penalty={self.penalty} with penalty_weight={self.penalty_weight}: give both, or"
                " neither for a free arm"
            )
        if not isinstance(self.penalty_weight, Real) or not math.isfinite(self.penalty_weight):
            raise ValueError(f"arm {self.name!r} has penalty_weight={self.penalty_weight!r}: give a finite number")
        until = whole_number(self.penalty_until)
        if self.penalty_until is not None and (self.penalty is None or until is None or until < 1):
            raise ValueError(
                f"arm {self.name!r} has penalty_until={self.penalty_until} with penalty={self.penalty}: it is for an "
                "arm with a penalty, a whole number of steps from 1 on"
            )
        # Numbers of numpy are no JSON, in which cells keep what they were made with.
        object.__setattr__(self, "penalty_weight", float(self.penalty_weight))
        object.__setattr__(self, "penalty_until", until)

    def settings(self) -> dict[str, Any]:
        """What the arm is, as JSON: functions by their names."""
        penalty, initial = map(_called, (self.penalty, self.initial_weights))
        settings: dict[str, Any] = {
            "positional_embedding_type": self.positional_embedding_type,
            "penalty": penalty,
            "penalty_weight": self.penalty_weight,
        }
        # What an arm does not use is not recorded: stored tables of arms without it have no such entry.
        if self.penalty_until is not None:
            settings["penalty_until"] = self.penalty_until
        if initial is not None:
            settings["initial_weights"] = initial
        return settings

    def made_with(self) -> dict[str, Any]:
        """What tells saved cells of one name apart: the settings, and a digest of each function."""
        given = {"penalty": self.penalty, "initial_weights": self.initial_weights}
        return {**self.settings(), "functions": {name: content_digest(function) for name, function in given.items()}}


def _called(function: Callable[..., Any] | None) -> str | None:
    """Return the name of a function. Numbers and texts that `partial` binds stand behind it, and types of others."""
    if function is None:
        return None
    if isinstance(function, partial):
        given = [("", value) for value in function.args] + [(f"{name}=", x) for name, x in function.keywords.items()]
        bound = [
            f"{name}{x!r}" if isinstance(x, int | float | str) else f"{name}{type(x).__name__}" for name, x in given
        ]
        return f"{_called(function.func)}({', '.join(bound)})"
    return getattr(function, "__name__", type(function).__name__)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("ape_free", "standard"),
        Arm("ape_sym", "standard", symmetric_penalty, 10.0),
        Arm("rope_free", "rotary"),
        Arm("rope_sym", "rotary", symmetric_penalty, 10.0),
        Arm("rope_imag", "rotary", phase_penalty, 10.0),
    )
}
"""The grid of "Fingerprint, Not Blueprint" (FP, section 10)."""


def loss_threshold(vocabulary: int) -> float:
    """Loss on predictable targets, in nats, below which the circuit counts as formed: half-way down from ln V."""
    return 0.5 * (math.log(vocabulary) + _FLOOR_LOSS)


@dataclass(frozen=True)
class Preset:
    """Sizes and schedule of a grid.

    Attributes:
        name: `"quick"` or `"paper"`, or a user's own.
        config: the architecture; an arm says which positions.
        task: what is learned.
        training: steps, batches, learning rate and how often is evaluated; a cell says which seed.
        stop_after: steps that a cell goes on after both criteria of formation hold; None: always all steps.
        save_every: steps between those whose weights are kept, and from which a stopped cell goes on. No number depends
            on it.
    """

    name: str
    config: TransformerConfig
    task: RandomMapTask
    training: TrainingSettings
    stop_after: int | None
    save_every: int = 100

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise ValueError(f"save_every={self.save_every}: the weights of a cell are kept every 1, 2, ... steps")

    @property
    def loss_threshold(self) -> float:
        """Level of formation for the task's vocabulary, in nats."""
        return loss_threshold(self.task.vocabulary)

    def last_step(self, formed: int | float) -> int | float:
        """Return the step at which a cell ends; `formed` is where both criteria of formation were met first, or NaN."""
        if self.stop_after is None or math.isnan(formed):
            return self.training.steps
        return min(self.training.steps, formed + self.stop_after)

    def config_of(self, arm: Arm) -> TransformerConfig:
        """The architecture with the arm's positions."""
        return replace(self.config, positional_embedding_type=arm.positional_embedding_type)

    def training_of(self, seed: int) -> TrainingSettings:
        """The schedule with the cell's seed."""
        return replace(self.training, seed=seed)

    def settings(self) -> dict[str, Any]:
        """Everything beside arm and seed that the numbers depend on, as JSON."""
        settings = asdict(self)
        # Cells have positions and a seed of their own.
        del settings["config"]["positional_embedding_type"], settings["training"]["seed"]
        del settings["save_every"]
        return {**settings, "loss_threshold": self.loss_threshold, "induction_threshold": INDUCTION_THRESHOLD}


PAPER = Preset(
    "paper",
    TransformerConfig(
        d_model=128, n_heads=4, d_head=32, d_vocab=64, n_ctx=256, rotary_adjacent_pairs=False, unembed_bias=True
    ),
    RandomMapTask(vocabulary=64, length=256),
    TrainingSettings(steps=6000, batch_size=64, learning_rate=1e-3, decay_share=0.0, evaluate_every=100),
    stop_after=200,
)
"""FP's own sizes and seeds, until soon after the circuit has formed: some 5 hours of one core for 5 arms x 5 seeds."""

QUICK = Preset(
    "quick",
    TransformerConfig(),
    RandomMapTask(),
    TrainingSettings(steps=4000, batch_size=32, learning_rate=2e-3, decay_share=0.0, evaluate_every=25),
    stop_after=200,
)
"""Smaller models that stop soon after the circuit has formed: 18 minutes for 5 arms x 5 seeds on two free cores."""

PRESETS = {preset.name: preset for preset in (PAPER, QUICK)}
