"""Token ids of sequences of unequal length, filled up to one tensor."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

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


def even_rows(tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return sequences of one length, all of whose tokens are real."""
    return PackedTokens(tokens.long(), torch.full((len(tokens),), tokens.shape[1]))
