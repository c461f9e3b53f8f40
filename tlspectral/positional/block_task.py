"""`BlockTask`: lists of blocks drawn from a seed, with questions about the blocks and their answers."""

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

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.prompts import packed_prompts, require_vocabulary
from tlspectral.tasks import Task
from tlspectral.tasks.block_prompt import BlockPrompt, Segment
from tlspectral.user_functions import call_users, require_call

Answer = str | int
"""Answer to a question: text, or a token id."""


@checked_settings
@dataclass(frozen=True)
class Question:
    """A question about one block of a draw: where it asks, its text, and the right answer. It is part of a `BlockDraw`.

    >>> import tlspectral as tls
    >>> question = tls.positional.Question(block=1, suffix="Bob likes", answer=" blue")
    >>> question.answer
    ' blue'

    Attributes:
        block: index of the block that the question is about, from 0.
        suffix: text or token ids after the blocks. The prompt ends with it, and its last token is the query.
        answer: right continuation. Text begins with its space, and only its first token counts; or a token id.

    Raises ValueError if `block` is not a whole number, or `answer` neither text nor a whole number. `BlockDraw` raises
    ValueError if the block does not exist.
    """

    block: int
    suffix: Segment
    answer: Answer


@checked_settings
@dataclass(frozen=True)
class BlockDraw:
    """One list of blocks and the questions about them: what `draw(seed)` of a `BlockTask` returns.

    >>> import tlspectral as tls
    >>> blocks = ("Ann likes red\\n", "Bob likes blue\\n", "Cy likes green\\n")
    >>> question = tls.positional.Question(1, "Bob likes", " blue")
    >>> tls.positional.BlockDraw("", blocks, (question,)).answer(1)
    ' blue'

    Attributes:
        prefix: text or token ids [pos] before the blocks; may be empty.
        blocks: three or more pieces of text or of token ids. Use text everywhere, or token ids everywhere.
        questions: a tuple of `Question`, at least one, each about a different block.
        choices: possible answers, each counted as equally likely by chance; an answer listed twice counts twice.
            Default: the answers of the questions.

    Raises:
        ValueError: no question, two questions about one block, or a question about a block that does not exist. Text
            mixed with ids is refused when a prompt is made.
    """

    prefix: Segment
    blocks: tuple[Segment, ...]
    questions: tuple[Question, ...]
    choices: tuple[Answer, ...] = ()

    def __post_init__(self) -> None:
        wrong = [question for question in self.questions if not isinstance(question, Question)]
        if wrong:
            raise TypeError(f"questions= must hold values of tls.positional.Question; found {shown(wrong[0])}")
        object.__setattr__(
            self,
            "choices",
            self.choices if len(self.choices) else tuple(question.answer for question in self.questions),
        )
        queried = list(self.asked)
        distinct = len(set(queried)) == len(queried)
        if not queried or not distinct or not all(0 <= block < len(self.blocks) for block in queried):
            raise ValueError(
                f"questions must be about different blocks from 0 to {len(self.blocks) - 1}, found blocks "
                f"{shown(queried)}"
            )

    @property
    def asked(self) -> tuple[int, ...]:
        """Indices of the blocks that have a question, as a tuple."""
        return tuple(question.block for question in self.questions)

    def question(self, block: int) -> Question:
        """Return the `Question` about the block with index `block`. Raises ValueError if the draw has none."""
        for question in self.questions:
            if question.block == block:
                return question
        raise ValueError(f"this draw has no question about block {block}: query one of {list(self.asked)}")

    def answer(self, block: int) -> Answer:
        """Return the right answer (text or token id) to the question about block `block`. Raises ValueError without a
        question.
        """
        return self.question(block).answer


