"""The attention weight on the answer by the position of the answer: small in the middle, or small at the ends.

Closed forms of Theorems 7 and 8 of "Decoupling Positional and Symbolic Attention Behavior" (PS, section 5 and appendix
D.2), for heads whose frequency is too low for a positional task or too high for a symbolic one.
"""

import math
from operator import index

import torch
from jaxtyping import Float64
from torch import Tensor


def positional_peak_weight(n: int, theta: float) -> Float64[Tensor, "answers"]:
    """Largest attention weight of `H_POS` for an answer at positions 1 .. n - 1, with logits `cos(theta (j - i))`.

    Args:
        n: tokens of the prompt, the query at n included.
        theta: radians per token, below 2 pi / n in PS.

    Returns:
        `e / sum_{i=1..n} exp(cos(theta (j - i)))` for j = 1 .. n - 1: U-shaped (PS, Theorem 7).

    Raises:
        ValueError: fewer than two tokens, or a theta that is no finite number.

    From j to j + 1 it changes as `cos(theta (n - j)) - cos(theta j)`. So for even n the two middle values n / 2 and
    n / 2 + 1 are equal, n = 4 has no rise at the end, theta = 2 pi / n is flat, and larger ones need not be U-shaped.

    What it does not establish: an accuracy. It is one head's attention; a weight below 1/2 can still give the answer.
    """
    if not math.isfinite(theta):
        raise ValueError(f"theta is an angle per token, a finite number of radians; found {theta!r}")
    position = torch.arange(1, _tokens(n) + 1, dtype=torch.float64)
    logits = (theta * (position[:-1, None] - position)).cos()
    return math.e / logits.exp().sum(1)


def symbolic_peak_weight(n: int) -> Float64[Tensor, "answers"]:
    """Largest attention weight for an answer at positions 1 .. n - 1, of a symbolic task at the frequency pi / n.

    The context is one token repeated, with logits `-sin(pi j / n)`, except for the answer, with `sin(pi l / n)`.

    Args:
        n: tokens of the prompt, the query at n included, which is left out of the weights as in PS.

    Returns:
        `v_1(l) / (S + v_1(l) - v_0(l))` for l = 1 .. n - 1, with `v_1(j) = exp(sin(pi j / n))`, `v_0 = 1 / v_1` and
        `S = sum_j v_0(j)`: an inverted U (PS, Theorem 8). PS assumes n >= 5 and, in the proof, n odd. It
        was checked for n = 4 .. 299, even and odd, and with the query among the keys too.

    Raises:
        ValueError: fewer than two tokens.

    What it does not establish: an accuracy, nor anything about two symbols less than pi apart, which a vocabulary
    of more than two needs.
    """
    position = torch.arange(1, _tokens(n), dtype=torch.float64)
    answer = (math.pi * position / n).sin().exp()
    other = 1 / answer
    return answer / (other.sum() + answer - other)


def _tokens(n: int) -> int:
    if index(n) < 2:
        raise ValueError(f"a prompt has two tokens at least, one for the answer and the query; found n={n}")
    return n
