"""The grid of constrained training: one resumable cell per arm and seed, and the tables made from them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from tlspectral.tables import write_table
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.run_folder import finish_runs, open_run_folder
from tlspectral_studies.common.saved_training import SavedTraining
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS
from tlspectral_studies.fingerprint.constrained.cell import train_cell
from tlspectral_studies.fingerprint.constrained.formation import (
    FORMATION,
    FORMATION_TESTS,
    WRITTEN,
    formation,
    formation_tests,
)
from tlspectral_studies.fingerprint.constrained.presets import ARMS, PRESETS, Arm, Preset
from tlspectral_studies.fingerprint.constrained.rerouting import REROUTING, rerouting
from tlspectral_studies.fingerprint.constrained.saved_cells import cell_name, saved_cell
from tlspectral_studies.fingerprint.published import CONSTRAINED

_columns = partial(columns, shared=(*CONSTRAINED, *RUN_COLUMNS))


GRID = {
    "evaluations": Schema(
        "constrained_grid.evaluations",
        _columns("""
            arm, seed, step
            loss | nat | Cross-entropy over all targets of the held-out sequences.
            ce_pred, ce_unpred, prev_best, ind_best, penalty
        """),
        f"{WRITTEN}evaluations.parquet",
    ),
    "heads": Schema(
        "constrained_grid.heads",
        _columns("""
            arm, seed, step, layer, head, name, prev, ind, dir_frac, D_head, rope_imag_frac, dir_frac_raw,
            D_head_raw, rope_imag_frac_raw
        """),
        f"{WRITTEN}heads.parquet; `previous_token_heads` takes rows of it",
    ),
    "kernels": Schema(
        "constrained_grid.kernels",
        _columns("arm, seed, step, layer, head, name, offset, score"),
        f"{WRITTEN}kernels.parquet",
    ),
    "formation": FORMATION,
    "table4": FORMATION_TESTS,
    "rerouting": REROUTING,
}


def constrained_grid(
    output: Path,
    preset: str | Preset = "quick",
    *,
    arms: Sequence[str | Arm] = tuple(ARMS),
    seeds: int | Sequence[int] = 5,
    until: int | None = None,
    n_jobs: int = 1,
    device: str = "cpu",
    command: str = "",
) -> dict[str, pd.DataFrame]:
    """Train every arm with every seed, or finish a grid that was interrupted, and write its tables (FP section 10).

    A cell is an arm with a seed. Its tables are kept in the folder `cells` of `output` as soon as it is finished, and
    every `preset.save_every` steps its weights, optimizer and measurements, so that a grid which is stopped at any
    moment goes on inside its cells and gives the tables it would have given. `cell_model` and `cell_checkpoints` give
    the trained models back. More arms or seeds can be added to a folder later.

    Args:
        output: folder for cells and tables.
        preset: `"quick"`, `"paper"` (FP's own sizes: many hours), or a `Preset`.
        arms: names of `ARMS`, or an `Arm` with a penalty or initial weights of one's own: give one that you changed a
            new name. Cells are kept with a digest of such functions, of what they close over and of what they call.
        seeds: how many, 0, 1, ..., or which. With one there is nothing to compare: what is computed over seeds is NaN.
        until: train no cell further than this step in this call; a later call goes on from there. The tables are then
            of what there is, and the verdict of a contrast with unfinished cells is `open`. None: to the end.
        n_jobs: workers among which cells are shared out, by joblib (processes with one thread each) or whatever
            `joblib.parallel_config` says, Dask included. The tables do not depend on it.
        device: where the cells are trained; the data are the same on every device, the rounding is not.
        command: recorded in the tables' `attrs`.

    Returns:
        The tables, which are also written to `output` as parquet files of these names: `evaluations`, `heads` and
        `kernels` (see `CellRun`), `formation`, `table4` (of `formation_tests`: a row where both arms of a contrast are
        there), `rerouting`.

    Raises:
        ValueError: an unknown preset or arm, an arm or a seed that is given twice, an arm with the name of another
            one, no seeds, or `until` before the first step.
        IncompatibleCheckpoint: the folder's cells were made with other settings, another version of torch, on another
            kind of device, or as another arm of the same name; or the state of a cell is damaged.

    What it does not establish: what the constraints cost a larger model, another task, or another optimiser.
    """
    preset, chosen, chosen_seeds = _preset(preset), _arms(arms), _seeds(seeds)
    if until is not None and until < 1:
        raise ValueError(f"until={until}: name a step after the start, of {preset.training.steps}")
    folder = open_run_folder(output / "cells", preset.settings(), command=command, device=device)
    runs = {
        cell_name(arm, seed): (
            seed,
            partial(_cell_tables, preset, arm, seed, saved_cell(folder.parts, arm, seed), until, device),
        )
        # Seeds outside, so that an unfinished grid has some of each arm.
        for seed in chosen_seeds
        for arm in chosen
    }
    to_the_end = until is None or until >= preset.training.steps
    cells = finish_runs(folder, runs, store=to_the_end, n_jobs=n_jobs)
    order = {arm.name: index for index, arm in enumerate(chosen)}
    tables = {}
    for name in ("evaluations", "heads", "kernels"):
        joined = pd.concat([cells[run][name] for run in runs])
        tables[name] = joined.sort_values(
            ["arm", "seed"], key=partial(_in_grid_order, order), kind="stable", ignore_index=True
        )
    tables["formation"] = formation(tables["evaluations"], vocabulary=preset.task.vocabulary)
    tables["table4"] = formation_tests(tables["formation"], finished=_finished(tables["formation"], preset))
    tables["rerouting"] = rerouting(tables["heads"], tables["kernels"])
    attrs = {
        **folder.provenance,
        "preset": preset.settings(),
        "arms": {arm.name: arm.settings() for arm in chosen},
        "seeds": chosen_seeds,
    }
    tables = {name: GRID[name].frame(table, attrs) for name, table in tables.items()}
    for name, table in tables.items():
        write_table(table, output / f"{name}.parquet")
    return tables


def _cell_tables(
    preset: Preset, arm: Arm, seed: int, saved: SavedTraining, until: int | None, device: str
) -> dict[str, pd.DataFrame]:
    return train_cell(preset, arm, seed, saved=saved, until=until, device=device).tables


def _finished(formation: pd.DataFrame, preset: Preset) -> pd.Series:
    """Whether each run went to its end: all steps, or those after formation."""
    return formation["last_step"] >= formation["formed_both"].map(preset.last_step)


def _in_grid_order(order: dict[str, int], column: pd.Series) -> pd.Series:
    """Sort key: arms by their index in the grid, numbers as they are."""
    return column.map(order) if column.name == "arm" else column


def _preset(preset: str | Preset) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"{preset!r} is no preset; there are {', '.join(PRESETS)}")
    return PRESETS[preset]


def _arms(arms: Sequence[str | Arm]) -> list[Arm]:
    chosen: list[Arm] = []
    for arm in arms:
        if isinstance(arm, str):
            if arm not in ARMS:
                raise ValueError(f"{arm!r} is no arm; there are {', '.join(ARMS)}")
            arm = ARMS[arm]
        elif arm.name in ARMS and arm != ARMS[arm.name]:
            raise ValueError(f"{arm.name!r} is the name of another arm: give yours its own")
        if arm.name in {other.name for other in chosen}:
            raise ValueError(f"arm {arm.name!r} comes twice")
        chosen.append(arm)
    if not chosen:
        raise ValueError(f"no arms were given; there are {', '.join(ARMS)}")
    return chosen


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not chosen:
        raise ValueError(f"seeds={seeds!r}: a grid needs one at least")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds={seeds!r}: a seed comes twice")
    return chosen
