"""Learned frequencies beside those that practitioners use: a small Llama trained at 128 bytes and read at 256.

The model is `LlamaForCausalLM` of transformers, trained from scratch on bytes of source code, and so are the settings
that its fixed frequencies are read with: linear, dynamic (NTK) and YaRN scaling.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tlspectral.heads import analyze_heads
from tlspectral.models.loading import load_model
from tlspectral.positional import positional_symbolic
from tlspectral.spectral_rope import to_spectral
from tlspectral.stats import benjamini_hochberg
from tlspectral.tables.schema import columns
from tlspectral.tasks import MetricValue, paired_effect
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral_studies.bifocal.code_text import code_rows, source_files
from tlspectral_studies.bifocal.evolution import EvolutionSettings, evolve
from tlspectral_studies.bifocal.schedule import describe_tables
from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.run_folder import RunFolder, finish_runs
from tlspectral_studies.common.seed_intervals import mean_by, means_and_differences, t_interval

START = 256  # the token before the bytes
# Rate of the frequencies as a share of the weights' rate, for arms that learn them.
OMEGA_SHARES = {"fixed": None, "learned": 0.1, "learned_fast": 1.0}
SCALINGS = ("linear", "dynamic", "yarn")
REFERENCE = "fixed"
_SHIFTS = ["omega_shift", "log_shift"]
_MEASURES = ("rope_imag_frac", "D_head", "s_pos")

describe_tables(
    "longer-context",
    {
        "extension_rates": """
            arm, learning_rate
            loss   | nat per byte | Mean held-out loss over the tuning seeds.
            chosen | flag         | Whether the rate has the lowest loss of its arm.
        """,
        "extension_runs": """
            seed, arm, adapted, position
            loss | nat per byte | Mean next-byte cross-entropy on held-out files.
        """,
        "extension": """
            adapted, arm, loss, low, high, n, difference, difference_low, difference_high
            positions | label | Which bins: all, within the trained length (trained), or beyond it.
        """,
        "extension_positions": """
            adapted, position, arm, loss, low, high, n, difference, difference_low, difference_high
        """,
        "extension_heads": """
            layer, head, name, rope_imag_frac, D_head
            s_pos       | score     | Positional score, mean over held-out prompts of four blocks of 16 bytes.
            step
            omega_shift | rad/token | Root mean square, over the head's pairs, of the change of omega.
            log_shift   | log ratio | The same of the change of log omega.
            arm, seed
        """,
        "extension_joined": """
            arm
            move    | label       | Which move of a head's frequencies: omega_shift or log_shift.
            measure | label       | Whose absolute change over training is compared: rope_imag_frac, D_head or s_pos.
            mean    | correlation | Mean over seeds of Spearman's correlation of move and change over heads.
            low, high, n
            pvalue  | probability | Two-sided p that the mean is 0, by flipping the signs of layers and seeds.
            pvalue_floor? | probability | Smallest pvalue that values of these sizes have with any signs.
            control | correlation | mean, with the change of the same head in the arm fixed.
            q       | probability | pvalue with the false discovery rate over all rows.
        """,
    },
    columns("""
        arm        | label        | Frequencies: fixed; fixed and read with a rope setting of transformers, factor 2
                   |              | (linear, dynamic, yarn); learned at a tenth of the weights' rate (learned) or at
                   |              | that rate (learned_fast).
        adapted    | flag         | Whether the model was then trained for a few steps at twice the length.
        position   | token        | First position of the bin of predicted bytes.
        loss       | nat per byte | Mean over seeds of the mean next-byte cross-entropy on held-out files.
        difference | nat per byte | Mean over seeds of loss less that of the arm fixed, on the same seed; NaN for it.
    """),
)


@dataclass(frozen=True)
class ExtensionSchedule:
    """The experiment, fixed before it was run.

    Attributes:
        package: whose source is read, split by file.
        layers, width, heads, mlp: sizes of the model.
        steps, batch_size, length: of the training.
        warmup_steps: of the training.
        rates: one grid; `fixed` and `learned` are trained at each, and `learned_fast` takes the rate of `learned`.
        tuning_seeds: mean loss at `length` over them chooses an arm's rate.
        seeds: of the runs that are reported: weights and rows, the same for all arms.
        held_out: files that one row each is read of, at twice the length.
        adapt_steps, adapt_rate: steps at twice the length, of half as many rows, that every arm is then given; the rate
            is the same for all.
        bin: positions of one bin of losses.
        prompts: held-out rows that positional scores are measured on.
    """

    package: str = "torch"
    layers: int = 2
    width: int = 128
    heads: int = 4
    mlp: int = 344
    steps: int = 800
    batch_size: int = 8
    length: int = 128
    warmup_steps: int = 40
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    tuning_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    held_out: int = 192
    adapt_steps: int = 40
    adapt_rate: float = 1e-3
    bin: int = 32
    prompts: int = 8


FULL_EXTENSION = ExtensionSchedule()
QUICK_EXTENSION = ExtensionSchedule(
    package="torch.nn", width=16, heads=2, mlp=24, steps=2, batch_size=2, length=128, warmup_steps=1, rates=(1e-3,),
    tuning_seeds=(100,), seeds=(0,), held_out=2, adapt_steps=1, bin=64, prompts=1,
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Bytes of the training files in one piece, and a row of each held-out file, [files, twice the length]."""

    train: UInt8[Tensor, "bytes"]
    held_out: Int64[Tensor, "files pos"]


