"""`positional_symbolic`: whether a head's attention stays or follows the blocks when two blocks of a prompt swap."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import warn_caller
from tlspectral.models.reading import measured
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.reading.view import heads_by_layer
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
from tlspectral.selection import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.block_prompt import BlockPrompt

RowsBy = Literal["query", "draw"]
"""Rows of scores in place of their mean over prompts: one per query, or one per draw."""

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
            frequency? | index | Rotary pair, 0 being the model's first. With `per_frequency`.
            query?     | index | Block that is asked about; of a prompt the position of the query. With `by="query"`.
            draw?      | index | Number of the draw of a task, or of the prompt in a list, from 0. With `by="draw"`.
        """),
        *SCORE_COLUMNS,
    ),
    "`tls.positional_symbolic`; `tlspectral positional -o FOLDER` writes it as heads, queries, draws and frequencies, "
    "_prompt.parquet and _key.parquet",
)


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
    """Score every head, or every rotary frequency of every head, as positional and symbolic, on prompts or a task.

    >>> import tlspectral as tls, torch
    >>> start, query, *blocks = torch.tensor([1]), torch.tensor([4]), *torch.tensor([[3, 13], [4, 14], [5, 15]])
    >>> prompt = tls.positional.BlockPrompt(start, blocks, query)
    >>> tls.positional_symbolic(tls.load_model("tiny-rope"), prompt)["s_sym"].round().tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]

    Blocks i and j of the prompt swap, and the attention that its last token pays to the two slots is compared before
    and after: `s_pos` is high where it stays in the slots, `s_sym` where it follows the blocks. A slot is as long as
    the block in it, so a swap of blocks of unequal length shifts the tokens between them.

    There are two kinds of swap, and they answer different questions:

    * `mode="prompt"`: the words swap and the model runs again, the experiment of PS. Deeper layers see other keys.
    * `mode="key"`: the keys of one pass swap and are rotated to their new positions with the model's own cos and sin,
      Definition 2 of PS itself. Without rotary positions or ALiBi every head is symbolic here, with index exactly 0: a
      learned position is part of the key vector and moves with it. For such models use `"prompt"`.

    Both agree in the first layer of a model without learned positions. Hooks that are on the model stay in force, as
    long as they leave the scores to the layer's own queries and keys.

    Args:
        model: a TransformerBridge or HookedTransformer, with a tokenizer if the prompts are text.
        prompt: a `BlockPrompt`, whose query is the last token of its suffix, or a list of them. Or a `BlockTask`, which
            asks `queries` questions about each of its `draws`; the model reads a draw once for all of them. Or the name
            of a ready task: `"binding"`, `"key-value"`, `"copying"`, `"needle"`, `"list-index"`, or a template of the
            binding task, `"plain"`, `"gemma-2"`, `"llama-3.2"`, `"qwen2"`.
        mode: see above.
        tau: temperature of the weighting of swaps, in attention weight, or None: 0.1 times the largest |d_i - d_j| of
            that head (and frequency), which does not depend on how much attention the blocks get at all. PS gives no
            value, and results depend on it.
        per_frequency: rows per rotary pair instead, from the same passes. Logits are then `L_t` of PS appendix B.3:
            no softcap and no ALiBi, and non-rotary columns are in no row.
        logit_scale: factor on the products of queries and keys. None takes the model's own, for heads and frequencies
            alike, so that the logits of the frequencies sum to the rotary part of the head's. PS writes no 1/sqrt(d):
            `logit_scale=1.0` is its formula to the letter.
        by: None is a row per head (and pair), the mean over prompts. `"query"`: a row per query too, which is a block
            that a task asks about, or each token of the suffix of one prompt, as PS Definition 2 is for any. `"draw"`:
            a row per draw of a task, or prompt of a list.
        swaps: `"kept"`, all pairs of the blocks but the first, which holds the attention sink of many prompts: the
            sink stays in the first slot under `"prompt"` and moves with its keys under `"key"`. `"all"`: all pairs. Of
            a task both are pairs of the blocks that `task.swapped` selects. `"per_query"`, of a task: the block that
            is asked about with each other one. Or pairs of block indices.
        heads: only these heads, in any form that `ablate` takes.
        folder: where what was measured is kept, part by part; what was stopped continues there. Calls that differ in
            mode, tau, `by`, number of draws, or `per_frequency` may share it, and measure again only what it lacks.
            A folder made with per_frequency=True also serves calls without it.
        n_jobs: workers, as joblib counts them.
        seed: of a task's draws, and of the null of the correlation.

    Returns:
        DataFrame, sorted. Columns: `layer, head, name, frequency?, query?, draw?, s_pos, s_sym, exclusion_index,
        logit_std, tau, alpha_ess, s_pos_se, s_sym_se, exclusion_index_se, logit_std_se`. Numbers are means over the
        queries of a draw, then over draws (or the prompts of a list), without prompts in which a head has no score. A
        swap counts for a head whose window shows both blocks to the query; where it shows none such, there is no score.
        `attrs`: provenance, settings, the mean `correlation` of the two scores over heads (of the heads also for
        frequency rows) with its null, see `score_correlation`; of a task also `answers`: the mean probability of the
        right answer, how often it is `first` of all tokens, its probability among the choices, and `chance`
        (`task_answers` has them prompt by prompt).

    Raises:
        TypeError: no model, or something else where a prompt, a list of prompts or a task belongs.
        ValueError: an unknown mode, `by` or task; tau or logit_scale not positive and finite; swaps that do not exist
            or none; queries of a list; text without a tokenizer, or that the tokenizer joins across blocks, before or
            after a swap; a prompt too long; ids outside the model's vocabulary; no prompt. All of these before a
            measurement.
        BadHead: a head that does not exist.
        UnsupportedArchitecture: no attention pattern, or no rotary positions to take frequencies of.
        ScoreMismatch: a layer's attention is not the softmax of its captured queries and keys.
        IncompatibleCheckpoint: the folder holds work on other weights, hooks, prompts or settings, or by an earlier
            version.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, sections 3.1 to 3.3, appendices B.3 to B.5).

    What it does not establish: how the model solves the task, or what a head is for. Scores on a task that the model
    does not answer describe attention on this text: read heads on tasks that are answered above 0.5. A negative
    correlation of the two scores is largely geometry: with f and f' the angles of v and v',
    `s_pos^2 + s_sym^2 = 1 + sin 2f sin 2f'` at each swap. Compare it with the null, in which heads differ only in how
    often they follow. Both scores near 1, and a small `logit_std`, mean that there was little attention to move. Scores
    at different `tau` do not compare; with `alpha_ess` near 1 they are the scores of one swap. `exclusion_index` needs
    no swaps, but what a position adds to a key in earlier layers counts as content.
    """
    with measured(model) as view:
        require_settings(mode, by, tau=tau, logit_scale=logit_scale)
        swaps = swaps if isinstance(swaps, str) else [(index(i), index(j)) for i, j in swaps]
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
            **_said(drawn, task),
            correlation=_mean_correlation([correlation for of_draw in correlations for correlation in of_draw]),
            **({} if task is None else _said_of_task(task, drawn, answers)),
            **notes,
        )


