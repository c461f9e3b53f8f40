"""Ready block tasks in addition to the binding task: key and value, copying, needle, list index, prompt files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from tlspectral.errors import did_you_mean, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.models.running.text import file_lines, packaged_text, packaged_words
from tlspectral.positional.binding import TEMPLATES, BindingTask
from tlspectral.positional.block_task import BlockDraw, BlockTask, Question, require_size

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


@checked_settings
@dataclass(frozen=True)
class KeyValueTask(BlockTask):
    """Make a block task with lines "The password of the KEY is VALUE." and a question that repeats a line without its
    value.

    Give it to `tls.positional_symbolic` or `tls.positional.task_answers`. Its default is the task "key-value" there.

    >>> import tlspectral as tls
    >>> draw = tls.positional.KeyValueTask(3).draw(0)
    >>> draw.blocks[0], draw.questions[0].suffix, draw.questions[0].answer
    ('The password of the violin is ocean.\\n', '---\\nThe password of the violin is', ' ocean')

    Attributes:
        n_blocks: number of lines, 3 to 44. Default: 9. All nouns of a draw differ.
        swapped, queries, draws: how many blocks swap (9), how many have a question (9), and how many lists of lines are
            drawn (10); defaults in brackets.

    Raises:
        ValueError: too few or too many lines. Later, when a model reads the prompts: a model without tokenizer, or
            prompts longer than its context.

    Not established: that the model solves the task; measure `tls.positional.task_answers(model, task)` first.
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(packaged_words("nouns")) // 2)

    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks of text and a question about each) with keys and values from the packaged nouns,
        all different, chosen by `seed`.
        """
        words = _nouns(seed, 2 * self.n_blocks)
        pairs = list(zip(words[::2], words[1::2], strict=True))
        return BlockDraw(
            "",
            tuple(f"The password of the {key} is {value}.\n" for key, value in pairs),
            tuple(
                Question(block, f"---\nThe password of the {key} is", f" {value}")
                for block, (key, value) in enumerate(pairs)
            ),
        )


@checked_settings
@dataclass(frozen=True)
class CopyingTask(BlockTask):
    """Make a block task with lines of nouns and a partial copy of them; the prompt ends before a word of the copy.

    From a word to its copy is always the same number of words. Give the task to `tls.positional_symbolic` or
    `tls.positional.task_answers`. Its default is the task "copying" there.

    >>> import tlspectral as tls
    >>> draw = tls.positional.CopyingTask(3, 6).draw(0)
    >>> draw.blocks[:2], draw.questions[0].suffix, draw.questions[0].answer
    (('violin ocean\\n', 'candle harbor\\n'), 'violin', ' ocean')

    Attributes:
        n_blocks: number of lines. Default: 9. A question asks for the last word of one line.
        distance: words from a word to its copy, which is the number of words of all lines: a multiple of `n_blocks`,
            from `2 * n_blocks` to 88. Default: 36.
        swapped, queries, draws: how many blocks swap (9), how many have a question (9), and how many lists of lines are
            drawn (10); defaults in brackets.

    Raises:
        ValueError: too few or too many lines, or another distance. Later, when a model reads the prompts: a model
            without tokenizer, or prompts longer than its context.

    Not established: that the model solves the task; measure `tls.positional.task_answers(model, task)` first.
    """

    n_blocks: int = 9
    distance: int = 36

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(packaged_words("nouns")) // 2)
        if self.distance % self.n_blocks or not 2 * self.n_blocks <= self.distance <= len(packaged_words("nouns")):
            raise ValueError(
                f"distance= must be a multiple of n_blocks = {self.n_blocks}, from {2 * self.n_blocks} to "
                f"{len(packaged_words('nouns'))} words; found {self.distance}"
            )

    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks of text and their questions) with different nouns from the packaged list, chosen
        by `seed`.
        """
        width = self.distance // self.n_blocks
        words = _nouns(seed, self.distance)
        lines = [words[start : start + width] for start in range(0, self.distance, width)]
        blocks = tuple(" ".join(line) + "\n" for line in lines)
        questions = (
            Question(number, "".join(blocks[:number]) + " ".join(line[:-1]), f" {line[-1]}")
            for number, line in enumerate(lines)
        )
        return BlockDraw("", blocks, tuple(questions), tuple(f" {word}" for word in words))


