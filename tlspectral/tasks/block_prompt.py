"""Prompts made of blocks that can swap: the input of positional and symbolic scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from operator import index
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import require_causal
from tlspectral.models.running.prompts import packed_rows

Segment = str | Tensor
"""A piece of a prompt: text, or token ids [pos]."""


@dataclass(frozen=True)
class BlockPrompt:
    """A prompt in blocks: `prefix`, then `blocks`, then `suffix`, whose last token is the query.

    Everything is text or everything is 1-D token ids; blocks may differ in length. Text is tokenised segment by segment
    and without special tokens, so that a block has the same tokens in every slot. Nothing is added in front: where the
    model wants a start token (`view.start_token`; its text is `tokenizer.bos_token`), write it into the prefix.

    Attributes:
        prefix: text or ids before the blocks, possibly nothing (`""` or no ids).
        blocks: three or more segments, none of them empty.
        suffix: text or ids after the blocks, at least the query.

    Raises:
        ValueError: fewer than three blocks, an empty block or suffix, text mixed with ids, or ids that are not 1-D.

    The source is "Decoupling Positional and Symbolic Attention Behavior" (PS, appendix B.3), where the blocks of a
    partition of the prompt are permuted.
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
            raise ValueError("a prompt is all text or all token ids: prefix, blocks and suffix mix the two")
        for name, segment in zip(self._names, self.pieces, strict=True):
            if isinstance(segment, Tensor) and (segment.ndim != 1 or segment.is_floating_point()):
                raise ValueError(f"{name}: ids are 1-D integers, found {tuple(segment.shape)} of {segment.dtype}")
            if len(segment) == 0 and name != "prefix":
                raise ValueError(f"{name} is empty: every block needs a token, and the suffix holds the query")
        if len(self.blocks) < 3:
            raise ValueError(f"found {len(self.blocks)} blocks: at least three are needed, so that two can swap")

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """The segments in order: prefix, blocks, suffix."""
        return (self.prefix, *self.blocks, self.suffix)

    @property
    def is_text(self) -> bool:
        """True for text, False for token ids."""
        return isinstance(self.suffix, str)

    @property
    def _names(self) -> list[str]:
        return ["prefix", *(f"block {number}" for number in range(len(self.blocks))), "suffix"]

    def tokens(self) -> Int[Tensor, "pos"]:
        """Return the whole prompt of a tokenised `BlockPrompt`. Raises ValueError for text."""
        return torch.cat(self._ids())

    def spans(self) -> list[tuple[int, int]]:
        """Return the first position of each block and the one after its last, tokenised. Raises ValueError for text."""
        bounds = torch.tensor([len(segment) for segment in self._ids()]).cumsum(0).tolist()
        return list(pairwise(bounds[:-1]))

    def swapped(self, i: int, j: int) -> BlockPrompt:
        """Return the same prompt with blocks i and j swapped. Raises IndexError where one does not exist."""
        blocks = list(self.blocks)
        blocks[i], blocks[j] = blocks[j], blocks[i]
        return replace(self, blocks=blocks)

    def tokenized(self, model: Any) -> BlockPrompt:
        """Return the same prompt as token ids.

        Args:
            model: a TransformerBridge or HookedTransformer, with a tokenizer if the prompt is text.

        Raises:
            ValueError: text without a tokenizer, text that the tokenizer joins across the border of two segments, a
                prompt longer than the model's context, or ids outside its vocabulary.
            UnsupportedArchitecture: an encoder.
        """
        view = attention_view(model)
        require_causal(view, "a swap of blocks changes what every block holds, not the order of keys alone")
        prompt = self if not self.is_text else self._from_text(getattr(view.model, "tokenizer", None))
        packed_rows(view, prompt.tokens()[None])  # raises for ids that the model cannot read
        return prompt

    def _from_text(self, tokenizer: Any) -> BlockPrompt:
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so text cannot be read: pass blocks of token ids")
        ids = [torch.tensor(_ids_of(tokenizer, segment), dtype=torch.int64) for segment in self.pieces]
        for name, segment, text in zip(self._names, ids, self.pieces, strict=True):
            if len(segment) == 0 and text:
                raise ValueError(f"{name}: the tokenizer makes no token of {text!r}")
        self.require_borders(tokenizer)
        return BlockPrompt(ids[0], ids[1:-1], ids[-1])

    def require_borders(self, tokenizer: Any, when: str = "") -> None:
        """Refuse text whose tokens differ from its segments' tokens; `when` says what was done to the prompt before.

        Raises:
            ValueError: a tokenizer that merges across block borders, or unequal token boundaries across a swap.
        """
        apart = [_ids_of(tokenizer, segment) for segment in self.pieces]
        if _ids_of(tokenizer, "".join(map(str, self.pieces))) == [token for segment in apart for token in segment]:
            return
        wrong = "unequal token boundaries across a swap" if when else "a tokenizer that merges across block borders"
        advice = "end every segment where a token ends (a line break, say), or pass blocks of token ids"
        nonempty = [number for number, segment in enumerate(self.pieces) if segment]
        for first, second in pairwise(nonempty):
            together = _ids_of(tokenizer, f"{self.pieces[first]}{self.pieces[second]}")
            if together != apart[first] + apart[second]:
                shown = [tokenizer.convert_ids_to_tokens(ids) for ids in (apart[first], apart[second], together)]
                raise ValueError(
                    f"{wrong}{when}: {self._names[first]} and {self._names[second]} are {shown[0]} and {shown[1]} "
                    f"apart but {shown[2]} together; {advice}"
                )
        raise ValueError(f"{wrong}{when}: the tokens of the whole text are not those of its segments; {advice}")

    def _ids(self) -> list[Int[Tensor, "_"]]:
        if self.is_text:
            raise ValueError("this prompt is text: take its tokens from .tokenized(model)")
        return [torch.as_tensor(segment) for segment in self.pieces]