def _said(drawn: list[DrawnPrompts], task: BlockTask | None) -> dict[str, Any]:
    """Return what a table says of its prompts: how many, and their sizes."""
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


def _said_of_task(task: BlockTask, drawn: list[DrawnPrompts], answers: Iterable[pd.DataFrame]) -> dict[str, Any]:
    """Return what a table says of a task, and how well the model answers it, from a table of answers per draw."""
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
    """Return a number for each given prompt, the same for equal ones, and what a table says of these; warns of them.

    None where all differ. Draws of a task are not asked: they are independent, also where two are equal.
    """
    numbers = numbered((draw.prompts[-1].tokens().tolist(), draw.prompts[0].spans(), draw.queries) for draw in drawn)
    notes = equality_notes(numbers)
    for note in notes:
        warn_caller(note.message)
    return (numbers, {"prompt_notes": {note.name: note.value for note in notes[-1:]}}) if notes else (None, {})


def _scored_tokens(task: BlockTask | None, drawn: list[DrawnPrompts]) -> list[Tensor]:
    """Return the prompts that show hooks on the model: of a task's draws the first one's, as more may come."""
    return [one.prompts[0].tokens() for one in (drawn if task is None else drawn[:1])]


def require_settings(mode: str, by: str | None = None, **positive: float | None) -> None:
    """Refuse an unknown mode or `by`, and numbers that are not positive and finite. Raises ValueError."""
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, or None for the default; found {value}")
    for name, value, known in (("mode", mode, get_args(SwapMode)), ("by", by, (None, *get_args(RowsBy)))):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {value!r}")