def extension_experiment(folder: RunFolder, schedule: ExtensionSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Train the arms, read them at twice the length, adapt them there for a few steps, and read them again.

    Returns:
        `extension_rates`: the tuning. `extension_runs`: a row per run and bin of positions; `arm` is also a scaling of
        the fixed frequencies. `extension`: means over seeds of all bins, and of those within (`trained`) and beyond the
        trained length, with the paired difference to `fixed`. `extension_positions`: the same by position.
        `extension_heads`: measures of every head, and how far its frequencies have moved. `extension_joined`: `joined`.

    What it does not establish: anything of larger models, longer training or other lengths.
    """

    def make(runs: list[tuple[str, float, int]], *, reported: bool) -> dict[tuple[str, float, int], Any]:
        names = {run: f"{'' if reported else 'tuning-'}{run[0]}-{run[1]:g}-seed{run[2]}" for run in runs}
        work = {names[run]: (run[2], partial(train_and_read, schedule, *run, reported)) for run in runs}
        finished = finish_runs(folder, work, n_jobs=n_jobs)
        return {run: finished[names[run]] for run in runs}

    tuned = [(arm, r, s) for s in schedule.tuning_seeds for arm in ("fixed", "learned") for r in schedule.rates]
    rates = _chosen(make(tuned, reported=False))
    chosen = rates[rates["chosen"]].set_index("arm")["learning_rate"].astype(float).to_dict()
    chosen["learned_fast"] = chosen["learned"]
    runs = make([(arm, chosen[arm], s) for s in schedule.seeds for arm in OMEGA_SHARES], reported=True)
    readings = pd.concat([tables["readings"].assign(seed=run[2]) for run, tables in runs.items()], ignore_index=True)
    heads = pd.concat([tables["heads"].assign(arm=run[0], seed=run[2]) for run, tables in runs.items()])
    return {
        "extension_rates": rates,
        "extension_runs": readings,
        "extension": _ranges(readings, schedule.length),
        "extension_positions": _loss_compared(readings, ["adapted", "position"]),
        "extension_heads": heads.reset_index(drop=True),
        "extension_joined": joined(heads),
    }


@lru_cache(1)
def read_texts(schedule: ExtensionSchedule) -> Texts:
    """Read the package's source."""
    files = source_files(schedule.package)
    train = b"\n".join(path.read_bytes() for path in files["train"])
    held_out = code_rows(_bytes, files["held_out"], schedule.held_out, length=2 * schedule.length, start_token=START)
    return Texts(torch.from_numpy(np.frombuffer(train, dtype=np.uint8).copy()), held_out)


def train_and_read(
    schedule: ExtensionSchedule, arm: str, rate: float, seed: int, reported: bool
) -> dict[str, pd.DataFrame]:
    """Train one model. Reported ones are read at twice the length, before and after a few steps there.

    Returns:
        `losses` and `trajectory` of `evolve`, `readings` (`arm, adapted, position, loss`) and `heads` (`step, layer,
        head` and the measures); of a tuning run `readings` at the trained length alone.
    """
    texts = read_texts(schedule)
    plain = new_model(schedule, seed)
    model = plain if OMEGA_SHARES[arm] is None else learnable(plain)
    stream = torch.Generator().manual_seed(10_000 + seed)
    heads = [head_measures(model, schedule, texts).assign(step=0)] if reported else []
    evolution = _train(model, schedule, arm, rate, texts, stream, schedule.steps, schedule.length)
    tables = {"losses": evolution.losses, "trajectory": evolution.trajectory}
    if not reported:
        return {**tables, "readings": _reading(model, texts.held_out[:, : schedule.length], schedule.bin)}
    heads.append(head_measures(model, schedule, texts).assign(step=schedule.steps))
    readers = {arm: model} if arm != REFERENCE else {arm: model, **{s: scaled(model, s, schedule) for s in SCALINGS}}
    readings = []
    for name, reader in readers.items():
        readings.append(_reading(reader, texts.held_out, schedule.bin).assign(arm=name, adapted=False))
    for name, reader in readers.items():
        stream = torch.Generator().manual_seed(20_000 + seed)
        _train(reader, schedule, arm, schedule.adapt_rate, texts, stream, schedule.adapt_steps, 2 * schedule.length)
        readings.append(_reading(reader, texts.held_out, schedule.bin).assign(arm=name, adapted=True))
    moved = pd.concat(heads, ignore_index=True).merge(_moves(evolution.trajectory), how="left")
    return {**tables, "readings": pd.concat(readings, ignore_index=True), "heads": moved}


def new_model(schedule: ExtensionSchedule, seed: int) -> LlamaForCausalLM:
    """A model before training; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=START + 1,
        hidden_size=schedule.width,
        intermediate_size=schedule.mlp,
        num_hidden_layers=schedule.layers,
        num_attention_heads=schedule.heads,
        max_position_embeddings=schedule.length,
        bos_token_id=START,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def learnable(plain: LlamaForCausalLM) -> Any:
    """A copy whose weights and log frequencies, per head, ask for a gradient; gain and phase stay as they are."""
    spectral = to_spectral(plain, share_weights=False)
    for module in spectral.spectral.values():
        module.gain.requires_grad_(False)
        module.phase.requires_grad_(False)
    return spectral


def scaled(model: LlamaForCausalLM, scaling: str, schedule: ExtensionSchedule) -> LlamaForCausalLM:
    """The model with the same weights and a rope setting of transformers, factor 2."""
    config = LlamaConfig(**model.config.to_dict())
    settings: Any = {
        "rope_type": scaling,
        "rope_theta": 10000.0,
        "factor": 2.0,
        **({"original_max_position_embeddings": schedule.length} if scaling == "yarn" else {}),
    }
    config.rope_parameters = settings
    reader = LlamaForCausalLM(config)
    reader.load_state_dict(model.state_dict())
    return reader


def head_measures(model: Any, schedule: ExtensionSchedule, texts: Texts) -> pd.DataFrame:
    """`layer, head, rope_imag_frac, D_head, s_pos`; the last on prompts of four blocks of 16 bytes each."""
    bridge = load_model(model)
    table = analyze_heads(bridge, null_draws=2, detectors=False)
    prompts = [BlockPrompt(row[:16], row[16:80].split(16), row[80:96]) for row in texts.held_out[: schedule.prompts]]
    scores = positional_symbolic(bridge, prompts)[["layer", "head", "s_pos"]]
    return table[["layer", "head", *_MEASURES[:2]]].merge(scores, on=["layer", "head"])


def joined(heads: pd.DataFrame) -> pd.DataFrame:
    """Correlate how far a head's frequencies moved with how far another paper's measure of that head moved.

    Spearman's correlation over the heads of a layer, then its mean over layers and seeds with a t interval. `control`
    is the same with the measure's move in the `fixed` arm: the head of the same seed, whose frequencies cannot move.

    Args:
        heads: `extension_heads` of `extension_experiment`.

    Returns:
        A row per arm, move and measure: the mean with its t interval, `pvalue` (signs flipped), `control` and `q`
        (Benjamini and Hochberg over all rows).

    What it does not establish: that one moves the other: both may follow a head's gradient.
    """
    key = ["seed", "layer", "head"]
    steps = heads["step"]
    ends = heads[steps == steps.max()].merge(heads[steps == steps.min()], on=[*key, "arm"], suffixes=("", "_start"))
    for measure in _MEASURES:
        ends[measure] = (ends[measure] - ends[f"{measure}_start"]).abs()
    pairs = ends.merge(ends.loc[ends["arm"] == REFERENCE, [*key, *_MEASURES]], on=key, suffixes=("", "_fixed"))
    rows = []
    for arm in ("learned", "learned_fast"):
        groups = [group for _, group in pairs[pairs["arm"] == arm].groupby(["seed", "layer"])]
        for move, measure in itertools.product(_SHIFTS, _MEASURES):
            found, control = (
                pd.Series([group[move].corr(group[name], method="spearman") for group in groups])
                for name in (measure, f"{measure}_fixed")
            )
            effect = paired_effect(MetricValue(found.to_numpy()), MetricValue(np.zeros(len(found))))
            tested = {"pvalue": effect.pvalue, "pvalue_floor": effect.floor}
            row = {"arm": arm, "move": move, "measure": measure, **t_interval(found), **tested}
            rows.append({**row, "control": float(control.mean())})
    table = pd.DataFrame(rows)
    return table.assign(q=benjamini_hochberg(table["pvalue"]).q)


def _train(
    model: Any, schedule: ExtensionSchedule, arm: str, rate: float, texts: Texts, stream: Any, steps: int, length: int
) -> Any:
    rows = schedule.batch_size * schedule.length // length

    def batch_loss(_: int) -> Float[Tensor, ""]:
        first = torch.randint(0, len(texts.train) - length, (rows, 1), generator=stream)
        batch = texts.train[first + torch.arange(length)].long()  # rows pos
        batch[:, 0] = START
        return _token_losses(model, batch).mean()

    settings = EvolutionSettings(
        steps=steps,
        learning_rate=rate,
        omega_share=OMEGA_SHARES[arm] or 0.0,
        warmup_steps=min(schedule.warmup_steps, steps // 4),
        log_every=steps,
    )
    return evolve(model, batch_loss, settings)


def _token_losses(model: Any, rows: Int64[Tensor, "rows pos"]) -> Float[Tensor, "rows targets"]:
    (rows,) = to_device_of(model, rows)
    logits = model(input_ids=rows, use_cache=False).logits  # rows pos d_vocab
    return F.cross_entropy(logits[:, :-1].mT, rows[:, 1:], reduction="none")


@torch.no_grad()
def _reading(model: Any, rows: Int64[Tensor, "rows pos"], width: int) -> pd.DataFrame:
    losses = torch.cat([_token_losses(model, part).cpu().double() for part in rows.split(16)]).mean(0)  # targets
    position = torch.arange(1, rows.shape[1])
    table = pd.DataFrame({"position": (position // width * width).numpy(), "loss": losses.numpy()})
    return mean_by(table, ["position"], ["loss"])


def _moves(trajectory: pd.DataFrame) -> pd.DataFrame:
    """Root mean square, over a head's pairs, of what its frequencies have moved by: `step, layer, head` and both."""
    key = ["layer", "head", "frequency"]
    start = trajectory.loc[trajectory["step"] == 0, [*key, "omega"]].rename(columns={"omega": "start"})
    table = trajectory.merge(start, on=key)
    table["omega_shift"] = (table["omega"] - table["start"]) ** 2
    table["log_shift"] = np.log(table["omega"] / table["start"]) ** 2
    means = mean_by(table, ["step", "layer", "head"], _SHIFTS)
    means[_SHIFTS] = np.sqrt(means[_SHIFTS])
    return means


def _chosen(tuning: dict[tuple[str, float, int], dict[str, pd.DataFrame]]) -> pd.DataFrame:
    table = pd.DataFrame(
        {"arm": run[0], "learning_rate": run[1], "loss": tables["readings"]["loss"].mean()}
        for run, tables in tuning.items()
    )
    means = mean_by(table, ["arm", "learning_rate"], ["loss"])
    return means.assign(chosen=means.index.isin(means.sort_values("loss").drop_duplicates("arm").index))


def _ranges(readings: pd.DataFrame, length: int) -> pd.DataFrame:
    """Means over bins, all and those within and beyond the trained length, compared."""
    tables = []
    for name, rows in {
        "all": readings["position"] >= 0,
        "trained": readings["position"] < length,
        "beyond": readings["position"] >= length,
    }.items():
        means = mean_by(readings.loc[rows], ["seed", "arm", "adapted"], ["loss"])
        tables.append(_loss_compared(means, ["adapted"]).assign(positions=name))
    return pd.concat(tables, ignore_index=True)


def _loss_compared(readings: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return means_and_differences(readings, by, "loss", reference=REFERENCE).rename(columns={"mean": "loss"})


def _bytes(text: str, **_: Any) -> SimpleNamespace:
    """A tokenizer whose tokens are bytes."""
    return SimpleNamespace(input_ids=list(text.encode()))
