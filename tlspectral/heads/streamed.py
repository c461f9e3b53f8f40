"""The head table of a checkpoint that is read layer by layer, each by itself, in any process."""

import os
from collections.abc import Collection
from functools import partial
from hashlib import sha256
from typing import Any

import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads.operators.verification import check_scores
from tlspectral.heads.weight_columns import NullSettings, measure_heads, of_heads, position_directions, with_null
from tlspectral.models.checkpoints.layers import WeightFiles, layer_named
from tlspectral.models.hooking.exclusive import refuse_autocast
from tlspectral.models.loading.damage import download_bars, misfit
from tlspectral.models.reading.layer import fold_attention, key_value_groups
from tlspectral.tables.job import Job
from tlspectral.version import __version__


def streamed_layers(
    checkpoint: WeightFiles,
    heads: dict[int, list[int]],
    null: NullSettings,
    extras: Collection[str],
    folder: str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], list[Job]]:
    """Return what tells the folder of this model apart, and a part for each layer, in order.

    `attrs` of a part's table hold `check`, `digest` and `valid_up_to` of the layer. Every file is checked before the
    first layer is measured. A stored layer is used again if it was made from the same weights. Raises BadWeights for
    files that cannot be read; a part also ScoreMismatch and UnsupportedArchitecture.
    """
    first = min(heads)
    with download_bars():
        checkpoint.prepare(list(heads))
        if "position_share" in extras:
            checkpoint.prepare([first], "positions")
    directions = None
    if "position_share" in extras:
        with one_thread(), checkpoint.layer(first, "positions") as view:
            directions = position_directions(view)
    # A layer that is wanted whole is stored whole, and any later call that wants it whole reads it.
    partly = {layer: chosen for layer, chosen in heads.items() if len(chosen) < checkpoint.n_heads(layer)}
    identity = {
        "config_sha256": sha256((checkpoint.files.config_folder / "config.json").read_bytes()).hexdigest(),
        "extras": sorted(extras),
        "heads": [[layer, head] for layer, chosen in partly.items() for head in chosen],
        "tlspectral": __version__,
    }
    parts = []
    for index, chosen in heads.items():
        name = f"L{index:03d}"
        file = os.path.join(folder or "", f"{name}.parquet")
        same_weights = partial(_require_same_weights, checkpoint, index, file)
        measure = partial(_measured, checkpoint, null, directions, index, chosen)
        parts.append(Job(name, measure, same_weights))
    return identity, parts


def _require_same_weights(checkpoint: WeightFiles, index: int, file: str, table: pd.DataFrame) -> None:
    if table.attrs["digest"] != checkpoint.digest(index):
        raise IncompatibleCheckpoint(
            f"{file} was made from other weights of layer {index} than those of "
            f"{checkpoint.files.name}: remove it, or choose another folder"
        )


def _measured(
    checkpoint: WeightFiles,
    null: NullSettings,
    directions: Float64[Tensor, "d_model directions"] | None,
    index: int,
    heads: list[int],
) -> pd.DataFrame:
    with one_thread(), checkpoint.layer(index) as view, layer_named(index):
        refuse_autocast(view.model)
        with misfit(checkpoint.files.record):
            check = check_scores(view)[0]
        raw = view.raw(0)
        groups = [
            measure_heads(fold_attention(group, 0), index, moments=None, directions=directions)
            for _, group in key_value_groups(raw)
        ]
        table = with_null(of_heads(groups, heads), null)
    table.attrs = {
        "check": check.record | {"layer": index},
        "valid_up_to": raw.valid_up_to,
        "digest": checkpoint.digest(index),
    }
    return table
