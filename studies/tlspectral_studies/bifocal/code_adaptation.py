"""BA's section 5.2: spectral parameters of a pretrained model, trained on source code while its weights stay frozen.

With frozen weights no weight takes up gain and phase: they scale and rotate M_t of a head. So the arm without omega,
named `placebo` as on the languages, can lower the loss: here it is a control for the frequencies alone. Frequencies are
learned as log shifts. Slow pairs are orders of magnitude below the fast ones: one step of omega itself would change
them by a multiple of their size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tlspectral.models.loading import load_model
from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import to_spectral
from tlspectral.tables.schema import columns
from tlspectral.tasks import MetricValue, paired_effect
from tlspectral_studies.bifocal.code_text import code_rows, source_files
from tlspectral_studies.bifocal.evolution import EvolutionSettings, evolve
from tlspectral_studies.bifocal.resonance import phase_drift
from tlspectral_studies.bifocal.schedule import describe_tables
from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.run_folder import RunFolder, finish_runs
from tlspectral_studies.common.seed_intervals import mean_by

CODE_ARMS = {"full": ("log_omega_shift", "gain", "phase"), "omega": ("log_omega_shift",), "placebo": ("gain", "phase")}
# With the weights trained too, as BA has it.
BACKBONE_ARMS = {"standard": (), "full": CODE_ARMS["full"]}

_ARM = columns("""
    arm | label | What is trained: log shifts of the frequencies (omega), gain and phase (placebo), all (full), or none
        |       | (standard); the weights too in the tables of fine-tuning.
""")
_LOSSES = """
    arm, step
    loss    | nat | Next-token cross-entropy, mean over held-out files; step 0 is the intact model.
    loss_se | nat | Standard error of loss over held-out files.
"""
_EFFECTS = """
    arm
    reference | label       | What the arm is compared with on the same files: the intact model, or another arm.
    value     | nat         | Held-out loss of the arm at the end less that of the reference, mean over files.
    value_se  | nat         | Standard error of value over files, paired.
    pvalue    | probability | Two-sided p of no difference, by flipping the signs of the files' differences.
    pvalue_floor? | probability | Smallest pvalue that differences of these sizes have with any signs.
