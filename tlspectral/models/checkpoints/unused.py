"""Tensors of a checkpoint's files for which the model that config.json describes has no place."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tlspectral.models.checkpoints.files import CheckpointFiles
from tlspectral.models.checkpoints.one_layer import empty_model, one_layer_config
from tlspectral.models.loading.unused_weights import check_unused, list_of_blocks, unplaced


def unused_tensors(files: CheckpointFiles, config: Any, stack: str) -> list[str]:
    """Their names, found with a model of one layer; refused are those that `check_unused` refuses.

    Of a tensor that has no place in any layer, one layer's is looked at.

    Args:
        files: of the checkpoint.
        config: of the text model.
        stack: what the names of the tensors of its layers begin with, up to the layer's number.

    Raises:
        BadWeights: as `check_unused`.
    """
    model = empty_model(one_layer_config(config, 0))
    in_first_layer = _naming(stack, list_of_blocks(model), int(config.num_hidden_layers))
    named = {tensor: in_first_layer(tensor) for tensor in files.file_of}
    missing = unplaced(model, set(named.values()))
    one_of = {name: tensor for tensor, name in reversed(named.items())}

    def read(tensor: str) -> Tensor:
        return files.read([tensor])[tensor]

    check_unused(
        model, {one_of[name]: target for name, target in missing.items()}, read, files.name, layers=_layers(config)
    )
    return [tensor for tensor, name in named.items() if name in missing]


def _layers(config: Any) -> tuple[int, int]:
    return int(config.num_hidden_layers), int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def _naming(stack: str, own: str, n_layers: int) -> Callable[[str], str]:
    """How a tensor would be called in the model of one layer, which calls its list of layers `own`.

    A text model that is part of another has longer names in the files. Layers behind the last keep their number.
    """
    around, own_around = (_without_last(name) for name in (stack, own))

    def name_of(tensor: str) -> str:
        if tensor.startswith(stack):
            index, _, rest = tensor.removeprefix(stack).partition(".")
            return f"{own}{0 if int(index) < n_layers else index}.{rest}"
        if around and tensor.startswith(around):
            return own_around + tensor.removeprefix(around)
        return tensor.removeprefix(around.removesuffix(own_around)) if around.endswith(own_around) else tensor

    return name_of


def _without_last(name: str) -> str:
    """`"model."` of `"model.layers."`, nothing of `"h."`."""
    before, dot, _ = name.rstrip(".").rpartition(".")
    return before + dot
