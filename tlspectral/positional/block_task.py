"""`BlockTask`: draws of prompts in blocks, with questions about the blocks and the answers to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.prompts import packed_prompts, require_vocabulary
from tlspectral.tasks import Task
from tlspectral.tasks.block_prompt import BlockPrompt, Segment
from tlspectral.user_functions import require_call

Answer = str | int
"""The answer to a question: text, or a token id."""


@dataclass(frozen=True)
class Question:
    """A question about one block of a draw.

    Attributes:
        block: index of the block that is asked about.
        suffix: what follows the blocks; its last token is the query.
        answer: what should follow: text with its space, whose first token counts, or a token id.
    """

    block: int
    suffix: Segment
    answer: Answer


@dataclass(frozen=True)
class BlockDraw:
    """One list of blocks and the questions about it. All is text, or all is token ids.

    Attributes:
        prefix, blocks: as in `BlockPrompt`.
        questions: one at least, each about another block.
        choices: answers among which chance chooses, each as often as it stands here; by default the answers of
            the questions.

    Raises:
        ValueError: no question, two about one block, or one about a block that is not there.
    """

    prefix: Segment
    blocks: tuple[Segment, ...]
    questions: tuple[Question, ...]
    choices: tuple[Answer, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", self.choices or tuple(question.answer for question in self.questions))
        asked = list(self.asked)
        if not asked or len(set(asked)) < len(asked) or not all(0 <= block < len(self.blocks) for block in asked):
            raise ValueError(f"questions are about different blocks from 0 to {len(self.blocks) - 1}, found {asked}")

    @property
    def asked(self) -> tuple[int, ...]:
        """Blocks that have a question."""
        return tuple(question.block for question in self.questions)

    def question(self, block: int) -> Question:
        """Return the question about a block. Raises ValueError where there is none."""
        for question in self.questions:
            if question.block == block:
                return question
        raise ValueError(f"there is no question about block {block}: there are some about {list(self.asked)}")

    def answer(self, block: int) -> Answer:
        """Return what should follow a prompt that asks about a block. Raises ValueError where no question does."""
        return self.question(block).answer


class _Blocks(ABC):
    n_blocks: int  # not a field of `BlockTask`: it comes where a subclass puts it, or is a property

    @abstractmethod
    def draw(self, seed: int) -> BlockDraw:
        """Return blocks and questions from a seed; the same ones for the same seed."""


@dataclass(frozen=True, kw_only=True)
class BlockTask(_Blocks):
    """Prompts in blocks with questions and answers: what positional and symbolic scores are measured on.

    A task of your own is a frozen dataclass with these two, and goes wherever a ready one does:

        @dataclass(frozen=True)
        class Capitals(tls.positional.BlockTask):
            n_blocks: int = 4

            def draw(self, seed):
                order = np.random.default_rng(seed).permutation(list(CAPITALS))[: self.n_blocks]
                blocks = tuple(f"{land}: {CAPITALS[land]}\\n" for land in order)
                questions = tuple(Question(i, f"{land}:", f" {CAPITALS[land]}") for i, land in enumerate(order))
                return BlockDraw("", blocks, questions)

    End every block where a token ends, at a line break say: a tokenizer that joins text across blocks is refused.

    Attributes:
        n_blocks: blocks of every draw.
        swapped: how many blocks swap with one another, evenly spaced from the first to the last; all where there are
            fewer.
        queries: how many of these are asked about, evenly spaced, or all where there are fewer; or which blocks, by
            index, of all. A draw that has no question about any of them is asked its own.
        draws: lists of blocks; standard errors are over them.

    The last three are keywords of every task and are not part of its name.

    What it does not establish: that the model can do the task. Look at the answers first, and read heads on tasks that
    are answered above 0.5.
    """

    swapped: int = field(default=9, repr=False)
    queries: int | tuple[int, ...] = field(default=9, repr=False)
    draws: int = field(default=10, repr=False)

    def seeds(self, seed: int) -> tuple[int, ...]:
        """Return a seed per draw, made from one; the first are the same for any number. Raises ValueError for none."""
        if self.draws < 1:
            raise ValueError(f"at least one draw is needed, found {self.draws}")
        return tuple(map(int, np.random.SeedSequence(seed).generate_state(self.draws)))

    def drawn(self, seed: int) -> BlockDraw:
        """Return `draw` of a seed. Raises TypeError or ValueError unless it is a `BlockDraw` of `n_blocks` blocks."""
        what = f"draw() of {type(self).__name__}"
        require_call(self.draw, ("seed",), what)
        draw = self.draw(seed)
        if not isinstance(draw, BlockDraw):
            raise TypeError(f"{what} returns a tls.positional.BlockDraw; found {type(draw).__name__}")
        if len(draw.blocks) != self.n_blocks:
            raise ValueError(f"{what} returns a draw of n_blocks={self.n_blocks} blocks; found {len(draw.blocks)}")
        return draw

    @property
    def name(self) -> str:
        """The task with its own settings, for tables and figures."""
        return repr(self)

    def prompt(self, draw: BlockDraw, query: int, *, bos: str = "") -> BlockPrompt:
        """Return the prompt that asks about block `query` of a draw. Prompts of one draw differ in their suffix alone.

        Args:
            draw: of this task.
            query: index of the block, from 0. Raises ValueError where no question is about it.
            bos: what text opens with, the tokenizer's `bos_token`; a prefix that has it already gets no second one.
        """
        opens = isinstance(draw.prefix, str) and not draw.prefix.startswith(bos)
        prefix = f"{bos}{draw.prefix}" if opens else draw.prefix
        return BlockPrompt(prefix, draw.blocks, draw.question(query).suffix)

    def task(self, *, seed: int = 0) -> Task:
        """Make the `Task` that scores the answers: probability of the answer's first token, from 0 to 1.

        The prompts are the same as in `positional_symbolic` with the same seed of the draws. Raises ValueError for
        queries about blocks that do not exist.
        """
        asked = asked_blocks(self)
        lists = [self.drawn(one) for one in self.seeds(seed)]
        rows = [(number, query) for number, draw in enumerate(lists) for query in questions_of(draw, asked)]
        questions = [lists[number].question(query) for number, query in rows]
        labels = pd.DataFrame(rows, columns=["draw", "query"]).assign(answer=[one.answer for one in questions])
        return Task(
            AnswerPrompts(tuple((self, lists[number], query) for number, query in rows)),
            AnswerProbability(tuple((question.suffix, question.answer) for question in questions)),
            predict=-1,
            labels=labels,
            higher_is_better=True,
            name=self.name,
        )


def swapped_blocks(task: BlockTask) -> tuple[int, ...]:
    """Return the blocks of a task that swap with one another."""
    return evenly(range(task.n_blocks), min(task.swapped, task.n_blocks))


def asked_blocks(task: BlockTask) -> tuple[int, ...]:
    """Return the blocks of a task that are asked about. Raises ValueError for none, or blocks that do not exist."""
    if not isinstance(task.queries, Iterable):
        blocks = swapped_blocks(task)
        if index(task.queries) < 1:
            raise ValueError(f"queries must be 1 or more, or blocks by index; found {task.queries}")
        return evenly(blocks, min(index(task.queries), len(blocks)))
    asked = tuple(index(query) for query in task.queries)
    if not asked or len(set(asked)) < len(asked) or not all(0 <= query < task.n_blocks for query in asked):
        raise ValueError(f"queries must be different blocks from 0 to {task.n_blocks - 1}, found {list(asked)}")
    return asked


def questions_of(draw: BlockDraw, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chosen blocks that a draw has questions about; all its questions where it has none about them."""
    return tuple(query for query in asked if query in draw.asked) or draw.asked


