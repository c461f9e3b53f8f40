"""Tensors over queries and keys that are never whole in memory: they are computed strip by strip where they are used.

While `ByStrips` is open, the product of queries and keys inside an attention module gives a `Striped`: it knows its
shape and how to compute the rows of a strip. Operations on it (scale, softcap, mask, softmax, a column of learned
sinks) give another `Striped`. Only the product with the values computes: for each strip the rows of all of them in
order, which are freed before the next strip. The operations are those that the model's own code calls, so the numbers
differ from its own by the rounding of smaller products. An operation that is not known to act on each row by itself
raises `NotByStrips`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.strips import Strip, current, strips


class NotByStrips(UnsupportedArchitecture):
    """An operation on a matrix of queries and keys that is not known to act on each query by itself."""


class Striped(Tensor):
    """A tensor [..., query, key] that is computed strip by strip.

    `rows` is a function from a `Strip` to its rows, [..., queries of the strip, keys of the strip]. `size_of_strip` is
    the number of queries of a strip, `causal` True if no query sees a later key. `uses` counts the tensors that are
    computed from this one, `spent` is True once it has been multiplied by values.
    """

    rows: Callable[[Strip], Tensor]
    made_by: ByStrips
    uses: int
    spent: bool

    @staticmethod
    def __new__(cls, rows: Callable[[Strip], Tensor], shape: Any, like: Tensor, made_by: ByStrips) -> Striped:
        """Make a tensor of a shape, with the type and device of `like` and no memory of its own."""
        made: Any = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
        made.rows, made.made_by, made.uses, made.spent = rows, made_by, 0, False
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Striped({tuple(self.shape)}, {self.dtype})"

    def of(self, strip: Strip) -> Tensor:
        """Return the rows of a strip. Rows of a tensor that is used twice are computed once."""
        if self.uses < 2:
            return self.rows(strip)
        if id(self) not in strip.known:
            strip.known[id(self)] = self.rows(strip)
        return strip.known[id(self)]

    def through(self, call: Callable[[Tensor], Tensor]) -> Striped:
        """Return a `Striped` whose rows are `call(rows)`, of the same shape. `call` runs once for each strip."""
        self.uses += 1

        def rows(strip: Strip) -> Tensor:
            before = self.of(strip)
            if strip.sample:
                return before
            token = current.set(strip)
            try:
                return call(before)
            finally:
                current.reset(token)

        passed = Striped(rows, self.shape, self, self.made_by)
        passed.uses += 1  # the second use of its rows must not call again
        return passed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        mode = next(value for value in _flat((args, kwargs or {})) if isinstance(value, Striped)).made_by
        return mode.applied(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotByStrips(f"{func} reads a matrix of queries and keys whole")


class ByStrips(TorchFunctionMode):
    """Inside the `with` block, matrices of queries and keys with `least` rows or more are `Striped`.

    size: queries of a strip. Keys behind the last query of a strip are not computed, because a causal model masks them.
    attending: set to True while an attention module runs; elsewhere only masks (of whole numbers) become `Striped`.
    computing: True while rows of a strip are computed, which are ordinary tensors.
    """

    def __init__(self, size: int, least: int):
        super().__init__()
        self.size, self.least, self.attending = size, least, False
        self.computing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.computing or any(issubclass(kind, Striped) for kind in types):
            return func(*args, **kwargs)
        if self.attending and func in _PRODUCTS and self._is_square(_product_shape(args)):
            return self.product(func, *args)
        if self.attending and func in _SUMS and self._is_square(_product_shape([*args, *kwargs.values()][1:3])):
            return self.sum_with_product(func, *args, **kwargs)
        if func in _COMPARISONS and self._is_square(_joined_shape(args)):
            return self.applied(func, args, kwargs)
        if self.attending and func in _MADE and self._is_square(_asked_shape(args, kwargs)):
            return self.made(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_square(self, shape: tuple[int, ...] | None) -> bool:
        return shape is not None and len(shape) > 1 and shape[-1] == shape[-2] >= self.least

    def each(self, n_queries: int) -> Iterator[Strip]:
        """Yield the strips of a prompt with `n_queries` tokens, whose rows are then to be computed."""
        outer, self.computing = self.computing, True
        try:
            for strip in strips(n_queries, self.size):
                yield strip
                strip.known.clear()
        finally:
            self.computing = outer

    def product(self, func: Any, queries: Tensor, keys: Tensor) -> Striped:
        """Return the products of all queries and keys as a `Striped`."""

        def rows(strip: Strip) -> Tensor:
            return func(queries[..., strip.queries, :], keys[..., : strip.n_keys])

        shape = (*torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2]), queries.shape[-2], keys.shape[-1])
        return Striped(rows, shape, queries, self)

    def sum_with_product(self, func: Any, added: Tensor, batch1: Tensor, batch2: Tensor, **factors: Any) -> Striped:
        """Return the sum of `added`, one value for each key, and the product of queries and keys as a `Striped`."""

        def rows(strip: Strip) -> Tensor:
            return func(
                added[..., : strip.n_keys], batch1[..., strip.queries, :], batch2[..., : strip.n_keys], **factors
            )

        if added.shape[-2] != 1 or added.shape[-1] != batch2.shape[-1]:
            raise NotByStrips("a matrix of queries and keys is added to their product")
        return Striped(rows, (*batch1.shape[:-1], batch2.shape[-1]), batch1, self)

    def made(self, func: Any, args: Any, kwargs: Any) -> Striped:
        """Return a constant matrix of queries and keys, such as `torch.ones(n, n)`, as a `Striped`."""
        sizes = _asked_shape(args, kwargs)
        assert sizes is not None
        rest = args[1:] if func is torch.full else ()
        named = {name: value for name, value in kwargs.items() if name != "size"}

        def rows(strip: Strip) -> Tensor:
            return func((*sizes[:-2], strip.stop - strip.start, strip.n_keys), *rest, **named)

        return Striped(rows, sizes, rows(Strip(0, 1, sizes[-2])), self)

    def applied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of PyTorch some of whose arguments are `Striped`."""
        name = getattr(func, "__name__", str(func))
        if func in _PRODUCTS:
            return self._times(func, *args, **kwargs)
        if name in ("tril", "triu"):
            return self._triangle(func, *args, **kwargs)
        if name == "__getitem__":
            return self._indexed(func, *args)
        if name == "narrow" and args[1] in range(args[0].ndim - 2):
            _, axis, start, length = args
            return self._indexed(Tensor.__getitem__, args[0], (*[slice(None)] * axis, slice(start, start + length)))
        if name in ("expand", "view", "reshape"):
            return self._reshaped(name, args[0], args[1] if isinstance(args[1], tuple | list) else args[1:])
        if name in _BY_ROW:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if not isinstance(axis, int) or axis not in (-1, 3):
                raise NotByStrips(f"{name} along another axis than the keys")
        elif name not in _BY_ENTRY:
            raise NotByStrips(f"{name} is not known to act on each query by itself")
        func = _OUT_OF_PLACE.get(name, func)
        if name == "max":
            largest = self._result(lambda *given, **named: func(*given, **named).values, args, kwargs)
            return _Largest(largest)
        return self._result(func, args, kwargs)

    def _result(self, func: Any, args: Any, kwargs: Any) -> Striped:
        """Return the `Striped` whose rows are `func` of the rows of its arguments."""
        striped = [value for value in _flat((args, kwargs)) if isinstance(value, Striped)]
        side = next((value.shape[-2] for value in striped if value.shape[-2] > 1), None) or _joined_shape(args)[-1]
        for value in striped:
            value.uses += 1

        def rows(strip: Strip) -> Tensor:
            return func(*_cut(args, side, strip), **_cut(kwargs, side, strip))

        # The shape of the result, from a strip of two queries that calls no hook.
        two = Strip(0, 2, side, sample=True)
        sample = rows(two)
        n_keys = sample.shape[-1] if sample.shape[-1] == 1 else sample.shape[-1] - two.n_keys + side
        return Striped(rows, (*sample.shape[:-2], side, n_keys), sample, self)

    def _times(self, func: Any, pattern: Any, values: Any) -> Tensor:
        """Return the product of attention weights and values, computed strip by strip."""
        if not isinstance(pattern, Striped) or isinstance(values, Striped):
            raise NotByStrips("a matrix of queries and keys is multiplied from the left")
        pattern.uses += 1
        pattern.spent = True

        def seen(strip: Strip) -> Tensor:
            return func(pattern.of(strip), values[..., : strip.n_keys, :])

        recorded = torch.is_grad_enabled()
        by_strip = []
        for strip in self.each(pattern.shape[-2]):
            by_strip.append(checkpoint(seen, strip, use_reentrant=False) if recorded else seen(strip))
        return torch.cat(by_strip, dim=-2)

    def _triangle(self, func: Any, matrix: Striped, diagonal: int = 0) -> Striped:
        matrix.uses += 1

        def rows(strip: Strip) -> Tensor:
            return func(matrix.of(strip), diagonal=diagonal + strip.start)

        return Striped(rows, matrix.shape, matrix, self)

    def _indexed(self, func: Any, matrix: Striped, index: Any) -> Striped:
        """Return a `Striped` for an index that keeps all queries and all keys, or leaves out a last column of sinks."""
        index = index if isinstance(index, tuple) else (index,)
        n_axes = sum(entry is not None and entry is not Ellipsis for entry in index)
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (matrix.ndim - n_axes), *index[place + 1 :])
        else:
            index = (*index, *[slice(None)] * (matrix.ndim - n_axes))
        *front, queries, keys = index
        shape = [len(range(*entry.indices(size))) if isinstance(entry, slice) else -1
                 for entry, size in zip((queries, keys), matrix.shape[-2:], strict=True)]  # fmt: skip
        without_last = keys == slice(None, -1)
        if shape[0] != matrix.shape[-2] or not (shape[1] == matrix.shape[-1] or without_last):
            raise NotByStrips("some queries or keys of a matrix are taken")
        cut = (*front, slice(None), keys if without_last else slice(None))
        matrix.uses += 1

        def rows(strip: Strip) -> Tensor:
            return func(matrix.of(strip), cut)

        leading = torch.empty(*matrix.shape[:-2], 1, 1, device="meta")[(*front, slice(None), slice(None))].shape[:-2]
        return Striped(rows, (*leading, *shape), matrix, self)

    def _reshaped(self, name: str, matrix: Striped, sizes: Any) -> Striped:
        """Return a `Striped` with other axes in front of queries and keys."""
        sizes = list(sizes)
        if any(size not in (-1, own) for size, own in zip(sizes[-2:], matrix.shape[-2:], strict=True)):
            raise NotByStrips("queries or keys of a matrix are joined with other axes")
        matrix.uses += 1

        def rows(strip: Strip) -> Tensor:
            part = matrix.of(strip)
            return getattr(part, name)(*sizes[:-2], *part.shape[-2:])

        leading = getattr(torch.empty(*matrix.shape[:-2], 1, 1, device="meta"), name)(*sizes[:-2], 1, 1).shape[:-2]
        return Striped(rows, (*leading, *matrix.shape[-2:]), matrix, self)


