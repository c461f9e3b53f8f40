"""Schedules of training on the canonical tasks: PS's own sizes, and one of minutes."""

from dataclasses import dataclass

from tlspectral_studies.common.gradient_steps import warm_up


@dataclass(frozen=True)
class CanonicalSchedule:
    """Steps, prompts and Adam's learning rate; the defaults are the preset `"quick"`.

    Attributes:
        steps: gradient steps.
        batch_size: prompts per step.
        learning_rate: Adam's, after the warm-up and before the decay.
        warmup_steps: steps of linear warm-up.
        decay_share: last share of the steps, over which the learning rate falls linearly to 0.
        frequency_rate: learning rate of learned frequencies, as a share of that of the weights.
        training_samples: prompts that are drawn once and shuffled anew in each epoch; None draws fresh ones each step.
        validation_samples: prompts on which accuracies are measured, the same for every run.
        log_every: steps between the rows of a history.
    """

    steps: int = 1200
    batch_size: int = 256
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    decay_share: float = 0.3
    frequency_rate: float = 0.1
    training_samples: int | None = None
    validation_samples: int = 20_480
    log_every: int = 50

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.validation_samples, self.log_every) < 1:
            raise ValueError(f"steps, batch_size, validation_samples and log_every must be at least 1, found {self}")
        if self.training_samples is not None and self.training_samples < self.batch_size:
            raise ValueError(
                f"training_samples={self.training_samples} do not fill one batch of {self.batch_size}: give more, or "
                "None for fresh prompts"
            )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of the weights at a step, counted from 0."""
        warm = warm_up(step + 1, self.warmup_steps)
        decay_steps = round(self.decay_share * self.steps)
        left = min(1.0, (self.steps - step) / decay_steps) if decay_steps else 1.0
        return self.learning_rate * warm * left


# PS (appendix D.1) gives 100 epochs, batches of 64, 40,960 training and 20,480 validation prompts: 64,000 steps. It
# names no optimizer and no learning rate: here Adam at its usual 1e-3, constant, and a new order in every epoch.
PRESETS = {
    "quick": CanonicalSchedule(),
    "paper": CanonicalSchedule(
        steps=100 * 40_960 // 64,
        batch_size=64,
        learning_rate=1e-3,
        warmup_steps=0,
        decay_share=0.0,
        training_samples=40_960,
        log_every=640,
    ),
}


def schedule_of(preset: str | CanonicalSchedule) -> CanonicalSchedule:
    """The schedule of a preset's name, or the schedule itself.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(preset, CanonicalSchedule):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"{preset!r} is no preset; there are {', '.join(PRESETS)}, or give a CanonicalSchedule")
    return PRESETS[preset]
