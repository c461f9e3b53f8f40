"""The rotary frequencies of a layer, compared with the cos and sin that the model's own code computes.

Frequencies can be edited after a model was built, tables of cos and sin can be changed in some rows, and a user can
replace a rotary module. So frequencies are not taken from a config. They are compared with the model's own tables
before anything is computed from them.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tlspectral.models.reading.digests import stored_bytes

_FIRST, _LAST = 32, 2**14
"""Positions at which tables are compared: all below `_FIRST`, and powers of two up to `_LAST`."""

# Largest difference of an entry of a table, in multiples of its type's resolution and of 1 + angle: float32 rounds the
# angle too. Measured over the zoo: 0.6 at most. A frequency that is off by 1e-5 of itself is noticed at an angle of 1.
_ALLOWED = 8


class Frequencies(NamedTuple):
    """The rotary frequencies of a layer.

    theta: radians per token of each rotary pair.
    scaling: factor on cos and sin.
    mismatch: None if the model rotates by these frequencies, else the reason, as the end of a sentence about a layer.
    """

    theta: Float64[Tensor, "pairs"]
    scaling: float
    mismatch: str | None = None


def compared_positions(n_positions: int) -> list[int]:
    """Return the positions below `n_positions` at which tables are compared: the first 32, then powers of two."""
    far = [2**power for power in range(_LAST.bit_length()) if _FIRST <= 2**power < n_positions]
    return [*range(min(_FIRST, n_positions)), *far]


def frequencies_of_tables(
    cos: Float[Tensor, "rows columns"],
    sin: Float[Tensor, "rows columns"],
    n_pairs: int,
    known: Frequencies | None = None,
) -> Frequencies:
    """Return the rotary frequencies that produce these tables of cos and sin, as `Frequencies` (`.theta`, `.scaling`,
    `.mismatch`).

    cos, sin: row i is at position `compared_positions(...)[i]`; one column per pair, or two equal columns per pair.
    n_pairs: number of rotary pairs. known: expected frequencies. They are returned if they produce the tables, else
    frequencies are read from the tables. If neither produces the tables, the result has a `mismatch`.
    """
    positions = compared_positions(_LAST + 1)[: len(cos)]
    exact = (
        dtype
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if all(torch.equal(table.to(dtype).to(table.dtype), table) for table in (cos, sin))
    )
    resolution = torch.finfo(next(exact, torch.float64)).eps
    cos, sin = (_one_column_per_pair(table.detach().cpu().double(), n_pairs) for table in (cos, sin))
    tried = [] if known is None else [known]
    if len(cos) > 1:
        tried.append(Frequencies(_angle_per_token(cos, sin, positions, resolution), float(cos[1, 0].hypot(sin[1, 0]))))
    excess = torch.zeros_like(cos)
    for theta, scaling, _ in tried:
        angle = torch.tensor(positions)[:, None] * theta
        difference = torch.maximum((scaling * angle.cos() - cos).abs(), (scaling * angle.sin() - sin).abs())
        excess = difference / (_ALLOWED * resolution * max(1.0, abs(scaling)) * (1 + angle.abs()))
        if bool((excess <= 1).all()):
            return Frequencies(theta, scaling)
    row, pair = divmod(int(excess.nan_to_num(torch.inf).argmax()), n_pairs)
    return tried[0]._replace(
        mismatch=f"its cos and sin do not turn pair {pair} by one angle per token (position {positions[row]} "
        "shows it), so it has no rotary frequencies that could be read: take another model"
    )


def _angle_per_token(
    cos: Float64[Tensor, "rows pairs"], sin: Float64[Tensor, "rows pairs"], positions: list[int], resolution: float
) -> Float64[Tensor, "pairs"]:
    """Return radians per token of each pair, from tables `cos` and `sin`: the angle at position 1, refined at 2, 4, 8,
    ... if tables are 16 bit.

    positions: position of each row of the tables. resolution: relative rounding (eps) of the numbers in the tables.
    """
    angles = torch.atan2(sin, cos)
    theta = angles[1]  # every theta in use is at most 1 radian
    for row, position in enumerate(positions):
        if resolution > 1e-4 and position > 1 and position & (position - 1) == 0:
            turns = ((position * theta - angles[row]) / (2 * torch.pi)).round()
            theta = (angles[row] + 2 * torch.pi * turns) / position
    return theta


def _one_column_per_pair(table: Float64[Tensor, "rows columns"], n_pairs: int) -> Float64[Tensor, "rows pairs"]:
    """Return a table of cos or sin with one column for each of `n_pairs` rotary pairs; NaN where the two columns of a
    pair differ.
    """
    if table.shape[1] == n_pairs:
        return table
    halves, neighbours = table.unflatten(1, (2, n_pairs)), table.unflatten(1, (n_pairs, 2)).mT
    of_pair = min((halves, neighbours), key=lambda columns: int((columns[:, 0] != columns[:, 1]).sum()))
    return of_pair[:, 0].where(of_pair[:, 0] == of_pair[:, 1], torch.nan)


_compared: WeakKeyDictionary[Any, dict[str | None, tuple[Any, Frequencies]]] = WeakKeyDictionary()


def frequencies_of_stored(
    holder: Any,
    cos: Float[Tensor, "pos columns"],
    sin: Float[Tensor, "pos columns"],
    n_pairs: int,
    known: Frequencies | None = None,
) -> Frequencies:
    """Return the rotary frequencies that produce whole tables of cos and sin, which a module stores.

    holder: the module; the result is remembered under it until the tables change. cos, sin: row i is position i.
    n_pairs: number of rotary pairs. known: expected frequencies, or None. As `frequencies_of_tables`, which compares
    some rows.
    """
    rows = _rows(len(cos)).to(cos.device)
    cos, sin = cos.detach()[rows], sin.detach()[rows]
    state = n_pairs, cos.dtype, bytes(stored_bytes(cos)), bytes(stored_bytes(sin))
    return _remembered(holder, None, state, lambda: frequencies_of_tables(cos, sin, n_pairs, known))


@torch.no_grad()
def frequencies_of_module(
    module: Any, layer_type: str | None, known: Frequencies, n_positions: int, d_head: int
) -> Frequencies:
    """Return the frequencies by which a rotary module rotates prompts of at most `n_positions` tokens, as
    `Frequencies`.

    module: of transformers; it is not changed. layer_type: passed to its forward; None if all layers have one type.
    known: the frequencies that its attributes state; they are returned if its tables agree, if it cannot be called with
    positions, or if it does not return tables of cos and sin. d_head: width of the input it is called with. The
    module's own forward is called on a copy with its own buffers. The result is remembered until the module changes.
    """
    n_pairs = len(known.theta)

    def compared() -> Frequencies:
        tables = _applied(module, layer_type, n_positions, d_head)
        if tables is None or tables[0].shape[1] not in (n_pairs, 2 * n_pairs):
            return known
        return frequencies_of_tables(*tables, n_pairs, known)

    state = (known.theta.numpy().tobytes(), known.scaling, n_positions, *_state_of(module))
    return _remembered(module, layer_type, state, compared)


def _remembered(holder: Any, name: str | None, state: Any, make: Callable[[], Frequencies]) -> Frequencies:
    """Return `make()` for a module, or the result that was remembered for it while `state` is the same.

    holder: the module. name: distinguishes results of one module. state: value that is compared by `!=`.
    """
    kept = _compared.setdefault(holder, {})
    if name not in kept or kept[name][0] != state:
        kept[name] = state, make()
    frequencies = kept[name][1]
    return frequencies._replace(theta=frequencies.theta.clone())


@cache
def _rows(n_positions: int) -> Int64[Tensor, "rows"]:
    """Return the positions below `n_positions` at which tables are compared, as a tensor of integers."""
    return torch.tensor(compared_positions(n_positions))


def _state_of(module: Any) -> Iterator[Any]:
    """Yield everything that determines a rotary module's tables: its code, its numbers, its buffers and parameters."""
    for inner in module.modules():
        yield type(inner).forward, vars(inner).get("forward")
        yield {name: value for name, value in vars(inner).items() if isinstance(value, int | float | str)}
    for values in (*module.buffers(), *module.parameters()):
        yield bytes(stored_bytes(values))


