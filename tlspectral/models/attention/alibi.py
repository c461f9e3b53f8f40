"""ALiBi: the part of a score that grows with the position of the key, in place of rotary or learned positions."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """What ALiBi adds to a scaled score, up to a shift of each query's row: `slope * position of the key`.

    Source: Press, Smith and Lewis (2022), "Train short, test long", section 3.

    Attributes:
        slopes: per query head and token.
    """

    slopes: tuple[float, ...]

    def bias(self, positions: Int[Tensor, "n"]) -> Float64[Tensor, "heads n"]:
        """What a key at each of the positions gets."""
        return torch.tensor(self.slopes, dtype=torch.float64, device=positions.device)[:, None] * positions

    def of_heads(self, heads: slice) -> "Alibi":
        """For some of the query heads."""
        return Alibi(self.slopes[heads])


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """The slopes that models are trained with: 2^(-8 i / n), filled up from 2n heads where n is no power of 2."""
    power = 2 ** int(np.floor(np.log2(n_heads)))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple(slopes + [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)])
