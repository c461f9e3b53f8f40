"""Token ids of sequences in one tensor: filled up to one length, positions in them, and how many of them a pass takes.

How large a batch is follows from the device and all of its memory. What else lies in the memory is not asked, so that a
batch is the same in every run on a device. Numbers of batches of other sizes differ by rounding alone. `attrs["batch"]`
of a table says how many rows of tokens a pass had at most; it is no setting, and tables of different batches are
compared and resumed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from tlspectral.containers import are_columns
from tlspectral.errors import warn_caller
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.given import numbers, whole

TokenMask = Bool[Tensor, "sequences pos"] | Int[Tensor, "sequences pos"]
"""Which tokens are real."""


class Note(NamedTuple):
    """What prompts became that a caller may not expect.

    Attributes:
        name, value: in the `prompt_notes` of a table's `attrs`.
        message: of the warning.
    """

    name: str
    value: Any
    message: str


@dataclass(frozen=True)
class PackedTokens:
    """Sequences of unequal length in one tensor, each from position 0 on and filled up with its last real token."""

    tokens: Int[Tensor, "sequences pos"]
    lengths: Int[Tensor, "sequences"]
    _: KW_ONLY
    notes: tuple[Note, ...] = ()

    @property
    def noted(self) -> dict[str, Any]:
        """What a table's `attrs` hold of the prompts: `prompt_notes`, a dictionary, or nothing without notes."""
        return {"prompt_notes": {note.name: note.value for note in self.notes}} if self.notes else {}

    @property
    def real(self) -> Bool[Tensor, "sequences pos"]:
        """Which positions are tokens of their sequence, and not filling."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def padded(self) -> bool:
        """Whether some sequence is shorter than the others."""
        return bool((self.lengths < self.tokens.shape[1]).any())

    def hashed(self, predicted: Any = "") -> str:
        """Return a hash of the sequences and of the positions predicted in them."""
        described = f"{tuple(self.tokens.shape)}{self.lengths.tolist()}{predicted}"
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes() + described.encode()).hexdigest()


def even_rows(tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return sequences of one length, all of whose tokens are real."""
    return PackedTokens(tokens.long(), torch.full((len(tokens),), tokens.shape[1]))


def attention_positions(lengths: Int[Tensor, "sequences"], attention: Any) -> Int[Tensor, "sequences 2"] | None:
    """Return query and key position of each sequence, counted from its first token; None without.

    Raises as `positions_in`; ValueError for a key behind its query.
    """
    if attention is None:
        return None
    pairs = _numbers(attention, "attention")
    if pairs.shape not in ((2,), (len(lengths), 2)):
        raise ValueError(
            f"attention is a query and a key position per sequence, [{len(lengths)}, 2]; found shape "
            f"{tuple(pairs.shape)}"
        )
    positions = positions_in(lengths, pairs, "attention")
    behind = (positions[:, 1] > positions[:, 0]).nonzero().flatten().tolist()
    if behind:
        raise ValueError(f"attention of sequence {behind[0]}: its key comes after its query")
    return positions


def position_of(prompts: PackedTokens, at: Any, what: str = "at") -> Int[Tensor, "sequences"]:
    """Return one position of each sequence, counted from its first token.

    `at` is a name of the task's positions; or a position for all sequences, or one for each, negative from its end.
    Raises ValueError for a name that the task does not have, TypeError for no numbers; as `positions_in`.
    """
    if isinstance(at, str):
        known = getattr(prompts, "positions", {})
        if at not in known:
            names = f"names {', '.join(map(repr, known))}" if known else "names none"
            raise ValueError(f"{what}={at!r} is no position of this task, which {names}: give Task(..., positions=)")
        return known[at]
    given = _numbers(at, what)
    return positions_in(prompts.lengths, given.reshape(-1, 1) if given.ndim else given.reshape(1), what)[:, 0]


def positions_in(lengths: Int[Tensor, "sequences"], given: Any, what: str) -> Int[Tensor, "sequences chosen"]:
    """Return positions counted from the first token of each sequence; negative ones count from its end.

    Raises ValueError for a position that a prompt does not have, TypeError for no whole numbers; `what` names them.
    """
    positions = _numbers(given, what)
    positions = positions[None] if positions.ndim == 0 else positions
    if positions.ndim > 2:
        raise _no_positions(given, what)
    if positions.ndim == 1:
        positions = positions.expand(len(lengths), -1)
    if len(positions) != len(lengths) or positions.shape[1] == 0:
        raise ValueError(f"{what} has shape {tuple(positions.shape)} and there are {len(lengths)} prompts")
    ends = lengths[:, None]
    wrong = ((positions >= ends) | (positions < -ends)).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise ValueError(
            f"{what}: prompt {row} has no position {int(positions[row, column])}; it has {int(lengths[row])} tokens"
        )
    return torch.where(positions < 0, positions + ends, positions).long().cpu()