def _applied(module: Any, layer_type: str | None, n_positions: int, d_head: int) -> tuple[Tensor, Tensor] | None:
    """Return (cos, sin), each [rows, columns], that a module's forward computes at the compared positions.

    module: rotary module of transformers. layer_type: passed to its forward unless None. n_positions: the positions are
    below it (`compared_positions`). d_head: width of the input. None if the module cannot be called like this or
    returns something else.
    """
    twin = copy.copy(module)  # frequencies that depend on the length are overwritten by a call
    vars(twin)["_buffers"] = {
        name: None if tensor is None else tensor.clone() for name, tensor in module._buffers.items()
    }
    # The forward is called without hooks, so that hooks of a user do not see this call.
    forward = vars(module).get("forward") or partial(type(module).forward, twin)
    device = next((tensor.device for tensor in (*module.buffers(), *module.parameters())), torch.device("cpu"))
    positions = torch.tensor([compared_positions(n_positions)], device=device)
    options = {} if layer_type is None else {"layer_type": layer_type}
    try:
        output = forward(torch.zeros(1, positions.shape[1], d_head, device=device), positions, **options)
    except Exception:  # a forward with another signature can raise anything
        return None
    if isinstance(output, Tensor) and output.is_complex():
        output = output.real, output.imag
    if not isinstance(output, tuple) or len(output) != 2:
        return None
    cos, sin = (
        tensor.reshape(-1, tensor.shape[-1]) if isinstance(tensor, Tensor) and tensor.ndim else None
        for tensor in output
    )
    if cos is None or sin is None or not len(cos) == len(sin) == positions.shape[1]:
        return None
    return cos, sin
