"""The head table of a checkpoint that is read layer by layer.

Each layer is measured by itself, in any process, and stored when it is finished.
"""

import os
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads.measure import (
    NullSettings,
    forget_blocks,
    joined,
    measure_heads,
    position_directions,
    selected,
    with_null,
)
from tlspectral.models.attention import fold_attention, key_value_groups
from tlspectral.models.checkpoints import CheckpointLayers, layer_named
from tlspectral.models.loading.bars import download_bars
from tlspectral.models.loading.damage import misfit, refusing
from tlspectral.nulls import one_thread
from tlspectral.operators import check_scores
from tlspectral.tables import WorkPart, finished_parts, open_parts
from tlspectral.tables.progress import hidden
from tlspectral.version import __version__


def streamed_layers(
    checkpoint: CheckpointLayers,
    indices: list[int],
    heads: dict[int, list[int]] | None,
    null: NullSettings,
    *,
    extras: Iterable[str],
    checkpoint_dir: str | os.PathLike[str] | None,
    n_jobs: int,
) -> list[pd.DataFrame]:
    """Return a table for each layer, in order; `attrs` hold `check`, `digest` and `valid_up_to` of the layer.

    `heads` gives the heads of each layer to tabulate, None all.
    Every file is checked before the first layer is measured. With a folder, each finished layer is stored as a file
    there. A stored layer is used again if it was made from the same weights.

    Raises:
        IncompatibleCheckpoint: the folder was made with other weights or settings.
        BadWeights, UnsupportedArchitecture, ScoreMismatch: a layer cannot be read or trusted.
    """
    with download_bars(not hidden()):
        checkpoint.prepare(indices)
        if "position_share" in extras:
            checkpoint.prepare(indices[:1], "positions")
    directions = None
    if "position_share" in extras:
        with one_thread(), checkpoint.layer(indices[0], "positions") as view:
            directions = position_directions(view)
    folder = None
    if checkpoint_dir is not None:
        settings = {
            "config_sha256": checkpoint.files.config_digest(),
            **asdict(null),
            "extras": sorted(extras),
            "tlspectral": __version__,
        }
        if heads is not None:
            settings["heads"] = [[layer, head] for layer, chosen in heads.items() for head in chosen]
        folder = open_parts(checkpoint_dir, settings, noted={"model": checkpoint.files.name})
    parts = []
    for index in indices:
        name = f"L{index:03d}"
        file = os.path.join(checkpoint_dir or "", f"{name}.parquet")
        same_weights = partial(_require_same_weights, checkpoint, index, file)
        chosen = None if heads is None else heads[index]
        measure = partial(_measured, checkpoint, null, directions, index, chosen)
        parts.append(WorkPart(name, measure, same_weights))
    try:
        tables = finished_parts(parts, folder, description="layers", unit="layer", n_jobs=n_jobs)
        return list(tables.values())
    finally:
        forget_blocks()


def _require_same_weights(checkpoint: CheckpointLayers, index: int, file: str, table: pd.DataFrame) -> None:
    if table.attrs["digest"] != checkpoint.digest(index):
        raise IncompatibleCheckpoint(
            f"{file} was made from other weights of layer {index} than those of "
            f"{checkpoint.files.name}: remove it, or choose another folder"
        )


def _measured(
    checkpoint: CheckpointLayers,
    null: NullSettings,
    directions: Float64[Tensor, "d_model directions"] | None,
    index: int,
    heads: list[int] | None,
) -> pd.DataFrame:
    """Measure a layer, or some heads of it, on one thread."""
    with one_thread(), checkpoint.layer(index) as view, layer_named(index):
        with refusing(misfit(checkpoint.files.record)):
            check = check_scores(view)
        raw = view.raw(0)
        groups = [
            measure_heads(fold_attention(group, 0), index, moments=None, directions=directions)
            for _, group in key_value_groups(raw)
        ]
        measured = joined(groups)
        table = with_null(measured if heads is None else selected(measured, heads), null)
    table.attrs = {
        "check": check.of_layer(0) | {"layer": index},
        "valid_up_to": raw.valid_up_to,
        "digest": checkpoint.digest(index),
    }
    return table
