"""Padding of token ids: refused where no mask is given, moved to the end of each row where one is."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.models.attention.view import AttentionView

TokenMask = Bool[Tensor, "sequences pos"] | Int[Tensor, "sequences pos"]


@dataclass(frozen=True)
class PackedTokens:
    """Sequences of unequal length in one tensor, each from position 0 on.

    Attributes:
        tokens: ids; a row is filled up with its last real token.
        lengths: number of real tokens in each row.
    """

    tokens: Int[Tensor, "sequences pos"]
    lengths: Int[Tensor, "sequences"]

    @property
    def real(self) -> Bool[Tensor, "sequences pos"]:
        """Which positions are tokens of their sequence, and not filling."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def padded(self) -> bool:
        """Whether some sequence is shorter than the others."""
        return bool((self.lengths < self.tokens.shape[1]).any())

    def hashed(self, scored: Any = "") -> str:
        """Return a hash of the sequences and of the positions scored in them."""
        described = f"{tuple(self.tokens.shape)}{self.lengths.tolist()}{scored}"
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes() + described.encode()).hexdigest()


def right_packed(tokens: Int[Tensor, "sequences pos"], attention_mask: TokenMask) -> PackedTokens:
    """Move the real tokens of each row to the left and cut columns that are padding in all rows.

    A causal model needs no mask for such a row, since no real token attends to what follows it. The rows are filled
    with their last real token, which no model takes for padding.

    Args:
        tokens: ids, padded on either side.
        attention_mask: 1 or True for real tokens, as tokenizers return it.

    Raises:
        ValueError: a mask of another shape or with other values, a row without a real token, or padding between real
            tokens.
    """
    mask = attention_mask.cpu()
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and tokens {tuple(tokens.shape)}: give one each"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"attention_mask is 1 for real tokens and 0 for padding; found {mask.unique().tolist()}")
    real = mask.bool()
    lengths = real.sum(1)
    first = real.long().argmax(1)
    positions = torch.arange(tokens.shape[1])
    contiguous = (positions >= first[:, None]) & (positions < (first + lengths)[:, None])
    for row in range(len(tokens)):
        if int(lengths[row]) == 0:
            raise ValueError(f"attention_mask marks no real token in row {row}")
        if not torch.equal(real[row], contiguous[row]):
            raise ValueError(
                f"attention_mask has padding between the real tokens of row {row}: leave it out of the row"
            )
    longest = int(lengths.max()) if len(tokens) else tokens.shape[1]
    source_positions = first[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)
    return PackedTokens(tokens.cpu().gather(1, source_positions), lengths)


def refuse_padding(view: AttentionView, tokens: Int[Tensor, "*batch pos"], way_out: str) -> None:
    """Refuse token ids that look padded. Without a tokenizer nothing is known of padding, and nothing is refused.

    A row looks padded if it begins or ends with the tokenizer's padding id. One such id at the beginning is allowed
    where the model opens sequences with it (padding id = BOS or EOS).

    Args:
        view: the model's view.
        tokens: ids as the caller gave them.
        way_out: end of the message, which says what to give instead.

    Raises:
        ValueError: a row looks padded; the message names the first.
    """
    tokenizer = getattr(view.model, "tokenizer", None)
    pad: Any = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    opening = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    allowed = 1 if pad in opening else 0
    padded = torch.atleast_2d(tokens.cpu()).flatten(0, -2) == pad
    leading, trailing = (side.long().cumprod(1).sum(1) for side in (padded, padded.flip(1)))
    wrong = ((leading > allowed) | (trailing > 0)).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    side = f"begins with {int(leading[row])}" if int(leading[row]) > allowed else f"ends with {int(trailing[row])}"
    raise ValueError(
        f"row {row} of the tokens {side} of the padding id {pad} ({len(wrong)} of {len(padded)} rows are like "
        f"this), and padding would be measured like text: {way_out}"
    )
