"""BA's resonance (sections 2.2 and 5.3): does a frequency move to where cos(Omega N) is 1 at the task's distances N?

Every slow pair has cos(Omega N) near 1 without learning, so the largest cosine over all pairs starts near 1 and cannot
grow. It is taken over two sets of pairs: `all`, and `turning`, those that start with at least half a rotation over the
longest distance. A gain is compared with that of moves of the same size with random signs: if resonance is learned, it
exceeds them.
"""

import math

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.tables.schema import columns
from tlspectral_studies.bifocal.language_runs import LanguageRun, finish_language_runs, tune_and_train
from tlspectral_studies.bifocal.languages import stacked
from tlspectral_studies.bifocal.llama import ARMS, PHASE_NOISE_ARMS
from tlspectral_studies.bifocal.schedule import LanguageSchedule, describe_tables
from tlspectral_studies.common.run_folder import RunFolder
from tlspectral_studies.common.seed_intervals import intervals, mean_by

PAIR_SETS = ("all", "turning")
_ARMS = {**ARMS, **PHASE_NOISE_ARMS}
_DRAWS = 1000

describe_tables(
    "resonance",
    {
        "trajectories": "language, arm, seed, step, layer, head, name, frequency, omega, gain, phase",
        "resonance_steps": """
            language, arm, pairs, step
            resonance | cosine | Mean over distances N of the largest cos(omega N) over pairs; mean over runs and heads.
        """,
        "phase_steps": "language, arm, step, mean_abs, start_abs, drift",
        "resonance_runs": """
            language, arm, seed, layer, head, name, pairs
            start       | cosine | Mean over distances N of the largest cos(omega N) over pairs, before training.
            end         | cosine | The same after training.
            gain        | cosine | end - start.
            random_mean | cosine | Mean gain of moves of the same size with random signs.
            random_sd   | cosine | Standard deviation of the gain of those moves.
            excess      | cosine | gain - random_mean.
            percentile  | share  | Share of those moves with at most this gain. NaN where nothing moved.
        """,
        "resonance": """
            language, arm, pairs
            mean | cosine | Mean over seeds of measure, a mean over heads.
            low, high, n, measure
        """,
        "phase_drift_runs": "language, arm, seed, step, layer, head, name, mean_abs, start_abs, drift, zigzag",
        "phase_drift": """
            language, arm
            mean | rad, or share for zigzag | Mean over seeds of measure, a mean over heads.
            low, high, n, measure
        """,
    },
    columns("""
        pairs   | label | Which rotary pairs count: all, or turning, by half a rotation over the longest distance.
        measure | label | Which number of the table per run the row is about.
    """),
)


def resonance(
    omega: Float64[np.ndarray, "rows pairs"], distances: Float64[np.ndarray, "distances"]
) -> Float64[np.ndarray, "rows"]:
    """Mean over distances N of the largest cos(omega N) over the pairs; 1 if some pair is back at its start at each N.

    Args:
        omega: radians per token.
        distances: N, tokens.
    """
    cosines = np.cos(omega[:, None, :] * distances[:, None])  # rows distances pairs
    return cosines.max(-1).mean(-1)


def resonance_over_training(trajectory: pd.DataFrame, distances: list[int]) -> pd.DataFrame:
    """Resonance after each recorded step: `step, layer, head, pairs, resonance`.

    Args:
        trajectory: of `evolve`, of one run.
        distances: tokens between a query and what it has to find; 0, where every cosine is 1, is left out.
    """
    reach = _positive(distances)
    tables = []
    for _, head in trajectory.groupby(["layer", "head"]):
        omega = head.pivot_table(index=["step", "layer", "head"], columns="frequency", values="omega").sort_index()
        values = omega.to_numpy()  # steps pairs; the first step is the start
        for pairs in PAIR_SETS:
            mask = _pair_mask(values[0], reach, pairs)
            table = omega.index.to_frame(index=False).assign(pairs=pairs)
            tables.append(table.assign(resonance=resonance(values[:, mask], reach)))
    return pd.concat(tables, ignore_index=True)


def resonance_gain(
    trajectory: pd.DataFrame, distances: list[int], *, draws: int = _DRAWS, seed: int = 0
) -> pd.DataFrame:
    """Compute the gain of resonance over training of each head, and that of moves of the same size with random signs.

    Args:
        trajectory: of `evolve`, of one run.
        distances: as in `resonance_over_training`.
        draws: random moves: each pair moves as far as it did, up or down with equal chance.
        seed: of the draws.

    Returns:
        `layer, head, pairs, start, end, gain`, `random_mean` and `random_sd` of the gain over the draws,
        `excess` = gain - random_mean, `percentile` (share of draws with at most this gain, NaN where nothing moved).

    What it does not establish: that resonance helps. A gain may come with any drift towards slower frequencies.
    """
    reach = _positive(distances)
    steps = trajectory["step"]
    rows = []
    for key, head in trajectory[steps.isin([steps.min(), steps.max()])].groupby(["layer", "head"]):
        assert isinstance(key, tuple)
        omega = head.pivot_table(index="step", columns="frequency", values="omega").sort_index().to_numpy()
        start, end = omega[0], omega[-1]
        generator = np.random.default_rng([seed, *map(int, key)])
        moved = start + (end - start) * generator.choice([-1.0, 1.0], size=(draws, len(start)))  # draws pairs
        for pairs in PAIR_SETS:
            mask = _pair_mask(start, reach, pairs)
            before, after = resonance(np.stack([start, end])[:, mask], reach).tolist()
            random = resonance(moved[:, mask], reach) - before
            gain = after - before
            rows.append(
                {
                    "layer": int(key[0]),
                    "head": int(key[1]),
                    "pairs": pairs,
                    "start": before,
                    "end": after,
                    "gain": gain,
                    "random_mean": float(random.mean()),
                    "random_sd": float(random.std()),
                    "excess": gain - float(random.mean()),
                    "percentile": float((random <= gain).mean()) if (start != end).any() else math.nan,
                }
            )
    return pd.DataFrame(rows)