class _Largest(NamedTuple):
    """The largest entry of each row, as `torch.max` returns it."""

    values: Striped


def _flat(value: Any) -> Iterator[Any]:
    """Yield the entries of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (tuple, list):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def _cut(value: Any, side: int, strip: Strip) -> Any:
    """Return arguments with the rows and columns of a strip in the place of tensors with `side` queries or keys."""
    if isinstance(value, dict):
        return {name: _cut(entry, side, strip) for name, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(entry, side, strip) for entry in value)
    if isinstance(value, Striped):
        return value.of(strip)
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if value.shape[-1] == side:
        value = value[..., : strip.n_keys]
    return value[..., strip.queries, :] if value.ndim > 1 and value.shape[-2] == side else value


def _product_shape(args: Any) -> tuple[int, ...] | None:
    """Return the last two sizes of the product of two tensors with axes in front; None for other arguments."""
    if len(args) != 2 or not all(isinstance(value, Tensor) and value.ndim > 2 for value in args):
        return None
    return args[0].shape[-2], args[1].shape[-1]


def _joined_shape(args: Any) -> Any:
    """Return the last two sizes to which whole numbers or masks are broadcast; None for other arguments.

    None too if one of them has these sizes by itself, so that nothing larger is made.
    """
    given = [value for value in args if isinstance(value, Tensor)]
    if len(given) < 2 or any(value.is_floating_point() or value.ndim < 2 for value in given):
        return None
    sizes = [tuple(value.shape[-2:]) for value in given]
    joined = tuple(torch.broadcast_shapes(*sizes))
    return None if joined in sizes else joined


def _asked_shape(args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the sizes for which a tensor is made, from the arguments of `torch.ones` and others."""
    sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else None


