"""Training of stacked heads on a canonical task, its schedules, and accuracy by the position of the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.nulls import one_thread
from tlspectral.studies.common.gradient_steps import gradient_steps, to_device_of, warm_up
from tlspectral.studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalBatch, CanonicalTask
from tlspectral.studies.positional_symbolic.columns import ACCURACY_BY_POSITION, FREQUENCIES, HISTORY
from tlspectral.tables import named

_TRAINING_STREAM = 10_000  # training prompts come from a generator with this plus the seed
_VALIDATION_STREAM = 99  # validation prompts are the same in every run, so that runs can be compared
_PROMPTS_AT_ONCE = 1024


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


@dataclass(frozen=True)
class CanonicalTraining:
    """Trained heads with the record of their training; `run` counts the stacked runs from 0.

    Attributes:
        model: the heads.
        history: one row per run and logged step, `run, seed, step, loss`: mean cross-entropy in nats over the steps
            since the row before.
        frequencies: one row per run, logged step and rotary pair, the start included: `run, seed, step, pair, theta`
            in radians per token. They move only if they were learned.
    """

    model: CanonicalHeads
    history: pd.DataFrame
    frequencies: pd.DataFrame


def train_canonical(
    task: CanonicalTask,
    runs: list[CanonicalRun],
    schedule: CanonicalSchedule | None = None,
    *,
    learn_frequencies: bool = False,
    observe: Callable[[int, CanonicalHeads], None] | None = None,
    device: str = "cpu",
    show_progress: bool = False,
) -> CanonicalTraining:
    """Train one-layer one-head models on a canonical task, all runs at once, on one thread (PS D.1).

    A run becomes to the bit what it becomes alone: the loss is the sum over runs of each run's mean, nothing is clipped
    across runs, and each run has its own seed. Runs of the same seed see the same prompts and start from the same
    weights, as far as they have the same shape: they differ by their frequencies alone.

    Args:
        task: what to learn.
        runs: frequencies and seed of each model, all with the same number of frequencies.
        schedule: how; None takes the preset `"quick"`.
        learn_frequencies: train the frequencies too, at `schedule.frequency_rate` of the weights' learning rate.
        observe: called with the number of steps done and the heads, before the first step, after every
            `schedule.log_every` steps and after the last. It must not change the heads.
        device: where the heads are trained.
        show_progress: a bar over steps.

    Returns:
        The heads, losses, and frequencies over the steps.

    Raises:
        ValueError: no run, or runs with different numbers of frequencies.

    What it does not establish: that a head which does not learn a task cannot do it. Another schedule, seed or initial
    scale may succeed. Bitwise equality holds on one machine, CPU and version of torch.
    """
    schedule = schedule or CanonicalSchedule()
    with one_thread():
        model = CanonicalHeads(task, runs, learn_frequencies=learn_frequencies).to(device)
        weights = [model.W_E, model.W_V, model.W_U, model.W_Q, model.W_K]
        groups, shares = [{"params": weights}], [1.0]
        if learn_frequencies:
            groups.append({"params": list(model.learned_frequencies)})
            shares.append(schedule.frequency_rate)
        optimizer = torch.optim.Adam(groups)
        seeds = sorted({run.seed for run in runs})
        of_run = torch.tensor([seeds.index(run.seed) for run in runs])
        streams = [training_prompts(task, schedule, seed) for seed in seeds]
        losses, frequencies = [], [_frequency_rows(model, 0)]
        summed = np.zeros(len(runs))
        logged = 0
        if observe is not None:
            observe(0, model)
        training = gradient_steps(
            optimizer,
            lambda _: _losses(model, *_stacked([next(stream) for stream in streams], of_run)),
            steps=schedule.steps,
            rates_at=lambda step: [share * schedule.learning_rate_at(step) for share in shares],
        )
        bar = tqdm(training, total=schedule.steps, desc=task.name, unit="step", leave=False, disable=not show_progress)
        for done, loss in enumerate(bar, start=1):  # loss: runs
            summed += loss.cpu().double().numpy()
            if done % schedule.log_every == 0 or done == schedule.steps:
                losses.append(_rows(model, step=done, loss=summed / (done - logged)))
                frequencies.append(_frequency_rows(model, done))
                summed, logged = np.zeros(len(runs)), done
                if observe is not None:
                    observe(done, model)
    history = named(pd.concat(losses, ignore_index=True), HISTORY)
    return CanonicalTraining(model, history, named(pd.concat(frequencies, ignore_index=True), FREQUENCIES))


@torch.no_grad()
def accuracy_by_position(model: CanonicalHeads, batch: CanonicalBatch) -> pd.DataFrame:
    """Count the right answers of each run by the position of the answer.

    Args:
        model: trained heads.
        batch: prompts of the model's task, [n] of them, the same for every run.

    Returns:
        DataFrame sorted by run and position: `run, seed, position, n` (prompts with the answer there), `correct` (how
        many of them are answered rightly: the right class has the largest logit). Every position of the context has a
        row, also one where no answer stands.

    What it does not establish: where the head looks. A right answer can come from several keys together.
    """
    length, n_runs = model.task.length, len(model.runs)
    n = torch.bincount(batch.answer_position, minlength=length).numpy()
    correct = np.zeros((n_runs, length), dtype=np.int64)
    with one_thread():
        for rows in torch.arange(len(batch.query)).split(_PROMPTS_AT_ONCE):
            part = CanonicalBatch(*(values[rows] for values in batch))
            context, query, answer = _stacked([part], torch.zeros(n_runs, dtype=torch.int64))
            right = model(*to_device_of(model, context, query)).argmax(-1).cpu() == answer  # runs batch
            for run in range(n_runs):
                correct[run] += torch.bincount(part.answer_position[right[run]], minlength=length).numpy()
    table = pd.DataFrame(
        {
            "run": np.repeat(np.arange(n_runs), length),
            "seed": np.repeat([run.seed for run in model.runs], length),
            "position": np.tile(np.arange(length), n_runs),
            "n": np.tile(n, n_runs),
            "correct": correct.ravel(),
        }
    )
    return named(table, ACCURACY_BY_POSITION)


def training_prompts(task: CanonicalTask, schedule: CanonicalSchedule, seed: int) -> Iterator[CanonicalBatch]:
    """Yield batches without end: fresh ones, or the full batches of a fixed set in a new order each epoch."""
    stream = torch.Generator().manual_seed(_TRAINING_STREAM + seed)
    if schedule.training_samples is None:
        while True:
            yield task.sample(schedule.batch_size, stream)
    fixed = task.sample(schedule.training_samples, stream)
    n_batches = schedule.training_samples // schedule.batch_size
    while True:
        order = torch.randperm(schedule.training_samples, generator=stream)
        for rows in order.split(schedule.batch_size)[:n_batches]:
            yield CanonicalBatch(*(values[rows] for values in fixed))


def validation_prompts(task: CanonicalTask, schedule: CanonicalSchedule) -> CanonicalBatch:
    """Draw the prompts on which every run of a task is measured."""
    return task.sample(schedule.validation_samples, torch.Generator().manual_seed(_VALIDATION_STREAM))


def _stacked(
    batches: list[CanonicalBatch], of_run: Int64[Tensor, "runs"]
) -> tuple[Int64[Tensor, "runs batch length"], Int64[Tensor, "runs batch"], Int64[Tensor, "runs batch"]]:
    """Stack the contexts, queries and answers of the batch that each run sees."""
    context, query, answer = (
        torch.stack([getattr(batch, name) for batch in batches])[of_run] for name in ("context", "query", "answer")
    )
    return context, query, answer


def _losses(
    model: CanonicalHeads,
    context: Int64[Tensor, "runs batch length"],
    query: Int64[Tensor, "runs batch"],
    answer: Int64[Tensor, "runs batch"],
) -> Float[Tensor, "runs"]:
    """Mean cross-entropy of every run, in nats."""
    context, query, answer = to_device_of(model, context, query, answer)
    log_probabilities = model(context, query).log_softmax(-1)  # runs batch answers
    return -log_probabilities.gather(-1, answer[..., None]).squeeze(-1).mean(-1)


def _rows(model: CanonicalHeads, *, step: int, loss: np.ndarray) -> pd.DataFrame:
    seeds = [run.seed for run in model.runs]
    return pd.DataFrame({"run": np.arange(len(seeds)), "seed": seeds, "step": step, "loss": loss})


def _frequency_rows(model: CanonicalHeads, step: int) -> pd.DataFrame:
    frequencies = model.frequencies.numpy()
    n_runs, n_pairs = frequencies.shape
    return pd.DataFrame(
        {
            "run": np.repeat(np.arange(n_runs), n_pairs),
            "seed": np.repeat([run.seed for run in model.runs], n_pairs),
            "step": step,
            "pair": np.tile(np.arange(n_pairs), n_runs),
            "theta": frequencies.ravel(),
        }
    )