class _Blocks(ABC):
    """Base of `BlockTask` with the two things that a subclass must provide: `n_blocks` (number of blocks of a prompt)
    and the method `draw(seed)`, which returns a `BlockDraw` (blocks and questions).
    """

    n_blocks: int  # not a field of `BlockTask`: it comes where a subclass puts it, or is a property

    @abstractmethod
    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks and questions) for a seed; the same seed must give the same draw."""


@checked_settings
@dataclass(frozen=True, kw_only=True)
class BlockTask(_Blocks):
    """Base class of tasks whose prompts consist of blocks that can swap, with questions and right answers.

    Write a subclass for a task of your own, a frozen dataclass with `n_blocks` and `draw`. Give it to
    `positional_symbolic`:

        from tlspectral.positional import BlockDraw, BlockTask, Question

        @dataclass(frozen=True)
        class Capitals(BlockTask):
            n_blocks: int = 4

            def draw(self, seed):
                order = np.random.default_rng(seed).permutation(list(CAPITALS))[: self.n_blocks]
                blocks = tuple(f"{land}: {CAPITALS[land]}\\n" for land in order)
                questions = tuple(
                    Question(i, f"{land}:", f" {CAPITALS[land]}") for i, land in enumerate(order)
                )
                return BlockDraw("", blocks, questions)

        scores = tls.positional_symbolic(model, Capitals(draws=20))

    Attributes:
        n_blocks: number of blocks of every draw.
        swapped: how many blocks swap with one another, evenly spaced from first to last. Default: 9.
        queries: how many of the swapped blocks have a question, evenly spaced (default: 9); or a tuple of block
            indices. A draw without a question about these blocks keeps its own questions.
        draws: number of lists of blocks that are drawn; standard errors are over lists. Default: 10.

    A larger `swapped` or `queries` than there are blocks means all blocks. The three settings are keywords of every
    task.

    Raises:
        TypeError, ValueError: when a model reads the task: `draw` returns no `BlockDraw` or another number of blocks,
            or the tokenizer merges text across blocks. End every block where a token ends, such as at a line break.

    Not established: that the model can do the task. Measure `task_answers` first, and read scores of heads only on
    tasks that the model answers in more than half of the prompts.
    """

    swapped: int = field(default=9, repr=False)
    queries: int | tuple[int, ...] = field(default=9, repr=False)
    draws: int = field(default=10, repr=False)

    def seeds(self, seed: int) -> tuple[int, ...]:
        """Return one seed per draw, `draws` numbers made from `seed`. A larger `draws` adds seeds at the end.

        Raises ValueError if `draws` is below 1.
        """
        if self.draws < 1:
            raise ValueError(f"draws= must be 1 or more, found {shown(self.draws)}")
        return tuple(map(int, np.random.SeedSequence(seed).generate_state(self.draws)))

    def drawn(self, seed: int) -> BlockDraw:
        """Return the `BlockDraw` of `draw(seed)` after checking it.

        Raises TypeError if the method returns another type, ValueError if the draw has not `n_blocks` blocks.
        """
        method = f"draw() of {type(self).__name__}"
        require_call(self.draw, ("seed",), method)
        draw = call_users(self.draw, {"seed": seed}, method, "a BlockDraw")
        if not isinstance(draw, BlockDraw):
            raise TypeError(f"{method} must return a tls.positional.BlockDraw; found {type(draw).__name__}")
        if len(draw.blocks) != self.n_blocks:
            raise ValueError(
                f"{method} must return a draw of n_blocks={self.n_blocks} blocks; found {len(draw.blocks)}"
            )
        return draw

    @property
    def name(self) -> str:
        """Class name and settings of the task as text, such as "KeyValueTask(n_blocks=9)", for tables and figures."""
        return repr(self)

    def prompt(self, draw: BlockDraw, query: int, *, bos: str = "") -> BlockPrompt:
        """Return the `BlockPrompt` (prefix, blocks, suffix) that asks about one block; prompts of the same draw differ
        only in their suffix.

        Args:
            draw: a draw of this task.
            query: index of the block, from 0. Raises ValueError if the draw has no question about it.
            bos: text to put in front of a text prompt, usually the tokenizer's `bos_token`. A prefix that begins with
                it stays.
        """
        opens = isinstance(draw.prefix, str) and not draw.prefix.startswith(bos)
        prefix = f"{bos}{draw.prefix}" if opens else draw.prefix
        return BlockPrompt(prefix, draw.blocks, draw.question(query).suffix)

    def task(self, *, seed: int = 0) -> Task:
        """Return a `tls.Task` with a prompt for each queried block of each draw; its metric is the probability of the
        right answer, 0 to 1.

        The probability is of the answer's first token. Use it as the `task=` of ablations. With the same `seed` it has
        the prompts of `positional_symbolic`. Raises ValueError if `queries` names blocks that do not exist.
        """
        queried = asked_blocks(self)
        lists = [self.drawn(draw_seed) for draw_seed in self.seeds(seed)]
        rows = [(number, query) for number, draw in enumerate(lists) for query in questions_of(draw, queried)]
        questions = [lists[number].question(query) for number, query in rows]
        answers = [question.answer for question in questions]
        labels = pd.DataFrame(rows, columns=["draw", "query"]).assign(answer=answers)
        return Task(
            AnswerPrompts(tuple((self, lists[number], query) for number, query in rows)),
            AnswerProbability(tuple((question.suffix, question.answer) for question in questions)),
            predict=-1,
            labels=labels,
            higher_is_better=True,
            name=self.name,
        )


def swapped_blocks(task: BlockTask) -> tuple[int, ...]:
    """Return the indices of the blocks of a task that swap with one another: `task.swapped` blocks, evenly spaced over
    all blocks.
    """
    return evenly(range(task.n_blocks), min(task.swapped, task.n_blocks))


def asked_blocks(task: BlockTask) -> tuple[int, ...]:
    """Return the indices of the blocks that a task asks about, as `task.queries` chooses them.

    Raises ValueError if `queries` is below 1, empty, or names blocks that do not exist.
    """
    if not isinstance(task.queries, Iterable):
        blocks = swapped_blocks(task)
        if index(task.queries) < 1:
            raise ValueError(f"queries= must be 1 or more, or a tuple of block indices; found {shown(task.queries)}")
        return evenly(blocks, min(index(task.queries), len(blocks)))
    queries = tuple(index(query) for query in task.queries)
    if not queries or len(set(queries)) < len(queries) or not all(0 <= query < task.n_blocks for query in queries):
        raise ValueError(
            f"queries= must be different blocks from 0 to {task.n_blocks - 1}, found {shown(list(queries))}"
        )
    return queries


def questions_of(draw: BlockDraw, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block indices in `asked` that have a question in the draw; if none has, all blocks with a question."""
    return tuple(query for query in asked if query in draw.asked) or draw.asked