@checked_settings
@dataclass(frozen=True)
class NeedleTask(BlockTask):
    """Make a block task with one line that names a secret word, among sentences of *Alice's Adventures in Wonderland*.

    The single question of a draw asks for the secret word. The word and its place are random. Give the task to
    `tls.positional_symbolic` or `tls.positional.task_answers`. Its default is the task "needle" there.

    >>> import tlspectral as tls
    >>> draw = tls.positional.NeedleTask(3).draw(0)
    >>> draw.blocks[draw.questions[0].block]
    'The secret word is bread.\\n'

    Attributes:
        n_blocks: number of lines, 3 to 80, including the line with the secret word. Default: 9.
        swapped: how many blocks swap. Default: 9. Set it to `n_blocks`, otherwise the secret word's line may not swap.
        draws: how many lists of lines are drawn, each with one question. Default: 10.

    Raises:
        ValueError: too few or too many lines. Later, when a model reads the prompts: a model without tokenizer, or
            prompts longer than its context.

    Not established: that the model solves the task; measure `tls.positional.task_answers(model, task)` first.
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(_sentences()))

    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks of text and one question) with different sentences, and a line with the secret
        word in place of one of them. `seed` chooses sentences, word (a noun) and line.
        """
        generator = np.random.default_rng(seed)
        lines = [_sentences()[number] for number in generator.choice(len(_sentences()), self.n_blocks, replace=False)]
        needle, word = int(generator.integers(self.n_blocks)), str(generator.choice(packaged_words("nouns")))
        lines[needle] = f"The secret word is {word}."
        question = Question(needle, "---\nQuestion: What is the secret word?\nAnswer: The secret word is", f" {word}")
        choices = tuple(f" {noun}" for noun in packaged_words("nouns"))
        return BlockDraw("", tuple(f"{line}\n" for line in lines), (question,), choices)


@checked_settings
@dataclass(frozen=True)
class ListIndexTask(BlockTask):
    """Make a block task with a list of nouns and a question such as "The third item of the list is the".

    It asks for the word at a place; the other ready tasks ask for the word that belongs to another word. Give it to
    `tls.positional_symbolic` or `tls.positional.task_answers`. Its default is the task "list-index" there.

    >>> import tlspectral as tls
    >>> draw = tls.positional.ListIndexTask(3).draw(0)
    >>> draw.blocks, draw.questions[2].suffix
    (('- violin\\n', '- ocean\\n', '- candle\\n'), '---\\nThe third item of the list is the')

    Attributes:
        n_blocks: number of lines, 3 to 9. Default: 9. All nouns of a draw differ.
        swapped, queries, draws: how many blocks swap (9), how many have a question (9), and how many lists of lines are
            drawn (10); defaults in brackets.

    Raises:
        ValueError: too few or too many lines. Later, when a model reads the prompts: a model without tokenizer, or
            prompts longer than its context.

    Not established: that the model solves the task; measure `tls.positional.task_answers(model, task)` first.
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(_ORDINALS))

    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks of text and their questions) with different nouns from the packaged list, chosen
        by `seed`.
        """
        words = _nouns(seed, self.n_blocks)
        questions = (
            Question(block, f"---\nThe {_ORDINALS[block]} item of the list is the", f" {word}")
            for block, word in enumerate(words)
        )
        return BlockDraw("List of items:\n", tuple(f"- {word}\n" for word in words), tuple(questions))


