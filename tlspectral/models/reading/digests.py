"""SHA-256 of tensors as they are stored, by which tables name the weights and tokens that they were made from.

It is computed once for a model's weights. Later calls compare the weights with what was hashed, on their device.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_PIECE = 2**26
"""Bytes of a weight that are copied at a time, where it has to be copied to be hashed."""

_SMALL = 2**14
"""Numbers of a tensor up to which it is kept and compared whole. Some are made at each call: gains of 1 + weight."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(values: Iterable[Tensor | None]) -> str:
    """Return the SHA-256 of the bytes of tensors as stored, in order; None is skipped."""
    digest = hashlib.sha256()
    for value in values:
        if value is not None:
            for piece in _pieces(value):
                digest.update(stored_bytes(piece))
    return digest.hexdigest()


def digest_of_named(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors, in the order of their names, with name, shape and type of each."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        for piece in _pieces(value):
            digest.update(stored_bytes(piece))
    return digest.hexdigest()


def stored_bytes(value: Tensor) -> Any:
    """Return the bytes of a tensor as stored, for a hash; a tensor on the CPU is not copied."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """Yield a tensor whole where its bytes stand in order on the CPU, else copies of a few of its rows at a time."""
    if value.ndim < 2 or (value.is_contiguous() and value.device.type == "cpu"):
        yield value
        return
    order = _by_stride(value)
    back = [order.index(axis) for axis in range(value.ndim)]
    for rows in value.detach().split(max(1, _PIECE * len(value) // max(1, value.nbytes))):
        # In two steps: of a transposed matrix a CPU copies some rows slowly, and transposes a matrix fast.
        yield rows.permute(order).contiguous().permute(back).contiguous()


def _by_stride(value: Tensor) -> list[int]:
    """Return the axes of a tensor in the order in which its numbers stand in memory."""
    return sorted(range(value.ndim), key=lambda axis: -value.stride(axis))


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was when it was hashed: its form and place, and what its numbers are compared by."""

    form: tuple[Any, ...]
    place: tuple[Any, ...] | None
    numbers: tuple[Tensor, ...]

    def same(self, now: "_Seen") -> bool:
        """Return whether the tensor is unchanged; tensors are compared last, since a GPU is waited for."""
        return (self.form, self.place) == (now.form, now.place) and all(map(torch.equal, self.numbers, now.numbers))


Sums = dict[Hashable, tuple[Tensor, tuple[Tensor, ...]]]
"""Tensors whose bits were summed, and the sums, by place and form. They are held, so that none takes their place."""

_kept: WeakKeyDictionary[Any, dict[Hashable, tuple[tuple[_Seen | None, ...], str]]] = WeakKeyDictionary()


@torch.no_grad()
def kept_digest(
    model: Any, name: Hashable, values: Iterable[Tensor | None], make: Callable[[], str], known: Sums | None = None
) -> str:
    """Return what `make` says of some weights of a model, which it is asked for again where one of them has changed.

    Compared are of each weight its place in memory, shape, type, strides, device and count of edits in place, and its
    numbers: its bits, read as integers, are summed over each row and over each column, modulo 2^64, all of them and on
    its device. So an edit of one number is seen, and an exchange of two, also through `.data`, which is not counted.
    Vectors, and tensors of at most `_SMALL` numbers, are compared whole, wherever they are. `known` are sums of
    earlier calls since which no weight has changed.
    """
    sums: Sums = {} if known is None else known
    now = tuple(None if value is None else _seen(value.detach(), sums) for value in values)
    of_model = _kept.setdefault(model, {})
    then, digest = of_model.get(name, ((), ""))
    if len(then) != len(now) or not all(map(_unchanged, then, now)):
        digest = make()
        of_model[name] = now, digest
    return digest


def _unchanged(then: _Seen | None, now: _Seen | None) -> bool:
    return then is now if then is None or now is None else then.same(now)


def _seen(value: Tensor, sums: Sums) -> _Seen:
    form = (value.shape, value.dtype, value.stride(), value.device)
    stored = value.permute(_by_stride(value))
    if value.ndim < 2 or value.numel() <= _SMALL:
        return _Seen(form, None, (stored.contiguous().view(_INTEGERS[value.itemsize]).clone(),))
    if stored.is_contiguous():
        stored = stored.flatten(0, -2)  # heads side by side are one matrix
    key = (value.data_ptr(), stored.shape, stored.stride(), value.dtype)  # of tied weights they are one
    if key not in sums:
        integers = _as_integers(stored)
        axes = tuple(range(integers.ndim - 1))
        sums[key] = value, (integers.sum(-1, dtype=torch.int64), integers.sum(axes, dtype=torch.int64))
    edits = None if value.is_inference() else value._version
    return _Seen(form, (value.data_ptr(), edits), sums[key][1])


def _as_integers(stored: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, of 64 bits where its rows can be read so, which is twenty times faster.

    A row of these may be several rows of the tensor.
    """
    numbers, width = 8 // stored.itemsize, stored.shape[-1]
    steps = (stored.storage_offset(), width, *stored.stride()[:-1])
    if stored.stride(-1) == 1 and not any(step % numbers for step in steps):
        return stored.view(torch.int64)
    if stored.is_contiguous() and not stored.storage_offset() % numbers and not stored.numel() % (numbers * width):
        return stored.reshape(-1).view(torch.int64).reshape(-1, width)
    return stored.view(_INTEGERS[stored.itemsize])


def recorded_weights(digests: Mapping[int, str], n_layers: int) -> dict[str, Any]:
    """Return the hashes by which a table's `attrs` tell the weights, of digests of the layers that were read.

    `weights_sha256` is of these layers together, `weights_by_layer` of each, by its index as text, since JSON has no
    other keys; `n_layers` is the model's number of layers.
    """
    return {
        "weights_sha256": _sha256("".join(digests.values())),
        "weights_by_layer": {str(layer): _sha256(digest) for layer, digest in digests.items()},
        "n_layers": n_layers,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
