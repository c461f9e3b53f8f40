"""`BlockPrompt`: a prompt whose blocks can swap places. Positional and symbolic scores are measured on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from operator import index
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.errors import not_a, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import require_causal
from tlspectral.models.running.prompts import packed_rows

Segment = str | Tensor
"""A piece of a prompt: text, or token ids [pos]."""


@checked_settings
@dataclass(frozen=True)
class BlockPrompt:
    """A prompt of `prefix`, `blocks` and `suffix` whose blocks can swap places; its last token is the query.

    Give it to `tls.positional_symbolic`, `tls.positional.logit_shares` or `tls.parts.Content`. The form comes from
    "Decoupling Positional and Symbolic Attention Behavior", appendix B.3.

    >>> import torch
    >>> import tlspectral as tls
    >>> blocks = torch.tensor([[5, 6], [7, 8], [9, 1]])
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> prompt.swapped(0, 2).tokens().tolist()
    [0, 9, 1, 7, 8, 5, 6, 7]

    With text: `tls.positional.BlockPrompt("", ["a: 1\\n", "b: 2\\n", "c: 3\\n"], "b:").tokenized(model)`. Use text
    everywhere, or 1-D token ids everywhere. Text is tokenised segment by segment without special tokens, so a block has
    the same tokens at every place. No start token is added: if the model needs one, write `tokenizer.bos_token` into
    the prefix.

    Attributes:
        prefix: text or ids before the blocks; may be empty (`""`, or no ids).
        blocks: three or more segments, each with one token or more. Lengths may differ.
        suffix: text or ids after the blocks, with one token or more.

    Raises:
        ValueError: fewer than three blocks, an empty block or suffix, text mixed with ids, or ids that are not 1-D.
            Whether a tokenizer merges text across segments is checked later, by `tokenized(model)`.
    """

    prefix: Segment
    blocks: Sequence[Segment]
    suffix: Segment

    def __post_init__(self) -> None:
        for side in ("prefix", "suffix"):
            object.__setattr__(self, side, _own(getattr(self, side)))
        object.__setattr__(self, "blocks", tuple(_own(block) for block in self.blocks))
        texts = [isinstance(segment, str) for segment in self.pieces]
        if any(texts) and not all(texts):
            raise ValueError("prefix, blocks and suffix mix text and token ids: give only text, or only ids")
        for name, segment in zip(self._names, self.pieces, strict=True):
            if isinstance(segment, Tensor) and (segment.ndim != 1 or segment.is_floating_point()):
                raise ValueError(
                    f"{name} has shape {tuple(segment.shape)} of {segment.dtype}: give whole token ids of shape [pos]"
                )
            if len(segment) == 0 and name != "prefix":
                raise ValueError(f"{name} is empty: give each block a token, and end the suffix with the query")
        if len(self.blocks) < 3:
            raise ValueError(f"{len(self.blocks)} blocks were given: give three or more, so that two can swap")

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """The segments in order, as a tuple: prefix, blocks, suffix."""
        return (self.prefix, *self.blocks, self.suffix)

    @property
    def is_text(self) -> bool:
        """True for text, False for token ids."""
        return isinstance(self.suffix, str)

    @property
    def _names(self) -> list[str]:
        """Names of the segments in messages: "prefix", "block 0", "block 1", ..., "suffix"."""
        return ["prefix", *(f"block {number}" for number in range(len(self.blocks))), "suffix"]

    def tokens(self) -> Int[Tensor, "pos"]:
        """Return the token ids of the whole prompt [pos]. Raises ValueError for text: call `tokenized(model)` first."""
        return torch.cat(self._ids())

    def spans(self) -> list[tuple[int, int]]:
        """Return for each block (position of its first token, position after its last token).

        Raises ValueError for a prompt of text: call `tokenized(model)` first.
        """
        bounds = torch.tensor([len(segment) for segment in self._ids()]).cumsum(0).tolist()
        return list(pairwise(bounds[:-1]))

    def swapped(self, i: int, j: int) -> BlockPrompt:
        """Return a copy of the prompt with blocks i and j swapped.

        Raises IndexError for a block that does not exist.
        """
        blocks = list(self.blocks)
        blocks[i], blocks[j] = blocks[j], blocks[i]
        return replace(self, blocks=blocks)

    def tokenized(self, model: Any) -> BlockPrompt:
        """Return a copy of the prompt with all segments as token ids of a model.

        Args:
            model: a TransformerBridge or HookedTransformer, with a tokenizer if the prompt is text.

        Raises:
            ValueError: text without a tokenizer, a token that spans the border of two segments, more tokens than the
                model's context, or ids outside its vocabulary.
            UnsupportedArchitecture: the model is an encoder.
        """
        view = attention_view(model)
        require_causal(view, "a swap of blocks changes what every block holds, not the order of keys alone")
        prompt = self if not self.is_text else self._from_text(getattr(view.model, "tokenizer", None))
        packed_rows(view, prompt.tokens()[None])  # raises for ids that the model cannot read
        return prompt

    def _from_text(self, tokenizer: Any) -> BlockPrompt:
        """Return a copy of this prompt of text with each segment as token ids of `tokenizer`.

        Raises ValueError without a tokenizer, or if the tokenizer merges text across the border of two segments.
        """
        if tokenizer is None:
            raise ValueError(
                "this model has no tokenizer, so it cannot read text: give prefix, blocks and suffix as token ids"
            )
        ids = [torch.tensor(_ids_of(tokenizer, segment), dtype=torch.int64) for segment in self.pieces]
        for name, segment, text in zip(self._names, ids, self.pieces, strict=True):
            if len(segment) == 0 and text:
                raise ValueError(f"{name} is {shown(text)}, which the tokenizer turns into no token: give other text")
        self.require_borders(tokenizer)
        return BlockPrompt(ids[0], ids[1:-1], ids[-1])

    def require_borders(self, tokenizer: Any, when: str = "") -> None:
        """Raise ValueError if the tokenizer merges text across the border of two segments.

        Then the tokens of the whole text are not the tokens of its segments, one after another. `when`: a note in the
        message about an earlier swap, such as " (after blocks 0 and 1 swap)".
        """
        apart = [_ids_of(tokenizer, segment) for segment in self.pieces]
        if _ids_of(tokenizer, "".join(map(str, self.pieces))) == [token for segment in apart for token in segment]:
            return
        wrong = "unequal token boundaries across a swap" if when else "a tokenizer that merges across block borders"
        advice = "end every segment where a token ends (for example with a line break), or give token ids"
        nonempty = [number for number, segment in enumerate(self.pieces) if segment]
        for first, second in pairwise(nonempty):
            together = _ids_of(tokenizer, f"{self.pieces[first]}{self.pieces[second]}")
            if together != apart[first] + apart[second]:
                tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in (apart[first], apart[second], together)]
                raise ValueError(
                    f"{wrong}{when}: {self._names[first]} and {self._names[second]} have the tokens "
                    f"{shown(tokens[0])} and {shown(tokens[1])} apart, but {shown(tokens[2])} together; {advice}"
                )
        raise ValueError(f"{wrong}{when}: the whole text has other tokens than its segments; {advice}")

    def _ids(self) -> list[Int[Tensor, "_"]]:
        """Return the token ids of the segments in order. Raises ValueError if the prompt is text."""
        if self.is_text:
            raise ValueError("this prompt is text: call .tokenized(model) first, which returns a prompt of token ids")
        return [torch.as_tensor(segment) for segment in self.pieces]


def chosen_swaps(
    n_blocks: int, swaps: str | Iterable[Sequence[int]], among: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of blocks to swap, i < j, sorted and without duplicates.

    `n_blocks`: number of blocks of the prompt. `swaps`: pairs of block indices in either order; "all" for every pair of
    the blocks in `among` (None: all blocks); or "kept" for every pair without the first block of `among`.

    Raises:
        ValueError: a block that does not exist, a block swapped with itself, or no pair.
    """
    if isinstance(swaps, str):
        blocks = range(n_blocks) if among is None else among
        named = {"kept": blocks[1:], "all": blocks}
        if swaps not in named:
            raise ValueError(
                f"swaps={shown(swaps)} is not known: give 'kept', 'all', pairs of block numbers such as [(0, 1)], or "
                "for a task also 'per_query'"
            )
        swaps = list(combinations(named[swaps], 2))
    pairs: set[tuple[int, int]] = set()
    for pair in swaps:
        i, j = sorted(index(block) for block in pair)
        if not 0 <= i < j < n_blocks:
            reason = "give two different blocks" if i == j else f"this prompt has blocks 0 to {n_blocks - 1}"
            raise ValueError(f"blocks {i} and {j} cannot swap: {reason}")
        pairs.add((i, j))
    if not pairs:
        raise ValueError(
            "swaps= names no pair of blocks: give pairs such as [(0, 1)], or a task with three blocks that swap (two "
            "for swaps='all')"
        )
    return sorted(pairs)


