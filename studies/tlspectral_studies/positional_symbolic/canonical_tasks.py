"""The canonical tasks: index needs positions, retrieval needs symbols, partial induction needs both.

They are those of "Decoupling Positional and Symbolic Attention Behavior" (PS, section 4 and appendix D.1). A prompt is
a context of symbol#integer pairs and one query token after it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

TASKS = ("index", "retrieval", "partial_induction")


class CanonicalBatch(NamedTuple):
    """Prompts of a canonical task and their answers.

    Attributes:
        context: ids of the pairs, [n, length]: symbol * n_integers + integer.
        query: id of the token after them, [n].
        answer_position: where in the context the answer stands, counted from 0, [n].
        answer: class, [n]: the symbol for `"index"`, the integer for the others.
    """

    context: Int64[Tensor, "n length"]
    query: Int64[Tensor, "n"]
    answer_position: Int64[Tensor, "n"]
    answer: Int64[Tensor, "n"]


@dataclass(frozen=True)
class CanonicalTask:
    """A task whose answer is in the context, found by its position, by its symbol, or by both (PS section 4).

    `"index"`: the query names a position, the answer is the symbol there. `"retrieval"`: the query names a symbol that
    the context has exactly once, the answer is its integer. `"partial_induction"`: the query names a symbol that the
    context has exactly twice, with two integers, and the answer is the integer of the last. PS asks for two occurrences
    or more, writes this query with its answer in the main text but without in appendix C.7, and does not say how
    contexts are drawn: here queries are bare symbols, and everything is uniform.

    Ids: first the pairs, then one index query per position, then one symbol query per symbol.

    Attributes:
        name: one of the three.
        length: pairs in the context.
        n_symbols, n_integers: kinds of each; PS has 16 and 32.
    """

    name: str
    length: int = 32
    n_symbols: int = 16
    n_integers: int = 32

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ValueError(f"{self.name!r} is no canonical task; there are {', '.join(map(repr, TASKS))}")
        least = {"index": (1, 1, 1), "retrieval": (1, 2, 1), "partial_induction": (2, 2, 2)}[self.name]
        sizes = (self.length, self.n_symbols, self.n_integers)
        if any(size < minimum for size, minimum in zip(sizes, least, strict=True)):
            raise ValueError(
                f"the {self.name} task needs length, n_symbols and n_integers of at least {least}, found {sizes}"
            )

    @property
    def n_pairs(self) -> int:
        """Number of pair tokens; their ids come first."""
        return self.n_symbols * self.n_integers

    @property
    def query_ids(self) -> range:
        """Ids of this task's own queries: one per position for index, one per symbol for the others."""
        symbols = self.n_pairs + self.length
        return range(self.n_pairs, symbols) if self.name == "index" else range(symbols, self.n_tokens)

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary, queries of both kinds included; it is the same for all three tasks."""
        return self.n_pairs + self.length + self.n_symbols

    @property
    def n_answers(self) -> int:
        """Number of classes; a guess is right with probability 1 / n_answers."""
        return self.n_symbols if self.name == "index" else self.n_integers

    def sample(self, n: int, generator: torch.Generator) -> CanonicalBatch:
        """Draw prompts on the CPU, one after the other from the generator.

        Args:
            n: number of prompts.
            generator: decides the whole batch; the global random state is neither used nor changed.

        Returns:
            A batch; see `CanonicalBatch`. The answer's position is uniform over the context; for partial induction it
            is the later one of two different uniform positions, and never 0.

        What it does not establish: that a model which is right on these prompts uses the position or the symbol; the
        integers and symbols beside the answer are independent of it only by construction.
        """
        if self.name == "index":
            return self._index(n, generator)
        symbol = torch.randint(self.n_symbols, (n,), generator=generator)
        # Others than the query's: a shift by 1 to n_symbols - 1 is uniform over them.
        shift = torch.randint(1, self.n_symbols, (n, self.length), generator=generator)
        symbols = (symbol[:, None] + shift) % self.n_symbols  # n length
        integers = torch.randint(self.n_integers, (n, self.length), generator=generator)
        position = torch.randint(self.length, (n,), generator=generator)
        rows = torch.arange(n)
        symbols[rows, position] = symbol
        if self.name == "partial_induction":
            other = (position + torch.randint(1, self.length, (n,), generator=generator)) % self.length
            symbols[rows, other] = symbol
            apart = torch.randint(1, self.n_integers, (n,), generator=generator)
            integers[rows, other] = (integers[rows, position] + apart) % self.n_integers
            position = torch.maximum(position, other)
        context = symbols * self.n_integers + integers
        return CanonicalBatch(context, self.query_ids.start + symbol, position, integers[rows, position])

    def _index(self, n: int, generator: torch.Generator) -> CanonicalBatch:
        context = torch.randint(self.n_pairs, (n, self.length), generator=generator)
        position = torch.randint(self.length, (n,), generator=generator)
        answer = context[torch.arange(n), position] // self.n_integers
        return CanonicalBatch(context, self.query_ids.start + position, position, answer)
