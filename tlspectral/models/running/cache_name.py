"""Hand the layers of a bridge the key/value cache under the names that they read.

From transformers 5.24 on, a layer calls its attention with `cache=`. Attention modules of TransformerLens 3.9 to 4.3
read `past_key_values=`, those with recurrent states `cache_params=`, as earlier versions call the cache, and ignore
`cache=`: the cache stays empty, and later tokens attend to themselves alone. Two hooks per layer rename the argument.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from tlspectral.models.reading.view import AttentionView

_NAMES = {"attn": "past_key_values", "linear_attn": "cache_params"}
"""From attribute of a layer to the name under which this module of TransformerLens reads the cache."""


def cache_name_hooks(view: AttentionView) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return pairs of a register method and a hook of PyTorch, which let each layer of a bridge fill the cache.

    A module of TransformerLens gets `cache` under its own name. If it leaves the computation to the module of
    transformers that it wraps, that module gets it as `cache` again. In other models than bridges the list is empty,
    and without an argument `cache` the hooks do nothing.
    """
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    for block in view.blocks:
        for place, name in _NAMES.items():
            module = getattr(block.module, place, None)
            wrapped = getattr(module, "original_component", None)
            if module is not None and wrapped is not None:
                before = partial(module.register_forward_pre_hook, with_kwargs=True)
                hooks.append((before, partial(_renamed, "cache", name)))
                # Others are of earlier versions, or in the way of a bridge.
                if "cache" in signature(type(wrapped).forward).parameters:
                    before = partial(wrapped.register_forward_pre_hook, with_kwargs=True)
                    hooks.append((before, partial(_renamed, name, "cache")))
    return hooks


def _renamed(
    old: str, new: str, module: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module, the keyword `old` renamed to `new` unless it is None. A forward pre-hook."""
    if named.get(old) is not None:
        named = {new if name == old else name: value for name, value in named.items()}
    return given, named
