"""Generation without a key/value cache while parts of heads are removed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

from tlspectral.errors import EditNotHonored
from tlspectral.models.attention.replay import methods_replaced


@contextmanager
def generating_without_cache(model: Any) -> Iterator[None]:
    """Let `model.generate` and `model.generate_stream` ignore `use_past_kv_cache` inside the context.

    A part of a score needs the unrotated queries and keys of all positions, and a cache holds rotated keys.
    """
    names = [name for name in ("generate", "generate_stream") if hasattr(type(model), name)]
    with methods_replaced(model, {name: _WithoutCache(getattr(model, name)) for name in names}):
        yield


class _WithoutCache:
    """A model's own method of generation, called without its cache."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self.generate = generate
        update_wrapper(self, generate)

    def __call__(self, *given: Any, **named: Any) -> Any:
        call = signature(self.generate).bind(*given, **named)
        call.arguments["use_past_kv_cache"] = False
        return self.generate(*call.args, **call.kwargs)

    def __reduce__(self) -> Any:
        # The method belongs to this model: a copy, such as that of a worker process, cannot have it.
        return partial, (_refuse_generation,)


def _refuse_generation(*given: Any, **named: Any) -> Any:
    raise EditNotHonored("this model was copied inside an ablation and cannot generate: copy it before the block")
