"""The draws of a profile: the prompts of the experiment, and what is measured of each draw, part by part."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch

from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import digest_of
from tlspectral.models.attention.replay import logits_at
from tlspectral.positional.answers import answers_table, bos_text
from tlspectral.positional.block_task import BlockDraw, BlockTask, asked_blocks, evenly, questions_of
from tlspectral.positional.block_weights import BlockReading, Mode, Swap, joined_columns, query_scores
from tlspectral.positional.measure import tokenized_for
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.positional.ready_tasks import block_task
from tlspectral.tables import PartFolder, WorkPart, bundled, open_model_parts, stacked, unbundled
from tlspectral.tables.progress import bar

Swaps = Literal["kept", "all", "per_query"]

_PAPER_PAIRS = 256
_PAPER_BLOCKS = 9
_LOSS_OF = 16  # last tokens of a prompt: their loss reveals other hooks, and few logits are computed
_SWAPS_IN_A_PART = 4  # a stopped profile loses four passes of the model at most


@dataclass(frozen=True)
class Experiment:
    """Prompts of a block task, which share their blocks within a draw, and the blocks of them that swap.

    Attributes:
        blocks: the selected blocks, evenly spaced from the first to the last.
        queries: blocks that are asked about.
        seeds: one for each draw.
        swaps: which pairs of the selected blocks swap, see `positional_symbolic_profile`.
        exclude_first_block: of `"kept"`.
    """

    task: BlockTask
    blocks: tuple[int, ...]
    queries: tuple[int, ...]
    seeds: tuple[int, ...]
    swaps: str = "kept"
    exclude_first_block: bool = True

    def swaps_of(self, query: int) -> list[Swap]:
        """The pairs of blocks whose swaps count for a query. Raises ValueError for none."""
        if self.swaps == "per_query":
            return sorted((min(query, block), max(query, block)) for block in self.blocks if block != query)
        kept = self.blocks[1:] if self.swaps == "kept" and self.exclude_first_block else self.blocks
        return list(combinations(kept, 2))


@dataclass(frozen=True)
class DrawnPrompts:
    """One draw of an experiment on one model.

    Attributes:
        seed: of the draw.
        queries: blocks that are asked about.
        prompts: one per query, as token ids.
        swaps: that count, per query.
        every_swap: those of all queries, each once, sorted.
    """

    seed: int
    draw: BlockDraw
    queries: tuple[int, ...]
    prompts: list[BlockPrompt]
    swaps: list[list[Swap]]
    every_swap: list[Swap]


@dataclass(frozen=True)
class DrawSettings:
    """How every draw is measured: arguments of `BlockReading`."""

    mode: Mode
    logit_scale: float | None
    per_frequency: bool
    heads: dict[int, list[int]] | None


def planned_experiment(
    task: BlockTask | str,
    *,
    n_pairs: int | None = None,
    n_blocks: int,
    queries: int | Iterable[int],
    draws: int,
    seed: int,
    preset: str | None = None,
    swaps: str | None = None,
    exclude_first_block: bool = True,
) -> Experiment:
    """The experiment that the arguments of `positional_symbolic_profile` ask for. Raises ValueError as it does."""
    queries = list(queries) if isinstance(queries, Iterable) else index(queries)
    if swaps not in (None, *get_args(Swaps)):
        raise ValueError(f"swaps are one of {', '.join(map(repr, get_args(Swaps)))}; found {swaps!r}")
    if preset is not None:
        n_pairs = _pairs_of(preset, task, n_pairs, n_blocks, queries)
        swaps = swaps or "all"
    task, swaps = block_task(task, n_pairs), swaps or "kept"
    least = 3 if swaps == "kept" and exclude_first_block else 2
    if not least <= n_blocks <= task.n_blocks:
        raise ValueError(f"n_blocks must be from {least} to the {task.n_blocks} pairs, found {n_blocks}")
    blocks = evenly(range(task.n_blocks), n_blocks)
    asked = asked_blocks(task, queries, blocks)
    return Experiment(task, blocks, asked, task.seeds(draws, seed), swaps, exclude_first_block)


def drawn_prompts(view: AttentionView, experiment: Experiment, mode: Mode) -> list[DrawnPrompts]:
    """All draws of an experiment as token ids of a model, checked before anything is measured.

    Raises:
        ValueError: text without a tokenizer, prompts beyond the context (the message says how many blocks fit), text
            that the tokenizer joins across blocks, or ids outside the vocabulary.
    """
    tokenizer, task = getattr(view.model, "tokenizer", None), experiment.task
    draws = [task.draw(seed) for seed in experiment.seeds]
    if tokenizer is None and isinstance(draws[0].prefix, str):
        raise ValueError(
            f"this model has no tokenizer, so the prompts of {task.name} cannot be written for it: load one that has, "
            "or give a task of token ids"
        )
    if isinstance(draws[0].prefix, str):
        require_context(experiment, tokenizer, view.n_ctx)
    bos, found = bos_text(view), []
    for seed, draw in zip(experiment.seeds, draws, strict=True):
        queries = questions_of(draw, experiment.queries)
        swaps = [experiment.swaps_of(query) for query in queries]
        every_swap = sorted({swap for of_query in swaps for swap in of_query})
        # Blocks that join their neighbours after a swap show so behind the first suffix too.
        prompts = [
            tokenized_for(view, task.prompt(draw, query, bos=bos), [] if number else every_swap, mode)
            for number, query in enumerate(queries)
        ]
        found.append(DrawnPrompts(seed, draw, queries, prompts, swaps, every_swap))
    return found


def require_context(experiment: Experiment, tokenizer: Any, n_ctx: int) -> None:
    """Refuse prompts of text that are longer than the context, whichever block they ask about. Raises ValueError."""
    bos, task = getattr(tokenizer, "bos_token", None) or "", experiment.task
    longest = np.max([_lengths(task, task.draw(seed), tokenizer, bos) for seed in experiment.seeds], axis=0)
    if longest[-1] > n_ctx:
        fits = int((longest <= n_ctx).sum())
        advice = f"at most n_pairs={fits} fit" if fits >= 3 else "not even three pairs fit"
        raise ValueError(
            f"{task.n_blocks} pairs of {task.name} are {longest[-1]} tokens, more than the model's context of {n_ctx}: "
            f"{advice}"
        )


def draw_folder(
    path: str | os.PathLike[str],
    view: AttentionView,
    experiment: Experiment,
    drawn: list[DrawnPrompts],
    settings: DrawSettings,
    seed: int,
) -> PartFolder:
    """Open the folder of a profile, which draws of both modes share. Raises IncompatibleCheckpoint."""
    tokens = drawn[0].prompts[0].tokens()
    first = max(1, len(tokens) - _LOSS_OF)
    with torch.no_grad():
        logits = logits_at(view, tokens[None], slice(first - 1, len(tokens) - 1))[0]
    loss = torch.nn.functional.cross_entropy(logits.cpu().double(), tokens[first:].cpu())
    stored = {
        "what": "positional and symbolic scores",
        "weights": view.weights_digest(),
        "tokens": digest_of([tokens]),
        "task": experiment.task.name,
        "blocks": list(experiment.blocks),
        "queries": list(experiment.queries),
        "swaps": experiment.swaps,
        "exclude_first_block": experiment.exclude_first_block,
        "logit_scale": settings.logit_scale,
        "per_frequency": settings.per_frequency,
        "heads": settings.heads and [[layer, *indices] for layer, indices in settings.heads.items()],
        "seed": seed,
    }
    return open_model_parts(path, stored, float(loss))


def draw_parts(drawn: DrawnPrompts, settings: DrawSettings) -> list[WorkPart]:
    """The parts of one draw: the unchanged prompts, then, where words swap, a few swaps at a time.

    Each is made of an `AttentionView`, so that a worker is sent the model once.
    """
    name, swaps = f"{settings.mode}_draw{drawn.seed}", drawn.every_swap
    parts = [WorkPart(name, partial(_intact_part, drawn, settings), items=1)]
    for start in range(0, len(swaps) if settings.mode == "prompt" else 0, _SWAPS_IN_A_PART):
        some = swaps[start : start + _SWAPS_IN_A_PART]
        make = partial(_swapped_part, drawn, settings, some)
        parts.append(WorkPart(f"{name}_swaps{start}", make, items=len(some)))
    return parts


def scored_draw(drawn: DrawnPrompts, parts: list[pd.DataFrame], tau: float | None) -> dict[str, pd.DataFrame]:
    """The scores of one draw from its parts: `heads, frequencies` (where asked for), `answers` and `correlation`."""
    intact = unbundled(parts[0])
    answers = intact.pop("answers")
    tables = joined_columns([intact, *map(unbundled, parts[1:])])
    scores, correlations = query_scores(tables, drawn.swaps, tau, drawn.seed)
    correlation = pd.DataFrame(correlations).rename(columns={"draws": "null_draws"})
    numbers = ("pearson", "null_mean", "null_sd", "null_pct")
    correlation = correlation.astype(dict.fromkeys(numbers, np.float64))  # None becomes NaN
    correlation.insert(0, "query", drawn.queries)
    return {
        **{
            name: stacked(one[name].assign(query=query) for query, one in zip(drawn.queries, scores, strict=True))
            for name in tables
        },
        "answers": answers,
        "correlation": correlation,
    }


def _intact_part(drawn: DrawnPrompts, settings: DrawSettings, view: AttentionView) -> pd.DataFrame:
    reading = _reading(view, drawn, settings)
    steps = reading.n_steps if settings.mode == "key" else len(reading.prompts) * len(reading.layers)
    with bar(steps, "prompts", "layer") as shown:
        tables, logits = reading.intact(shown.update)
    tokenizer = getattr(view.model, "tokenizer", None)
    stored = torch.stack(logits).cpu().double()
    return bundled({**tables, "answers": answers_table(tokenizer, drawn.draw, drawn.queries, stored)})


def _swapped_part(drawn: DrawnPrompts, settings: DrawSettings, swaps: list[Swap], view: AttentionView) -> pd.DataFrame:
    reading = _reading(view, drawn, settings)
    steps = len(swaps) * len(reading.prompts) * len(reading.layers)
    with bar(steps, "swaps", "layer") as shown:
        return bundled(reading.swapped(swaps, shown.update))


def _reading(view: AttentionView, drawn: DrawnPrompts, settings: DrawSettings) -> BlockReading:
    return BlockReading(view, drawn.prompts, drawn.every_swap, **vars(settings))


def _pairs_of(preset: str, task: BlockTask | str, n_pairs: int | None, n_blocks: int, queries: int | list[int]) -> int:
    """Number of pairs of a preset. Raises ValueError where another argument contradicts it."""
    if preset != "paper":
        raise ValueError(f"there is one preset, 'paper'; found {preset!r}")
    checked = {"n_blocks": (n_blocks, _PAPER_BLOCKS), "queries": (queries, _PAPER_BLOCKS)}
    if n_pairs is not None:
        checked["n_pairs"] = (n_pairs, _PAPER_PAIRS)
    if isinstance(task, BlockTask):
        checked["the task's n_pairs"] = (task.n_blocks, _PAPER_PAIRS)
    for name, (given, wanted) in checked.items():
        if given != wanted:
            raise ValueError(f"preset='paper' has {name} = {wanted}, found {given}: omit it, or omit the preset")
    return _PAPER_PAIRS


def _lengths(task: BlockTask, draw: BlockDraw, tokenizer: Any, bos: str) -> list[int]:
    """Tokens of the longest prompt with the first 1, 2, ... blocks of a draw."""
    prompts = {block: task.prompt(draw, block, bos=bos) for block in draw.asked}
    some = next(iter(prompts.values()))
    blocks = accumulate(_n_tokens(tokenizer, block) for block in some.blocks)
    ends = [_n_tokens(tokenizer, prompts[block].suffix) if block in prompts else 0 for block in range(task.n_blocks)]
    shortest = min(end for end in ends if end)
    prefix = _n_tokens(tokenizer, some.prefix)
    return [prefix + before + max(after, shortest) for before, after in zip(blocks, accumulate(ends, max), strict=True)]


def _n_tokens(tokenizer: Any, text: Any) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else 0
