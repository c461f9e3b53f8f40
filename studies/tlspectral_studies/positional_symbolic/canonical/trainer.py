"""Training of stacked heads on a canonical task, and accuracy by the position of the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.gradient_steps import gradient_steps, to_device_of
from tlspectral_studies.positional_symbolic.canonical.behaviour import CANONICAL
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun
from tlspectral_studies.positional_symbolic.canonical.schedule import CanonicalSchedule
from tlspectral_studies.positional_symbolic.canonical.state import TrainingLog, TrainingState
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalBatch, CanonicalTask

_TRAINING_STREAM = 10_000  # training prompts come from a generator with this plus the seed
_VALIDATION_STREAM = 99  # validation prompts are the same in every run, so that runs can be compared
_PROMPTS_AT_ONCE = 1024

_columns = partial(columns, shared=CANONICAL)
_HISTORY = Schema(
    "train_canonical.history",
    _columns("""
        run, seed, step
        loss | nat | Mean cross-entropy of the answers in training since the row before.
    """),
)
_FREQUENCIES = Schema(
    "train_canonical.frequencies",
    _columns("""
        run, seed, step
        pair  | index     | Index of the head's rotary pair.
        theta | rad/token | The pair's frequency after that many steps; it moves only if frequencies are learned.
    """),
)
_PROGRESS = Schema("train_canonical.progress", _columns("run, seed, step, position, n, correct"))
_BY_POSITION = Schema("accuracy_by_position", _columns("run, seed, position, n, correct"))


@dataclass(frozen=True)
class CanonicalTraining:
    """Trained heads with the record of their training; `run` counts the stacked runs from 0.

    Attributes:
        model: the heads.
        history: one row per run and logged step.
        frequencies: one row per run, logged step and rotary pair, the start included.
        progress: one row per run, logged step and position of the answer, of the prompts that `train_canonical` was
            given to measure; None without.
    """

    model: CanonicalHeads
    history: pd.DataFrame
    frequencies: pd.DataFrame
    progress: pd.DataFrame | None = None


def train_canonical(
    task: CanonicalTask,
    runs: list[CanonicalRun],
    schedule: CanonicalSchedule | None = None,
    *,
    learn_frequencies: bool = False,
    measured: CanonicalBatch | None = None,
    state: Path | None = None,
    observe: Callable[[int, CanonicalHeads], None] | None = None,
    device: str = "cpu",
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
        measured: prompts on which right answers are counted at every logged step, for `progress`.
        state: a file that is written once a minute and at the end. A training that was stopped continues there and
            becomes to the bit what it would have become. `saved_heads` reads the weights of a finished one.
        observe: called with the number of steps done and the heads, before the first step of this call, after every
            `schedule.log_every` steps and after the last. It must not change the heads.
        device: where the heads are trained.

    Returns:
        The heads, losses, and frequencies over the steps.

    Raises:
        ValueError: no run, or runs with different numbers of frequencies.
        IncompatibleCheckpoint: `state` is of another training, or damaged.

    What it does not establish: that a head which does not learn a task cannot do it. Another schedule, seed or initial
    scale may succeed. Bitwise equality holds on one machine, CPU and version of torch.
    """
    schedule = schedule or CanonicalSchedule()
    with one_thread(), bar(schedule.steps, task.name, "step") as shown:
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
        n_measured = 0 if measured is None else len(measured.query)
        file = None if state is None else TrainingState(state, model, optimizer, schedule, n_measured)
        log = TrainingLog() if file is None else file.resume()
        if not log.steps:
            log.note(0, model.frequencies, torch.zeros(len(runs)), _counted(model, measured))
        for _ in range(log.done):  # the prompts of the steps that were taken before
            for stream in streams:
                next(stream)
        summed = torch.zeros(len(runs), dtype=torch.float64)
        if observe is not None:
            observe(log.done, model)
        training = gradient_steps(
            optimizer,
            lambda _: _losses(model, *_stacked([next(stream) for stream in streams], of_run)),
            steps=schedule.steps,
            done=log.done,
            rates_at=lambda step: [share * schedule.learning_rate_at(step) for share in shares],
        )
        shown.update(log.done)
        for done, loss in enumerate(training, start=log.done + 1):  # loss: runs
            shown.update()
            summed += loss.cpu().double()
            if done % schedule.log_every == 0 or done == schedule.steps:
                log.note(done, model.frequencies, summed / (done - log.done), _counted(model, measured))
                summed = torch.zeros(len(runs), dtype=torch.float64)
                if file is not None:
                    file.save(log)
                if observe is not None:
                    observe(done, model)
    return _training_tables(model, log, measured)


