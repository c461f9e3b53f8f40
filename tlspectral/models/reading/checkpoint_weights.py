"""The weights of a model of transformers by their names in its checkpoint, also of one that a bridge has wrapped."""

from collections.abc import Iterator

from torch import Tensor, nn


def checkpoint_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and stored buffers of a model of transformers, whole or in a bridge, by their names.

    A bridge puts a module of its own around each that it wraps. What it holds beside these is left out, such as the
    parts of a packed projection, which it runs in its place.
    """
    return dict(_named_weights(module, ""))


def _named_weights(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    while (wrapped := module._modules.get("_original_component")) is not None:
        module = wrapped
    stored = {name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, value in {**module._parameters, **stored}.items():
        if value is not None:
            yield prefix + name, value
    for name, part in module._modules.items():
        if part is not None:
            yield from _named_weights(part, f"{prefix}{name}.")
