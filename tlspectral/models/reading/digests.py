"""SHA-256 of tensors. Tables name by them the weights and tokens from which they were made.

A model's weights are hashed once. Later calls compare the weights with the hashed ones, on their device.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_PIECE = 2**26
"""Bytes of a weight that are copied at a time if it has to be copied for hashing."""

_SMALL = 2**14
"""Tensors of at most this many numbers are kept and compared whole, such as gains of 1 + weight made at each call."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(values: Iterable[Tensor | None]) -> str:
    """Return the SHA-256 (hex) of the stored bytes of the tensors `values`, in order; None is skipped."""
    digest = hashlib.sha256()
    for value in values:
        if value is not None:
            for piece in _pieces(value):
                digest.update(stored_bytes(piece))
    return digest.hexdigest()


def digest_of_named(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of `values`, a dict from name to tensor, sorted by name: name, shape, type and bytes of
    each.
    """
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        for piece in _pieces(value):
            digest.update(stored_bytes(piece))
    return digest.hexdigest()


def stored_bytes(value: Tensor) -> Any:
    """Return the bytes of the tensor `value` as a uint8 array, for a hash. The bytes of a tensor on the CPU are not
    copied.
    """
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """Yield the tensor `value` in pieces for hashing: whole if it is contiguous on the CPU, else copies of a few rows
    each.
    """
    if value.ndim < 2 or (value.is_contiguous() and value.device.type == "cpu"):
        yield value
        return
    order = _by_stride(value)
    back = [order.index(axis) for axis in range(value.ndim)]
    for rows in value.detach().split(max(1, _PIECE * len(value) // max(1, value.nbytes))):
        # Two steps, because a CPU copies some rows of a transposed matrix slowly but transposes a matrix fast.
        yield rows.permute(order).contiguous().permute(back).contiguous()


def _by_stride(value: Tensor) -> list[int]:
    """Return the axes of the tensor `value` in the order of memory, largest stride first."""
    return sorted(range(value.ndim), key=lambda axis: -value.stride(axis))


@dataclass(frozen=True)
class Seen:
    """State of a tensor when it was hashed.

    form: shape, type, strides and device.
    place: address in memory and count of in-place edits; None for a small tensor.
    numbers: the tensor itself if it is small, else sums of its bits over rows and columns.
    """

    form: tuple[Any, ...]
    place: tuple[Any, ...] | None
    numbers: tuple[Tensor, ...]

    def same(self, now: "Seen") -> bool:
        """Return True if the tensor's present state `now` equals the state when it was hashed."""
        # The numbers come last because comparing them waits for a GPU.
        return (self.form, self.place) == (now.form, now.place) and all(map(torch.equal, self.numbers, now.numbers))


Sums = dict[Hashable, tuple[Tensor, tuple[Tensor, ...]]]
"""From address and form of a tensor to the tensor and the sums of its bits.

The tensors are kept alive, because otherwise another tensor could get the same address.
"""

_kept: WeakKeyDictionary[Any, dict[Hashable, tuple[tuple[Seen | None, ...], str]]] = WeakKeyDictionary()


@torch.no_grad()
def kept_digest(
    model: Any, name: Hashable, values: Iterable[Tensor | None], make: Callable[[], str], known: Sums | None = None
) -> str:
    """Return `make()` for some weights of a model, from memory if no weight has changed since the last call.

    name: key under which the result is remembered for this model.
    values: the weights.
    make: function without arguments that computes the result, such as a SHA-256.
    known: sums of bits from earlier calls, to be used if no weight can have changed since; None computes the sums.

    Compared are each weight's address, shape, type, strides, device, count of in-place edits, and numbers. For the
    numbers, the bits are read as integers and summed over rows and over columns, modulo 2^64, on the weight's device.
    The sums notice a change of one number and an exchange of two, also through `.data`, which is not counted as an
    edit. Vectors and tensors of at most `_SMALL` numbers are compared whole.
    """
    sums: Sums = {} if known is None else known
    now = tuple(None if value is None else seen(value.detach(), sums) for value in values)
    of_model = _kept.setdefault(model, {})
    then, digest = of_model.get(name, ((), ""))
    if len(then) != len(now) or not all(map(_unchanged, then, now)):
        digest = make()
        of_model[name] = now, digest
    return digest


def _unchanged(then: Seen | None, now: Seen | None) -> bool:
    """Return True if a weight's earlier state `then` and present state `now` are equal, or if both are None."""
    return then is now if then is None or now is None else then.same(now)


def seen(value: Tensor, sums: Sums) -> Seen:
    """Return the present state of the tensor `value` as a `Seen`, for comparison with an earlier one.

    sums: a dict from address and form of tensors to sums of their bits; this tensor's sums are added to it.
    """
    form = (value.shape, value.dtype, value.stride(), value.device)
    stored = value.permute(_by_stride(value))
    if value.ndim < 2 or value.numel() <= _SMALL:
        return Seen(form, None, (stored.contiguous().view(_INTEGERS[value.itemsize]).clone(),))
    if stored.is_contiguous():
        stored = stored.flatten(0, -2)  # heads side by side are one matrix
    key = (value.data_ptr(), stored.shape, stored.stride(), value.dtype)  # tied weights have the same key
    if key not in sums:
        integers = _as_integers(stored)
        axes = tuple(range(integers.ndim - 1))
        sums[key] = value, (integers.sum(-1, dtype=torch.int64), integers.sum(axes, dtype=torch.int64))
    edits = None if value.is_inference() else value._version
    return Seen(form, (value.data_ptr(), edits), sums[key][1])


def _as_integers(stored: Tensor) -> Tensor:
    """Return the bits of the tensor `stored` as integers, a view: int64 if its rows allow it, which is twenty times
    faster.

    One row of the result may hold several rows of the tensor.
    """
    numbers, width = 8 // stored.itemsize, stored.shape[-1]
    steps = (stored.storage_offset(), width, *stored.stride()[:-1])
    if stored.stride(-1) == 1 and not any(step % numbers for step in steps):
        return stored.view(torch.int64)
    if stored.is_contiguous() and not stored.storage_offset() % numbers and not stored.numel() % (numbers * width):
        return stored.reshape(-1).view(torch.int64).reshape(-1, width)
    return stored.view(_INTEGERS[stored.itemsize])


def recorded_weights(digests: Mapping[int, str], n_layers: int) -> dict[str, Any]:
    """Return the hashes of weights that a table's `attrs` record, as a dict.

    Its keys: `weights_sha256` (of all these layers together), `weights_by_layer` (from layer, as text, to hash) and
    `n_layers` (layers of the whole model).

    digests: from layer that was read to the digest of its weights.
    """
    return {
        "weights_sha256": _sha256("".join(digests.values())),
        "weights_by_layer": {str(layer): _sha256(digest) for layer, digest in digests.items()},
        "n_layers": n_layers,
    }


def _sha256(text: str) -> str:
    """Return the SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