def chosen_swaps(
    n_blocks: int, swaps: str | Iterable[Sequence[int]], among: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return pairs (i, j) of blocks that swap, i < j, sorted, each once.

    `swaps` are pairs in either order, `"all"` pairs of the blocks `among` all (None: every block), or `"kept"`, those
    without the first of them.

    Raises:
        ValueError: a block that does not exist, a block swapped with itself, or no swap.
    """
    if isinstance(swaps, str):
        blocks = range(n_blocks) if among is None else among
        named = {"kept": blocks[1:], "all": blocks}
        if swaps not in named:
            raise ValueError(
                f"swaps are 'kept', 'all', of a task 'per_query', or pairs of block indices; not {swaps!r}"
            )
        swaps = list(combinations(named[swaps], 2))
    pairs: set[tuple[int, int]] = set()
    for pair in swaps:
        i, j = sorted(index(block) for block in pair)
        if not 0 <= i < j < n_blocks:
            reason = "a block does not swap with itself" if i == j else f"blocks are 0 to {n_blocks - 1}"
            raise ValueError(f"swap ({i}, {j}): {reason}")
        pairs.add((i, j))
    if not pairs:
        raise ValueError("there is no swap to measure: give pairs, or a task three blocks that swap, two for 'all'")
    return sorted(pairs)


def tokenized_for(model: Any, prompt: BlockPrompt, swaps: list[tuple[int, int]]) -> BlockPrompt:
    """Return the prompt as token ids. Its text must keep its tokens when words swap. Raises ValueError."""
    tokenized = prompt.tokenized(model)
    if prompt.is_text:
        for i, j in swaps:
            prompt.swapped(i, j).require_borders(
                attention_view(model).model.tokenizer, f" (after blocks {i} and {j} swap)"
            )
    return tokenized


def _own(segment: Any) -> Any:
    """Return a segment that shares nothing with the caller's."""
    return segment.clone() if isinstance(segment, Tensor) else segment


def _ids_of(tokenizer: Any, text: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else []
