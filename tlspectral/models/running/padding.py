"""Token ids of sequences of unequal length, filled up to one tensor, and positions in them."""

import hashlib
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

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
    try:
        found = numbers(given)
    except (TypeError, ValueError) as error:
        raise _no_positions(given, what) from error
    if not whole(found):
        raise _no_positions(given, what)
    return found


def _no_positions(given: Any, what: str) -> TypeError:
    return TypeError(f"{what} are whole numbers, one list for all prompts or a row per prompt; found {given!r}"[:200])
