"""ALiBi: a linear position bias that some models add to their scores instead of rotary or learned positions."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """ALiBi's bias on a scaled score: slope of the head times position of the key, up to a constant per query.

    slopes: one number per query head, in units of the score per token. Source: Press, Smith and Lewis (2022), "Train
    short, test long", section 3.
    """

    slopes: tuple[float, ...]

    def bias(self, positions: Int[Tensor, "n"]) -> Float64[Tensor, "heads n"]:
        """Return the bias [heads, n] that each head adds to the scores of keys at these n positions."""
        return torch.tensor(self.slopes, dtype=torch.float64, device=positions.device)[:, None] * positions

    def of_heads(self, heads: list[int] | slice) -> "Alibi":
        """Return a new `Alibi` with only the slopes of these query heads (indices or a slice), in the given order."""
        chosen = range(len(self.slopes))[heads] if isinstance(heads, slice) else heads
        return Alibi(tuple(self.slopes[head] for head in chosen))


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes of a layer with `n_heads` heads: head i (from 1) has 2^(-8 i / n_heads).

    If `n_heads` is not a power of 2, the next lower power p gives the first p slopes. The rest are every other slope of
    a layer with 2 p heads.
    """
    power = 2 ** int(np.floor(np.log2(n_heads)))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple(slopes + [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)])
