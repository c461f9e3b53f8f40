"""`positional_symbolic`: does a head's attention stay or follow the blocks when two blocks of a prompt swap?"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import not_a, shown, warn_caller
from tlspectral.errors.settings import checked_settings, pairs_in, whole_number
from tlspectral.models.reading import measured
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.running.long_prompts import run_noted
from tlspectral.models.running.prompts import equality_notes, numbered
from tlspectral.positional.block_task import BlockTask, asked_blocks, swapped_blocks
from tlspectral.positional.block_weights import SCORES, WITH_ERRORS, SwapMode
from tlspectral.positional.draws import (
    DrawnPrompts,
    draw_parts,
    last_loss,
    prompts_given,
    prompts_identity,
    prompts_of_task,
    scored_draw,
)
from tlspectral.positional.ready_tasks import block_task
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.block_prompt import BlockPrompt

RowsBy = Literal["query", "draw"]
"""Rows of scores instead of their mean over prompts: one per query, or one per draw."""

SCORE_COLUMNS = columns("""
    s_pos              | weighted cosine | Sum over swaps of alpha cos(v', v): 1 where attention stays at its positions.
    s_sym              | weighted cosine | Sum over swaps of alpha cos(v', (d_j, d_i)): 1 where it moves with the
                       |                 | blocks.
    exclusion_index    | share           | sym / (pos + sym) of PS Theorem 1 over all tokens before the query: 0
                       |                 | symbolic, 1 positional.
    logit_std          | logit           | Standard deviation of the query's logits over the same tokens.
    tau                | attention       | Temperature of alpha, the softmax of |d_i - d_j| / tau over swaps.
    alpha_ess          | swaps           | Effective number of swaps behind the scores: 1 / sum of alpha^2.
    s_pos_se           | weighted cosine | Standard error of s_pos over draws or distinct prompts; NaN for one.
    s_sym_se           | weighted cosine | Standard error of s_sym.
    exclusion_index_se | share           | Standard error of exclusion_index.
    logit_std_se       | logit           | Standard error of logit_std.
""")
"""Scores of a head or frequency on prompts, and their standard errors."""

POSITIONAL_SYMBOLIC = Schema(
    "positional_symbolic",
    (
        *HEAD,
        *columns("""
            frequency? | index | Rotary pair; 0 is the model's first. With `per_frequency`.
            query?     | index | Index of the queried block; for a given prompt the position of the query. With
                       |       | `by="query"`.
            draw?      | index | Number of the draw of a task, or of the prompt in a list, from 0. With `by="draw"`.
        """),
        *SCORE_COLUMNS,
    ),
    "`tls.positional_symbolic`; `tlspectral positional -o FOLDER` writes it as heads, queries, draws and frequencies, "
    "_prompt.parquet and _key.parquet",
)


@checked_settings
def positional_symbolic(
    model: Any,
    prompt: Any,
    *,
    mode: SwapMode = "prompt",
    tau: float | None = None,
    per_frequency: bool = False,
    logit_scale: float | None = None,
    by: RowsBy | None = None,
    swaps: str | Iterable[Sequence[int]] = "kept",
    heads: Heads | None = None,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Score each head as positional and symbolic: does attention stay or follow when two blocks of a prompt swap?

    >>> import tlspectral as tls, torch
    >>> blocks = torch.tensor([[3, 13], [4, 14], [5, 15]])
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([1]), blocks, torch.tensor([4]))
    >>> scores = tls.positional_symbolic(tls.load_model("tiny-rope"), prompt)
    >>> scores["s_sym"].round().tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]

    The last token's attention to two blocks is compared before and after the blocks swap ("Decoupling Positional and
    Symbolic Attention Behavior", PS): `s_pos` is 1 if it stays at the places, `s_sym` 1 if it follows the blocks.

    Args:
        model: TransformerBridge or HookedTransformer; hooks on it act as usual.
        prompt: a `BlockPrompt`, a list of them, a `BlockTask`, or a ready task's name: "binding" (templates "plain",
            "gemma-2", "llama-3.2", "qwen2"), "key-value", "copying", "needle", "list-index".
        mode: "prompt" (default) swaps words and runs the model again; "key" swaps the keys of one run.
        tau: temperature of the weights of swaps. Default: 0.1 of the head's largest difference between two blocks.
        per_frequency: True gives a row per rotary pair. logit_scale: factor on scores. Default: the model's.
        by: "query" gives a row per query, "draw" a row per draw or prompt. Default: means over all.
        swaps: "kept" (default, all pairs without the first block), "all", "per_query" (the queried block with each
            other block), or index pairs.
        heads: "L5H1", (5, 1), "L5", "L5KV1", a list, or a DataFrame with layer and head. Default: all.
        folder: keeps finished parts; the same call resumes. n_jobs: parallel workers. seed: of draws and of the null.

    Returns:
        DataFrame. Columns (`?`: not in every table): `layer, head, name, frequency?, query?, draw?, s_pos, s_sym,
            exclusion_index, logit_std, tau, alpha_ess, s_pos_se, s_sym_se, exclusion_index_se, logit_std_se`. Scores
            and `exclusion_index` (0 symbolic, 1 positional) lie from 0 to 1; `logit_std`: standard deviation of logits;
            `alpha_ess`: effective number of swaps; `_se`: standard error over draws. Its attrs hold the `correlation`
            over heads of both scores, beside a random null, and the model's `answers` to a task.

    Raises:
        TypeError, ValueError: an unusable model, prompt, task, setting or swap. BadHead: a head does not exist.
        UnsupportedArchitecture: no attention pattern, or no rotary positions for frequencies.
        ScoreMismatch: attention is not the softmax of queries and keys.
        IncompatibleCheckpoint: the folder holds other work.

    Not established: how the model solves the task. Read heads only on tasks that the model answers in more than half of
    the prompts. A negative correlation of both scores is largely geometry. More: docs/positional.md.
    """
    with measured(model) as view:
        require_settings(mode, by, tau=tau, logit_scale=logit_scale)
        swaps = swaps if isinstance(swaps, str) else _block_pairs(swaps)
        task = block_task(prompt) if isinstance(prompt, str) else prompt if isinstance(prompt, BlockTask) else None
        chosen = None if heads is None else heads_by_layer(view, heads)
        if task is not None:
            drawn = prompts_of_task(view, task, swaps, mode, seed)
        else:
            prompts = _prompts(prompt, by)
            drawn = prompts_given(view, prompts, swaps, mode, seed, every_query=by == "query")
        measurement = Measurement(
            POSITIONAL_SYMBOLIC,
            {
                "swaps": swaps if isinstance(swaps, str) else [*map(list, swaps)],
                "logit_scale": logit_scale,
                "seed": seed,
            },
            origin=view.origin(),
            identity={
                "what": "positional_symbolic",
                "weights": view.weights_digest,
                "heads": chosen and [[layer, *indices] for layer, indices in chosen.items()],
                **prompts_identity(task, drawn),
            },
            folder=folder,
            score=lambda: [last_loss(view, tokens) for tokens in _scored_tokens(task, drawn)],
            n_jobs=n_jobs,
        )
        how = {"mode": mode, "per_frequency": per_frequency, "logit_scale": logit_scale, "heads": chosen}
        jobs_of = [draw_parts(draw, how, measurement.kept) for draw in drawn]
        made = measurement.made(
            [job for jobs in jobs_of for job in jobs],
            description="positional",
            unit="pass",
            prepare=lambda: view,
        )
        tables, correlations, answers = zip(
            *(
                scored_draw(draw, [made[job.name] for job in jobs], tau, per_frequency)
                for draw, jobs in zip(drawn, jobs_of, strict=True)
            ),
            strict=True,
        )
        distinct, notes = (None, {}) if task is not None else _equal_prompts(drawn)
        return measurement.table(
            averaged(list(tables), by, distinct),
            mode=mode,
            tau=tau,
            per_frequency=per_frequency,
            by=by,
            **_prompt_attrs(drawn, task),
            **run_noted(view, max(len(prompt.tokens()) for draw in drawn for prompt in draw.prompts)),
            correlation=_mean_correlation([correlation for of_draw in correlations for correlation in of_draw]),
            **({} if task is None else _task_attrs(task, drawn, answers)),
            **notes,
        )


def _prompt_attrs(drawn: list[DrawnPrompts], task: BlockTask | None) -> dict[str, Any]:
    """Return a dict for the table's attrs: numbers of prompts, swaps, blocks and tokens, and a digest of the token ids.

    Keys: n_prompts, n_swaps, n_blocks, n_tokens, tokens_sha256. `drawn`: the tokenised prompts. `task` is None for
    given prompts. A number that is equal for all prompts is given once, otherwise as a list.
    """
    # A given prompt is cut behind each query, and the last of these is whole.
    prompts = [prompt for draw in drawn for prompt in (draw.prompts if task is not None else draw.prompts[-1:])]
    tokens = [prompt.tokens() for prompt in prompts]
    return {
        "n_prompts": len(prompts),
        "n_swaps": _one_or_list([len(swaps) for draw in drawn for swaps in draw.swaps]),
        "n_blocks": _one_or_list([len(prompt.blocks) for prompt in prompts]),
        "n_tokens": _one_or_list([len(ids) for ids in tokens]),
        "tokens_sha256": digest_of(tokens),
    }


def _task_attrs(task: BlockTask, drawn: list[DrawnPrompts], answers: Iterable[pd.DataFrame]) -> dict[str, Any]:
    """Return a dict for the table's attrs: the task's name, blocks, queries and seeds, and the means of the answers.

    Keys: task, blocks, queries, draws, draw_seeds, answers. `drawn`: the prompts of each draw. `answers`: a table of
    `answers_table` per draw. The means are of probability, relative probability, chance, and the share of answers with
    rank 1.
    """
    table = stacked(answers)
    means = table.assign(first=table["rank"] == 1)[["probability", "first", "relative_probability", "chance"]]
    return {
        "task": task.name,
        "blocks": list(swapped_blocks(task)),
        "queries": list(asked_blocks(task)),
        "draws": len(drawn),
        "draw_seeds": [draw.seed for draw in drawn],
        "answers": means.mean().to_dict(),
    }


def _equal_prompts(drawn: list[DrawnPrompts]) -> tuple[Int[np.ndarray, "draws"] | None, dict[str, Any]]:
    """Find equal prompts among the given prompts in `drawn`, and warn about them.

    Return an array with a number per prompt, the same for equal prompts, and a dict with the key "prompt_notes" for the
    table's attrs. Returns (None, {}) if all prompts differ.
    """
    # Called for given prompts only: draws of a task are independent, even if two are equal.
    numbers = numbered((draw.prompts[-1].tokens().tolist(), draw.prompts[0].spans(), draw.queries) for draw in drawn)
    notes = equality_notes(numbers)
    for note in notes:
        warn_caller(note.message)
    return (numbers, {"prompt_notes": {note.name: note.value for note in notes[-1:]}}) if notes else (None, {})


def _scored_tokens(task: BlockTask | None, drawn: list[DrawnPrompts]) -> list[Tensor]:
    """Return a list with the token ids of each of the prompts whose loss tells whether hooks on the model have changed
    since a folder was made.

    For a task only the first draw counts, so that later calls may add draws. `drawn`: the tokenised prompts of each
    draw. `task` is None for given prompts.
    """
    return [draw.prompts[0].tokens() for draw in (drawn if task is None else drawn[:1])]


def _block_pairs(swaps: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the given swaps as pairs of block indices. Raises ValueError for an entry that is not such a pair."""
    pairs = []
    for pair in pairs_in("swaps", swaps, "(block, block)"):
        first, second = map(whole_number, pair)
        if first is None or second is None:
            raise ValueError(f"swaps= must be pairs of block indices, such as [(0, 1)]; found {shown(pair)}")
        pairs.append((first, second))
    return pairs


def require_settings(mode: str, by: str | None = None, **positive: float | None) -> None:
    """Raise ValueError for an unknown `mode` or `by`, or for another setting that is not None, positive and finite.

    `positive`: these other settings by name, such as `tau=0.1`.
    """
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, or None for the default; found {value}")
    for name, value, known in (("mode", mode, get_args(SwapMode)), ("by", by, (None, *get_args(RowsBy)))):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {shown(value)}")


def averaged(
    draws: list[dict[int, pd.DataFrame]], by: RowsBy | None, distinct: Int[np.ndarray, "draws"] | None = None
) -> pd.DataFrame:
    """Average scores over the queries of each draw, then over draws. Return a DataFrame of means and standard errors.

    `draws`: for each draw a dict from query to a score table. `by`: None for one row per head, "query" or "draw" for a
    row per head and query or draw. Queries and draws without a score are left out. Standard errors are over draws, NaN
    for one draw; `tau` and `alpha_ess` have none. `distinct`: a number per draw; draws with the same number are equal
    and count as one observation. Default: all differ. Raises ValueError for tables with different rows.
    """
    if by is None:
        return _over_draws([list(draw.values()) for draw in draws], distinct)
    if by == "draw":
        groups = {number: [list(draw.values())] for number, draw in enumerate(draws)}
    else:
        queries = sorted({query for draw in draws for query in draw})
        groups = {query: [[draw[query]] for draw in draws if query in draw] for query in queries}
    table = stacked(_over_draws(group).assign(**{by: key}) for key, group in groups.items())
    keys = [name for name in ("layer", "head", "frequency", by) if name in table]
    return table.sort_values(keys, ignore_index=True)


def _over_draws(draws: list[list[pd.DataFrame]], distinct: Int[np.ndarray, "draws"] | None = None) -> pd.DataFrame:
    """Return one DataFrame with the means over draws and their standard errors.

    `draws`: for each draw a list of score tables, one per query. `distinct`: a number per draw, the same for equal
    draws; None if all differ. Raises ValueError for tables with different rows.
    """
    names = draws[0][0].drop(columns=list(SCORES))
    for table in (table for draw in draws for table in draw):
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged: use the same heads=")
    by_draw = np.array([mean([table[list(SCORES)].to_numpy(np.float64) for table in draw]) for draw in draws])
    errors = _standard_error(by_draw[..., : len(WITH_ERRORS)], distinct)
    columns = dict(zip(SCORES, mean(by_draw).T, strict=True))
    return names.assign(**columns, **{f"{name}_se": error for name, error in zip(WITH_ERRORS, errors.T, strict=True)})


def mean(values: Any) -> Float64[np.ndarray, "*rest"]:
    """Return the mean of an array over its first axis, without NaN; NaN where all values are NaN."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(np.asarray(values), axis=0)


def _prompts(prompt: Any, by: RowsBy | None) -> list[BlockPrompt]:
    """Return one given prompt or a list of prompts as a list of `BlockPrompt`.

    Raises TypeError for anything else, ValueError for an empty list and for `by="query"` with several prompts.
    """
    prompts: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [prompt]
    strange = [type(entry).__name__ for entry in prompts if not isinstance(entry, BlockPrompt)]
    strange = strange and [f"{strange[0]}: {not_a(prompt, 'a prompt in blocks')}"]
    if strange:
        raise TypeError(
            "prompt= must be a tls.positional.BlockPrompt(prefix, blocks, suffix), a list of them, a "
            f"tls.positional.BlockTask or the name of a ready task; found {strange[0]}"
        )
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one tls.positional.BlockPrompt")
    if by == "query" and len(prompts) > 1:
        raise ValueError(
            f"by='query' needs one prompt or a task, found {len(prompts)} prompts, whose queries stand at different "
            "positions: give by='draw' for a row per prompt"
        )
    return prompts


def _one_or_list(counts: list[int]) -> int | list[int]:
    """Return a single number if all counts are equal, otherwise the list of counts."""
    return counts[0] if len(set(counts)) == 1 else counts


def _mean_correlation(correlations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one dict with the keys of `score_correlation` (pearson, null_mean, null_sd, null_share, draws, n_heads):
    the mean of each number over the `correlations` in which it is not None.

    `draws` and `n_heads` are taken from the first dict.
    """
    means = {}
    for name in ("pearson", "null_mean", "null_sd", "null_share"):
        values = [correlation[name] for correlation in correlations if correlation[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return {**correlations[0], **means}


def _standard_error(
    by_draw: Float64[np.ndarray, "draws *rows"], distinct: Int[np.ndarray, "draws"] | None
) -> Float64[np.ndarray, "*rows"]:
    """Return the standard error of the mean over draws for each row, ignoring NaN.

    `by_draw`: a value of each row in each draw. `distinct`: a number per draw; draws with the same number are equal and
    count as one observation. None: all differ.
    """
    known = ~np.isnan(by_draw)
    count = known.sum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom|Mean of empty slice", RuntimeWarning)
        if distinct is None:
            return np.nanstd(by_draw, axis=0, ddof=1) / np.sqrt(np.maximum(count, 1))
        deviations = np.where(known, by_draw - np.nanmean(by_draw, axis=0), 0.0)
    of_equal = np.eye(distinct.max() + 1)[distinct].T
    sums, n = np.tensordot(of_equal, deviations, 1), (np.tensordot(of_equal, known, 1) > 0).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(n > 1, np.sqrt(n / (n - 1) * (sums**2).sum(0)) / count, np.nan)
