"""Token positions of the blocks of a prompt, and means of activations over blocks."""

import math
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.errors import shown

_LISTED = 120
"""Most cycles through all blocks that are listed, so that two draws never use the same cycle (up to six blocks)."""


@dataclass(frozen=True)
class BlockPlaces:
    """Token positions of the blocks of one prompt, or of several prompts whose blocks stand at the same positions.

    Attributes:
        starts: position of the first token of each block.
        width: tokens in a block; all blocks have as many.
        ids: for each prompt, its token ids up to the end of its last block.
    """

    starts: tuple[int, ...]
    width: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def stop(self) -> int:
        """Position of the first token after the last block."""
        return self.starts[-1] + self.width

    def tokens(self) -> Int[Tensor, "blocks width"]:
        """Return the positions of all block tokens [blocks, width], a row for each block."""
        return torch.tensor(self.starts)[:, None] + torch.arange(self.width)

    def require_own(self, passed: Tensor, own: Tensor, where: str) -> None:
        """Raise ValueError unless each row begins with the tokens of one prompt, up to the end of its last block.

        `passed`: token ids of a run [rows, pos], or their embeddings [rows, pos, width]. `own`: for each prompt its ids
        or embeddings, in the same form. `where`: what a row is called in the message. Rows that end before the last
        block pass here; `read` raises for them.
        """
        if passed.shape[1] < self.stop:
            return
        same = torch.stack([passed[:, : self.stop] == prompt.to(passed.device) for prompt in own], dim=1)
        same = same if same.ndim == 3 else same.all(-1)  # rows prompts pos
        wrong = (~same.all(-1).any(1)).nonzero().flatten().tolist()
        if not wrong:
            return
        row = wrong[0]
        agreeing = same[row].long().cumprod(-1).sum(-1)
        nearest, at = int(agreeing.argmax()), int(agreeing.max())
        token = f"token {int(passed[row, at])}" if passed.ndim == 2 else "another token"
        later = [
            shift
            for shift in range(1, passed.shape[1] - self.stop + 1)
            if torch.equal(passed[row, shift : shift + self.stop], own[nearest].to(passed))
        ]
        moved = f" (the prompt begins {later[0]} {'token' if later[0] == 1 else 'tokens'} later)" if later else ""
        raise ValueError(
            f"{where} {row} has {token} at position {at}, and the prompt of the part has token "
            f"{self.ids[nearest][at]} there{moved}: this part works only on its own prompt. Run "
            "prompt.tokenized(model).tokens(), and pad at the end. model(text), to_tokens and a task of text may put a "
            "start token in front: leave it out (prepend_bos=False), or write it into the prefix of the prompt"
        )

    def split(self, x: Float[Tensor, "*batch pos columns"]) -> tuple[Tensor, Tensor]:
        """Return two changed copies of x [..., pos, columns]: one with the means over blocks, one with the deviations
        from these means.

        In the first copy each block token is replaced by the mean over blocks of the tokens at its offset in the block.
        In the second copy it is replaced by its difference from this mean. Tokens outside the blocks stay unchanged in
        both.
        """
        at = self.tokens().to(x.device)
        of_blocks = x[..., at, :]  # *batch blocks width columns
        left = centred(of_blocks, dim=-3)
        averaged, deviating = x.clone(), x.clone()
        averaged[..., at, :] = (of_blocks.narrow(-3, 0, 1) - left.narrow(-3, 0, 1)).expand_as(of_blocks)
        deviating[..., at, :] = left
        return averaged, deviating

    def read(self, allowed: Bool[Tensor, "*batch pos pos"]) -> Bool[Tensor, "*batch pos pos"]:
        """Return a new mask: `allowed`, restricted to queries after the last block and keys inside the blocks.

        `allowed`: True for (query, key) pairs that may attend. Raises ValueError if the run has no query after the
        blocks, has padding in front, or has a window that hides a block from such a query.
        """
        n = allowed.shape[-1]
        if n <= self.stop:
            raise ValueError(
                f"this run has {n} tokens and the blocks fill the first {self.stop}, so no query comes after the "
                "blocks: run the whole prompt, with its suffix"
            )
        seen = allowed[..., self.stop :, self.starts[0] : self.stop]
        if not bool(allowed[..., 1, 0].all() & seen.all()):
            raise ValueError(
                "a query after the blocks does not see all blocks: pad rows at their end, not in front, and leave out "
                "layers whose attention window is shorter than the blocks"
            )
        inside = torch.zeros(n, n, dtype=torch.bool, device=allowed.device)
        inside[self.stop :, self.tokens().flatten().to(allowed.device)] = True
        return allowed & inside

    def shuffled(
        self, difference: Float[Tensor, "batch replays pos pos"], seeds: list[list[int]]
    ) -> Float[Tensor, "batch replays pos pos"]:
        """Return a copy of `difference` with the values of each block moved to another block, by a random cycle of the
        blocks.

        `difference`: scores that a part of a head removes. `replays`: copies of the batch with different controls; each
        has a cycle of its own. `seeds`: for each replay numbers that seed it; the last is the number of the draw. The
        result is a random control of equal size: each query loses the same numbers at other blocks. With up to six
        blocks the first `cycles` draws all differ.
        """
        moved, at = difference.clone(), self.tokens().to(difference.device)
        for replay, seed in enumerate(seeds):
            cycle = torch.from_numpy(self._cycle(seed)).to(at.device)
            moved[:, replay][..., at[cycle]] = difference[:, replay][..., at[cycle.roll(1)]]
        return moved

    @property
    def cycles(self) -> int:
        """Number of different cycles through all blocks, (blocks - 1)!. A draw of the control uses one cycle."""
        return math.factorial(len(self.starts) - 1)

    def _cycle(self, seed: list[int]) -> Int[np.ndarray, "blocks"]:
        """Return a random order of the blocks, an array of their indices; the values of each block move to the next
        block of the order.

        `seed`: numbers that seed the choice; the last is the number of the draw.
        """
        *of_head, draw = seed
        if self.cycles > _LISTED:
            return np.random.default_rng(seed).permutation(len(self.starts))
        listed = [(0, *rest) for rest in permutations(range(1, len(self.starts)))]
        return np.array(listed[np.random.default_rng(of_head).permutation(self.cycles)[draw % self.cycles]])


