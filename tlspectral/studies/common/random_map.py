"""The random-map task: every sequence follows a map of its own, which can only be learned from the sequence itself."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


class RandomMapBatch(NamedTuple):
    """Sequences of the task, and which of their targets can be predicted.

    Attributes:
        tokens: ids, [batch, pos].
        predictable: [batch, pos - 1]; entry t is about the target at t + 1. True where that target is a step of the
            map (not noise) and the current token stood in the sequence before.
        noise: of the same shape; True where that target was drawn as noise.
    """

    tokens: Int64[Tensor, "batch pos"]
    predictable: Bool[Tensor, "batch targets"]
    noise: Bool[Tensor, "batch targets"]


@dataclass(frozen=True)
class RandomMapTask:
    """`x_{t+1} = f(x_t)`, f a fresh random map of the vocabulary in each sequence; now and then a uniform token.

    A previous-token head and an induction head solve it together: where did the current token stand before, and what
    came after it? This is the task of the constrained training in "Fingerprint, Not Blueprint" (FP section 10).

    Attributes:
        vocabulary: number of tokens.
        length: tokens of a sequence.
        noise: probability of a uniform token in place of the map's. It can happen to be the map's token.
    """

    vocabulary: int = 32
    length: int = 128
    noise: float = 0.1

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 2 or not 0.0 <= self.noise <= 1.0:
            raise ValueError(
                "the random-map task needs two tokens in the vocabulary, two in a sequence and a probability of noise,"
                f" found vocabulary={self.vocabulary}, length={self.length}, noise={self.noise}"
            )

    def sample(self, n_sequences: int, generator: torch.Generator) -> RandomMapBatch:
        """Draw sequences on the CPU: first the maps, then the first tokens, the places of noise, the noise tokens."""
        n_steps = self.length - 1
        maps = torch.randint(0, self.vocabulary, (n_sequences, self.vocabulary), generator=generator)
        first = torch.randint(0, self.vocabulary, (n_sequences,), generator=generator)
        is_noise = torch.rand(n_sequences, n_steps, generator=generator) < self.noise
        noise = torch.randint(0, self.vocabulary, (n_sequences, n_steps), generator=generator)
        tokens = torch.empty(n_sequences, self.length, dtype=torch.int64)
        tokens[:, 0] = first
        rows = torch.arange(n_sequences)
        met = torch.zeros(n_sequences, self.vocabulary, dtype=torch.bool)  # tokens before the current one
        met_before = torch.empty(n_sequences, n_steps, dtype=torch.bool)
        for t in range(n_steps):
            current = tokens[:, t]
            met_before[:, t] = met[rows, current]
            met[rows, current] = True
            tokens[:, t + 1] = torch.where(is_noise[:, t], noise[:, t], maps[rows, current])
        return RandomMapBatch(tokens, met_before & ~is_noise, is_noise)
