"""Jobs of `positional_symbolic`: prompts as token ids, checked before any run, and readings of them part by part."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.positional.answers import answers_table
from tlspectral.positional.block_task import BlockDraw, BlockTask, asked_blocks, bos_text, questions_of, swapped_blocks
from tlspectral.positional.block_weights import BlockReading, Swap, SwapMode, joined_columns, query_scores
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import bundled, unbundled
from tlspectral.tables.resume_folder import ResumeFolder
from tlspectral.tasks.block_prompt import BlockPrompt, chosen_swaps, tokenized_for
from tlspectral.tasks.identity import content_digest

Swaps = str | Sequence[Swap]
Reading = Callable[[AttentionView], BlockReading]

_LOSS_OF = 16  # last tokens of a prompt: their loss reveals other hooks, and few logits are computed
_SWAPS_IN_A_PART = 4  # of a task: stopped work loses four passes of the model at most


@dataclass(frozen=True)
class DrawnPrompts:
    """Prompts that differ only in their suffix: the questions of a task's draw, or the queries of a given prompt.

    Attributes:
        name: first part of the names of the jobs that run these prompts.
        seed: seed of the random null of the score correlation.
        queries: indices of the queried blocks; for a given prompt, positions of the last tokens.
        prompts: one token-id prompt per query.
        swaps: for each query, the pairs of blocks that count in its scores.
        draw: the task's draw; None for a given prompt.
    """

    name: str
    seed: int
    queries: tuple[int, ...]
    prompts: list[BlockPrompt]
    swaps: list[list[Swap]]
    draw: BlockDraw | None = None

    @property
    def every_swap(self) -> list[Swap]:
        """Swaps of all queries, without duplicates, sorted."""
        return sorted({swap for of_query in self.swaps for swap in of_query})


def prompts_of_task(
    view: AttentionView, task: BlockTask, swaps: Swaps, mode: SwapMode, seed: int
) -> list[DrawnPrompts]:
    """Return one `DrawnPrompts` (prompts of token ids, queries and swaps) per draw of a task, tokenised for a model and
    checked.

    `view`: the model. `swaps`: which pairs of blocks swap: "kept" (all pairs of the task's `swapped` blocks without the
    first of them), "all", "per_query" (each block with the queried block) or pairs of block indices. `mode`: "prompt"
    also checks that swaps keep the tokens; "key" does not. `seed`: the seeds of the draws are made from it.

    Raises:
        ValueError: text without a tokenizer, prompts beyond the context, text that the tokenizer merges across blocks,
            ids outside the vocabulary, or swaps that do not exist.
    """
    queried, swaps_of = asked_blocks(task), _swaps_of_task(task, swaps)
    seeds = task.seeds(seed)
    draws = [task.drawn(draw_seed) for draw_seed in seeds]
    bos, all_prompts = bos_text(view), []
    for draw_seed, draw in zip(seeds, draws, strict=True):
        queries = questions_of(draw, queried)
        drawn = DrawnPrompts(f"draw{draw_seed}", draw_seed, queries, [], list(map(swaps_of, queries)), draw)
        # Swaps are checked in front of the first suffix only: blocks that join their neighbours show it there too.
        for query in queries:
            moved = drawn.every_swap if mode == "prompt" and not drawn.prompts else []
            drawn.prompts.append(tokenized_for(view.model, task.prompt(draw, query, bos=bos), moved))
        all_prompts.append(drawn)
    return all_prompts


def prompts_given(
    view: AttentionView, prompts: Iterable[BlockPrompt], swaps: Swaps, mode: SwapMode, seed: int, *, every_query: bool
) -> list[DrawnPrompts]:
    """Return one `DrawnPrompts` (prompts of token ids, queries and swaps) per given prompt, tokenised for a model.

    `view`: the model. `every_query`: True makes every token of the suffix a query; False only the last. `swaps`: "kept"
    (all pairs without the first block), "all" or pairs of block indices. `mode`: "prompt" also checks that swaps keep
    the tokens. `seed`: of the random null of the score correlation. Raises ValueError for text that cannot be tokenised
    block by block, and for swaps that do not exist.
    """
    all_prompts = []
    for number, prompt in enumerate(prompts):
        chosen = chosen_swaps(len(prompt.blocks), swaps)
        tokenized = tokenized_for(view.model, prompt, chosen if mode == "prompt" else [])
        suffix = torch.as_tensor(tokenized.suffix)
        # A causal model reads each query as in the whole prompt.
        ends = range(1 if every_query else len(suffix), len(suffix) + 1)
        cut = [replace(tokenized, suffix=suffix[:end]) for end in ends]
        queries = tuple(len(shortened.tokens()) - 1 for shortened in cut)
        all_prompts.append(DrawnPrompts(f"prompt{number}", seed, queries, cut, [chosen] * len(cut)))
    return all_prompts


def prompts_identity(task: BlockTask | None, drawn: list[DrawnPrompts]) -> dict[str, Any]:
    """Return a dict by which a results folder recognises its prompts.

    Keys for a task: tokens (digest of the first prompt), task (name), blocks (that swap) and queries. Only the first
    draw counts, so a later call may add draws. For given prompts (`task` is None): tokens (digest of all), blocks
    (their spans) and queries. `drawn`: the tokenised prompts.
    """
    if task is None:
        return {
            "tokens": digest_of([draw.prompts[-1].tokens() for draw in drawn]),
            "blocks": [draw.prompts[0].spans() for draw in drawn],
            "queries": [draw.queries for draw in drawn],
        }
    tokens = digest_of([drawn[0].prompts[0].tokens()])
    return {"tokens": tokens, "task": task.name, "blocks": swapped_blocks(task), "queries": asked_blocks(task)}


def last_loss(view: AttentionView, tokens: Int[Tensor, "pos"]) -> float:
    """Return the mean next-token loss (nats) on the last 16 tokens of the prompt `tokens`. The model runs with its
    current hooks, without gradients.
    """
    first = max(1, len(tokens) - _LOSS_OF)
    with torch.no_grad():
        logits = logits_at(view, tokens[None], slice(first - 1, len(tokens) - 1))[0]
    return float(torch.nn.functional.cross_entropy(logits.cpu().double(), tokens[first:].cpu()))


def draw_parts(drawn: DrawnPrompts, how: dict[str, Any], folder: ResumeFolder | None) -> list[Job]:
    """Return the jobs of one draw: one for the unchanged prompts and, for `mode="prompt"`, one per group of swaps. A
    job returns one DataFrame that bundles tables of attention weights.

    `drawn`: the prompts of the draw. `how`: keyword arguments of `BlockReading`: mode, per_frequency, logit_scale,
    heads. `folder`: folder of finished jobs, or None. If it has jobs of an earlier `per_frequency=True` call, these are
    used, because their tables contain the heads too. A job's function takes an `AttentionView`, so a worker process
    receives the model once.
    """
    mode, swaps = how["mode"], drawn.every_swap
    wide = f"{mode}_frequencies_{drawn.name}"
    if folder is not None and (folder.path / f"{wide}.parquet").exists():
        how = {**how, "per_frequency": True}
    name = wide if how["per_frequency"] else f"{mode}_{drawn.name}"
    reading = partial(BlockReading, prompts=drawn.prompts, swaps=swaps, **how)
    at_once = _SWAPS_IN_A_PART if drawn.draw is not None else len(swaps)
    identity = content_digest([[prompt.pieces for prompt in drawn.prompts], drawn.draw])
    check = partial(_require_same_prompts, drawn.name, identity)
    parts = [Job(name, partial(_intact_part, drawn, reading, identity), check)]
    for start in range(0, len(swaps) if mode == "prompt" else 0, at_once):
        few = swaps[start : start + at_once]
        make = partial(_swapped_part, reading, few, identity)
        parts.append(Job(f"{name}_swaps{start}", make, check, items=len(few)))
    return parts


def scored_draw(
    drawn: DrawnPrompts, parts: list[pd.DataFrame], tau: float | None, per_frequency: bool
) -> tuple[dict[int, pd.DataFrame], list[dict[str, Any]], pd.DataFrame | None]:
    """Return the scores of one draw: a dict from query to score table, a list of correlations, a table of answers.

    A score table has a row per layer and head (or rotary pair). The list has a dict per query, the correlation of s_pos
    and s_sym over heads. The answers are the table of `answers_table`; None for a given prompt.

    `drawn`: the prompts. `parts`: tables of the draw's jobs, the unchanged prompts first. `tau`: temperature of the
    weights of swaps; None for the default. `per_frequency`: True for tables of rotary pairs.
    """
    intact = unbundled(parts[0])
    answers = intact.pop("answers", None)
    if not per_frequency:
        intact = {"heads": intact["heads"]}
    tables = joined_columns([intact, *map(unbundled, parts[1:])])
    scores, correlations = query_scores(tables, drawn.swaps, tau, drawn.seed)
    name = "frequencies" if per_frequency else "heads"
    by_query = {query: score_tables[name] for query, score_tables in zip(drawn.queries, scores, strict=True)}
    return by_query, correlations, answers


def _swaps_of_task(task: BlockTask, swaps: Swaps) -> Callable[[int], list[Swap]]:
    """Return a function from the index of a queried block to the list of pairs of blocks that swap for it.

    `task`: the block task, whose `swapped` blocks take part. `swaps`: "kept" (all pairs of these blocks without the
    first of them), "all", "per_query" (each block with the queried block) or pairs of block indices. Raises ValueError
    if no blocks swap.
    """
    blocks = swapped_blocks(task)
    if swaps == "per_query":
        return lambda query: chosen_swaps(task.n_blocks, [(query, block) for block in blocks if block != query])
    chosen = chosen_swaps(task.n_blocks, swaps, blocks)
    return lambda query: chosen


def _require_same_prompts(name: str, identity: str, table: pd.DataFrame) -> None:
    """Raise IncompatibleCheckpoint unless a stored table was made from the same prompts, questions and answers.

    `name`: of the draw, for the message. `identity`: digest of the current prompts. The digests differ if a user has
    changed the `draw` method of a task.
    """
    if table.attrs.get("prompts") != identity:
        raise IncompatibleCheckpoint(
            f"folder= holds {name} with other prompts, questions or answers, perhaps because the task's draw() was "
            "changed: give another folder"
        )


def _intact_part(drawn: DrawnPrompts, reading_of: Reading, identity: str, view: AttentionView) -> pd.DataFrame:
    """Run the unchanged prompts. Return one DataFrame that bundles their tables and, for a task, the table of answers.

    `drawn`: the prompts, for their questions. `reading_of`: function that makes the `BlockReading` (which runs the
    model) from a view. `identity`: digest stored in `attrs["prompts"]`.
    """
    tables, logits = reading_of(view).intact()
    if drawn.draw is not None:
        tokenizer = getattr(view.model, "tokenizer", None)
        stored = torch.stack(logits).cpu().double()
        tables["answers"] = answers_table(tokenizer, drawn.draw, drawn.queries, stored)
    return _identified(tables, identity)


def _swapped_part(reading_of: Reading, swaps: list[Swap], identity: str, view: AttentionView) -> pd.DataFrame:
    """Run the prompts once with each swap in `swaps`. Return one DataFrame that bundles the tables of attention
    weights.

    `reading_of`: function that makes the `BlockReading` (which runs the model) from `view`. `identity`: digest stored
    in `attrs["prompts"]`.
    """
    return _identified(reading_of(view).swapped(swaps), identity)


def _identified(tables: dict[str, pd.DataFrame], identity: str) -> pd.DataFrame:
    """Return one new DataFrame with the rows of all `tables`, for `unbundled`; `attrs["prompts"]` is `identity`, the
    digest of their prompts.
    """
    table = bundled(tables)
    table.attrs["prompts"] = identity
    return table
