"""A batch that grows from block to block: copies of the same sequences join it, each at a layer of its own.

Everything else that a block is given, such as masks and positions, is made for the whole batch and cut to the rows that
have joined. Which axis counts rows is known from a pass with another number of rows.
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
    """The shapes of what a block was given beside the residual stream, in a pass with some number of rows."""

    rows: int
    shapes: Any

    @classmethod
    def of_block(cls, given: tuple[Any, ...], named: dict[str, Any]) -> "BlockArguments":
        """Return the shapes of what a block is given."""
        stream, others = _stream_first(given, named)
        return cls(len(stream), _shapes(others))

    def cut(self, given: Any, rows: int, alive: int, where: str) -> Any:
        """Return arguments of a pass with `rows` rows as they are for the first `alive` of them.

        Raises UnsupportedArchitecture for arguments of another form.
        """
        return self._cut(given, self.shapes, rows, alive, where)

    def _cut(self, given: Any, shapes: Any, rows: int, alive: int, where: str) -> Any:
        cut = partial(self._cut, rows=rows, alive=alive, where=where)
        if isinstance(shapes, _Parts) and isinstance(parts := _parts(given), dict) and parts.keys() == shapes.keys():
            return _with_parts(given, {name: cut(part, shapes[name]) for name, part in parts.items()})
        if isinstance(shapes, tuple) and isinstance(given, Tensor) and given.ndim == len(shapes):
            for axis, (then, now) in enumerate(zip(shapes, given.shape, strict=True)):
                if then == now:
                    continue
                each = now // rows
                if each * rows != now or each * self.rows != then:
                    break
                given = given.narrow(axis, 0, each * alive)
            else:
                return given
        elif shapes is None and not isinstance(given, Tensor) and _parts(given) is None:
            return given
        raise UnsupportedArchitecture(
            f"{where}: a block is given other arguments in passes of {self.rows} and {rows} rows, so that it cannot "
            "run some of the rows"
        )


class _Parts(dict[Any, Any]):
    """Shapes of what an argument consists of."""


def _parts(given: Any) -> dict[Any, Any] | None:
    """Return what an argument consists of, by name or place; None for one that is a tensor or is left as it is."""
    if isinstance(given, tuple | list):
        return dict(enumerate(given))
    if isinstance(given, dict):
        return given
    if is_dataclass(given) and not isinstance(given, type):  # the cache of one layer of a HookedTransformer
        return {field.name: getattr(given, field.name) for field in fields(given)}
    return None


def _with_parts(given: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(given, dict):
        return {**parts}
    if isinstance(given, tuple | list):
        return type(given)(parts.values()) if type(given) in (tuple, list) else type(given)(*parts.values())
    return replace(given, **parts)


def _shapes(given: Any) -> Any:
    if isinstance(given, Tensor):
        return tuple(given.shape)
    parts = _parts(given)
    return None if parts is None else _Parts({name: _shapes(part) for name, part in parts.items()})


def _stream_first(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Any]:
    """Return the residual stream that a block is given, which comes first, and everything else."""
    if given:
        return given[0], (given[1:], named)
    name = next(iter(named))
    return named[name], ((), {other: value for other, value in named.items() if other != name})


@dataclass(frozen=True)
class GrowingBatch:
    """Copies of the same sequences, in the order of the layers at which they join.

    Attributes:
        layers: of each copy; they do not decrease.
        n: sequences of a copy.
        arguments: by layer, what its block was given in another pass over as long sequences.
    """

    view: AttentionView
    layers: tuple[int, ...]
    n: int
    arguments: Mapping[int, BlockArguments]

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return len(self.layers) * self.n

    def alive(self, layer: int) -> int:
        """Return how many rows, the first of the batch, a block runs."""
        return self.n * bisect_right(self.layers, layer)

    def of_copies(self, by_copies: Iterable[tuple[slice, list[Hook]]]) -> list[Hook]:
        """Return hooks of some copies each, so that they see and edit these alone."""
        by_block = {block.name: self.alive(layer) for layer, block in enumerate(self.view.blocks)}
        hooks = []
        for copies, some in by_copies:
            rows = slice(copies.start * self.n, copies.stop * self.n)
            for name, hook in some:
                batch = by_block.get(".".join(name.split(".")[:2]), self.rows)
                hooks.append((name, hook if rows == slice(0, batch) else OfRows(hook, rows, batch)))
        return hooks

    def joined(
        self,
        layer: int,
        entering: Float[Tensor, "sequences pos d_model"] | None,
        block: Any,
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a block is given, with the streams of the copies that join there, cut to the rows alive.

        This is a forward pre-hook of PyTorch with named arguments. `entering` is None for layer 0, to which the model
        hands the streams of the whole batch.
        """
        alive = self.alive(layer)
        stream, others = _stream_first(given, named)
        if entering is None:
            stream = stream[:alive]
        elif joining := self.layers.count(layer):
            fresh = entering.to(stream.device).repeat(joining, 1, 1)
            stream = fresh if layer == self.layers[0] else torch.cat([stream, fresh])
        if alive < self.rows:
            others = self.arguments[layer].cut(others, self.rows, alive, self.view.blocks[layer].name)
        others_given, others_named = others
        return ((stream, *others_given), others_named) if given else ((), {next(iter(named)): stream, **others_named})


def growing_batch(
    view: AttentionView, layers: Sequence[int], n: int, arguments: Mapping[int, BlockArguments]
) -> GrowingBatch:
    """Return the batch of copies of n sequences that join at some layers, which do not decrease.

    All join at the first of these where the axis that counts rows is not known for every block: from a pass with as
    many rows no axis can be told.
    """
    known = all(
        layer in arguments and arguments[layer].rows != n * len(layers) for layer in range(layers[0], layers[-1])
    )
    return GrowingBatch(view, (*layers,) if known else (layers[0],) * len(layers), n, arguments)