def require_size(n_blocks: int, most: int) -> None:
    """Raise ValueError unless `n_blocks` is from 3 to `most`."""
    if not 3 <= n_blocks <= most:
        raise ValueError(f"n_blocks= must be from 3 to {most}; found {shown(n_blocks)}")


def evenly(items: range | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return a tuple of `count` evenly spaced entries of `items`, with the first and the last; a count of 1 gives the
    first.
    """
    return tuple(items[number] for number in np.linspace(0, len(items) - 1, count).round().astype(int).tolist())


@dataclass(frozen=True)
class AnswerPrompts:
    """Prompts of a block task as the `prompts` of a `Task`; they are tokenised when a model reads them.

    `prompts`: for each prompt a tuple (task, draw, index of the queried block).
    """

    prompts: tuple[tuple[BlockTask, BlockDraw, int], ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the prompts as one padded batch of token ids with their lengths, for the model behind `view`.

        Raises ValueError if the tokenizer joins text across blocks, or a prompt is longer than the context.
        """
        bos = bos_text(view)
        prompts = (task.prompt(draw, query, bos=bos) for task, draw, query in self.prompts)
        return packed_prompts(view, [prompt.tokenized(view.model).tokens() for prompt in prompts])


@dataclass(frozen=True)
class AnswerProbability:
    """Metric of a `Task`: probability (0 to 1) of the first token of each prompt's right answer, after the prompt.

    Attributes:
        ends: for each prompt, its suffix (text or ids) and its answer (text or id).
    """

    ends: tuple[tuple[Any, str | int], ...]

    def for_model(self, view: AttentionView, prompts: PackedTokens) -> Any:
        """Return the metric for one model: a function of logits, tokens and mask that returns a probability per prompt.

        `view`: the model, whose tokenizer gives the first token of each answer. `prompts`: the tokenised prompts, not
        used here. Raises ValueError for answer ids outside the model's vocabulary, and for text answers without a
        tokenizer or merged with the prompt.
        """
        tokenizer = getattr(view.model, "tokenizer", None)
        ids = torch.tensor([first_token(tokenizer, suffix, answer) for suffix, answer in self.ends])
        require_vocabulary(view.d_vocab, ids)
        return partial(_probability, ids)


def first_token(tokenizer: Any, suffix: Any, answer: str | int) -> int:
    """Return the id of the first token of `answer` after `suffix`, the end of the prompt; an answer that is an id is
    returned unchanged.

    Raises ValueError for a text answer if the tokenizer is None or the suffix is not text, and if the tokenizer merges
    the end of the suffix with the answer.
    """
    if not isinstance(answer, str):
        return int(answer)
    if tokenizer is None or not isinstance(suffix, str):
        raise ValueError(
            f"the answer {shown(answer)} is text, but this prompt is token ids or the model has no tokenizer: give the "
            "answer's token id"
        )
    before = tokenizer(suffix, add_special_tokens=False, verbose=False).input_ids
    joined = tokenizer(suffix + answer, add_special_tokens=False, verbose=False).input_ids
    if len(joined) <= len(before) or joined[: len(before)] != before:
        raise ValueError(
            f"this tokenizer joins the end of the prompt with the answer {shown(answer)}: begin the answer with a "
            "space, or end the prompt where a token ends"
        )
    return int(joined[len(before)])


def bos_text(view: AttentionView) -> str:
    """Return the BOS token (start of text) of the model's tokenizer as text, or "" if the model has none."""
    return getattr(getattr(view.model, "tokenizer", None), "bos_token", None) or ""


def _probability(
    ids: Int[Tensor, "sequences"], logits: Float[Tensor, "sequences 1 d_vocab"], tokens: Tensor, mask: Tensor
) -> Float[Tensor, "sequences"]:
    """Return the probability [sequences] (0 to 1) of the token `ids[i]` after sequence i, from its logits. `tokens` and
    `mask` are not used.
    """
    return logits[:, -1].softmax(-1).gather(1, ids.to(logits.device)[:, None])[:, 0]
