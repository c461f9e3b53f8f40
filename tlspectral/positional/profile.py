"""`positional_symbolic_profile`: positional and symbolic scores of a whole model on a block task, over draws."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.layer import digest_of
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.positional.block_task import BlockTask
from tlspectral.positional.block_weights import Mode
from tlspectral.positional.columns import PROFILE
from tlspectral.positional.draws import (
    DrawSettings,
    draw_folder,
    draw_parts,
    drawn_prompts,
    planned_experiment,
    scored_draw,
)
from tlspectral.positional.measure import mean_over_prompts, over_draws, require_settings
from tlspectral.selection import Heads
from tlspectral.tables import finished_parts, named
from tlspectral.tables.html_summary import html_rows


@dataclass(frozen=True, repr=False)
class PositionalSymbolicProfile:
    """Result of `positional_symbolic_profile`. The `attrs` of every table hold the settings.

    Attributes:
        heads: the columns of `positional_symbolic`, those but `tau` and `alpha_ess` with a standard error `_se`: means
            over the queries of a draw, then over draws, without prompts in which a head has no score; errors are over
            draws, NaN for one.
        queries: the same per queried block, `layer, head, query`.
        draws: the scores of each draw, `layer, head, draw`: means over its queries.
        frequencies: the same per rotary pair, `layer, head, frequency`; None if not asked for.
        answers: per prompt, the table of `task_answers`.
        median_tests: `score, early_median, late_median, statistic, pvalue`, see `median_tests`.
        correlation: per prompt, `draw, query`, what `score_correlation` returns.
    """

    heads: pd.DataFrame
    queries: pd.DataFrame
    draws: pd.DataFrame
    frequencies: pd.DataFrame | None
    answers: pd.DataFrame
    median_tests: pd.DataFrame
    correlation: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The DataFrames by name, `frequencies` only where they were asked for."""
        tables = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: table for name, table in tables.items() if table is not None}

    @property
    def pearson(self) -> float:
        """Correlation over heads of the averaged s_pos and s_sym; NaN where it is not defined. It has no null."""
        return pearson_of_scores(self.heads)

    def __repr__(self) -> str:
        lines = [f"PositionalSymbolicProfile of {self.heads.attrs['model']}"]
        return "\n".join(lines + [f"  {name}: {text}" for name, text in self._summary()])

    def _repr_html_(self) -> str:
        return html_rows(f"Profile of {self.heads.attrs['model']}", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        about, answers = self.heads.attrs, self.answers.mean(numeric_only=True)
        rho = self.correlation[["pearson", "null_mean"]].mean()
        quartiles = self.heads["exclusion_index"].quantile([0.25, 0.5, 0.75])
        tests = [
            f"{row['score']} {row['early_median']:.3f} early, {row['late_median']:.3f} late (p = {row['pvalue']:.1g})"
            for row in self.median_tests.to_dict("records")
        ]
        counted = f"blocks that swap: {len(about['blocks'])}, queries: {len(about['queries'])}"
        first = "without" if about["exclude_first_block"] else "with"
        return [
            ("task", f"{about['task']}, {counted}, draws: {about['draws']}"),
            (
                "swaps",
                f"by {about['mode']}, {about['swaps']} ({first} the first block), tau "
                f"{'0.1 of the largest difference' if about['tau'] is None else about['tau']}",
            ),
            (
                "answer",
                f"mean probability {answers['probability']:.3g}, first of all tokens in "
                f"{(self.answers['rank'] == 1).mean():.2f} of the prompts; {answers['relative_probability']:.2f} among "
                f"the choices (a random one: {answers['chance']:.2f})",
            ),
            ("medians over heads", "; ".join(tests)),
            ("quartiles of the exclusion index", ", ".join(f"{one:.2f}" for one in quartiles)),
            (
                "correlation of s_pos and s_sym",
                f"{self.pearson:.2f} of averages; mean over prompts {rho['pearson']:.2f}, null {rho['null_mean']:.2f}",
            ),
            ("swaps behind a score", f"{self.heads['alpha_ess'].median():.1f} of {about['n_swaps']} (median)"),
        ]


def positional_symbolic_profile(
    model: Any,
    task: BlockTask | str,
    *,
    n_pairs: int | None = None,
    n_blocks: int = 9,
    queries: int | Iterable[int] = 9,
    draws: int = 5,
    seed: int = 0,
    preset: Literal["paper"] | None = None,
    swaps: str | None = None,
    mode: Mode = "prompt",
    tau: float | None = None,
    exclude_first_block: bool = True,
    per_frequency: bool = False,
    logit_scale: float | None = None,
    heads: Heads | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
) -> PositionalSymbolicProfile:
    """Positional and symbolic scores of every head on a block task, averaged over questions and draws.

    A draw is a list of blocks: for the binding task, lines of a name and a colour. `n_blocks` of them, evenly spaced
    from the first to the last, swap in pairs, and several questions are asked about each list; the model reads a list
    once for all of them. The last token of each prompt is the query whose attention is scored, as by
    `positional_symbolic`.

    Args:
        model: a TransformerBridge or HookedTransformer, with a tokenizer if the task is text.
        task: any `BlockTask`; or the name of a ready one: `"binding"`, `"key-value"`, `"copying"`, `"needle"`,
            `"list-index"`, or a template of the binding task, `"plain"`, `"gemma-2"`, `"llama-3.2"`, `"qwen2"`.
        n_pairs: blocks of the list, for a task by name; None is its own size, 64 for the binding task.
        n_blocks: blocks that are swapped with one another.
        queries: how many of these blocks are asked about, evenly spaced; or which blocks, by index, of all. A draw
            that has no question about any of them is asked its own.
        draws: number of lists; standard errors are over them.
        seed: of the draws and of the correlation's null.
        preset: `"paper"` sets 256 pairs, 9 blocks, 9 queries and `swaps="all"`: PS appendix B.5, whose "for all i, j =
            1 .. 9" is read as all 36 pairs of the 9 blocks. B.5 goes on with "nine permutations per query";
            `preset="paper", swaps="per_query"` is that reading. PS gives neither tau nor the number of lists.
        swaps: which pairs of the selected blocks swap. `"kept"` (None without a preset): all pairs of those that
            `exclude_first_block` keeps, 28 of nine blocks. `"all"`: all pairs, 36. `"per_query"`: the queried block
            with each other one, 8; the paper's ninth permutation, the identity, moves nothing.
        mode, tau, logit_scale: see `positional_symbolic`.
        exclude_first_block: of `swaps="kept"`: leave out the first selected block, which may still be asked about.
        per_frequency: also score every rotary pair of every head.
        heads: only these heads, in any form that `ablate` takes; their layers alone are read.
        checkpoint_dir: a folder for what was measured, written every few swaps; a profile that was stopped continues
            there and gives the tables it would have given. Both modes, profiles of more draws and of other `tau` may
            share it.
        n_jobs: workers, as joblib counts them.

    Returns:
        A `PositionalSymbolicProfile` of DataFrames.

    Raises:
        TypeError: no model, or no task.
        ValueError: a model without tokenizer for a task of text; more blocks than the context holds (the message says
            how many it does); arguments that contradict one another or the preset; and as `positional_symbolic`. All of
            these before a measurement.
        BadHead: a head that does not exist.
        UnsupportedArchitecture, ScoreMismatch: as `positional_symbolic`.
        IncompatibleCheckpoint: the folder holds a profile of other weights, hooks, prompts or settings.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, appendices B.3 to B.5).

    What it does not establish: how the model solves the task. A profile of a model that does not answer, which
    `answers` shows, describes attention on this text and no mechanism of the task: read heads on tasks that are
    answered above 0.5. Heads of a layer are not independent, so that p-values of `median_tests` are too small. For the
    correlation, see `positional_symbolic`.
    """
    view = attention_view(model)
    require_settings(mode, tau=tau, logit_scale=logit_scale)
    experiment = planned_experiment(
        task,
        n_pairs=n_pairs,
        n_blocks=n_blocks,
        queries=queries,
        draws=draws,
        seed=seed,
        preset=preset,
        swaps=swaps,
        exclude_first_block=exclude_first_block,
    )
    chosen = None if heads is None else heads_by_layer(view, heads)
    settings = DrawSettings(mode, logit_scale, per_frequency, chosen)
    drawn = drawn_prompts(view, experiment, mode)
    folder = None
    if checkpoint_dir is not None:
        folder = draw_folder(checkpoint_dir, view, experiment, drawn, settings, seed)
    of_draws = [draw_parts(one, settings) for one in drawn]
    made = finished_parts(
        [part for parts in of_draws for part in parts],
        folder,
        description="profile",
        unit="part",
        items="passes",
        prepare=partial(_unchanged, view),
        n_jobs=n_jobs,
    )
    measured = [
        scored_draw(one, [made[part.name] for part in parts], tau) for one, parts in zip(drawn, of_draws, strict=True)
    ]
    heads_by_query, frequencies = (
        [_by_query(draw[name], one.queries) for draw, one in zip(measured, drawn, strict=True) if name in draw]
        for name in ("heads", "frequencies")
    )
    scored = over_draws([list(draw.values()) for draw in heads_by_query])
    asked = sorted({query for draw in heads_by_query for query in draw})
    profile = PositionalSymbolicProfile(
        heads=scored,
        queries=_labelled(
            "query", {query: over_draws([[draw[query]] for draw in heads_by_query if query in draw]) for query in asked}
        ),
        draws=_labelled("draw", dict(enumerate(mean_over_prompts(list(draw.values())) for draw in heads_by_query))),
        frequencies=over_draws([list(draw.values()) for draw in frequencies]) if frequencies else None,
        answers=_numbered([draw["answers"] for draw in measured]),
        median_tests=median_tests(scored, view.n_layers),
        correlation=_numbered([draw["correlation"] for draw in measured]),
    )
    tokens = [prompt.tokens() for one in drawn for prompt in one.prompts]
    attrs: dict[Any, Any] = {
        **view.origin(),
        "task": experiment.task.name,
        "n_pairs": experiment.task.n_blocks,
        "blocks": list(experiment.blocks),
        "queries": list(experiment.queries),
        "draws": len(experiment.seeds),
        "draw_seeds": list(experiment.seeds),
        "seed": seed,
        "preset": preset,
        "swaps": experiment.swaps,
        "mode": mode,
        "tau": tau,
        "exclude_first_block": experiment.swaps == "kept" and exclude_first_block,
        "logit_scale": logit_scale,
        "n_swaps": len(experiment.swaps_of(experiment.queries[0])),
        "n_tokens": [len(prompt_tokens) for prompt_tokens in tokens],
        "tokens_sha256": digest_of(tokens),
    }
    for name, table in profile.tables.items():
        table.attrs = attrs
        named(table, PROFILE[name])
    return profile


def _unchanged(view: AttentionView) -> AttentionView:
    """What every part is made of."""
    return view


def _by_query(table: pd.DataFrame, queries: tuple[int, ...]) -> dict[int, pd.DataFrame]:
    """The rows of one draw as a table per query."""
    return {query: table.loc[table["query"] == query].drop(columns="query").reset_index(drop=True) for query in queries}


def _labelled(name: str, tables: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """The tables in one, with their keys as the column `name` behind layer and head, sorted."""
    for key, table in tables.items():
        table.insert(2, name, key)
    return pd.concat(tables.values()).sort_values(["layer", "head", name], ignore_index=True)


def _numbered(tables: list[pd.DataFrame]) -> pd.DataFrame:
    joined = pd.concat(tables, keys=range(len(tables)), names=["draw"])
    return joined.reset_index("draw").reset_index(drop=True)


def median_tests(heads: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Mood's median test of each score between heads of the first half of the layers and the others.

    The middle one of an odd number of layers counts as late; heads without a score are left out. The statistic is
    chi-square with Yates' correction, NaN where a half has no head, or where no head lies above the median of all.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, footnote 2).

    What it does not establish: that depth is the cause. Heads of a layer are not independent, as the test assumes:
    at nominal 5 % it rejects 29.7 % of simulated tables with an intra-class correlation of 0.4 (docs/statistics.md).
    """
    rows = []
    for score in ("s_pos", "s_sym"):
        early, late = (
            heads.loc[half, score].dropna().to_numpy(np.float64)
            for half in (heads["layer"] < n_layers // 2, heads["layer"] >= n_layers // 2)
        )
        statistic = pvalue = np.nan
        both = np.concatenate([early, late])
        # Ties with the grand median count as below it.
        if len(early) and len(late) and (both > np.median(both)).any():
            tested: Any = scipy.stats.median_test(early, late)
            statistic, pvalue = float(tested.statistic), float(tested.pvalue)
        medians = (float(np.median(half)) if len(half) else np.nan for half in (early, late))
        rows.append((score, *medians, statistic, pvalue))
    return pd.DataFrame(rows, columns=["score", "early_median", "late_median", "statistic", "pvalue"])


def pearson_of_scores(heads: pd.DataFrame) -> float:
    """Correlation of s_pos and s_sym over heads that have both; NaN where it is not defined."""
    scores = heads[["s_pos", "s_sym"]].dropna().to_numpy(np.float64)
    # Scores lie in [0, 1]; equal ones differ by rounding, 1e-16 or so.
    if len(scores) < 3 or np.ptp(scores, axis=0).min() < 1e-12:
        return float("nan")
    return float(np.corrcoef(scores.T)[0, 1])
