"""Sequences of token ids in one tensor: padding, positions, and how many rows a pass takes.

The batch size depends only on the device's total memory, not on free memory, so it is the same in every run on a
device. Numbers from batches of other sizes differ only by rounding. `attrs["batch"]` of a table records the
largest number of rows of a pass. It is not a setting: tables of different batch sizes can be compared and resumed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from tlspectral.containers import are_columns
from tlspectral.errors import shown, warn_caller
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.given import numbers, whole

TokenMask = Bool[Tensor, "sequences pos"] | Int[Tensor, "sequences pos"]
"""Which tokens are real (1 or True) and which are padding."""


class Note(NamedTuple):
    """A property of prompts that a caller may not expect.

    Attributes:
        name, value: as stored in `prompt_notes` of a table's `attrs`.
        message: text of the warning.
    """

    name: str
    value: Any
    message: str


@dataclass(frozen=True)
class PackedTokens:
    """Sequences of unequal length in one tensor, each starting at position 0 and padded with its last real token.

    tokens: token ids, on the CPU.
    lengths: real tokens of each sequence.
    notes: properties of the prompts that a caller may not expect.
    """

    tokens: Int[Tensor, "sequences pos"]
    lengths: Int[Tensor, "sequences"]
    _: KW_ONLY
    notes: tuple[Note, ...] = ()

    @property
    def noted(self) -> dict[str, Any]:
        """The notes for a table's `attrs`: {"prompt_notes": {name: value, ...}}, or {} without notes."""
        return {"prompt_notes": {note.name: note.value for note in self.notes}} if self.notes else {}

    @property
    def real(self) -> Bool[Tensor, "sequences pos"]:
        """Bool mask of the positions that are real tokens, not padding."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def padded(self) -> bool:
        """True if the sequences differ in length, so that some are padded."""
        return bool((self.lengths < self.tokens.shape[1]).any())

    def hashed(self, predicted: Any = "") -> str:
        """Return a SHA-256 (hex) of the sequences and of `predicted`, the positions that are predicted in them."""
        described = f"{tuple(self.tokens.shape)}{self.lengths.tolist()}{predicted}"
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes() + described.encode()).hexdigest()


def even_rows(tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return `tokens`, sequences of one length, as a `PackedTokens` without padding."""
    return PackedTokens(tokens.long(), torch.full((len(tokens),), tokens.shape[1]))


def attention_positions(lengths: Int[Tensor, "sequences"], attention: Any) -> Int[Tensor, "sequences 2"] | None:
    """Return the query and key position of each sequence, counted from its first token; None for None.

    lengths: tokens of each sequence. attention: (query, key) for all sequences, or one such pair per sequence; negative
    positions count from the end. Raises ValueError for a position outside a sequence or a key that comes after its
    query, TypeError for anything but whole numbers.
    """
    if attention is None:
        return None
    pairs = _numbers(attention, "attention")
    if pairs.shape not in ((2,), (len(lengths), 2)):
        raise ValueError(
            f"attention= has shape {tuple(pairs.shape)}: give a query and a key position, (query, key), or one such "
            f"pair per sequence, [{len(lengths)}, 2]"
        )
    positions = positions_in(lengths, pairs, "attention")
    behind = (positions[:, 1] > positions[:, 0]).nonzero().flatten().tolist()
    if behind:
        raise ValueError(f"attention of sequence {behind[0]}: its key comes after its query; give (query, key)")
    return positions


def position_of(prompts: PackedTokens, at: Any, what: str = "at") -> Int[Tensor, "sequences"]:
    """Return one position for each sequence, counted from its first token.

    prompts: the sequences. at: name of a position of the task; one position for all sequences; or one per sequence.
    Negative positions count from the end. what: name of the argument, for messages. Raises ValueError for a name that
    the task does not have or a position outside a prompt, TypeError for anything but whole numbers.
    """
    if isinstance(at, str):
        known = getattr(prompts, "positions", {})
        if at not in known:
            names = f"the task names {', '.join(map(repr, known))}" if known else "the task names no positions"
            raise ValueError(f"{what}={shown(at)} is not a named position, {names}: give Task(..., positions=)")
        return known[at]
    positions = _numbers(at, what)
    return positions_in(prompts.lengths, positions.reshape(-1, 1) if positions.ndim else positions.reshape(1), what)[
        :, 0
    ]


