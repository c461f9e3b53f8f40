"""The three formal languages of "Bifocal Attention" (BA, section 4.2) as data: Dyck-3, Bio-Rotation, Modulo-7.

The paper gives one sentence per task and neither lengths, vocabulary, loss mask nor data size. What is fixed here where
it is silent: every sequence opens with a begin token, as Llama's do; rows are padded on the right, where causal
attention does not look; only the tokens that the prefix decides are scored. Sequences are drawn afresh from a
generator, in training and in tests, so that nothing but the language can be learned from them.

Loss floors are in nats per token. Under this mask every scored token follows from its prefix, and the floor is 0.
Counted over all tokens it is far above 0: the openers, the motif and the noise are random, and no model predicts them.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

PAD, BEGIN = 0, 1
_LETTERS = 4


class LanguageBatch(NamedTuple):
    """Sequences of a formal language.

    Attributes:
        tokens: ids, [batch, pos], padded on the right.
        scored: [batch, pos - 1]; entry t is about the target at t + 1. True where it is an answer.
        size: what the structure gap is about, [batch]: depth of a Dyck word, noise letters of a Bio-Rotation sequence,
            0 in Modulo-7.
    """

    tokens: Int64[Tensor, "batch pos"]
    scored: Bool[Tensor, "batch targets"]
    size: Int64[Tensor, "batch"]


class Answers(NamedTuple):
    """The scored targets of a batch, row by row.

    Attributes:
        position: position at which each answer is predicted, [batch, answers]; 0 beyond a row's last answer.
        token: the answer, [batch, answers]; `UNSCORED` beyond a row's last answer.
    """

    position: Int64[Tensor, "batch answers"]
    token: Int64[Tensor, "batch answers"]


UNSCORED = -100  # cross_entropy's own mark of a target that does not count


def answers_of(batch: LanguageBatch) -> Answers:
    """Return the positions at which a row's scored targets are predicted, in order, and these targets."""
    width = int(batch.scored.sum(1).max())
    order = batch.scored.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]  # batch answers
    is_answer = batch.scored.gather(1, order)
    token = batch.tokens.gather(1, order + 1)
    return Answers(torch.where(is_answer, order, 0), torch.where(is_answer, token, UNSCORED))


@dataclass(frozen=True)
class Dyck3:
    """Fully nested brackets of three types: `( [ { ... } ] )`, then an end token (BA's stack test).

    All closers and the end are scored. The paper says "deeply nested sequences"; depths are uniform over a range here,
    and openers are uniform over the three types. The task can be solved by counting back: the opener of the j-th closer
    is 2 j tokens before the position at which that closer is predicted.

    Attributes:
        depths: smallest and largest depth, both included. 8 at most in training, so that deeper words are left for the
            structure gap; at least 4, so that no draw repeats most of another.
    """

    depths: tuple[int, int] = (4, 8)

    END = 2
    name = "dyck3"
    vocabulary = ("<pad>", "<begin>", "<end>", "(", "[", "{", ")", "]", "}")
    entropy_floor = 0.0

    def __post_init__(self) -> None:
        _check_range("depths", self.depths)

    def sample(self, n_sequences: int, generator: torch.Generator) -> LanguageBatch:
        """Draw words on the CPU: first the depths, then the openers."""
        low, high = self.depths
        depth = torch.randint(low, high + 1, (n_sequences,), generator=generator)
        openers = torch.randint(3, 6, (n_sequences, high), generator=generator)
        position = torch.arange(2 * high + 2).expand(n_sequences, -1) - 1  # position in the word; the begin token is -1
        d = depth[:, None]
        closes = (position >= d) & (position < 2 * d)
        partner = torch.where(closes, 2 * d - 1 - position, position).clamp(0, high - 1)
        tokens = openers.gather(1, partner) + 3 * closes
        tokens = torch.where(position == 2 * d, self.END, tokens).masked_fill(position > 2 * d, PAD)
        tokens[:, 0] = BEGIN
        return LanguageBatch(tokens, (closes | (position == 2 * d))[:, 1:], depth)

    @property
    def sizes(self) -> tuple[int, int]:
        """Smallest and largest `LanguageBatch.size`."""
        return self.depths

    @property
    def sequence_floor(self) -> float:
        """Entropy per token where every target counts: depths, then openers; the rest is decided."""
        low, high = self.depths
        depth = (low + high) / 2
        return (math.log(high - low + 1) + depth * math.log(3)) / (2 * depth + 1)

    @property
    def chance_loss(self) -> float:
        """Loss of the best guess that sees no sequence: the entropy of the answers' frequencies."""
        end = 1 / (sum(self.depths) / 2 + 1)
        return -end * math.log(end) - (1 - end) * math.log((1 - end) / 3)

    @property
    def chance_accuracy(self) -> float:
        """Frequency of the most frequent answer."""
        end = 1 / (sum(self.depths) / 2 + 1)
        return max(end, (1 - end) / 3)

    @property
    def distances(self) -> list[int]:
        """Tokens from where a closer is predicted back to its opener: 0, 2, 4, ..., one per closer of the deepest."""
        return [2 * j for j in range(self.depths[1])]


