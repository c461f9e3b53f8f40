"""Where the blocks of a prompt stand, and means over blocks."""

import math
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_LISTED = 120
"""Cycles that are listed, so that draws differ: those of up to six blocks."""


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of one or more prompts stand: the first position of each, and the tokens in any of them.

    `ids` are the tokens of each prompt up to the end of its last block.
    """

    starts: tuple[int, ...]
    width: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def stop(self) -> int:
        """First position behind the last block."""
        return self.starts[-1] + self.width

    def tokens(self) -> Int[Tensor, "blocks width"]:
        """Return the positions of the tokens of every block."""
        return torch.tensor(self.starts)[:, None] + torch.arange(self.width)

    def require_own(self, passed: Tensor, own: Tensor, where: str) -> None:
        """Refuse rows that do not begin with the tokens of one of the prompts, up to the end of the last block.

        `passed` are the token ids of the rows, [rows, pos], or what stands for each, [rows, pos, width]; `own` the same
        of the prompts. Raises ValueError for the first wrong row. Rows that end in front are left to `read`.
        """
        if passed.shape[1] < self.stop:
            return
        same = torch.stack([passed[:, : self.stop] == one.to(passed.device) for one in own], dim=1)
        same = same if same.ndim == 3 else same.all(-1)  # rows prompts pos
        wrong = (~same.all(-1).any(1)).nonzero().flatten().tolist()
        if not wrong:
            return
        row = wrong[0]
        agreeing = same[row].long().cumprod(-1).sum(-1)
        nearest, at = int(agreeing.argmax()), int(agreeing.max())
        found = f"token {int(passed[row, at])}" if passed.ndim == 2 else "another token"
        later = [
            shift
            for shift in range(1, passed.shape[1] - self.stop + 1)
            if torch.equal(passed[row, shift : shift + self.stop], own[nearest].to(passed))
        ]
        moved = f" (the prompt begins {later[0]} {'token' if later[0] == 1 else 'tokens'} later)" if later else ""
        raise ValueError(
            f"{where} {row} has {found} at position {at}, where the prompt of the part has {self.ids[nearest][at]}"
            f"{moved}: the blocks of a part are those of its prompt, counted from the first token. Run its own tokens, "
            "prompt.tokenized(model).tokens(), and pad at the end; model(text), to_tokens and a task of text may put a "
            "start token in front: leave that out (prepend_bos=False), or write it into the prefix"
        )

    def split(self, x: Float[Tensor, "*batch pos columns"]) -> tuple[Tensor, Tensor]:
        """Return x with the tokens of blocks replaced by their mean over blocks, and by what is left of it.

        Tokens outside the blocks keep their rows in both.
        """
        at = self.tokens().to(x.device)
        of_blocks = x[..., at, :]  # *batch blocks width columns
        left = centred(of_blocks, dim=-3)
        averaged, deviating = x.clone(), x.clone()
        averaged[..., at, :] = (of_blocks.narrow(-3, 0, 1) - left.narrow(-3, 0, 1)).expand_as(of_blocks)
        deviating[..., at, :] = left
        return averaged, deviating

    def read(self, allowed: Bool[Tensor, "*batch pos pos"]) -> Bool[Tensor, "*batch pos pos"]:
        """Limit pairs of tokens to queries behind the blocks and keys in them.

        Raises ValueError for a run without a query behind the blocks, with padding in front, or with a window that
        hides a block from such a query.
        """
        n = allowed.shape[-1]
        if n <= self.stop:
            raise ValueError(f"the blocks end at token {self.stop}, and this run has {n}: no query stands behind them")
        seen = allowed[..., self.stop :, self.starts[0] : self.stop]
        if not bool(allowed[..., 1, 0].all() & seen.all()):
            raise ValueError(
                "a query behind the blocks does not see all of them: blocks are counted from the first token of a run, "
                "so pad at its end; and leave out layers whose window is shorter than the blocks"
            )
        inside = torch.zeros(n, n, dtype=torch.bool, device=allowed.device)
        inside[self.stop :, self.tokens().flatten().to(allowed.device)] = True
        return allowed & inside

    def shuffled(
        self, difference: Float[Tensor, "batch replays pos pos"], seeds: list[list[int]]
    ) -> Float[Tensor, "batch replays pos pos"]:
        """Move what is removed from each block to another one, by a random cycle through all blocks for each replay.

        Every query then loses the same numbers from other blocks: a random part of equal size. `seeds` end with the
        number of the draw. Draws of few blocks differ from each other, as long as there are so many `cycles`.
        """
        moved, at = difference.clone(), self.tokens().to(difference.device)
        for replay, seed in enumerate(seeds):
            cycle = torch.from_numpy(self._cycle(seed)).to(at.device)
            moved[:, replay][..., at[cycle]] = difference[:, replay][..., at[cycle.roll(1)]]
        return moved

    @property
    def cycles(self) -> int:
        """Cycles through all blocks, of which each draw of a control is one."""
        return math.factorial(len(self.starts) - 1)

    def _cycle(self, seed: list[int]) -> Int[np.ndarray, "blocks"]:
        *of_head, draw = seed
        if self.cycles > _LISTED:
            return np.random.default_rng(seed).permutation(len(self.starts))
        listed = [(0, *rest) for rest in permutations(range(1, len(self.starts)))]
        return np.array(listed[np.random.default_rng(of_head).permutation(self.cycles)[draw % self.cycles]])


def block_places(model: Any, blocks: Any) -> BlockPlaces:
    """Return where the blocks of a `BlockPrompt` stand, or of a list of them that stand at the same places.

    Raises ValueError for blocks of unequal length, and for prompts whose blocks stand elsewhere.
    """
    if isinstance(blocks, BlockPlaces):
        return blocks
    prompts = list(blocks) if isinstance(blocks, list | tuple) else [blocks]
    strange = [type(one).__name__ for one in prompts if not hasattr(one, "tokenized")]
    if strange or not prompts:
        raise ValueError(
            f"blocks are those of a BlockPrompt, the keys, or of a list of them; found {[*strange, 'none'][0]}"
        )
    tokenized = [one.tokenized(model) for one in prompts]
    spans = [one.spans() for one in tokenized]
    widths = sorted({stop - start for one in spans for start, stop in one})
    if len(widths) > 1:
        raise ValueError(
            f"blocks of {widths[0]} to {widths[-1]} tokens: content and position are taken apart token by token, so "
            "give blocks of equal length"
        )
    elsewhere = [index for index, one in enumerate(spans) if one != spans[0]]
    if elsewhere:
        raise ValueError(
            f"the blocks of prompt {elsewhere[0]} begin at {[start for start, _ in spans[elsewhere[0]]]} and those of "
            f"prompt 0 at {[start for start, _ in spans[0]]}: give each its own part"
        )
    stop = spans[0][-1][1]
    ids = tuple(tuple(one.tokens()[:stop].tolist()) for one in tokenized)
    return BlockPlaces(tuple(start for start, _ in spans[0]), widths[0], ids)


def centred(values: Tensor, dim: int) -> Tensor:
    """Centre the values. The first value is subtracted beforehand, so that equal values give exactly 0."""
    from_first = values - values.narrow(dim, 0, min(1, values.shape[dim]))
    return from_first - from_first.mean(dim, keepdim=True)