def probe_tokens(d_vocab: int, length: int) -> Int64[Tensor, "1 pos"]:
    """Return a short prompt from the middle of the vocabulary: TransformerLens masks leading pad tokens, of low ids."""
    return (d_vocab // 2 + torch.arange(length))[None] % d_vocab


def positions_by_place(given: Any, what: str) -> Any:
    """Return positions as an integer, a list or a list of lists. Raises TypeError for no whole numbers."""
    return _numbers(given, what).tolist()


def _numbers(given: Any, what: str) -> Tensor:
    if isinstance(given, tuple) and are_columns(given):
        raise TypeError(
            f"{what} has two readings: a tuple of {len(given)} arrays or lists holds a column of positions in each, as "
            "np.where returns them, or a row for each prompt. Write np.stack(columns, axis=1) for the first, a list of "
            "lists for the second"
        )
    try:
        found = numbers(given)
    except (TypeError, ValueError) as error:
        raise _no_positions(given, what) from error
    if not whole(found):
        raise _no_positions(given, what)
    return found


def _no_positions(given: Any, what: str) -> TypeError:
    return TypeError(f"{what} are whole numbers, one list for all prompts or a row per prompt; found {given!r}"[:200])


# --- how many sequences a pass takes ---


_Found = TypeVar("_Found")
_Key = TypeVar("_Key")


class Batch(NamedTuple):
    """What a pass may hold on a device.

    Attributes:
        tokens: of all its rows together.
        logits: numbers that are scored.
        held: bytes of activations that are kept beside the model's own, of which a run has up to three copies.
        copied: bytes of copies of a residual stream that one operation makes; on a CPU as much as its caches hold.
        scores: bytes of attention scores and patterns, as `score_bytes` counts them.
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
    """Return the size of a batch on a device, by its total memory rounded down to a power of two."""
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
    """Return the bytes that eager attention needs for the scores and patterns of one row.

    `n_keys`: that a query has, where this is not `n_queries`. With `backward` those of all layers are kept.
    """
    each = _BYTES_OF_LAYER + _BYTES_OF_BACKWARD * view.n_layers * backward
    return each * max(1, int(view.model.cfg.n_heads)) * n_queries * (n_keys or n_queries)


def rows_of_scores(view: AttentionView, n_queries: int, n_keys: int | None = None, *, backward: bool = False) -> int:
    """Return how many rows the device has room for by `score_bytes` alone; it may be none."""
    return batch_on(view.device).scores // score_bytes(view, n_queries, n_keys, backward=backward)


def rows_of_pass(view: AttentionView, n_tokens: int) -> int:
    """Return how many rows of so many tokens a pass takes, by its tokens and scores: one at least."""
    return max(1, min(batch_on(view.device).tokens // n_tokens, rows_of_scores(view, n_tokens)))


TOKENS_OF_JOB = ON_CPU.tokens
"""Tokens of all rows up to which layers share a job that is kept in a folder: what a pass on a CPU takes.

It names the files of a folder, which may be resumed on another device, so it is the same on all.
"""


def filled(sizes: Mapping[_Key, int], most: int) -> list[list[_Key]]:
    """Return keys in groups of consecutive ones, whose sizes sum to `most` at most where there are several."""
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
    """Yield what `run` returns for one slice of n rows after the other, at most `at_once` rows in each.

    Where memory runs out, the batch and those behind it are halved, with a warning; one row that does not fit alone
    raises torch.OutOfMemoryError. `run` is then called again for some of the rows, so it changes nothing before its end
    that a second call does not overwrite.
    """
    first, warned = 0, False
    while first < n:
        rows = slice(first, min(first + at_once, n))
        try:
            found = run(rows)
        except torch.OutOfMemoryError:
            if rows.stop - rows.start == 1:
                raise
            at_once = (rows.stop - rows.start) // 2
        else:
            yield found
            del found
            first = rows.stop
            continue
        if not warned:
            warn_caller(
                "the device ran out of memory, so batches are halved until they fit: it takes longer, and numbers move "
                "by rounding alone"
            )
            warned = True
