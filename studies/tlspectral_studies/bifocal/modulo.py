"""Modulo-7 so that it can be learned: a part of the 343 expressions, weight decay, many steps; the rest is held out.

400 steps on fresh draws, as for the other languages, leave most runs at chance. Here a pilot of `standard` alone
chooses rate and weight decay; if it does not learn the held-out expressions, no arm is trained.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.tables.schema import columns
from tlspectral_studies.bifocal.evolution import EvolutionSettings, evolve
from tlspectral_studies.bifocal.formal_languages import LanguageBatch, Modulo7
from tlspectral_studies.bifocal.language_runs import answer_loss, score_answers
from tlspectral_studies.bifocal.languages import REFERENCE
from tlspectral_studies.bifocal.llama import ARMS, LITERAL_ARM, LlamaConfig, SpectralLlama
from tlspectral_studies.bifocal.schedule import describe_tables
from tlspectral_studies.common.run_folder import RunFolder, finish_runs
from tlspectral_studies.common.seed_intervals import means_and_differences

describe_tables(
    "modulo",
    {
        "modulo_pilot": """
            learning_rate
            weight_decay | 1    | AdamW's, on the weights; spectral parameters have none.
            loss, accuracy, trained_loss
            chosen       | flag | Whether it has the highest held-out accuracy.
        """,
        "modulo_runs": """
            arm, seed, loss, accuracy, trained_loss
            learned_at | step | First measured step with a held-out accuracy of .9. NaN: none.
        """,
        "modulo": """
            arm
            mean | share | Mean over seeds of accuracy on held-out expressions.
            low, high, n, difference_mean, difference_low, difference_high
        """,
    },
    columns("""
        loss         | nat per answer | Mean cross-entropy of the sum over held-out expressions.
        accuracy     | share          | Share of held-out expressions whose sum has the largest logit; chance is 1/7.
        trained_loss | nat per answer | The loss on the trained expressions.
    """),
)


@dataclass(frozen=True)
class ModuloSchedule:
    """The experiment, fixed before it was run.

    Attributes:
        arms: what is compared, all at the rate and weight decay of the pilot.
        trained: expressions that are trained; the split is drawn by the seed.
        batch_size: of them per step, drawn without replacement.
        steps, warmup_steps: of every run, the pilot's too.
        rates, weight_decays: of the pilot.
        pilot_seed: of the pilot.
        learned: held-out accuracy from which the task counts as learned.
        seeds: of the runs that are reported.
        evaluate_every: steps between measurements of held-out accuracy.
    """

    arms: tuple[str, ...] = ("standard", "omega", "full", "literal")
    trained: int = 240
    batch_size: int = 80
    steps: int = 2000
    warmup_steps: int = 20
    rates: tuple[float, ...] = (1e-3, 3e-3)
    weight_decays: tuple[float, ...] = (0.1, 1.0)
    pilot_seed: int = 100
    learned: float = 0.9
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    evaluate_every: int = 100


FULL_MODULO = ModuloSchedule()
QUICK_MODULO = ModuloSchedule(
    arms=("standard", "literal"), steps=2, warmup_steps=1, rates=(1e-3,), weight_decays=(0.1,), learned=0.0,
    seeds=(0, 1), evaluate_every=1,
)  # fmt: skip


def modulo_experiment(folder: RunFolder, schedule: ModuloSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Run the pilot, and if it has learned the task every arm on every seed; compare with `standard`.

    Returns:
        `modulo_pilot`: a row per rate and weight decay. `modulo_runs`: a row per run. `modulo`: means over seeds of
        held-out accuracy and the paired difference to `standard`. The last two only if the pilot has learned the task.

    What it does not establish: that the frequencies found the modulus. Weight decay is on weights alone, so that gain
    and phase, which W_Q can take up, can still make a difference.
    """

    def make(runs: list[tuple[str, float, float, int]]) -> dict[Any, pd.DataFrame]:
        names = {run: "{}-{:g}-decay{:g}-seed{}".format(*run) for run in runs}
        work = {names[run]: (run[3], partial(train_modulo, schedule, *run, folder.device)) for run in runs}
        finished = finish_runs(folder, work, n_jobs=n_jobs)
        return {run: finished[names[run]]["measured"] for run in runs}

    grid = [(REFERENCE, r, d, schedule.pilot_seed) for r in schedule.rates for d in schedule.weight_decays]
    pilot = pd.DataFrame(
        {"learning_rate": run[1], "weight_decay": run[2], **_end(table)} for run, table in make(grid).items()
    )
    pilot["chosen"] = pilot.index == pilot.sort_values(["accuracy", "loss"], ascending=[False, True]).index[0]
    best = pilot.loc[pilot["chosen"]].iloc[0]
    if best["accuracy"] < schedule.learned:
        return {"modulo_pilot": pilot}
    where = (float(best["learning_rate"]), float(best["weight_decay"]))
    finished = make([(arm, *where, seed) for seed in schedule.seeds for arm in schedule.arms])
    runs = pd.DataFrame(
        {"arm": run[0], "seed": run[3], **_end(table), "learned_at": _learned_at(table, schedule.learned)}
        for run, table in finished.items()
    )
    table = means_and_differences(runs, [], "accuracy", reference=REFERENCE).rename(
        columns={"difference": "difference_mean"}
    )
    return {"modulo_pilot": pilot, "modulo_runs": runs, "modulo": table}