def positions_in(lengths: Int[Tensor, "sequences"], given: Any, what: str) -> Int[Tensor, "sequences chosen"]:
    """Return positions as a tensor [sequences, chosen], counted from the first token of each sequence.

    lengths: tokens of each sequence. given: one position, a list for all sequences, or one row per sequence; negative
    positions count from the end. what: name of the argument, for messages. Raises ValueError for a position outside a
    prompt, TypeError for anything but whole numbers.
    """
    positions = _numbers(given, what)
    positions = positions[None] if positions.ndim == 0 else positions
    if positions.ndim > 2:
        raise _no_positions(given, what)
    if positions.ndim == 1:
        positions = positions.expand(len(lengths), -1)
    if len(positions) != len(lengths) or positions.shape[1] == 0:
        raise ValueError(
            f"{what} has shape {tuple(positions.shape)} and there are {len(lengths)} prompts: give one list of "
            "positions for all prompts, or one row per prompt"
        )
    ends = lengths[:, None]
    wrong = ((positions >= ends) | (positions < -ends)).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise ValueError(
            f"{what}: prompt {row} has no position {int(positions[row, column])}; it has {int(lengths[row])} tokens: "
            f"give 0 to {int(lengths[row]) - 1}, or negative positions from the end"
        )
    return torch.where(positions < 0, positions + ends, positions).long().cpu()


