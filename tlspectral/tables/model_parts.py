"""The resumable folder of work on a model in memory. Its manifest also holds the model's score.

Hooks change the score, but no hash of weights shows them.
"""

import os
from typing import Any

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.parts import PartFolder, open_parts

# Other machines and other numbers of threads change a score by 1e-6; other hooks change it by more.
_SAME_VALUE = 1e-4


def open_model_parts(
    path: str | os.PathLike[str], settings: dict[str, Any], intact_value: float, *, manifest: str = "settings.json"
) -> PartFolder:
    """Make the folder, or check that an existing one was made with the same settings and hooks.

    Args:
        path: the folder; missing parents are made.
        settings: weights, tokens and whatever else the numbers depend on, as JSON.
        intact_value: score of the model without ablation, with the hooks that are on it.
        manifest: name of the file that holds both.

    Raises:
        IncompatibleCheckpoint: the folder was made with other weights, tokens, settings or hooks, or holds other files.
    """
    folder = open_parts(path, settings, manifest=manifest, noted={"intact_value": intact_value})
    stored_value = folder.noted["intact_value"]
    if not isinstance(stored_value, float | int):
        raise IncompatibleCheckpoint(
            f"{folder.path / manifest} cannot be read (intact_value is {stored_value!r}): choose another folder"
        )
    if not abs(stored_value - intact_value) <= _SAME_VALUE * max(1.0, abs(stored_value)):
        raise IncompatibleCheckpoint(
            f"{folder.path} holds work on this model at score {stored_value:.6f} without ablation, now it is "
            f"{intact_value:.6f}: were there other hooks on the model? Choose another folder"
        )
    return folder
