"""The head table of a checkpoint that is read layer by layer: each layer by itself, in any process, kept when done."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import joblib
import pandas as pd
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads.extras import position_directions
from tlspectral.heads.measure import joined, measure_heads
from tlspectral.heads.null import forget_blocks, layer_null
from tlspectral.models.attention import AttentionView, fold_attention, key_value_groups
from tlspectral.models.checkpoints import CheckpointLayers, layer_named
from tlspectral.nulls import one_thread
from tlspectral.operators import check_scores
from tlspectral.tables import PieceFolder, open_pieces
from tlspectral.version import __version__


@dataclass(frozen=True)
class _Plan:
    """What is done to every layer, in whichever process."""

    checkpoint: CheckpointLayers
    draws: int
    blocks: Literal["shared", "fresh"]
    seed: int
    directions: Float64[Tensor, "d_model directions"] | None


def streamed_layers(
    checkpoint: CheckpointLayers,
    indices: list[int],
    *,
    null_draws: int,
    null_blocks: Literal["shared", "fresh"],
    seed: int,
    extras: Iterable[str],
    checkpoint_dir: str | os.PathLike[str] | None,
    n_jobs: int,
    show_progress: bool,
) -> list[pd.DataFrame]:
    """A table for each layer, in order; `attrs` hold `check`, `digest` and `valid_up_to` of the layer.

    Every file is looked at before the first layer is measured. With a folder, each finished layer is a file of it, and
    those that are there are taken from it if the layer's weights are still those that they were made from.

    Raises:
        IncompatibleCheckpoint: the folder was made with other weights or settings.
        BadWeights, UnsupportedArchitecture, ScoreMismatch: a layer cannot be read or trusted.
    """
    checkpoint.prepare(indices)
    directions = None
    if "position_share" in extras:
        checkpoint.prepare(indices[:1], "positions")
        with one_thread(), checkpoint.layer(indices[0], "positions") as view:
            directions = position_directions(view)
    plan = _Plan(checkpoint, null_draws, null_blocks, seed, directions)
    folder, found = None, {}
    if checkpoint_dir is not None:
        settings = {
            "config_sha256": checkpoint.files.config_digest(),
            "null_draws": null_draws,
            "null_blocks": null_blocks,
            "seed": seed,
            "extras": sorted(extras),
            "tlspectral": __version__,
        }
        folder = open_pieces(checkpoint_dir, settings, noted={"model": checkpoint.files.name})
        found = _kept(checkpoint, folder, indices)
    missing = [index for index in indices if index not in found]
    bar = partial(tqdm, desc="layers", unit="layer", leave=False, disable=not show_progress)
    with bar(total=len(indices), initial=len(found)) as progress:
        if n_jobs == 1 or min(joblib.effective_n_jobs(n_jobs), len(missing)) <= 1:
            try:
                found |= _measured(plan, missing, folder, progress.update)
            finally:
                forget_blocks()
        else:
            jobs = (joblib.delayed(_measured)(plan, [index], folder) for index in missing)
            done: Any = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")(jobs)
            for one in done:
                found |= one
                progress.update(len(one))
    return [found[index] for index in indices]


def _piece(index: int) -> str:
    return f"L{index:03d}"


def _kept(checkpoint: CheckpointLayers, folder: PieceFolder, indices: Iterable[int]) -> dict[int, pd.DataFrame]:
    found = {}
    for index in indices:
        table = folder.read(_piece(index))
        if table is None:
            continue
        if table.attrs["digest"] != checkpoint.digest(index):
            raise IncompatibleCheckpoint(
                f"{folder.path / _piece(index)}.parquet was made from other weights of layer {index} than those of "
                f"{checkpoint.files.name}: remove it, or choose another folder"
            )
        found[index] = table
    return found


def _measured(
    plan: _Plan,
    indices: Iterable[int],
    folder: PieceFolder | None,
    advance: Callable[[int], Any] = lambda count: None,
) -> dict[int, pd.DataFrame]:
    """Measure some layers, one after the other, on one thread."""
    found = {}
    for index in indices:
        with one_thread(), plan.checkpoint.layer(index) as view, layer_named(index):
            table = _layer_table(plan, view, index)
        table.attrs["digest"] = plan.checkpoint.digest(index)
        if folder is not None:
            folder.write(_piece(index), table)
        found[index] = table
        advance(1)
    return found


def _layer_table(plan: _Plan, view: AttentionView, index: int) -> pd.DataFrame:
    check = check_scores(view)
    raw = view.raw(0)
    pieces = [
        measure_heads(fold_attention(piece, 0), index, moments=None, directions=plan.directions)
        for _, piece in key_value_groups(raw)
    ]
    measured = joined(pieces)
    null = layer_null(measured.spectra, draws=plan.draws, blocks=plan.blocks, seed=plan.seed)
    table = pd.DataFrame(measured.columns | null)
    table.attrs = {
        "check": check.of_layer(0) | {"layer": index},
        "valid_up_to": raw.valid_up_to,
    }
    return table
