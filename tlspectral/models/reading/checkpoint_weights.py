"""Name the weights of a transformers model as its checkpoint does, even if a bridge has wrapped the model."""

from collections.abc import Iterator

from torch import Tensor, nn


def checkpoint_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and stored buffers of a transformers model, as a dict from checkpoint name to tensor (the
    model's own, not copies).

    module: the model, plain or in a bridge. A bridge puts its own module around each module that it wraps. Weights that
    only the bridge holds are left out, for example the split parts of a packed projection.
    """
    return dict(_named_weights(module, ""))


def _named_weights(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (prefix + name, tensor) of each parameter and stored buffer of a module and its children, at any depth."""
    while (wrapped := module._modules.get("_original_component")) is not None:
        module = wrapped
    stored = {name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, value in {**module._parameters, **stored}.items():
        if value is not None:
            yield prefix + name, value
    for name, part in module._modules.items():
        if part is not None:
            yield from _named_weights(part, f"{prefix}{name}.")
