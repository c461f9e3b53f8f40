"""The folder of a sweep that can be continued."""

import os
from typing import Any

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import PieceFolder, open_pieces

# Between machines and numbers of threads a loss moves by 1e-6; hooks that were not there before move it by more.
_SAME_LOSS = 1e-4


def open_folder(path: str | os.PathLike[str], settings: dict[str, Any], intact_loss: float) -> PieceFolder:
    """Make the folder of a sweep, one file per layer and part, or check that the one that is there fits.

    Args:
        path: the folder; its parent must exist or be makeable.
        settings: weights, tokens and whatever else the numbers depend on, as JSON.
        intact_loss: of the model as it is, with the hooks that are on it, which no hash of weights sees.

    Raises:
        IncompatibleCheckpoint: the folder holds a sweep of other weights, tokens or settings, or other files.
    """
    folder = open_pieces(path, settings, manifest="sweep.json", noted={"intact_loss": intact_loss})
    before = float(folder.noted["intact_loss"])
    if not abs(before - intact_loss) <= _SAME_LOSS * max(1.0, abs(before)):
        raise IncompatibleCheckpoint(
            f"{folder.path} holds a sweep of this model at loss {before:.6f} without ablation, now it is "
            f"{intact_loss:.6f}: were there other hooks on the model? Choose another checkpoint_dir"
        )
    return folder
