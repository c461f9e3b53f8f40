"""A block task of token ids, for any model of the zoo and without a tokenizer."""

from dataclasses import dataclass

import numpy as np
import torch

import tlspectral as tls
from tlspectral.positional import BlockDraw, Question


@dataclass(frozen=True)
class Marks(tls.positional.BlockTask):
    """Blocks of two ids, a mark and a value; the question repeats the mark."""

    n_blocks: int = 5

    def draw(self, seed):
        ids = np.random.default_rng(seed).permutation(np.arange(3, 30))[: 2 * self.n_blocks]
        blocks = torch.from_numpy(ids).split(2)
        questions = tuple(Question(i, block[:1], int(block[1])) for i, block in enumerate(blocks))
        return BlockDraw(torch.tensor([1, 2]), blocks, questions, tuple(int(block[1]) for block in blocks))
