"""Ready block tasks beside the binding task: key and value, copying, needle, list index, prompts from a file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from tlspectral.errors import did_you_mean
from tlspectral.models.running.text import file_lines, packaged_text, packaged_words
from tlspectral.positional.binding import TEMPLATES, BindingTask
from tlspectral.positional.block_task import BlockDraw, BlockTask, Question, require_size

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


@dataclass(frozen=True)
class KeyValueTask(BlockTask):
    """Lines "The password of the KEY is VALUE." of common nouns, all different, and one line again without its value.

    Attributes:
        n_blocks: lines, from 3 to half of the packaged nouns (`packaged_words`).
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(packaged_words("nouns")) // 2)

    def draw(self, seed: int) -> BlockDraw:
        """Draw keys and values without repetition."""
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


@dataclass(frozen=True)
class CopyingTask(BlockTask):
    """Lines of common nouns, all different, and their copy; the prompt ends before the last word of a line of the copy.

    From the word that is copied to its copy it is always as far, whichever line is asked about.

    Attributes:
        n_blocks: lines of the list.
        distance: words from a word to its copy: a multiple of `n_blocks`, two words a line at least.
    """

    n_blocks: int = 9
    distance: int = 36

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(packaged_words("nouns")) // 2)
        if self.distance % self.n_blocks or not 2 * self.n_blocks <= self.distance <= len(packaged_words("nouns")):
            raise ValueError(
                f"distance is a multiple of n_blocks = {self.n_blocks}, from {2 * self.n_blocks} to "
                f"{len(packaged_words('nouns'))} words; found {self.distance}"
            )

    def draw(self, seed: int) -> BlockDraw:
        """Draw words without repetition."""
        width = self.distance // self.n_blocks
        words = _nouns(seed, self.distance)
        lines = [words[start : start + width] for start in range(0, self.distance, width)]
        blocks = tuple(" ".join(line) + "\n" for line in lines)
        questions = (
            Question(number, "".join(blocks[:number]) + " ".join(line[:-1]), f" {line[-1]}")
            for number, line in enumerate(lines)
        )
        return BlockDraw("", blocks, tuple(questions), tuple(f" {word}" for word in words))


@dataclass(frozen=True)
class NeedleTask(BlockTask):
    """One line names a secret word among sentences of *Alice's Adventures in Wonderland*; the question asks for it.

    A draw has one question, about the block of the secret word, which is drawn too.

    Attributes:
        n_blocks: sentences, the one with the secret word among them. Let as many swap, that the word's block is
            among those that do.
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(_sentences()))

    def draw(self, seed: int) -> BlockDraw:
        """Draw sentences without repetition, and a noun for the secret word."""
        generator = np.random.default_rng(seed)
        lines = [_sentences()[number] for number in generator.choice(len(_sentences()), self.n_blocks, replace=False)]
        needle, word = int(generator.integers(self.n_blocks)), str(generator.choice(packaged_words("nouns")))
        lines[needle] = f"The secret word is {word}."
        question = Question(needle, "---\nQuestion: What is the secret word?\nAnswer: The secret word is", f" {word}")
        choices = tuple(f" {noun}" for noun in packaged_words("nouns"))
        return BlockDraw("", tuple(f"{line}\n" for line in lines), (question,), choices)


@dataclass(frozen=True)
class ListIndexTask(BlockTask):
    """Lines of one noun each, all different, and "The third item of the list is the": which place, not which word.

    Attributes:
        n_blocks: lines, from 3 to 9.
    """

    n_blocks: int = 9

    def __post_init__(self) -> None:
        require_size(self.n_blocks, len(_ORDINALS))

    def draw(self, seed: int) -> BlockDraw:
        """Draw words without repetition."""
        words = _nouns(seed, self.n_blocks)
        questions = (
            Question(block, f"---\nThe {_ORDINALS[block]} item of the list is the", f" {word}")
            for block, word in enumerate(words)
        )
        return BlockDraw("List of items:\n", tuple(f"- {word}\n" for word in words), tuple(questions))


@dataclass(frozen=True)
class PromptFile(BlockTask):
    """Draws from a file of JSON lines, one draw a line, in the order of the file whatever the seed.

    A line is `{"prefix": "", "blocks": ["a: 1\\n", ...], "questions": [[0, "a:", " 1"], ...]}`; block, suffix and
    answer make a question. `"choices"` are the answers among which chance chooses, by default the answers of the line.
    All lines have as many blocks, and end at newlines alone.

    Attributes:
        path: the file. If it has fewer lines than `draws`, all are read.

    Raises:
        ValueError: a file without lines, or a line that is not of this form or has another key.
    """

    path: str

    def __post_init__(self) -> None:
        sizes = sorted({len(draw.blocks) for draw in self.lines})
        if len(sizes) > 1:
            raise ValueError(f"{self.path}: lines have {sizes} blocks; give all of them as many")

    @property
    def n_blocks(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Blocks of every line."""
        return len(self.lines[0].blocks)

    @cached_property
    def lines(self) -> tuple[BlockDraw, ...]:
        """The lines of the file."""
        lines = enumerate(file_lines(self.path), 1)
        draws = tuple(_draw_of(f"{self.path}, line {number}", line) for number, line in lines if line.strip())
        if not draws:
            raise ValueError(f"{self.path} has no lines: give one draw a line, such as {LINE}")
        return draws

    def draw(self, seed: int) -> BlockDraw:
        """Return the line with this number, from 0."""
        return self.lines[seed]

    def seeds(self, seed: int) -> tuple[int, ...]:
        """Return the first lines, whatever the seed. Raises ValueError for no draw."""
        return tuple(range(min(len(super().seeds(seed)), len(self.lines))))


