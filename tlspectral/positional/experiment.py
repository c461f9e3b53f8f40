"""The binding prompts of a profile: their pairs, the blocks that swap, the questions and the seeds."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, combinations
from operator import index
from typing import Any

import numpy as np

from tlspectral.positional.binding import BindingDraw, BindingTask
from tlspectral.positional.prompts import BlockPrompt

DEFAULT_PAIRS = 64
PAPER_PAIRS = 256
_PAPER_BLOCKS = 9


@dataclass(frozen=True)
class BindingExperiment:
    """Binding prompts, which share their pairs within a draw, and the blocks of them that swap.

    Attributes:
        task: wording and number of pairs.
        blocks: the selected blocks, evenly spaced from the first pair to the last.
        queries: blocks that are asked about.
        seeds: one for each draw.
    """

    task: BindingTask
    blocks: tuple[int, ...]
    queries: tuple[int, ...]
    seeds: tuple[int, ...]

    def swaps(self, *, exclude_first_block: bool) -> list[tuple[int, int]]:
        """All pairs of the selected blocks; `exclude_first_block` leaves out the pairs of the first one."""
        return list(combinations(self.blocks[1:] if exclude_first_block else self.blocks, 2))

    def prompts(self, draw: BindingDraw, tokenizer: Any) -> list[BlockPrompt]:
        """The prompts of one draw, one for each question."""
        bos = _bos_text(tokenizer)
        return [self.task.prompt(draw, query, bos=bos) for query in self.queries]

    def require_context(self, tokenizer: Any, n_ctx: int) -> None:
        """Refuse prompts that are longer than the context, whichever pair they ask about.

        Raises:
            ValueError: it names the largest number of pairs that fits.
        """
        lengths = [self._lengths(self.task.draw(seed), tokenizer) for seed in self.seeds]
        longest = np.max(lengths, axis=0)
        if longest[-1] > n_ctx:
            fits = int((longest <= n_ctx).sum())
            advice = f"at most n_pairs={fits} fit" if fits >= 3 else "not even three pairs fit"
            raise ValueError(
                f"{self.task.n_pairs} pairs in the template {self.task.template!r} are {longest[-1]} tokens, more than "
                f"the model's context of {n_ctx}: {advice}"
            )

    def _lengths(self, draw: BindingDraw, tokenizer: Any) -> list[int]:
        """Tokens of the longest prompt with the first 1, 2, ... pairs of a draw."""
        bos, pairs = _bos_text(tokenizer), range(self.task.n_pairs)
        prompts = [self.task.prompt(draw, query, bos=bos) for query in pairs]
        blocks = accumulate(_n_tokens(tokenizer, block) for block in prompts[0].blocks)
        suffixes = accumulate((_n_tokens(tokenizer, prompt.suffix) for prompt in prompts), max)
        prefix = _n_tokens(tokenizer, prompts[0].prefix)
        return [prefix + before + after for before, after in zip(blocks, suffixes, strict=True)]


def planned_experiment(
    task: BindingTask | str,
    *,
    n_pairs: int,
    n_blocks: int,
    queries: int | Iterable[int],
    draws: int,
    seed: int,
    preset: str | None = None,
    least_blocks: int = 2,
) -> BindingExperiment:
    """The experiment that the arguments of `positional_symbolic_profile` ask for.

    Draws have seeds of their own, made from `seed`; the first ones are the same for any number of draws.

    Args:
        task, n_pairs, n_blocks, queries, draws, seed, preset: see there.
        least_blocks: smallest number of selected blocks that leaves a swap.

    Raises:
        ValueError: arguments that contradict one another, or that no prompt can have.
    """
    queries = list(queries) if isinstance(queries, Iterable) else index(queries)
    if preset is not None:
        n_pairs = _pairs_of(preset, task, n_pairs, n_blocks, queries)
    if isinstance(task, str):
        task = BindingTask(task, n_pairs)
    elif n_pairs not in (DEFAULT_PAIRS, task.n_pairs):
        raise ValueError(
            f"n_pairs is {n_pairs}, but the task has {task.n_pairs} pairs: set the number in the task alone, or pass "
            f"its template {task.template!r} as the task"
        )
    if draws < 1:
        raise ValueError(f"at least one draw is needed, found {draws}")
    if not least_blocks <= n_blocks <= task.n_pairs:
        raise ValueError(f"n_blocks must be from {least_blocks} to the {task.n_pairs} pairs, found {n_blocks}")
    blocks = _evenly(range(task.n_pairs), n_blocks)
    seeds = np.random.SeedSequence(seed).generate_state(draws)
    return BindingExperiment(task, blocks, _queries(blocks, queries, task.n_pairs), tuple(map(int, seeds)))


def _pairs_of(preset: str, task: BindingTask | str, n_pairs: int, n_blocks: int, queries: int | list[int]) -> int:
    """Number of pairs of a preset. Raises ValueError where another argument contradicts it."""
    if preset != "paper":
        raise ValueError(f"there is one preset, 'paper'; found {preset!r}")
    checked = {"n_blocks": (n_blocks, _PAPER_BLOCKS), "queries": (queries, _PAPER_BLOCKS)}
    if n_pairs != DEFAULT_PAIRS:
        checked["n_pairs"] = (n_pairs, PAPER_PAIRS)
    if isinstance(task, BindingTask):
        checked["the task's n_pairs"] = (task.n_pairs, PAPER_PAIRS)
    for name, (given, wanted) in checked.items():
        if given != wanted:
            raise ValueError(f"preset='paper' has {name} = {wanted}, found {given}: omit it, or omit the preset")
    return PAPER_PAIRS


def _queries(blocks: tuple[int, ...], queries: int | list[int], n_pairs: int) -> tuple[int, ...]:
    if isinstance(queries, int):
        if not 1 <= queries <= len(blocks):
            raise ValueError(f"queries must be from 1 to the {len(blocks)} selected blocks, found {queries}")
        return _evenly(blocks, queries)
    asked = tuple(index(query) for query in queries)
    if not asked or len(set(asked)) < len(asked) or not all(0 <= query < n_pairs for query in asked):
        raise ValueError(f"queries must be different blocks from 0 to {n_pairs - 1}, found {list(asked)}")
    return asked


def _evenly(items: range | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Evenly spaced items, the first and the last among them; a single one is the first."""
    return tuple(items[number] for number in np.linspace(0, len(items) - 1, count).round().astype(int).tolist())


def _bos_text(tokenizer: Any) -> str:
    return getattr(tokenizer, "bos_token", None) or ""


def _n_tokens(tokenizer: Any, text: Any) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