@dataclass(frozen=True)
class BioRotation:
    """A motif of 8 letters, noise, a separator, and the motif's reverse complement (BA's distance test).

    The reverse complement is scored. The paper says "100-200 characters of noise"; the length is uniform here, letters
    of motif and noise are uniform over A, C, G, T, and the paper names neither the motif's length nor a separator.

    Attributes:
        noise: smallest and largest number of noise letters, both included.
        motif: letters of the motif.
    """

    noise: tuple[int, int] = (100, 200)
    motif: int = 8

    SEPARATOR = 2
    name = "bio_rotation"
    vocabulary = ("<pad>", "<begin>", "|", "A", "C", "G", "T")
    entropy_floor = 0.0
    chance_loss = math.log(_LETTERS)
    chance_accuracy = 1 / _LETTERS

    def __post_init__(self) -> None:
        _check_range("noise", self.noise)
        if self.motif < 1:
            raise ValueError(f"motif={self.motif}: a motif has at least one letter")

    def sample(self, n_sequences: int, generator: torch.Generator) -> LanguageBatch:
        """Draw sequences on the CPU: first the noise lengths, then all letters."""
        low, high = self.noise
        length = torch.randint(low, high + 1, (n_sequences,), generator=generator)
        letters = torch.randint(3, 7, (n_sequences, self.motif + high), generator=generator)
        position = torch.arange(2 * self.motif + high + 2).expand(n_sequences, -1) - 1  # the begin token is -1
        separator = self.motif + length[:, None]
        answers = (position > separator) & (position <= separator + self.motif)
        partner = torch.where(answers, separator + self.motif - position, position).clamp(0, self.motif + high - 1)
        letter = letters.gather(1, partner)
        tokens = torch.where(answers, 9 - letter, letter)  # A and T, C and G add up to 9
        tokens = torch.where(position == separator, self.SEPARATOR, tokens)
        tokens = tokens.masked_fill(position > separator + self.motif, PAD)
        tokens[:, 0] = BEGIN
        return LanguageBatch(tokens, answers[:, 1:], length)

    @property
    def sizes(self) -> tuple[int, int]:
        """Smallest and largest `LanguageBatch.size`."""
        return self.noise

    @property
    def sequence_floor(self) -> float:
        """Entropy per token where every target counts: the noise length, then motif and noise."""
        low, high = self.noise
        random = self.motif + (low + high) / 2
        return (math.log(high - low + 1) + random * math.log(_LETTERS)) / (random + 1 + self.motif)

    @property
    def distances(self) -> list[int]:
        """Tokens from where an answer is predicted back to the letter it complements, over all noise lengths."""
        low, high = self.noise
        return sorted({noise + 1 + 2 * j for noise in range(low, high + 1) for j in range(self.motif)})


@dataclass(frozen=True)
class Modulo7:
    """`a + b + c =`, then the sum modulo 7 (BA's cycle test); the one answer is scored.

    There are only 343 expressions: a training of some thousand draws has seen them all. So fresh draws are not
    unseen expressions here, unlike in the two other languages.
    """

    name = "modulo7"
    vocabulary = ("<pad>", "<begin>", "+", "=", "0", "1", "2", "3", "4", "5", "6")
    entropy_floor = 0.0
    chance_loss = math.log(7)
    chance_accuracy = 1 / 7
    sizes = (0, 0)
    sequence_floor = 3 * math.log(7) / 7
    distances = (5, 3, 1)  # from the equals sign back to a, b and c

    def sample(self, n_sequences: int, generator: torch.Generator) -> LanguageBatch:
        """Draw expressions on the CPU."""
        return self.of_numbers(torch.randint(0, 7, (n_sequences, 3), generator=generator))

    def of_numbers(self, numbers: Int64[Tensor, "batch 3"]) -> LanguageBatch:
        """The expressions of these summands."""
        n_sequences = len(numbers)
        tokens = torch.tensor([BEGIN, 4, 2, 4, 2, 4, 3, 4]).repeat(n_sequences, 1)
        tokens[:, 1:6:2] += numbers
        tokens[:, 7] += numbers.sum(1) % 7
        scored = torch.zeros(n_sequences, 7, dtype=torch.bool)
        scored[:, 6] = True
        return LanguageBatch(tokens, scored, torch.zeros(n_sequences, dtype=torch.int64))


FormalLanguage = Dyck3 | BioRotation | Modulo7


def _check_range(name: str, given: tuple[int, int]) -> None:
    if not 1 <= given[0] <= given[1]:
        raise ValueError(f"{name}={given}: give the smallest and the largest number, at least 1 and in this order")