def phase_drift(trajectory: pd.DataFrame) -> pd.DataFrame:
    """Measure how far phases are from 0 and from their start, after each recorded step.

    Args:
        trajectory: of `evolve`, of one run.

    Returns:
        `step, layer, head`; `mean_abs` (BA's "mean shift", radians), `start_abs` (the same of the start), `drift` (mean
        distance from the start), `zigzag` (share of neighbouring increments over frequency with opposite signs;
        independent noise has 2/3; NaN where phases are equal).

    What it does not establish: learning. A phase that cancels in every score drifts too, on rounding noise that Adam
    scales up.
    """
    rows = []
    for key, head in trajectory.groupby(["layer", "head"]):
        assert isinstance(key, tuple)
        phase = head.pivot_table(index="step", columns="frequency", values="phase").sort_index()
        start = phase.to_numpy()[0]
        for step, values in zip(phase.index, phase.to_numpy(), strict=True):
            increments = np.diff(values)
            products = increments[:-1] * increments[1:]
            rows.append(
                {
                    "step": int(step),
                    "layer": int(key[0]),
                    "head": int(key[1]),
                    "mean_abs": float(np.abs(values).mean()),
                    "start_abs": float(np.abs(start).mean()),
                    "drift": float(np.abs(values - start).mean()),
                    "zigzag": float((products < 0).mean()) if np.abs(products).any() else math.nan,
                }
            )
    return pd.DataFrame(rows).sort_values(["step", "layer", "head"], ignore_index=True)


def resonance_experiment(folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Resonance and phase drift of the models of `languages`, and of two arms that start with BA's phase noise.

    The noisy arms run at the learning rate that was chosen for `full`.

    Returns:
        `trajectories`: of every run. `resonance_steps`, `phase_steps`: `resonance_over_training` and `phase_drift`,
        means over runs, layers and heads. `resonance_runs`, `phase_drift_runs`: `resonance_gain`, and the last step of
        `phase_drift`, per run and head; heads that an arm leaves geometric and arms that learn no phase are left out.
        `resonance`, `phase_drift`: their means over heads, with 95 % t intervals over seeds.
    """
    rates, runs = tune_and_train(folder, schedule, list(ARMS), n_jobs=n_jobs)
    chosen = rates[rates["chosen"] & (rates["arm"] == "full")].set_index("language")["learning_rate"]
    noisy = [
        LanguageRun(plan.language.name, arm, float(chosen[plan.language.name]), seed)
        for plan in schedule.plans
        for arm in PHASE_NOISE_ARMS
        for seed in schedule.seeds
    ]
    runs |= finish_language_runs(folder, schedule, noisy, n_jobs=n_jobs)
    gains, drifts, resonances, phases = {}, {}, {}, {}
    for run, tables in runs.items():
        trajectory = _spectral_heads(run.arm, tables["trajectory"])
        if not len(trajectory):
            continue
        distances = list(schedule.plan(run.language).language.distances)
        gains[run] = {"gain": resonance_gain(trajectory, distances, seed=run.seed)}
        resonances[run] = {"resonance": resonance_over_training(trajectory, distances)}
        if "phase" in _ARMS[run.arm].learned:
            drift = phase_drift(trajectory)
            phases[run] = {"phase": drift}
            drifts[run] = {"drift": drift[drift["step"] == drift["step"].max()]}
    gain, drift = stacked(gains, "gain"), stacked(drifts, "drift")
    arm = ["language", "arm"]
    return {
        "trajectories": stacked(runs, "trajectory"),
        "resonance_steps": mean_by(stacked(resonances, "resonance"), [*arm, "pairs", "step"], ["resonance"]),
        "phase_steps": mean_by(stacked(phases, "phase"), [*arm, "step"], ["mean_abs", "start_abs", "drift"]),
        "resonance_runs": gain,
        "resonance": _over_seeds(gain, ["language", "arm", "pairs"], ["gain", "excess"]),
        "phase_drift_runs": drift,
        "phase_drift": _over_seeds(drift, ["language", "arm"], ["mean_abs", "start_abs", "drift", "zigzag"]),
    }


def _spectral_heads(arm: str, trajectory: pd.DataFrame) -> pd.DataFrame:
    """Leave out the heads that the arm leaves geometric."""
    if not _ARMS[arm].half_geometric:
        return trajectory
    return trajectory.loc[trajectory["head"] <= trajectory["head"].max() // 2]


def _over_seeds(table: pd.DataFrame, by: list[str], measures: list[str]) -> pd.DataFrame:
    by_seed = mean_by(table, [*by, "seed"], measures)
    tables = [intervals(by_seed, by, measure).assign(measure=measure) for measure in measures]
    return pd.concat(tables, ignore_index=True)


def _positive(distances: list[int]) -> Float64[np.ndarray, "distances"]:
    reach = np.asarray([distance for distance in distances if distance > 0], dtype=float)
    if not len(reach):
        raise ValueError(f"distances={distances}: give at least one above 0")
    return reach


def _pair_mask(
    start: Float64[np.ndarray, "pairs"], distances: Float64[np.ndarray, "distances"], pairs: str
) -> np.ndarray:
    return np.ones(len(start), dtype=bool) if pairs == "all" else np.abs(start) * distances.max() >= math.pi