def _counted(model: CanonicalHeads, measured: CanonicalBatch | None) -> Int64[Tensor, "runs positions"] | None:
    return None if measured is None else right_answers(model, measured)


def _training_tables(model: CanonicalHeads, log: TrainingLog, measured: CanonicalBatch | None) -> CanonicalTraining:
    n_pairs, length = model.frequencies.shape[1], model.task.length
    history = _by_step(model, log.steps[1:], loss=torch.stack(log.losses[1:]))
    frequencies = _by_step(
        model, log.steps, pair=torch.arange(n_pairs).expand(len(log.steps), len(model.runs), -1), theta=log.frequencies
    )
    progress = None
    if measured is not None:
        shape = len(log.steps), len(model.runs), length
        n = torch.bincount(measured.answer_position, minlength=length)
        counted = _by_step(
            model,
            log.steps,
            position=torch.arange(length).expand(shape),
            n=n.expand(shape),
            correct=[counts for counts in log.correct if counts is not None],
        )
        progress = _PROGRESS.frame(counted)
    return CanonicalTraining(model, _HISTORY.frame(history), _FREQUENCIES.frame(frequencies), progress)


def _by_step(model: CanonicalHeads, steps: list[int], **columns: Tensor | list[Tensor]) -> pd.DataFrame:
    """A row per step, run and, for columns of [steps, runs, things], thing."""
    values = {name: torch.stack(column) if isinstance(column, list) else column for name, column in columns.items()}
    things = next(iter(values.values())).shape[2:].numel()
    n_runs = len(model.runs)
    return pd.DataFrame(
        {
            "run": np.tile(np.repeat(np.arange(n_runs), things), len(steps)),
            "seed": np.tile(np.repeat([run.seed for run in model.runs], things), len(steps)),
            "step": np.repeat(steps, n_runs * things),
            **{name: value.flatten().numpy() for name, value in values.items()},
        }
    )


def accuracy_by_position(model: CanonicalHeads, batch: CanonicalBatch) -> pd.DataFrame:
    """Count the right answers of each run by the position of the answer.

    Args:
        model: trained heads.
        batch: prompts of the model's task, [n] of them, the same for every run.

    Returns:
        DataFrame sorted by run and position. Columns: `run, seed, position, n, correct`. Every position of the context
        has a row, also one where no answer stands.

    What it does not establish: where the head looks. A right answer can come from several keys together.
    """
    length, n_runs = model.task.length, len(model.runs)
    table = _by_step(
        model,
        [0],
        position=torch.arange(length).expand(1, n_runs, -1),
        n=torch.bincount(batch.answer_position, minlength=length).expand(1, n_runs, -1),
        correct=right_answers(model, batch)[None],
    )
    return _BY_POSITION.frame(table.drop(columns="step"))


@torch.no_grad()
def right_answers(model: CanonicalHeads, batch: CanonicalBatch) -> Int64[Tensor, "runs positions"]:
    """Count the right answers of each run by the position of the answer; see `accuracy_by_position`."""
    length, n_runs = model.task.length, len(model.runs)
    correct = torch.zeros(n_runs, length, dtype=torch.int64)
    with one_thread():
        for rows in torch.arange(len(batch.query)).split(_PROMPTS_AT_ONCE):
            part = CanonicalBatch(*(values[rows] for values in batch))
            context, query, answer = _stacked([part], torch.zeros(n_runs, dtype=torch.int64))
            right = model(*to_device_of(model, context, query)).argmax(-1).cpu() == answer  # runs batch
            for run in range(n_runs):
                correct[run] += torch.bincount(part.answer_position[right[run]], minlength=length)
    return correct


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
