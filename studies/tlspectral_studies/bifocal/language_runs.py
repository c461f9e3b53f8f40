"""One training run on a formal language, what is measured at its end, and the choice of learning rates."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tlspectral_studies.bifocal.evolution import EvolutionSettings, evolve
from tlspectral_studies.bifocal.formal_languages import UNSCORED, LanguageBatch, answers_of
from tlspectral_studies.bifocal.llama import ARMS, LITERAL_ARM, PHASE_NOISE_ARMS, LlamaConfig, SpectralLlama
from tlspectral_studies.bifocal.schedule import EquivalenceSchedule, LanguageSchedule
from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.run_folder import RunFolder, finish_runs

# Seeds of streams of random numbers; the run's seed is added, so that no two runs or parts share a stream.
_TRAINING_STREAM = 10_000
_HELD_OUT_STREAM = 20_000
_BY_SIZE_STREAM = 30_000
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class LanguageRun:
    """Settings of one training run.

    Attributes:
        language: name of a plan of the schedule.
        arm: name of an arm.
        learning_rate: of the weights.
        seed: of weights and data; arms of one seed share both.
        memorise: train on the same few sequences in every step.
    """

    language: str
    arm: str
    learning_rate: float
    seed: int
    memorise: bool = False

    @property
    def name(self) -> str:
        """Name of the run's file."""
        kind = "memorise-" if self.memorise else ""
        return f"{kind}{self.language}-{self.arm}-{self.learning_rate:g}-seed{self.seed}"


def train_on_language(run: LanguageRun, schedule: LanguageSchedule, device: str = "cpu") -> dict[str, pd.DataFrame]:
    """Train one model from scratch and test it on fresh sequences.

    Returns:
        Tables `losses` and `trajectory` (of `evolve`), `held_out` (one row: `loss` in nats per scored token,
        `accuracy`, `tokens` scored) and `by_size` (the same per `size`).
    """
    return trained_model(run, schedule, device)[1]


def trained_model(
    run: LanguageRun, schedule: LanguageSchedule, device: str = "cpu"
) -> tuple[SpectralLlama, dict[str, pd.DataFrame]]:
    """Train and test as `train_on_language` does; returns the model too."""
    plan = schedule.plan(run.language)
    language = plan.language
    config = LlamaConfig(len(language.vocabulary))
    model = SpectralLlama(config, {**ARMS, **PHASE_NOISE_ARMS, **LITERAL_ARM}[run.arm], seed=run.seed).to(device)
    stream = torch.Generator().manual_seed(_TRAINING_STREAM + run.seed)
    fixed = language.sample(plan.memorised, stream) if run.memorise else None

    def batch_loss(_: int) -> Float[Tensor, ""]:
        return answer_loss(model, language.sample(plan.batch_size, stream) if fixed is None else fixed)

    settings = EvolutionSettings(
        steps=schedule.steps,
        learning_rate=run.learning_rate,
        warmup_steps=schedule.warmup_steps,
        log_every=schedule.log_every,
    )
    evolution = evolve(model, batch_loss, settings)
    held_out = language.sample(plan.held_out, torch.Generator().manual_seed(_HELD_OUT_STREAM + run.seed))
    by_size = []
    for number, at_size in enumerate(plan.by_size):
        fresh = at_size.sample(plan.per_size, torch.Generator().manual_seed(_BY_SIZE_STREAM + 100 * run.seed + number))
        by_size.append({"size": int(fresh.size[0]), **score_answers(model, fresh)})
    return model, {
        "losses": evolution.losses,
        "trajectory": evolution.trajectory,
        "held_out": pd.DataFrame([score_answers(model, held_out)]),
        "by_size": pd.DataFrame(by_size, columns=["size", "loss", "accuracy", "tokens"]),
    }


