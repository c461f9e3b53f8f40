"""Sequences that heads are typed on: repeated segments of two texts, or of random ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.detectors.patterns import PATTERNS
from tlspectral.heads.types.kinds import HeadType
from tlspectral.models.attention import AttentionView
from tlspectral.models.text import packaged_text, text_tokens

ROWS = 16
LENGTH = 64


@dataclass(frozen=True)
class TwoTexts:
    """Repeated segments `[BOS, r, r]` of two texts, or two draws of random ids.

    Attributes:
        tokens: the sequences of the first text, then as many of the second.
        texts: the documents; None for random ids.
        read: what they are: "book" (its two halves), "given" or "random ids".
    """

    tokens: Int[Tensor, "sequences pos"]
    texts: tuple[str, str] | None
    read: Literal["book", "given", "random ids"]

    @property
    def length(self) -> int:
        """Tokens in a segment."""
        return (self.tokens.shape[1] - 1) // 2

    def halves(self) -> tuple[slice, slice]:
        """Return the sequences of each text."""
        rows = len(self.tokens) // 2
        return slice(0, rows), slice(rows, 2 * rows)

    def first_rows(self, n: int) -> Int[Tensor, "chosen"]:
        """Return the indices of the first `n` sequences of each text."""
        return torch.cat([torch.arange(half.start, half.stop)[:n] for half in self.halves()])


def two_texts(view: AttentionView, texts: Sequence[str] | None, seed: int) -> TwoTexts:
    """Return the sequences of two texts: as given, the halves of the packaged book, or random ids without a tokenizer.

    Raises ValueError for texts that are not two, that are too short, or without a tokenizer.
    """
    if texts is None and getattr(view.model, "tokenizer", None) is None:
        return TwoTexts(repeated_sequences(view, 2 * ROWS, LENGTH, seed=seed), None, "random ids")
    if texts is None:
        book = packaged_text()
        middle = book.index("\n\n", len(book) // 2)
        first, second, read = book[:middle], book[middle:], "book"
    elif isinstance(texts, str) or len(texts) != 2:
        raise ValueError("texts are two documents, a pair of strings: reliability is measured between them")
    else:
        (first, second), read = texts, "given"
    length = min(LENGTH, (view.n_ctx - 1) // 2)
    if length < 2:
        raise ValueError(f"a repeated segment needs a context of 5 tokens, found {view.n_ctx}")
    rows = []
    for index, text in enumerate((first, second)):
        # One string with a name's form would be read as the name of a data set.
        segments = text_tokens(view, [text], n_sequences=ROWS, sequence_length=length + 1)
        if len(segments) < ROWS or segments.shape[1] < length + 1:
            raise ValueError(f"text {index} is too short: {ROWS} segments of {length} tokens are needed")
        rows.append(torch.cat([segments, segments[:, 1:]], dim=1))
    return TwoTexts(torch.cat(rows), (first, second), read)


def scored_keys(
    tokens: Int[Tensor, "sequences pos"], length: int, kinds: Sequence[HeadType]
) -> Bool[Tensor, "types sequences query key"]:
    """Return the keys that each of some patterns of attention is scored on.

    Queries are the tokens of the segment but its first, where nothing has been repeated yet, or those of the copy.
    """
    position = torch.arange(tokens.shape[1])
    queries: dict[str | None, Tensor] = {"segment": (position >= 2) & (position <= length), "copy": position > length}
    return torch.stack([PATTERNS[kind.name](tokens) & queries[kind.queries][:, None] for kind in kinds])