def block_places(model: Any, blocks: Any) -> BlockPlaces:
    """Return the token positions of the blocks of a `BlockPrompt`, or of several with equal positions, as `BlockPlaces`
    (`starts`, `width`, `ids`).

    `blocks`: the prompt or a list of prompts; `BlockPlaces` are returned unchanged. `model`: its tokenizer reads text.
    Raises ValueError if blocks differ in length, or if blocks of two prompts stand at different positions.
    """
    if isinstance(blocks, BlockPlaces):
        return blocks
    prompts = list(blocks) if isinstance(blocks, list | tuple) else [blocks]
    strange = [shown(prompt) for prompt in prompts if not hasattr(prompt, "tokenized")]
    if strange or not prompts:
        raise ValueError(
            f"{[*strange, 'an empty list'][0]} is not a BlockPrompt, so its blocks are not known: give "
            "tls.positional.BlockPrompt(prefix, blocks, suffix), or a list of such prompts"
        )
    tokenized = [prompt.tokenized(model) for prompt in prompts]
    spans = [prompt.spans() for prompt in tokenized]
    widths = sorted({stop - start for blocks_of_prompt in spans for start, stop in blocks_of_prompt})
    if len(widths) > 1:
        raise ValueError(
            f"blocks have {widths[0]} to {widths[-1]} tokens, and content and position are separated token by token: "
            "give blocks with equally many tokens"
        )
    elsewhere = [index for index, blocks_of_prompt in enumerate(spans) if blocks_of_prompt != spans[0]]
    if elsewhere:
        starts = [shown([start for start, _ in spans[index]]) for index in (elsewhere[0], 0)]
        raise ValueError(
            f"the blocks of prompt {elsewhere[0]} begin at positions {starts[0]}, and the blocks of prompt 0 at "
            f"{starts[1]}: make a part of its own for each of the two prompts"
        )
    stop = spans[0][-1][1]
    ids = tuple(tuple(prompt.tokens()[:stop].tolist()) for prompt in tokenized)
    return BlockPlaces(tuple(start for start, _ in spans[0]), widths[0], ids)


def centred(values: Tensor, dim: int) -> Tensor:
    """Return a new tensor, `values` minus their mean along the axis `dim`; exactly 0 where all values along `dim` are
    equal.

    The first value is subtracted before the mean, because rounding of the mean could leave a small rest.
    """
    from_first = values - values.narrow(dim, 0, min(1, values.shape[dim]))
    return from_first - from_first.mean(dim, keepdim=True)