def require_size(n_blocks: int, most: int) -> None:
    """Refuse fewer than three blocks, or more than there are words for. Raises ValueError."""
    if not 3 <= n_blocks <= most:
        raise ValueError(f"n_blocks must be from 3 to {most}; found {n_blocks}")


def evenly(items: range | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return evenly spaced items, the first and the last among them; a single one is the first."""
    return tuple(items[number] for number in np.linspace(0, len(items) - 1, count).round().astype(int).tolist())


@dataclass(frozen=True)
class AnswerPrompts:
    """Prompts of a block task: a task, a draw and the block asked about of each; token ids where a model is met."""

    prompts: tuple[tuple[BlockTask, BlockDraw, int], ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the prompts. Raises ValueError for text that the tokenizer joins."""
        bos = bos_text(view)
        prompts = (task.prompt(draw, query, bos=bos) for task, draw, query in self.prompts)
        return packed_prompts(view, [prompt.tokenized(view.model).tokens() for prompt in prompts])


@dataclass(frozen=True)
class AnswerProbability:
    """Probability of the first token of each prompt's answer, at the one position that is predicted.

    Attributes:
        ends: suffix and answer of each prompt.
    """

    ends: tuple[tuple[Any, str | int], ...]

    def for_model(self, view: AttentionView, prompts: PackedTokens) -> Any:
        """Return the metric with the answers as token ids of a model. Raises ValueError for other ids."""
        tokenizer = getattr(view.model, "tokenizer", None)
        ids = torch.tensor([first_token(tokenizer, suffix, answer) for suffix, answer in self.ends])
        require_vocabulary(view.d_vocab, ids)
        return partial(_probability, ids)


def first_token(tokenizer: Any, suffix: Any, answer: str | int) -> int:
    """Return the first token of an answer where it follows the suffix; an id stands for itself. Raises ValueError."""
    if not isinstance(answer, str):
        return int(answer)
    if tokenizer is None or not isinstance(suffix, str):
        raise ValueError(f"the answer {answer!r} is text, and this prompt is not: give its token id")
    before = tokenizer(suffix, add_special_tokens=False, verbose=False).input_ids
    both = tokenizer(suffix + answer, add_special_tokens=False, verbose=False).input_ids
    if len(both) <= len(before) or both[: len(before)] != before:
        raise ValueError(
            f"this tokenizer joins the end of the prompt with the answer {answer!r}: no first token to read"
        )
    return int(both[len(before)])


def bos_text(view: AttentionView) -> str:
    """Return the text of the BOS token of a model's tokenizer, `""` without one."""
    return getattr(getattr(view.model, "tokenizer", None), "bos_token", None) or ""


def _probability(
    ids: Int[Tensor, "sequences"], logits: Float[Tensor, "sequences 1 d_vocab"], tokens: Tensor, mask: Tensor
) -> Float[Tensor, "sequences"]:
    return logits[:, -1].softmax(-1).gather(1, ids.to(logits.device)[:, None])[:, 0]