def answer_loss(model: SpectralLlama, batch: LanguageBatch) -> Float[Tensor, ""]:
    """Mean cross-entropy over the scored tokens of a batch, in nats."""
    answers = answers_of(batch)
    tokens, position, answer = to_device_of(model, batch.tokens, *answers)
    logits = model(tokens, position)  # batch answers d_vocab
    return F.cross_entropy(logits.flatten(0, 1), answer.flatten(), ignore_index=UNSCORED)


@torch.no_grad()
def score_answers(model: SpectralLlama, batch: LanguageBatch) -> dict[str, float]:
    """`loss` in nats per scored token and `accuracy` (share of scored tokens with the largest logit), `tokens`."""
    loss = correct = count = 0.0
    for start in range(0, len(batch.tokens), _ROWS_AT_ONCE):
        part = LanguageBatch(*(value[start : start + _ROWS_AT_ONCE] for value in batch))
        answers = answers_of(part)
        logits = model(*to_device_of(model, part.tokens, answers.position)).cpu().double()  # batch answers d_vocab
        summed = F.cross_entropy(logits.flatten(0, 1), answers.token.flatten(), ignore_index=UNSCORED, reduction="sum")
        loss += summed.item()
        correct += float((logits.argmax(-1) == answers.token).sum())
        count += float((answers.token != UNSCORED).sum())
    return {"loss": loss / count, "accuracy": correct / count, "tokens": count}


def tune_and_train(
    folder: RunFolder, schedule: LanguageSchedule, arms: list[str], *, n_jobs: int = 1
) -> tuple[pd.DataFrame, dict[LanguageRun, dict[str, pd.DataFrame]]]:
    """Choose each arm's learning rate on the tuning seed, then train it on all seeds at that rate.

    Returns:
        The table of `chosen_rates`, and the tables of the trainings at the chosen rates.
    """
    languages = [plan.language.name for plan in schedule.plans]
    tuning = [
        LanguageRun(language, arm, rate, schedule.tuning_seed)
        for language in languages
        for arm in arms
        for rate in schedule.rates
    ]
    rates = chosen_rates(finish_language_runs(folder, schedule, tuning, n_jobs=n_jobs))
    chosen = rates[rates["chosen"]]
    trainings = [
        LanguageRun(language, arm, rate, seed)
        for language, arm, rate in zip(chosen["language"], chosen["arm"], chosen["learning_rate"], strict=True)
        for seed in schedule.seeds
    ]
    return rates, finish_language_runs(folder, schedule, trainings, n_jobs=n_jobs)


def finish_language_runs(
    folder: RunFolder,
    schedule: LanguageSchedule | EquivalenceSchedule,
    runs: list[LanguageRun],
    *,
    train: Callable[[LanguageRun, Any, str], dict[str, pd.DataFrame]] | None = None,
    n_jobs: int = 1,
) -> dict[LanguageRun, dict[str, pd.DataFrame]]:
    """Return the tables of runs: finished ones are read from the folder, the others trained and written there.

    `train` takes a run, the schedule and a device; None is `train_on_language`.
    """
    train = train or train_on_language
    work = {run.name: (run.seed, partial(train, run, schedule, folder.device)) for run in runs}
    finished = finish_runs(folder, work, n_jobs=n_jobs)
    return {run: finished[run.name] for run in runs}


def chosen_rates(runs: dict[LanguageRun, dict[str, pd.DataFrame]]) -> pd.DataFrame:
    """Choose the learning rate with the lowest held-out loss, at a tie the lowest rate.

    Returns:
        Columns `language, arm, learning_rate, seed, loss, chosen`.
    """
    table = pd.DataFrame(
        {
            "language": [run.language for run in runs],
            "arm": [run.arm for run in runs],
            "learning_rate": [run.learning_rate for run in runs],
            "seed": [run.seed for run in runs],
            "loss": [float(tables["held_out"]["loss"].iloc[0]) for tables in runs.values()],
        }
    )
    lowest = table.sort_values(["loss", "learning_rate"]).drop_duplicates(["language", "arm"]).index
    return table.assign(chosen=table.index.isin(lowest))
