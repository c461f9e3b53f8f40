"""Training on the random-map task: AdamW on fresh sequences, one evaluation every so many steps."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.gradient_steps import gradient_steps, to_device_of, warm_up
from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.random_map import RandomMapBatch, RandomMapTask, evaluate, token_losses

_TRAINING_STREAM = 10_000  # training sequences come from a generator with this plus the seed, as in FP's runs
_EVALUATION_STREAM = 99  # evaluation sequences are the same in every run, so that runs can be compared

TRAIN_HISTORY = Schema(
    "train.history",
    columns("""
        step             | step                  | Gradient steps done.
        loss             | nat                   | Cross-entropy over all targets of held-out sequences.
        loss_predictable | nat                   | Cross-entropy over the targets that the map decides.
        prev_best        | attention probability | Attention to the previous token, of the head where it is largest.
        ind_best         | attention probability | The same to all keys behind an earlier copy of the query's token.
        penalty?         | of the penalty        | Value of the penalty on the loss, without its weight. With a penalty.
    """),
)

Penalty = Callable[[AttentionOnlyTransformer], Float[Tensor, ""]]
"""A differentiable function of the model. Its value times a weight is added to the loss of each step."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults make a small model learn the random-map task in about two minutes of one core.

    Attributes:
        steps: gradient steps.
        batch_size: sequences per step.
        learning_rate: after the warm-up and before the decay.
        warmup_steps: steps of linear warm-up from 0.
        decay_share: last share of the steps, over which the learning rate falls to 0 along a cosine.
        weight_decay: AdamW's, on all parameters.
        clip: largest norm of the gradient.
        evaluate_every: steps between evaluations; there is one before the first step and one after the last.
        evaluation_sequences: sequences of an evaluation.
        seed: of the initial weights and of the training sequences.
    """

    steps: int = 1500
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    decay_share: float = 0.4
    weight_decay: float = 0.01
    clip: float = 1.0
    evaluate_every: int = 100
    evaluation_sequences: int = 64
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = warm_up(step, self.warmup_steps)
        decay_from = self.steps - round(self.decay_share * self.steps)
        if step < decay_from:
            return self.learning_rate * warm
        progress = (step - decay_from) / (self.steps - decay_from)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))

    def evaluates_after(self, done: int) -> bool:
        """Whether the model is evaluated after `done` steps."""
        return done % self.evaluate_every == 0 or done == self.steps


@dataclass(frozen=True)
class TrainingRun:
    """A trained model, its history with a row per evaluation, and its weights after every step of `keep_steps`.

    Weights stand under the model's parameter names.
    """

    model: AttentionOnlyTransformer
    history: pd.DataFrame
    checkpoints: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def train(
    config: TransformerConfig,
    task: RandomMapTask,
    settings: TrainingSettings | None = None,
    *,
    penalty: Penalty | None = None,
    penalty_weight: float = 0.0,
    keep_steps: Iterable[int] = (),
    device: str | torch.device = "cpu",
) -> TrainingRun:
    """Train a model from scratch.

    The same arguments give the same weights on the same machine and number of threads. Another build of torch or of its
    BLAS, or another device, rounds differently, and training amplifies that: weights then differ while the circuit is
    the same. The sequences are the same on every device.

    Args:
        config: the architecture.
        task: what to learn; its vocabulary and length have to fit the architecture.
        settings: how; None takes the defaults.
        penalty: added to the loss of every step; see `tlspectral_studies.fingerprint.constrained`.
        penalty_weight: factor on it.
        keep_steps: numbers of steps after which a copy of the weights is kept; 0 is before the first. The training
            does not depend on them. The copies are on the CPU.
        device: where the model is trained.

    Raises:
        ValueError: the task has another vocabulary than the model, or longer sequences than its context; a step to
            keep that the training does not reach.
    """
    settings = settings or TrainingSettings()
    steps_to_keep = set(keep_steps)
    if beyond := sorted(steps_to_keep - set(range(settings.steps + 1))):
        raise ValueError(f"keep_steps holds {beyond}; training reaches the whole numbers from 0 to {settings.steps}")
    training = begin_training(config, settings, device=device)
    model = training.model
    held_out = held_out_sequences(task, settings)
    history, checkpoints = [], {}
    with bar(settings.steps, "training", "step") as shown:
        for done in training_steps(training, task, settings, penalty=penalty, penalty_weight=penalty_weight):
            shown.update(done - shown.n)
            if done in steps_to_keep:
                weights = model.state_dict()
                checkpoints[done] = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
            if settings.evaluates_after(done):
                measures = evaluate(model, held_out)
                if penalty is not None:
                    measures["penalty"] = penalty(model).item()
                history.append({"step": done, **measures})
                shown.set_postfix({name: f"{value:.3f}" for name, value in measures.items()})
    return TrainingRun(model, TRAIN_HISTORY.frame(history), checkpoints)


def held_out_sequences(task: RandomMapTask, settings: TrainingSettings) -> RandomMapBatch:
    """Draw the sequences of every evaluation; they do not depend on the seed."""
    return task.sample(settings.evaluation_sequences, torch.Generator().manual_seed(_EVALUATION_STREAM))


@dataclass(frozen=True)
class Training:
    """A model in training, and everything else that its next step depends on.

    Attributes:
        model: trained in place.
        optimizer: of all parameters of the model.
        stream: generator of the training sequences, on the CPU.
    """

    model: AttentionOnlyTransformer
    optimizer: torch.optim.AdamW
    stream: torch.Generator


def begin_training(
    config: TransformerConfig, settings: TrainingSettings, *, device: str | torch.device = "cpu"
) -> Training:
    """Make a model with the initial weights of the seed, and its optimizer and sequences before the first step."""
    model = AttentionOnlyTransformer(config, seed=settings.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return Training(model, optimizer, torch.Generator().manual_seed(_TRAINING_STREAM + settings.seed))


def training_steps(
    training: Training,
    task: RandomMapTask,
    settings: TrainingSettings,
    *,
    done: int = 0,
    penalty: Penalty | None = None,
    penalty_weight: float = 0.0,
    penalty_until: int | None = None,
) -> Iterator[int]:
    """Train in place; yields how many steps are done, `done` first, so that the caller can measure, save, or stop.

    Args:
        training: of `begin_training`, or as it was after `done` steps.
        task: what to learn.
        settings: how.
        done: steps that were taken before.
        penalty: added to the loss of every step.
        penalty_weight: factor on it.
        penalty_until: steps of the training that have the penalty, the first ones; None: all.

    Raises:
        ValueError: the task has another vocabulary than the model, or longer sequences than its context.
    """
    model, config = training.model, training.model.config
    if task.vocabulary != config.d_vocab or task.length > config.n_ctx:
        raise ValueError(
            f"the task has {task.vocabulary} tokens in sequences of {task.length}, the model d_vocab={config.d_vocab}"
            f" and n_ctx={config.n_ctx}"
        )

    def batch_loss(step: int) -> Float[Tensor, ""]:
        (tokens,) = to_device_of(model, task.sample(settings.batch_size, training.stream).tokens)
        loss = token_losses(model(tokens), tokens).mean()
        if penalty is None or (penalty_until is not None and step >= penalty_until):
            return loss
        return loss + penalty_weight * penalty(model)

    losses = gradient_steps(
        training.optimizer,
        batch_loss,
        steps=settings.steps,
        done=done,
        rates_at=lambda step: [settings.learning_rate_at(step)],
        clipped=[list(model.parameters())],
        clip=settings.clip,
    )
    yield done
    for step, _ in enumerate(losses, start=done + 1):
        yield step
