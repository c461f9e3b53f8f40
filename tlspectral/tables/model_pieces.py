"""The folder of work on a model in memory: its settings, and the model's loss, which sees hooks that no hash sees."""

import os
from typing import Any

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.pieces import PieceFolder, open_pieces

# Between machines and numbers of threads a loss moves by 1e-6; hooks that were not there before move it by more.
_SAME_LOSS = 1e-4


def open_model_pieces(
    path: str | os.PathLike[str], settings: dict[str, Any], intact_loss: float, *, manifest: str = "settings.json"
) -> PieceFolder:
    """Make the folder, or check that the one that is there was made with the same settings and hooks.

    Args:
        path: the folder; its parent must exist or be makeable.
        settings: weights, tokens and whatever else the numbers depend on, as JSON.
        intact_loss: of the model as it is, with the hooks that are on it.
        manifest: name of the file that holds both.

    Raises:
        IncompatibleCheckpoint: the folder was made with other weights, tokens, settings or hooks, or holds other files.
    """
    folder = open_pieces(path, settings, manifest=manifest, noted={"intact_loss": intact_loss})
    before = folder.noted["intact_loss"]
    if not isinstance(before, float | int):
        raise IncompatibleCheckpoint(
            f"{folder.path / manifest} cannot be read (intact_loss is {before!r}): choose another folder"
        )
    if not abs(before - intact_loss) <= _SAME_LOSS * max(1.0, abs(before)):
        raise IncompatibleCheckpoint(
            f"{folder.path} holds work on this model at loss {before:.6f} without ablation, now it is "
            f"{intact_loss:.6f}: were there other hooks on the model? Choose another folder"
        )
    return folder