def averaged(
    draws: list[dict[int, pd.DataFrame]], by: RowsBy | None, distinct: Int[np.ndarray, "draws"] | None = None
) -> pd.DataFrame:
    """Average every score over the queries of each draw; return mean and standard error over draws, row by row.

    `draws` hold a table of `SCORES` for each query. Queries and draws without a score are left out. Errors are NaN for
    one draw; `tau` and `alpha_ess` have none. Draws of one number in `distinct` are equal, and one observation; None:
    all differ. Raises ValueError for tables whose rows differ.
    """
    if by is None:
        return _over_draws([list(draw.values()) for draw in draws], distinct)
    if by == "draw":
        groups = {number: [list(draw.values())] for number, draw in enumerate(draws)}
    else:
        asked = sorted({query for draw in draws for query in draw})
        groups = {query: [[draw[query]] for draw in draws if query in draw] for query in asked}
    table = stacked(_over_draws(group).assign(**{by: key}) for key, group in groups.items())
    keys = [name for name in ("layer", "head", "frequency", by) if name in table]
    return table.sort_values(keys, ignore_index=True)


def _over_draws(draws: list[list[pd.DataFrame]], distinct: Int[np.ndarray, "draws"] | None = None) -> pd.DataFrame:
    names = draws[0][0].drop(columns=list(SCORES))
    for table in (table for draw in draws for table in draw):
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged")
    by_draw = np.array([mean([table[list(SCORES)].to_numpy(np.float64) for table in draw]) for draw in draws])
    errors = _standard_error(by_draw[..., : len(WITH_ERRORS)], distinct)
    columns = dict(zip(SCORES, mean(by_draw).T, strict=True))
    return names.assign(**columns, **{f"{name}_se": error for name, error in zip(WITH_ERRORS, errors.T, strict=True)})


def mean(values: Any) -> Float64[np.ndarray, "*rest"]:
    """Return the mean over the first axis of those that are no NaN; NaN where all are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(np.asarray(values), axis=0)


def _prompts(given: Any, by: RowsBy | None) -> list[BlockPrompt]:
    """Return a list of prompts. Raises TypeError for anything else, ValueError for none, or queries of several."""
    prompts: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    strange = [type(one).__name__ for one in prompts if not isinstance(one, BlockPrompt)]
    if strange:
        raise TypeError(
            "prompt is a tls.positional.BlockPrompt(prefix, blocks, suffix), a list of them, a "
            f"tls.positional.BlockTask or the name of a ready one; found {strange[0]}"
        )
    if not prompts:
        raise ValueError("the list of prompts is empty: there is nothing to measure")
    if by == "query" and len(prompts) > 1:
        raise ValueError(f"by='query' is for one prompt or a task, found {len(prompts)}: their positions differ")
    return prompts


def _one_or_list(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


def _mean_correlation(correlations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each number over prompts that have it; draws and heads are the first prompt's."""
    means = {}
    for name in ("pearson", "null_mean", "null_sd", "null_share"):
        values = [one[name] for one in correlations if one[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return {**correlations[0], **means}


def _standard_error(
    by_draw: Float64[np.ndarray, "draws *rows"], distinct: Int[np.ndarray, "draws"] | None
) -> Float64[np.ndarray, "*rows"]:
    """Return the standard error of the mean over draws, as `tasks.metric_value.standard_error` without NaN."""
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