def probe_tokens(d_vocab: int, length: int) -> Int64[Tensor, "1 pos"]:
    """Return a short prompt [1, length] of ids from the middle of a vocabulary of `d_vocab` tokens.

    TransformerLens masks padding tokens at the beginning of a prompt, which have low ids.
    """
    return (d_vocab // 2 + torch.arange(length))[None] % d_vocab


def positions_by_place(given: Any, what: str) -> Any:
    """Return positions as an integer, a list or a list of lists, in the order in which their container has them.

    given: a number, or a list, array, Series or tensor of numbers; labels are ignored. what: name of the argument, for
    messages. Raises TypeError for anything but whole numbers.
    """
    return _numbers(given, what).tolist()


def _numbers(given: Any, what: str) -> Tensor:
    """Return the positions `given`, in any container, as a tensor of whole numbers.

    what: name of the argument, for messages. Raises TypeError for other values, and for a tuple of arrays, which has
    two readings.
    """
    if isinstance(given, tuple) and are_columns(given):
        raise TypeError(
            f"{what} has two readings: each of the {len(given)} arrays or lists in this tuple can be a column of "
            "positions, as np.where returns them, or a row for one prompt. For columns give np.stack(columns, axis=1), "
            "for rows a list of lists"
        )
    try:
        values = numbers(given)
    except (TypeError, ValueError) as error:
        raise _no_positions(given, what) from error
    if not whole(values):
        raise _no_positions(given, what)
    return values


def _no_positions(given: Any, what: str) -> TypeError:
    """Return the TypeError for values `given` that are not positions. what: name of the argument, in the message."""
    return TypeError(f"{what}: give whole numbers, one list for all prompts or a row per prompt; found {shown(given)}")


# --- how many sequences a pass takes ---


_Found = TypeVar("_Found")
_Key = TypeVar("_Key")


class Batch(NamedTuple):
    """What one pass may hold on a device.

    Attributes:
        tokens: tokens of all rows together.
        logits: number of logits that are scored.
        held: bytes of activations that are kept besides the model's own; a run has up to three copies.
        copied: bytes of copies of a residual stream in one operation; on a CPU the size of its caches.
        scores: bytes of attention scores and patterns, counted by `score_bytes`.
    """

    tokens: int
    logits: int
    held: int
    copied: int
    scores: int


# Measured on two cores: more tokens are no faster, and 2^26 logits are 256 MB in float32.
ON_CPU = Batch(tokens=2**11, logits=2**26, held=2**29, copied=2**20, scores=2**30)

# Measured in bytes of a score over models of transformers and HookedTransformer, in float32 and in 16 bits: 6 to 16 at
# a time in one layer, up to 24 where an edit of all its heads is computed. A backward pass keeps 4 to 10 of each layer.
_BYTES_OF_LAYER, _BYTES_OF_BACKWARD = 16, 8


def batch_on(device: torch.device) -> Batch:
    """Return what one pass may hold on `device`, as a `Batch` (`.tokens`, `.logits`, `.held`, `.copied`, `.scores`),
    from its total memory rounded down to a power of two.
    """
    if device.type in ("cuda", "xpu"):
        total = getattr(torch, device.type).get_device_properties(device).total_memory
    elif device.type == "mps":
        total = torch.mps.recommended_max_memory()
    else:
        return ON_CPU
    memory = 2 ** (int(total).bit_length() - 1)
    return Batch(
        tokens=memory // 2**21,
        logits=memory // 2**6,
        held=memory // 2**3,
        copied=memory // 2**5,
        scores=memory // 2**2,
    )


def score_bytes(view: AttentionView, n_queries: int, n_keys: int | None = None, *, backward: bool = False) -> int:
    """Return the bytes that eager attention of the model in `view` needs for the scores and patterns of one row.

    n_queries: queries of the row. n_keys: keys of a query; default: n_queries. backward: True counts all layers,
    because a backward pass keeps them.
    """
    per_entry = _BYTES_OF_LAYER + _BYTES_OF_BACKWARD * view.n_layers * backward
    return per_entry * max(1, int(view.model.cfg.n_heads)) * n_queries * (n_keys or n_queries)


def rows_of_scores(view: AttentionView, n_queries: int, n_keys: int | None = None, *, backward: bool = False) -> int:
    """Return how many rows fit on the device of the model in `view` by the memory of their attention scores; it can be
    0.

    n_queries: queries of a row. n_keys: keys of a query; default: n_queries. backward: True counts all layers, because
    a backward pass keeps them.
    """
    return batch_on(view.device).scores // score_bytes(view, n_queries, n_keys, backward=backward)


def rows_of_pass(view: AttentionView, n_tokens: int) -> int:
    """Return how many rows of `n_tokens` tokens one pass of the model in `view` takes, at least 1, by tokens and
    scores.
    """
    return max(1, min(batch_on(view.device).tokens // n_tokens, rows_of_scores(view, n_tokens)))


TOKENS_OF_JOB = ON_CPU.tokens
"""Layers share a job, kept in a folder, up to this many tokens of all rows: the size of a pass on a CPU.

The files of a folder are named by it and the folder may be resumed on another device, so it is the same everywhere.
"""


def filled(sizes: Mapping[_Key, int], most: int) -> list[list[_Key]]:
    """Return the keys of `sizes` in groups of consecutive keys, whose sizes sum to at most `most`.

    sizes: from key to its size. A key larger than `most` has its own group.
    """
    groups: list[list[_Key]] = []
    taken = most
    for key, size in sizes.items():
        if taken + size > most:
            groups.append([])
            taken = 0
        groups[-1].append(key)
        taken += size
    return groups


def in_batches(n: int, at_once: int, run: Callable[[slice], _Found]) -> Iterator[_Found]:
    """Yield the results of `run(rows)` for consecutive slices of n rows, at most `at_once` rows each.

    If memory runs out, this batch and later ones are halved, with a warning; torch.OutOfMemoryError is raised if a
    single row does not fit. `run` is then called again for some rows, so it must not change anything that a second call
    does not overwrite.
    """
    first, warned = 0, False
    while first < n:
        rows = slice(first, min(first + at_once, n))
        try:
            result = run(rows)
        except torch.OutOfMemoryError:
            if rows.stop - rows.start == 1:
                raise
            at_once = (rows.stop - rows.start) // 2
        else:
            yield result
            del result
            first = rows.stop
            continue
        if not warned:
            warn_caller(
                "the device ran out of memory, so batches are halved until they fit: this takes longer and changes "
                "numbers only by rounding"
            )
            warned = True
