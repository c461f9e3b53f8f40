"""Jobs that make the head table of a checkpoint from its files, one layer at a time, without loading the model."""

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
from tlspectral.selection.heads_as_written import HEADS_PER_GROUP
from tlspectral.tables.job import Job
from tlspectral.version import __version__


def streamed_layers(
    checkpoint: WeightFiles,
    heads: dict[int, list[int]],
    null: NullSettings,
    extras: Collection[str],
    folder: str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], list[Job]]:
    """Return a dict that identifies this work in a resume folder, and a list of `Job`, one for each layer in `heads`.

    `checkpoint` has the weight files. `heads` has heads by layer, `null` the settings of the random null, `extras` the
    names of extra columns. `folder` is the resume folder, or None. The dict has hashes of the config, `extras`, heads
    of incomplete layers and the version. A job returns the head table of its layer, with attrs `check` (of the scores),
    `digest` (hash of the weights), `valid_up_to` (longest valid prompt) and `heads_per_group`. All files are checked
    before the first layer is measured. Raises BadWeights for files that cannot be read; a job also raises ScoreMismatch
    and UnsupportedArchitecture.
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
    # A layer with all its heads is left out: its file then serves every call that needs the whole layer.
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
    """Raise IncompatibleCheckpoint if the stored head table `table` of layer `index` was made from other weights than
    the checkpoint's.

    `file` is the table's path, for the message.
    """
    if table.attrs["digest"] != checkpoint.digest(index):
        raise IncompatibleCheckpoint(
            f"{file} was made from other weights of layer {index} than {checkpoint.files.name} has: remove it, or "
            "choose another folder"
        )


def _measured(
    checkpoint: WeightFiles,
    null: NullSettings,
    directions: Float64[Tensor, "d_model directions"] | None,
    index: int,
    heads: list[int],
) -> pd.DataFrame:
    """Read layer `index` from `checkpoint`, check it against the scores of a model of this layer alone, and return the
    head table of `heads`.

    `null` has the settings of the random null. `directions` are the position directions for the extra "position_share",
    or None. The attrs of the table are `check`, `valid_up_to`, `heads_per_group` and `digest` of the layer. Raises
    ScoreMismatch, UnsupportedArchitecture or BadWeights.
    """
    with one_thread(), checkpoint.layer(index) as view, layer_named(index):
        refuse_autocast(view.model)
        with misfit(checkpoint.files.record):
            check = check_scores(view)[0]
        raw, size = view.raw(0), view.heads_per_group(0)
        groups = [
            measure_heads(fold_attention(group, 0), index, moments=None, directions=directions)
            for _, group in key_value_groups(raw)
        ]
        table = with_null(of_heads(groups, heads), null)
    table.attrs = {
        "check": check.record | {"layer": index},
        "valid_up_to": raw.valid_up_to,
        HEADS_PER_GROUP: size,
        "digest": checkpoint.digest(index),
    }
    return table