@checked_settings
@dataclass(frozen=True)
class PromptFile(BlockTask):
    """Make a block task from a file with one draw (a list of blocks and questions) per line, in JSON.

    Use it for your own prompts in `tls.positional_symbolic` or `tls.positional.task_answers`:

        task = tls.positional.PromptFile("prompts.jsonl", draws=50)
        scores = tls.positional_symbolic(model, task)

    A line of the file, with each question as [index of a block, suffix, answer]:

        {"prefix": "", "blocks": ["a: 1\\n", "b: 2\\n", "c: 3\\n"], "questions": [[0, "a:", " 1"]]}

    "prefix" may be left out. "choices" may list the possible answers, equally likely by chance (default: the answers of
    the line). All lines need the same number of blocks.

    Attributes:
        path: the file. Only its first `draws` lines are used, in their order, whatever the seed.
        draws: number of lines to use. Default: 10. If the file has fewer lines, all are used.
        swapped, queries: how many blocks swap and how many have a question. Default: 9 each.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: no lines, a line that is not such JSON, an unknown key, or lines with different numbers of blocks.

    Not established: that the model solves the task; measure `tls.positional.task_answers(model, task)` first.
    """

    path: str

    def __post_init__(self) -> None:
        sizes = sorted({len(draw.blocks) for draw in self.lines})
        if len(sizes) > 1:
            raise ValueError(f"{self.path}: lines have {sizes} blocks; give every line the same number")

    @property
    def n_blocks(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of blocks of every line."""
        return len(self.lines[0].blocks)

    @cached_property
    def lines(self) -> tuple[BlockDraw, ...]:
        """All draws in the file, one `BlockDraw` per line that is not blank."""
        lines = enumerate(file_lines(self.path), 1)
        draws = tuple(_draw_of(f"{self.path}, line {number}", line) for number, line in lines if line.strip())
        if not draws:
            raise ValueError(f"{self.path} has no lines: write one draw per line, such as {LINE}")
        return draws

    def draw(self, seed: int) -> BlockDraw:
        """Return the `BlockDraw` (blocks and questions) of line number `seed` of the file, counted from 0 without blank
        lines.
        """
        return self.lines[seed]

    def seeds(self, seed: int) -> tuple[int, ...]:
        """Return 0, 1, 2, ...: the numbers of the first `draws` lines, whatever the seed.

        Raises ValueError if `draws` is below 1.
        """
        return tuple(range(min(len(super().seeds(seed)), len(self.lines))))


READY = {
    "key-value": KeyValueTask,
    "copying": CopyingTask,
    "needle": NeedleTask,
    "list-index": ListIndexTask,
}
"""Ready tasks by name. `block_task` also takes "binding" and the templates of the binding task."""

LINE = (
    '{"prefix": "", "blocks": ["apple: red\\n", "plum: blue\\n", "pear: green\\n"], '
    '"questions": [[0, "apple:", " red"], [2, "pear:", " green"]]}'
)
"""Example line of a `PromptFile`: blocks that swap, and questions as [block, suffix, answer]."""


_KEYS = ("prefix", "blocks", "questions", "choices")


def block_task(name: str) -> BlockTask:
    """Return the ready task with this name and its defaults.

    Names: "binding", "key-value", "copying", "needle", "list-index". A template of the binding task ("plain",
    "gemma-2", "llama-3.2", "qwen2") gives that task. Raises ValueError for other names.
    """
    if name in READY:
        return READY[name]()
    template = "plain" if name == "binding" else name
    if template not in TEMPLATES:
        names = ", ".join(map(repr, ("binding", *READY)))
        raise ValueError(
            f"{shown(name)} is not a ready task: give {names}, or a template of the binding task: "
            f"{', '.join(map(repr, TEMPLATES))}"
        )
    return BindingTask(template)


def _nouns(seed: int, count: int) -> list[str]:
    """Return `count` different nouns of the packaged list in a random order that `seed` chooses."""
    return [str(word) for word in np.random.default_rng(seed).permutation(packaged_words("nouns"))[:count]]


@cache
def _sentences() -> list[str]:
    """Return the different sentences of the packaged book that have 40 to 90 characters."""
    text = re.sub(r"\s+", " ", packaged_text())
    whole = (sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 40 <= len(sentence) <= 90)
    return list(dict.fromkeys(sentence for sentence in whole if re.fullmatch(r"[A-Z][A-Za-z ,;.!?']+", sentence)))


def _draw_of(where: str, line: str) -> BlockDraw:
    """Return the `BlockDraw` (blocks and questions) in `line`, one line of a `PromptFile` in JSON. `where` names the
    line's place in messages.

    Raises ValueError that names the place, the wrong piece and the expected form.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found no JSON, {error}; expected a line such as {LINE}") from error
    fault = _strange_in(fields)
    if fault is not None:
        raise ValueError(f"{where}: found {fault}; expected a line such as {LINE}")
    questions = tuple(Question(*question) for question in fields["questions"])
    try:
        return BlockDraw(fields.get("prefix", ""), tuple(fields["blocks"]), questions, tuple(fields.get("choices", ())))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _strange_in(fields: Any) -> str | None:
    """Return text that describes the first wrong piece of `fields`, the JSON value of a line of a `PromptFile`; None if
    the line is right.
    """
    if not isinstance(fields, dict):
        return f"a {type(fields).__name__}"
    for name in fields:
        if name not in _KEYS:
            return f"the key {name!r}{did_you_mean(name, _KEYS)}"
    missing = [name for name in ("blocks", "questions") if name not in fields]
    if missing:
        return f"{' and '.join(map(repr, fields)) or 'nothing'}, without {' and '.join(map(repr, missing))}"
    if not isinstance(fields.get("prefix", ""), str):
        return f"the prefix {fields['prefix']!r}"
    for name, kinds in (("blocks", (str,)), ("choices", (str, int))):
        values = fields.get(name, [])
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            return f"{name} {values!r}"[:80]
    if not isinstance(fields["questions"], list):
        return f"questions {fields['questions']!r}"[:80]
    for question in fields["questions"]:
        types = list(map(type, question)) if isinstance(question, list) else None
        if types not in ([int, str, str], [int, str, int]):
            return f"the question {question!r}"[:80]
    return None