_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_SUMS = {torch.baddbmm, Tensor.baddbmm}
_MADE = {torch.ones, torch.zeros, torch.full}
_COMPARISONS = {
    getattr(owner, name)
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "sub", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__",
                 "__and__", "__or__", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "__sub__")
    for owner in (torch, Tensor) if hasattr(owner, name)
}  # fmt: skip
_BY_ENTRY = frozenset((
    "mul", "div", "true_divide", "add", "sub", "rsub", "neg", "tanh", "where", "masked_fill", "isnan", "zeros_like",
    "invert", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "lt", "le", "gt",
    "ge", "eq", "ne", "to", "float", "type", "type_as", "bool", "contiguous", "clone", "detach", "dropout", "clamp",
    "__mul__", "__rmul__", "__truediv__", "__div__", "__rdiv__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__neg__", "__and__", "__rand__", "__or__", "__ror__", "__invert__", "__lt__", "__le__", "__gt__", "__ge__",
    "__eq__", "__ne__", "__iadd__", "__imul__", "__itruediv__", "__isub__", "__idiv__", "add_", "mul_", "div_",
    "masked_fill_", "nan_to_num", "abs", "floor_divide", "__floordiv__",
))  # fmt: skip
"""Functions that act on each entry by itself. Their `Striped` arguments and others are broadcast as in PyTorch."""

_BY_ROW = frozenset(("softmax", "_softmax", "max", "amax", "cat"))
"""Functions that act on each row by itself if they act along the keys."""

_OUT_OF_PLACE: dict[str, Any] = {
    "__iadd__": torch.add, "__imul__": torch.mul, "__itruediv__": torch.div, "__idiv__": torch.div,
    "__isub__": torch.sub, "add_": torch.add, "mul_": torch.mul, "div_": torch.div, "masked_fill_": torch.masked_fill,
}  # fmt: skip
"""The same functions without an edit in place."""

_ABOUT = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
    Tensor.element_size, Tensor.nelement, torch.is_floating_point, Tensor.stride, Tensor.is_contiguous, torch.numel,
    Tensor.get_device,
    *(getattr(Tensor, name).__get__ for name in
      ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "grad_fn", "is_leaf", "is_sparse",
       "is_meta", "is_mps", "is_quantized", "is_nested", "itemsize", "nbytes")),
}  # fmt: skip
"""Functions and attributes that tell the shape, type and device of a tensor."""
