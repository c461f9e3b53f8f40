"""The models of a grid, from the steps that its cells saved."""

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlspectral.tables.resume_folder import ResumeFolder
from tlspectral_studies.common.checkpoints import saved_checkpoints
from tlspectral_studies.common.model import AttentionOnlyTransformer
from tlspectral_studies.common.saved_training import SavedTraining, saved_model, saved_steps
from tlspectral_studies.fingerprint.constrained.presets import ARMS, Arm


def cell_name(arm: Arm, seed: int) -> str:
    """Return the name of a cell, of the file with its tables and of the folder with its weights."""
    until = "" if arm.penalty_until is None else f"until{arm.penalty_until}_"
    return f"{arm.name}_lam{arm.penalty_weight}_{until}seed{seed}"


def saved_cell(cells: ResumeFolder, arm: Arm, seed: int) -> SavedTraining:
    """Return where a cell saves its weights and state.

    Raises IncompatibleCheckpoint where a cell of this name was trained as another arm.
    """
    name = cell_name(arm, seed)
    made_with: dict[str, Any] = {"cell": name, "settings": cells.key}
    if arm != ARMS.get(arm.name):  # the name of an arm of the grid says all
        made_with["arm"] = arm.made_with()
    saved = SavedTraining(cells.path / name, made_with)
    saved.require_own()
    return saved


def cell_model(
    output: str | os.PathLike[str], arm: str, seed: int = 0, *, step: int | None = None
) -> AttentionOnlyTransformer:
    """Return the model of a cell of a grid, as it was at a saved step.

    `to_model()` makes of it a model that `analyze_heads`, `ablate` and all else take.

    Args:
        output: folder of the grid.
        arm: name of the arm.
        seed: of the cell.
        step: a saved step; None for the last one.

    Raises:
        ValueError: the folder has no such cell, or the cell no such step.
        BadWeights: the file of weights is damaged.

    What it does not establish: that the cell is finished; its last saved step may be an early one.
    """
    files = saved_steps(_folder(output, arm, seed))
    step = max(files) if step is None else step
    if step not in files:
        raise ValueError(f"arm {arm}, seed {seed} has no weights of step {step}; it has {', '.join(map(str, files))}")
    return saved_model(files[step])


def cell_checkpoints(output: str | os.PathLike[str], arm: str, seed: int = 0) -> list[tuple[int, Callable[[], Any]]]:
    """Return the saved steps of a cell for `head_history`, as functions that load them.

    Args:
        output: folder of the grid.
        arm: name of the arm.
        seed: of the cell.

    Returns:
        `(step, function)` by step, 0 first.

    Raises:
        ValueError: the folder has no such cell.
    """
    return saved_checkpoints(_folder(output, arm, seed), f"{arm}, seed {seed}")


def _folder(output: str | os.PathLike[str], arm: str, seed: int) -> Path:
    """Return the folder of a cell's saved steps."""
    cells = Path(output).expanduser() / "cells"
    folders = [folder for folder in cells.glob(f"{glob.escape(arm)}_lam*_seed{seed}") if saved_steps(folder)]
    if len(folders) > 1:
        raise ValueError(
            f"{cells} has arm {arm}, seed {seed} with several weights of its penalty: give each an arm of its own name"
        )
    if not folders:
        there = sorted(folder.name for folder in cells.glob("*_lam*_seed*") if saved_steps(folder))
        raise ValueError(
            f"{cells} has no saved weights of arm {arm}, seed {seed}; it has those of {', '.join(there) or 'no cell'}. "
            "A cell that was finished before weights were kept has none: remove its file and train it again"
        )
    return folders[0]