"""
describe_tables(
    "source-code",
    {
        "code_losses": _LOSSES,
        "code_effects": _EFFECTS,
        "code_movement": """
            arm, layer, head, name, frequency
            omega_start | rad/token | Frequency of the pair before training: the model's own.
            omega
            log_ratio   | log ratio | log(omega / omega_start).
            gain, phase
        """,
        "code_by_frequency": """
            arm, frequency
            omega_start   | rad/token | Frequency of the pair before training; all are means over layers and heads.
            wavelength    | token     | 2 pi / omega_start.
            log_ratio     | log ratio | log(omega / omega_start) at the end.
            log_ratio_abs | log ratio | Its absolute value.
            log_gain      | log ratio | Logarithm of the absolute gain.
            log_gain_abs  | log ratio | Its absolute value.
            phase         | rad       | The phase.
            phase_abs     | rad       | The absolute phase.
        """,
        "code_phase_drift": "arm, step, layer, head, name, mean_abs, start_abs, drift, zigzag",
        "code_training": """
            arm, step
            loss | nat | Loss of the step's rows of code, before the step was taken.
        """,
    },
    _ARM,
)
describe_tables(
    "fine-tuning",
    {
        "backbone_losses": _LOSSES,
        "backbone_effects": _EFFECTS,
        "backbone_phase_drift": "arm, step, layer, head, name, mean_abs, start_abs, drift, zigzag",
    },
    _ARM,
)


@dataclass(frozen=True)
class CodeSchedule:
    """The experiment on code, fixed before it is run.

    Attributes:
        model: name for `load_model`, a model with a tokenizer.
        package: whose source is read.
        steps, batch_size, length: gradient steps, rows per step, tokens per row; every row is of another
            file while there are enough; then the same rows come again in the same order.
        train_files: files that training rows are taken from.
        held_out: held-out rows, each of a file of its own.
        evaluate_every: steps between held-out losses.
        learning_rate: of gain and phase; the log shift of omega has a tenth of it.
        warmup_steps: of linear warm-up.
        log_every: steps between records of the spectral parameters.
        seed: of the position of each row in its file.
        backbone: the weights are trained too, at `learning_rate`.
    """

    model: str = "smollm2-135m"
    package: str = "torch"
    steps: int = 250
    batch_size: int = 2
    length: int = 128
    train_files: int = 500
    held_out: int = 48
    evaluate_every: int = 50
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    log_every: int = 25
    seed: int = 0
    backbone: bool = False


FULL_CODE = CodeSchedule()
QUICK_CODE = CodeSchedule(
    steps=1, batch_size=1, length=8, train_files=1, held_out=2, evaluate_every=1, warmup_steps=1, log_every=1
)
FULL_BACKBONE = CodeSchedule(
    steps=40, evaluate_every=40, learning_rate=1e-4, warmup_steps=5, log_every=40, backbone=True
)
QUICK_BACKBONE = replace(QUICK_CODE, backbone=True)


def adapt(
    model: Any,
    learned: tuple[str, ...],
    train: Int64[Tensor, "rows pos"],
    held_out: Int64[Tensor, "held_out pos"],
    schedule: CodeSchedule,
) -> dict[str, pd.DataFrame]:
    """Train spectral parameters on rows of text, and the weights of a copy if the schedule says so.

    The model itself is not changed.

    Args:
        model: a TransformerBridge or HookedTransformer with rotary positions.
        learned: some of `log_omega_shift`, `gain`, `phase`, or none.
        train: rows; `schedule.batch_size` of them per step, in order, from the top again after the last.
        held_out: rows that are not trained on.
        schedule: how.

    Returns:
        `losses` and `trajectory` (of `evolve`) and `held_out` (`step, row, loss`: nats per token of each row after so
        many steps; step 0 is the intact model).
    """
    spectral = to_spectral(model, scope="head", log_omega=True, share_weights=not schedule.backbone)
    for name, parameter in spectral.spectral.named_parameters():
        parameter.requires_grad_(name.rsplit(".", 1)[-1] in learned)
    measured = []

    def measure(step: int) -> None:
        losses = row_losses(spectral, held_out)
        measured.append(pd.DataFrame({"step": step, "row": np.arange(len(losses)), "loss": losses}))

    def batch_loss(step: int) -> Float[Tensor, ""]:
        if step % schedule.evaluate_every == 0:
            measure(step)
        rows = torch.arange(step * schedule.batch_size, (step + 1) * schedule.batch_size) % len(train)
        return _token_losses(spectral, train[rows]).mean()

    settings = EvolutionSettings(
        steps=schedule.steps,
        learning_rate=schedule.learning_rate,
        warmup_steps=schedule.warmup_steps,
        log_every=schedule.log_every,
    )
    evolution = evolve(spectral, batch_loss, settings, frozen_backbone=not schedule.backbone)
    measure(schedule.steps)
    return {
        "losses": evolution.losses,
        "trajectory": evolution.trajectory,
        "held_out": pd.concat(measured, ignore_index=True),
    }


@torch.no_grad()
def row_losses(model: Any, rows: Int64[Tensor, "rows pos"]) -> Float64[np.ndarray, "rows"]:
    """Mean next-token cross-entropy of each row, in nats; two rows at a time."""
    losses = [_token_losses(model, rows[start : start + 2]).cpu().double().mean(1) for start in range(0, len(rows), 2)]
    return torch.cat(losses).numpy()


def code_experiment(
    folder: RunFolder, schedule: CodeSchedule, *, n_jobs: int = 1, load: Callable[[str], Any] | None = None
) -> dict[str, pd.DataFrame]:
    """Adapt the model to code in three arms on the same rows, and compare on files that were held out.

    Returns:
        `code_losses`: means over held-out files. `code_effects`: the paired difference of held-out loss at the end,
        against the intact model and against the other arms. `code_movement`: spectral parameters at the end, of every
        head. `code_by_frequency`: `by_frequency`. `code_phase_drift`: `phase_drift` at the end. `code_training`: loss
        per step.

    What it does not establish: that the model needed other frequencies. The files may have been in its training; one
    run per arm says nothing about the spread between runs; intervals are over held-out files.
    """
    finished = _finished(folder, schedule, CODE_ARMS, load, n_jobs=n_jobs)
    return {
        "code_losses": _over_rows(finished),
        "code_effects": _effects(finished, [("full", "placebo"), ("full", "omega"), ("omega", "placebo")]),
        "code_movement": (movement := _movement(finished)),
        "code_by_frequency": by_frequency(movement),
        "code_phase_drift": _phases(finished, schedule),
        "code_training": _stacked({arm: tables["losses"] for arm, tables in finished.items()}),
    }


def fine_tuning(
    folder: RunFolder, schedule: CodeSchedule, *, n_jobs: int = 1, load: Callable[[str], Any] | None = None
) -> dict[str, pd.DataFrame]:
    """Fine-tune all weights on code with fixed rotary positions and with learned ones, at equal steps and rate.

    Both arms are spectral copies, and in `standard` frequencies, gain and phase are not trained.

    Returns:
        `backbone_losses`, `backbone_effects`, `backbone_phase_drift`: as `code_losses` and so on of `code_experiment`.

    What it does not establish: the spread between runs, of which there is one per arm, or what longer training does.
    """
    finished = _finished(folder, schedule, BACKBONE_ARMS, load, n_jobs=n_jobs)
    return {
        "backbone_losses": _over_rows(finished),
        "backbone_effects": _effects(finished, [("full", "standard")]),
        "backbone_phase_drift": _phases({"full": finished["full"]}, schedule),
    }


def by_frequency(movement: pd.DataFrame) -> pd.DataFrame:
    """Average the changes of the parameters over layers and heads, frequency by frequency.

    Args:
        movement: `code_movement` of `code_experiment`.

    Returns:
        A row per arm and frequency; `log_ratio` is of omega against its start, `_abs` a mean of absolute values.
    """
    table = movement.assign(
        log_ratio_abs=movement["log_ratio"].abs(),
        log_gain=np.log(movement["gain"].abs()),
        phase_abs=movement["phase"].abs(),
        wavelength=2 * np.pi / movement["omega_start"],
    )
    table["log_gain_abs"] = table["log_gain"].abs()
    measures = ["omega_start", "wavelength", "log_ratio", "log_ratio_abs", "log_gain", "log_gain_abs"]
    return mean_by(table, ["arm", "frequency"], [*measures, "phase", "phase_abs"])


def _finished(
    folder: RunFolder,
    schedule: CodeSchedule,
    arms: dict[str, tuple[str, ...]],
    load: Callable[[str], Any] | None,
    *,
    n_jobs: int,
) -> dict[str, dict[str, pd.DataFrame]]:
    load = partial(load_model, device=folder.device) if load is None else load
    runs = {arm: (schedule.seed, partial(_adapt_arm, schedule, learned, load)) for arm, learned in arms.items()}
    return finish_runs(folder, runs, n_jobs=n_jobs)


def _phases(finished: dict[str, dict[str, pd.DataFrame]], schedule: CodeSchedule) -> pd.DataFrame:
    return _stacked(
        {
            arm: phase_drift(trajectory.loc[trajectory["step"].isin([0, schedule.steps])])
            for arm, tables in finished.items()
            for trajectory in [tables["trajectory"]]
        }
    )


def _adapt_arm(schedule: CodeSchedule, learned: tuple[str, ...], load: Callable[[str], Any]) -> dict[str, pd.DataFrame]:
    model = load(schedule.model)
    view = attention_view(model)
    files = source_files(schedule.package)
    amounts = {"train": min(schedule.train_files, schedule.steps * schedule.batch_size), "held_out": schedule.held_out}
    rows = {
        part: code_rows(
            model.tokenizer,
            files[part],
            amount,
            length=schedule.length,
            start_token=view.start_token,
            seed=schedule.seed,
        )
        for part, amount in amounts.items()
    }
    return adapt(model, learned, rows["train"], rows["held_out"], schedule)


def _token_losses(model: Any, rows: Int64[Tensor, "rows pos"]) -> Float[Tensor, "rows targets"]:
    (rows,) = to_device_of(model, rows)
    logits = model(rows, return_type="logits")  # rows pos d_vocab
    return F.cross_entropy(logits[:, :-1].mT, rows[:, 1:], reduction="none")


def _over_rows(by_arm: dict[str, dict[str, pd.DataFrame]]) -> pd.DataFrame:
    held_out = _stacked({arm: tables["held_out"] for arm, tables in by_arm.items()})
    return held_out.groupby(["arm", "step"], sort=False, as_index=False).agg(
        loss=("loss", "mean"), loss_se=("loss", "sem")
    )


def _effects(by_arm: dict[str, dict[str, pd.DataFrame]], compared: list[tuple[str, str]]) -> pd.DataFrame:
    ends = {"intact": _row_losses_at(by_arm["full"]["held_out"], 0)}
    for arm, tables in by_arm.items():
        ends[arm] = _row_losses_at(tables["held_out"], int(tables["held_out"]["step"].max()))
    pairs = [(arm, "intact") for arm in by_arm] + compared
    rows = []
    for arm, reference in pairs:
        effect = paired_effect(ends[arm], ends[reference])
        both = {"arm": arm, "reference": reference}
        tested = {"pvalue": effect.pvalue, "pvalue_floor": effect.floor}
        rows.append({**both, "value": effect.value, "value_se": effect.se, **tested})
    return pd.DataFrame(rows)


def _row_losses_at(held_out: pd.DataFrame, step: int) -> MetricValue:
    return MetricValue(held_out.loc[held_out["step"] == step].sort_values("row")["loss"].to_numpy(dtype=float))


def _movement(by_arm: dict[str, dict[str, pd.DataFrame]]) -> pd.DataFrame:
    keys = ["layer", "head", "name", "frequency"]
    tables = {}
    for arm, run in by_arm.items():
        steps = run["trajectory"]["step"]
        start = run["trajectory"].loc[steps == 0, [*keys, "omega"]].rename(columns={"omega": "omega_start"})
        table = start.merge(run["trajectory"][steps == steps.max()].drop(columns="step"), on=keys)
        tables[arm] = table.assign(log_ratio=np.log(table["omega"] / table["omega_start"]))
    return _stacked(tables)


def _stacked(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([table.assign(arm=arm) for arm, table in tables.items()], ignore_index=True)
