"""The resumable folder of work on a model in memory. Its manifest also holds the model's loss.

Hooks change the loss, but no hash of weights shows them.
"""

import os
from typing import Any

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.parts import PartFolder, open_parts

# Other machines and other numbers of threads change a loss by 1e-6; other hooks change it by more.
_SAME_LOSS = 1e-4


def open_model_parts(
    path: str | os.PathLike[str], settings: dict[str, Any], intact_loss: float, *, manifest: str = "settings.json"
) -> PartFolder:
    """Make the folder, or check that an existing one was made with the same settings and hooks.

    Args:
        path: the folder; missing parents are made.
        settings: weights, tokens and whatever else the numbers depend on, as JSON.
        intact_loss: loss of the model without ablation, with the hooks that are on it.
        manifest: name of the file that holds both.

    Raises:
        IncompatibleCheckpoint: the folder was made with other weights, tokens, settings or hooks, or holds other files.
    """
    folder = open_parts(path, settings, manifest=manifest, noted={"intact_loss": intact_loss})
    stored_loss = folder.noted["intact_loss"]
    if not isinstance(stored_loss, float | int):
        raise IncompatibleCheckpoint(
            f"{folder.path / manifest} cannot be read (intact_loss is {stored_loss!r}): choose another folder"
        )
    if not abs(stored_loss - intact_loss) <= _SAME_LOSS * max(1.0, abs(stored_loss)):
        raise IncompatibleCheckpoint(
            f"{folder.path} holds work on this model at loss {stored_loss:.6f} without ablation, now it is "
            f"{intact_loss:.6f}: were there other hooks on the model? Choose another folder"
        )
    return folder
