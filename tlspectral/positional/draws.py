"""The draws of a profile: the binding prompts of the experiment, and what is measured of one draw."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations
from operator import index
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import digest_of
from tlspectral.models.attention.replay import logits_at
from tlspectral.positional.binding import BindingDraw, BindingTask
from tlspectral.positional.measure import Mode, QueryScores, measure_queries
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.tables import PartFolder, bundled, open_model_parts, stacked

_DEFAULT_PAIRS = 64
_PAPER_PAIRS = 256
_PAPER_BLOCKS = 9
_LOSS_OF = 16  # last tokens of a prompt: their loss reveals other hooks, and few logits are computed


@dataclass(frozen=True)
class BindingExperiment:
    """Binding prompts, which share their pairs within a draw, and the blocks of them that swap.

    Attributes:
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
        """Refuse prompts that are longer than the context, whichever pair they ask about. Raises ValueError."""
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
    """The experiment that the arguments of `positional_symbolic_profile` ask for. Raises ValueError as it does.

    Draws have seeds of their own, made from `seed`; the first ones are the same for any number of draws. At least
    `least_blocks` blocks are needed to leave a swap.
    """
    queries = list(queries) if isinstance(queries, Iterable) else index(queries)
    if preset is not None:
        n_pairs = _pairs_of(preset, task, n_pairs, n_blocks, queries)
    if isinstance(task, str):
        task = BindingTask(task, n_pairs)
    elif n_pairs not in (_DEFAULT_PAIRS, task.n_pairs):
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
    if n_pairs != _DEFAULT_PAIRS:
        checked["n_pairs"] = (n_pairs, _PAPER_PAIRS)
    if isinstance(task, BindingTask):
        checked["the task's n_pairs"] = (task.n_pairs, _PAPER_PAIRS)
    for name, (given, wanted) in checked.items():
        if given != wanted:
            raise ValueError(f"preset='paper' has {name} = {wanted}, found {given}: omit it, or omit the preset")
    return _PAPER_PAIRS


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


@dataclass(frozen=True)
class DrawSettings:
    """How every draw is measured; see `positional_symbolic` for the names."""

    mode: Mode
    tau: float | None
    exclude_first_block: bool
    logit_scale: float | None
    per_frequency: bool


def draw_folder(
    path: str | os.PathLike[str], view: AttentionView, experiment: BindingExperiment, settings: DrawSettings, seed: int
) -> PartFolder:
    """Open the folder of a profile, which draws of both modes share. Raises IncompatibleCheckpoint."""
    prompts = experiment.prompts(experiment.task.draw(experiment.seeds[0]), view.model.tokenizer)
    tokens = prompts[0].tokenized(view.model).tokens()
    first = max(1, len(tokens) - _LOSS_OF)
    with torch.no_grad():
        logits = logits_at(view, tokens[None], slice(first - 1, len(tokens) - 1))[0]
    loss = torch.nn.functional.cross_entropy(logits.cpu().double(), tokens[first:].cpu())
    shared = {name: value for name, value in asdict(settings).items() if name != "mode"}
    return open_model_parts(
        path,
        {
            "what": "positional and symbolic scores",
            "weights": view.weights_digest(),
            "tokens": digest_of([tokens]),
            "task": asdict(experiment.task),
            "blocks": list(experiment.blocks),
            "queries": list(experiment.queries),
            "seed": seed,
            **shared,
        },
        float(loss),
    )


def measured_draw(
    view: AttentionView, experiment: BindingExperiment, draw_seed: int, settings: DrawSettings, show_progress: bool
) -> pd.DataFrame:
    """Measure one draw. Its tables `heads, frequencies, answers, correlation, tokens` come as one, see `bundled`."""
    tokenizer = view.model.tokenizer
    swaps = experiment.swaps(exclude_first_block=settings.exclude_first_block)
    draw = experiment.task.draw(draw_seed)
    prompts = experiment.prompts(draw, tokenizer)
    total = len(prompts) * (1 + len(swaps))
    with tqdm(total=total, desc="draw", unit="prompt", leave=False, disable=not show_progress) as bar:
        scores = measure_queries(
            view,
            prompts[0].prefix,
            prompts[0].blocks,
            [prompt.suffix for prompt in prompts],
            **asdict(settings),
            swaps=swaps,
            seed=draw_seed,
            advance=bar.update,
        )
    queries = experiment.queries
    logits = torch.stack([result.last_logits for result in scores])
    tables = {
        "heads": _by_query([result.heads for result in scores], queries),
        "answers": answers_table(tokenizer, draw, queries, prompts, logits),
        "correlation": _correlations(scores, queries),
        "tokens": _by_query([pd.DataFrame({"token": result.tokens.cpu().numpy()}) for result in scores], queries),
    }
    if settings.per_frequency:
        frequencies = [result.frequencies for result in scores if result.frequencies is not None]
        tables["frequencies"] = _by_query(frequencies, queries)
    return bundled(tables)


def _by_query(tables: list[pd.DataFrame], queries: tuple[int, ...]) -> pd.DataFrame:
    return stacked(table.assign(query=query) for table, query in zip(tables, queries, strict=True))


def _correlations(scores: list[QueryScores], queries: tuple[int, ...]) -> pd.DataFrame:
    table = pd.DataFrame([result.correlation for result in scores]).rename(columns={"draws": "null_draws"})
    for name in ("pearson", "null_mean", "null_sd", "null_pct"):
        table[name] = table[name].astype(np.float64)  # None becomes NaN
    table.insert(0, "query", queries)
    return table


def answers_table(
    tokenizer: Any,
    draw: BindingDraw,
    queries: tuple[int, ...],
    prompts: list[BlockPrompt],
    logits: Float64[Tensor, "queries d_vocab"],
) -> pd.DataFrame:
    """Probability and rank of the right colour after each prompt of a draw: whether the model can do the binding task.

    Where the tokenizer makes several tokens of a colour, the first one counts. See `PositionalSymbolicProfile` for the
    columns.

    Raises:
        ValueError: a tokenizer that joins the prompt's end with the answer.

    What it does not establish: that the model read the line of the name. Colours differ in how often a draw has them,
    which `chance` takes into account, and in how probable they are in any text, which it does not.
    """
    rows = []
    for query, prompt, prompt_logits in zip(queries, prompts, logits, strict=True):
        suffix = str(prompt.suffix)
        first_tokens = {colour: _first_token(tokenizer, suffix, f" {colour}") for colour in set(draw.colours)}
        answer = first_tokens[draw.colours[query]]
        probabilities = prompt_logits.softmax(0)
        pair_tokens = [first_tokens[colour] for colour in draw.colours]
        colour_mass = probabilities[sorted(set(pair_tokens))].sum()
        rows.append(
            {
                "query": query,
                "answer": draw.answer(query),
                "probability": float(probabilities[answer]),
                "rank": 1 + int((prompt_logits > prompt_logits[answer]).sum()),
                "relative_probability": float(probabilities[answer] / colour_mass),
                "chance": pair_tokens.count(answer) / len(pair_tokens),
            }
        )
    return pd.DataFrame(rows)


def _first_token(tokenizer: Any, text: str, answer: str) -> int:
    """First token of an answer where it follows the text."""
    before = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    both = tokenizer(text + answer, add_special_tokens=False, verbose=False).input_ids
    if len(both) <= len(before) or both[: len(before)] != before:
        raise ValueError(
            f"this tokenizer joins the end of the prompt with the answer {answer!r}: no first token to read"
        )
    return int(both[len(before)])