READY = {
    "key-value": KeyValueTask,
    "copying": CopyingTask,
    "needle": NeedleTask,
    "list-index": ListIndexTask,
}
"""Ready tasks by name; `"binding"` and the templates of the binding task are names too."""

LINE = (
    '{"prefix": "", "blocks": ["apple: red\\n", "plum: blue\\n", "pear: green\\n"], '
    '"questions": [[0, "apple:", " red"], [2, "pear:", " green"]]}'
)
"""A line of a file of prompts: blocks that swap, and questions, each with its block, its text and the answer."""


_KEYS = ("prefix", "blocks", "questions", "choices")


def block_task(name: str) -> BlockTask:
    """Return the ready task of a name, or the binding task in a template's wording. Raises ValueError for another."""
    if name in READY:
        return READY[name]()
    template = "plain" if name == "binding" else name
    if template not in TEMPLATES:
        names = ", ".join(map(repr, ("binding", *READY)))
        raise ValueError(
            f"{name!r} is no template of the binding task ({', '.join(map(repr, TEMPLATES))}), and no "
            f"ready task: {names}"
        )
    return BindingTask(template)


def _nouns(seed: int, count: int) -> list[str]:
    return [str(word) for word in np.random.default_rng(seed).permutation(packaged_words("nouns"))[:count]]


@cache
def _sentences() -> list[str]:
    """Return the sentences of the packaged book with 40 to 90 characters, each once."""
    text = re.sub(r"\s+", " ", packaged_text())
    whole = (sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 40 <= len(sentence) <= 90)
    return list(dict.fromkeys(sentence for sentence in whole if re.fullmatch(r"[A-Z][A-Za-z ,;.!?']+", sentence)))


def _draw_of(where: str, line: str) -> BlockDraw:
    """Return the draw of a line of JSON. Raises ValueError, which says where, what was found and what is expected."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found no JSON, {error}; expected a line such as {LINE}") from error
    found = _strange_in(given)
    if found is not None:
        raise ValueError(f"{where}: found {found}; expected a line such as {LINE}")
    questions = tuple(Question(*question) for question in given["questions"])
    try:
        return BlockDraw(given.get("prefix", ""), tuple(given["blocks"]), questions, tuple(given.get("choices", ())))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _strange_in(given: Any) -> str | None:
    """Return what is not in a line as `PromptFile` describes it, in words; None where all is."""
    if not isinstance(given, dict):
        return f"a {type(given).__name__}"
    for name in given:
        if name not in _KEYS:
            return f"the key {name!r}{did_you_mean(name, _KEYS)}"
    missing = [name for name in ("blocks", "questions") if name not in given]
    if missing:
        return f"{' and '.join(map(repr, given)) or 'nothing'}, without {' and '.join(map(repr, missing))}"
    if not isinstance(given.get("prefix", ""), str):
        return f"the prefix {given['prefix']!r}"
    for name, kinds in (("blocks", (str,)), ("choices", (str, int))):
        values = given.get(name, [])
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            return f"{name} {values!r}"[:80]
    if not isinstance(given["questions"], list):
        return f"questions {given['questions']!r}"[:80]
    for question in given["questions"]:
        types = list(map(type, question)) if isinstance(question, list) else None
        if types not in ([int, str, str], [int, str, int]):
            return f"the question {question!r}"[:80]
    return None