def train_modulo(
    schedule: ModuloSchedule, arm: str, rate: float, decay: float, seed: int, device: str = "cpu"
) -> dict[str, pd.DataFrame]:
    """Train one model on its part of the expressions; `measured`: `step`, held-out and trained loss and accuracy."""
    train, held_out = split_expressions(schedule.trained, seed)
    model = SpectralLlama(LlamaConfig(len(Modulo7.vocabulary)), {**ARMS, **LITERAL_ARM}[arm], seed=seed).to(device)
    stream = torch.Generator().manual_seed(10_000 + seed)
    measured = []

    def measure(step: int) -> None:
        on_trained = score_answers(model, train)
        found = {name: value for name, value in score_answers(model, held_out).items() if name != "tokens"}
        measured.append({"step": step, **found, "trained_loss": on_trained["loss"]})

    def batch_loss(step: int) -> Float[Tensor, ""]:
        if step % schedule.evaluate_every == 0:
            measure(step)
        rows = torch.randperm(schedule.trained, generator=stream)[: schedule.batch_size]
        return answer_loss(model, LanguageBatch(*(value[rows] for value in train)))

    settings = EvolutionSettings(
        steps=schedule.steps,
        learning_rate=rate,
        weight_decay=decay,
        warmup_steps=schedule.warmup_steps,
        log_every=schedule.steps,
    )
    evolution = evolve(model, batch_loss, settings)
    measure(schedule.steps)
    return {"measured": pd.DataFrame(measured), "trajectory": evolution.trajectory}


def split_expressions(trained: int, seed: int) -> tuple[LanguageBatch, LanguageBatch]:
    """All 343 expressions, in a random order of the seed: the first `trained`, and the rest."""
    numbers = torch.cartesian_prod(*[torch.arange(7)] * 3)  # 343 3
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(20_000 + seed))
    everything = Modulo7().of_numbers(numbers[order])
    parts = ([value[:trained] for value in everything], [value[trained:] for value in everything])
    return LanguageBatch(*parts[0]), LanguageBatch(*parts[1])


def _end(measured: pd.DataFrame) -> dict[str, float]:
    return {name: float(measured[name].iloc[-1]) for name in ("loss", "accuracy", "trained_loss")}


def _learned_at(measured: pd.DataFrame, learned: float) -> float:
    steps = measured.loc[measured["accuracy"] >= learned, "step"]
    return float(steps.iloc[0]) if len(steps) else float("nan")
