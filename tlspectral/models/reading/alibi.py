"""ALiBi, the linear position bias that some models add to scores in place of rotary or learned positions."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """ALiBi's bias on a scaled score: `slope * position of the key`, up to a shift of each query's row.

    Slopes are per query head, in units of the score per token. Source: Press, Smith and Lewis (2022), "Train short,
    test long", section 3.
    """

    slopes: tuple[float, ...]

    def bias(self, positions: Int[Tensor, "n"]) -> Float64[Tensor, "heads n"]:
        """Return the bias of a key at each of the positions."""
        return torch.tensor(self.slopes, dtype=torch.float64, device=positions.device)[:, None] * positions

    def of_heads(self, heads: list[int] | slice) -> "Alibi":
        """Return the bias of some of the query heads, in the given order."""
        chosen = range(len(self.slopes))[heads] if isinstance(heads, slice) else heads
        return Alibi(tuple(self.slopes[head] for head in chosen))


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return the slopes of n heads that models are trained with: 2^(-8 i / n).

    Where n is no power of 2, they are the slopes of the next lower power, then every other slope of twice that power.
    """
    power = 2 ** int(np.floor(np.log2(n_heads)))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple(slopes + [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)])
