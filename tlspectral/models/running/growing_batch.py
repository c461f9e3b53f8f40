"""A batch that grows from layer to layer: copies of the same sequences join it, each at its own layer.

Everything else that a layer is called with, such as masks and positions, is made for the whole batch and cut to the
rows that have joined. A pass with another number of rows shows which axis counts rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.some_rows import OfRows
from tlspectral.models.reading.view import AttentionView


@dataclass(frozen=True)
class BlockArguments:
    """Shapes of a layer's arguments besides the residual stream, in a pass with `rows` rows.

    shapes: a nested structure like the arguments, with a shape for each tensor and None for each other value.
    """

    rows: int
    shapes: Any

    @classmethod
    def of_block(cls, arguments: tuple[Any, ...], named: dict[str, Any]) -> "BlockArguments":
        """Return the `BlockArguments` of a layer's call: rows of the pass, shapes of arguments besides the stream.

        arguments, named: positional and named arguments of the call.
        """
        stream, further = _stream_first(arguments, named)
        return cls(len(stream), _shapes(further))

    def cut(self, arguments: Any, rows: int, alive: int, where: str) -> Any:
        """Return the arguments of a layer (without the stream) of a pass with `rows` rows, cut to the first `alive`
        rows; a copy with views of the tensors.

        where: name of the layer, for messages. Raises UnsupportedArchitecture if the arguments have another form than
        `shapes`.
        """
        return self._cut(arguments, self.shapes, rows, alive, where)

    def _cut(self, argument: Any, shapes: Any, rows: int, alive: int, where: str) -> Any:
        """Return one argument of a pass with `rows` rows, cut to the first `alive` rows, with all of its parts.

        shapes: shapes of this argument in the pass that was noted. where: name of the layer, for messages.
        """
        cut = partial(self._cut, rows=rows, alive=alive, where=where)
        if isinstance(shapes, _Parts) and isinstance(parts := _parts(argument), dict) and parts.keys() == shapes.keys():
            return _with_parts(argument, {name: cut(part, shapes[name]) for name, part in parts.items()})
        if isinstance(shapes, tuple) and isinstance(argument, Tensor) and argument.ndim == len(shapes):
            for axis, (then, now) in enumerate(zip(shapes, argument.shape, strict=True)):
                if then == now:
                    continue
                per_row = now // rows
                if per_row * rows != now or per_row * self.rows != then:
                    break
                argument = argument.narrow(axis, 0, per_row * alive)
            else:
                return argument
        elif shapes is None and not isinstance(argument, Tensor) and _parts(argument) is None:
            return argument
        raise UnsupportedArchitecture(
            f"{where}: a block is given other arguments in passes of {self.rows} and {rows} rows, so it cannot compute "
            "only some of the rows: such models are not supported here, take another model"
        )


class _Parts(dict[Any, Any]):
    """Shapes of the parts of one argument (list, dict or dataclass): a dict from name or index to shape."""


def _parts(argument: Any) -> dict[Any, Any] | None:
    """Return the parts of a list, dict or dataclass `argument` as a dict from name or index to part; None for other
    values.
    """
    if isinstance(argument, tuple | list):
        return dict(enumerate(argument))
    if isinstance(argument, dict):
        return argument
    if is_dataclass(argument) and not isinstance(argument, type):  # the cache of one layer of a HookedTransformer
        return {field.name: getattr(argument, field.name) for field in fields(argument)}
    return None


def _with_parts(argument: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a copy of an argument (list, dict or dataclass) with other `parts`, a dict from name or index."""
    if isinstance(argument, dict):
        return {**parts}
    if isinstance(argument, tuple | list):
        return type(argument)(parts.values()) if type(argument) in (tuple, list) else type(argument)(*parts.values())
    return replace(argument, **parts)


def _shapes(argument: Any) -> Any:
    """Return the shape of a tensor, or the shapes of an argument's parts as a `_Parts`; None for any other value."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape)
    parts = _parts(argument)
    return None if parts is None else _Parts({name: _shapes(part) for name, part in parts.items()})


def _stream_first(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Any]:
    """Return (residual stream, other arguments) of a layer's call. The stream is the first argument.

    arguments, named: positional and named arguments. The other arguments are a pair (positional, named).
    """
    if arguments:
        return arguments[0], (arguments[1:], named)
    name = next(iter(named))
    return named[name], ((), {other: value for other, value in named.items() if other != name})


@dataclass(frozen=True)
class GrowingBatch:
    """Copies of the same sequences in one batch, in the order of the layers at which they join.

    Attributes:
        view: view of the model.
        layers: for each copy the layer at which it joins, in ascending order.
        n: sequences of a copy.
        arguments: from layer to the shapes of its other arguments, seen in a pass over equally long sequences.
    """

    view: AttentionView
    layers: tuple[int, ...]
    n: int
    arguments: Mapping[int, BlockArguments]

    @property
    def rows(self) -> int:
        """Number of rows of the whole batch."""
        return len(self.layers) * self.n

    def alive(self, layer: int) -> int:
        """Return how many rows of the batch the layer `layer` computes, counted from the first row."""
        return self.n * bisect_right(self.layers, layer)

    def of_copies(self, by_copies: Iterable[tuple[slice, list[Hook]]]) -> list[Hook]:
        """Return the hooks of all copies as a list; each acts only on the rows of its own copies.

        by_copies: pairs of a slice of copies and the hooks of these copies: (hook point name, function).
        """
        by_block = {block.name: self.alive(layer) for layer, block in enumerate(self.view.blocks)}
        hooks = []
        for copies, copy_hooks in by_copies:
            rows = slice(copies.start * self.n, copies.stop * self.n)
            for name, hook in copy_hooks:
                batch = by_block.get(".".join(name.split(".")[:2]), self.rows)
                hooks.append((name, hook if rows == slice(0, batch) else OfRows(hook, rows, batch)))
        return hooks

    def joined(
        self,
        layer: int,
        entering: Float[Tensor, "sequences pos d_model"] | None,
        block: Any,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (arguments, named) of a layer's call: streams of joining copies added, cut to the rows it computes.

        It is used as a PyTorch forward pre-hook with named arguments, on the module `block`. entering: streams of one
        copy that enter this layer; None for layer 0, where the model passes the streams of the whole batch.
        """
        alive = self.alive(layer)
        stream, further = _stream_first(arguments, named)
        if entering is None:
            stream = stream[:alive]
        elif joining := self.layers.count(layer):
            fresh = entering.to(stream.device).repeat(joining, 1, 1)
            stream = fresh if layer == self.layers[0] else torch.cat([stream, fresh])
        if alive < self.rows:
            further = self.arguments[layer].cut(further, self.rows, alive, self.view.blocks[layer].name)
        further_arguments, further_named = further
        return (
            ((stream, *further_arguments), further_named)
            if arguments
            else ((), {next(iter(named)): stream, **further_named})
        )


def growing_batch(
    view: AttentionView, layers: Sequence[int], n: int, arguments: Mapping[int, BlockArguments]
) -> GrowingBatch:
    """Return the batch in which copies of n sequences join at these layers, as a `GrowingBatch`.

    view: the model. layers: one per copy, in ascending order. arguments: from layer to the shapes of its other
    arguments. All copies join at the first of these layers unless the axis that counts rows is known for every layer
    between. It is not known after a pass with the same number of rows.
    """
    known = all(
        layer in arguments and arguments[layer].rows != n * len(layers) for layer in range(layers[0], layers[-1])
    )
    return GrowingBatch(view, (*layers,) if known else (layers[0],) * len(layers), n, arguments)
