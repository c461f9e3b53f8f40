"""Generation without a key/value cache while parts of heads are removed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any


@contextmanager
def generating_without_cache(model: Any) -> Iterator[None]:
    """Let `model.generate` and `model.generate_stream` ignore `use_past_kv_cache` inside the context.

    A part of a score needs the unrotated queries and keys of all positions, and a cache holds rotated keys.
    """
    names = [name for name in ("generate", "generate_stream") if hasattr(type(model), name)]
    # In __dict__: a bridge passes attributes that are set on it to the module it wraps.
    before = {name: model.__dict__[name] for name in names if name in model.__dict__}
    for name in names:
        model.__dict__[name] = _without_cache(getattr(model, name))
    try:
        yield
    finally:
        for name in names:
            del model.__dict__[name]
        model.__dict__.update(before)


def _without_cache(generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def generated(*given: Any, **named: Any) -> Any:
        call = signature(generate).bind(*given, **named)
        call.arguments["use_past_kv_cache"] = False
        return generate(*call.args, **call.kwargs)

    return generated