def require_block_prompt(prompt: Any) -> None:
    """Raise TypeError for a prompt that is not a `BlockPrompt`."""
    if not isinstance(prompt, BlockPrompt):
        raise TypeError(
            f"{not_a(prompt, 'a prompt in blocks')}: give tls.positional.BlockPrompt(prefix, blocks, suffix)"
        )


def tokenized_for(model: Any, prompt: BlockPrompt, swaps: list[tuple[int, int]]) -> BlockPrompt:
    """Return a copy of the prompt with all segments as token ids of a model; `swaps` are pairs of block indices that a
    measurement will swap.

    Raises ValueError if a swap would change the tokens of the text, and as `BlockPrompt.tokenized`: text without a
    tokenizer, merged borders, too many tokens, ids outside the vocabulary.
    """
    tokenized = prompt.tokenized(model)
    if prompt.is_text:
        for i, j in swaps:
            prompt.swapped(i, j).require_borders(
                attention_view(model).model.tokenizer, f" (after blocks {i} and {j} swap)"
            )
    return tokenized


def _own(segment: Any) -> Any:
    """Return a copy of a segment (tensor of ids), so that later changes by the caller have no effect; text stays.

    Raises TypeError if the segment is neither text nor a sequence of ids.
    """
    if not isinstance(segment, str | Tensor | Sequence):
        raise TypeError(f"{not_a(segment, 'a piece of a prompt')}: give text, or a tensor of token ids [pos]")
    return segment.clone() if isinstance(segment, Tensor) else segment


def _ids_of(tokenizer: Any, text: Any) -> list[int]:
    """Return the tokenizer's ids of a text without special tokens; [] for an empty text."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else []
