"""`positional_symbolic_profile`: positional and symbolic scores of a whole model on the binding task, over draws."""

import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float64

from tlspectral.models.attention import attention_view
from tlspectral.models.attention.layer import digest_of
from tlspectral.positional.binding import BindingTask
from tlspectral.positional.columns import PROFILE
from tlspectral.positional.draws import DrawSettings, draw_folder, measured_draw, planned_experiment
from tlspectral.positional.measure import Mode
from tlspectral.tables import WorkPart, finished_parts, named, unbundled
from tlspectral.tables.html_summary import html_rows

_WITH_ERRORS = ("s_pos", "s_sym", "exclusion_index", "logit_std")
_SCORES = (*_WITH_ERRORS, "tau", "alpha_ess")


@dataclass(frozen=True, repr=False)
class PositionalSymbolicProfile:
    """Result of `positional_symbolic_profile`. The `attrs` of every table hold the settings.

    Attributes:
        heads: `layer, head`, then `s_pos, s_sym, exclusion_index, logit_std`, each with its standard error `_se`, and
            `tau, alpha_ess`: means over the queries of a draw, then over draws; errors are over draws, NaN for one.
            See `positional_symbolic` for what they are. Means leave out prompts in which a head has no score.
        queries: the same per queried block, `layer, head, query`.
        frequencies: the same per rotary pair, `layer, head, frequency`; None if not asked for.
        answers: per prompt, `draw, query, answer`; `probability` of the answer's first token and its `rank` among all
            tokens, from 1; `relative_probability`, its share among the first tokens of the colours of this draw;
            `chance`, that share for the colour of a random pair.
        median_tests: `score, early_median, late_median, statistic, pvalue`: Mood's median test of the scores in `heads`
            between the first half of the layers and the others, as PS footnote 2; the middle one of an odd number is
            late. NaN where there is nothing to compare.
        correlation: per prompt, `draw, query`; `pearson` of s_pos and s_sym over heads, with its per-head-coin null
            `null_mean, null_sd, null_pct` over `null_draws` (see `score_correlation`) and `n_heads`.
    """

    heads: pd.DataFrame
    queries: pd.DataFrame
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
        tests = [
            f"{row['score']} {row['early_median']:.3f} early, {row['late_median']:.3f} late (p = {row['pvalue']:.1g})"
            for row in self.median_tests.to_dict("records")
        ]
        counted = f"{about['n_pairs']} pairs, blocks: {len(about['blocks'])}, queries: {len(about['queries'])}"
        return [
            ("task", f"{about['template']}, {counted}, draws: {about['draws']}, swaps by {about['mode']}"),
            (
                "answer",
                f"mean probability {answers['probability']:.3g}, median rank {self.answers['rank'].median():.0f}; "
                f"{answers['relative_probability']:.2f} among the colours (a random pair's colour: "
                f"{answers['chance']:.2f})",
            ),
            ("medians over heads", "; ".join(tests)),
            (
                "correlation of s_pos and s_sym",
                f"{self.pearson:.2f} of averages; mean over prompts {rho['pearson']:.2f}, null {rho['null_mean']:.2f}",
            ),
            ("swaps behind a score", f"{self.heads['alpha_ess'].median():.1f} of {about['n_swaps']} (median)"),
        ]


def positional_symbolic_profile(
    model: Any,
    task: BindingTask | str,
    *,
    n_pairs: int = 64,
    n_blocks: int = 9,
    queries: int | Iterable[int] = 9,
    draws: int = 5,
    seed: int = 0,
    preset: Literal["paper"] | None = None,
    mode: Mode = "prompt",
    tau: float | None = None,
    exclude_first_block: bool = True,
    per_frequency: bool = False,
    logit_scale: float | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> PositionalSymbolicProfile:
    """Positional and symbolic scores of every head on the binding task, averaged over questions and draws.

    A draw is a list of names and colours. `n_blocks` of its lines, evenly spaced from the first to the last, swap in
    pairs, and several questions are asked about each list; the model reads a list once for all of them. The last token
    of each prompt is the query whose attention is scored, as by `positional_symbolic`.

    Args:
        model: a TransformerBridge or HookedTransformer with a tokenizer.
        task: a `BindingTask`, or the name of a template: `"plain"`, `"gemma-2"`, `"llama-3.2"`, `"qwen2"`.
        n_pairs: lines of the list, each a block; not needed for a `BindingTask`, which has its own.
        n_blocks: blocks that are swapped with one another, all pairs of them.
        queries: how many of these blocks are asked about, evenly spaced; or which blocks, by index, of all pairs.
        draws: number of lists; standard errors are over them.
        seed: of the draws and of the correlation's null.
        preset: `"paper"` sets 256 pairs, 9 blocks and 9 queries, as PS appendix B.5. PS does not give tau, nor how many
            lists it drew.
        mode, tau, exclude_first_block, logit_scale: see `positional_symbolic`. Block 0 is the first selected block; it
            may still be asked about.
        per_frequency: also score every rotary pair of every head.
        checkpoint_dir: a folder for one file per mode and draw; a profile that was stopped continues there and gives
            the tables it would have given. Both modes, and profiles of more draws, may share it.
        show_progress: bars over draws and prompts.

    Returns:
        A `PositionalSymbolicProfile` of DataFrames.

    Raises:
        ValueError: a model without tokenizer; more pairs than the context holds (the message says how many it does);
            arguments that contradict one another or the preset; and as `positional_symbolic`.
        UnsupportedArchitecture, ScoreMismatch: as `positional_symbolic`.
        IncompatibleCheckpoint: the folder holds a profile of other weights, hooks, prompts or settings.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, appendices B.4 and B.5).

    What it does not establish: how the model binds names to colours. A profile of a model that does not answer, which
    `answers` shows, describes attention on this text and no mechanism of the task. Heads of a layer are not
    independent, so that p-values of `median_tests` are too small. For the correlation, see `positional_symbolic`.
    """
    view = attention_view(model)
    tokenizer = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer, so the binding task cannot be written for it: load one that has, or measure "
            "prompts of token ids with positional_symbolic"
        )
    experiment = planned_experiment(
        task,
        n_pairs=n_pairs,
        n_blocks=n_blocks,
        queries=queries,
        draws=draws,
        seed=seed,
        preset=preset,
        least_blocks=3 if exclude_first_block else 2,
    )
    experiment.require_context(tokenizer, view.n_ctx)
    settings = DrawSettings(mode, tau, exclude_first_block, logit_scale, per_frequency)
    folder = None if checkpoint_dir is None else draw_folder(checkpoint_dir, view, experiment, settings, seed)
    parts = [
        WorkPart(f"{mode}_draw{number}", partial(measured_draw, view, experiment, number, settings, show_progress))
        for number in experiment.seeds
    ]
    bundles = finished_parts(parts, folder, description="profile", unit="draw", show_progress=show_progress)
    measured = [unbundled(bundle) for bundle in bundles.values()]
    heads_by_query, frequencies = (
        [_by_query(draw[name], experiment.queries) for draw in measured if name in draw]
        for name in ("heads", "frequencies")
    )
    heads = over_draws(heads_by_query)
    tokens = [
        torch.as_tensor(of_query["token"].to_numpy(copy=True))
        for draw in measured
        for _, of_query in draw["tokens"].groupby("query", sort=False)
    ]
    profile = PositionalSymbolicProfile(
        heads=heads,
        queries=_per_query(heads_by_query, experiment.queries),
        frequencies=over_draws(frequencies) if frequencies else None,
        answers=_numbered([draw["answers"] for draw in measured]),
        median_tests=median_tests(heads, view.n_layers),
        correlation=_numbered([draw["correlation"] for draw in measured]),
    )
    attrs: dict[Any, Any] = {
        **view.origin(),
        "template": experiment.task.template,
        "n_pairs": experiment.task.n_pairs,
        "blocks": list(experiment.blocks),
        "queries": list(experiment.queries),
        "draws": len(experiment.seeds),
        "draw_seeds": list(experiment.seeds),
        "seed": seed,
        "preset": preset,
        **{name: value for name, value in asdict(settings).items() if name != "per_frequency"},
        "n_swaps": len(experiment.swaps(exclude_first_block=exclude_first_block)),
        "n_tokens": [len(prompt_tokens) for prompt_tokens in tokens],
        "tokens_sha256": digest_of(tokens),
    }
    for name, table in profile.tables.items():
        table.attrs = attrs
        named(table, PROFILE[name])
    return profile


def _by_query(table: pd.DataFrame, queries: tuple[int, ...]) -> list[pd.DataFrame]:
    """The rows of one draw as a table per query."""
    return [table.loc[table["query"] == query].drop(columns="query").reset_index(drop=True) for query in queries]


def _per_query(heads: list[list[pd.DataFrame]], queries: tuple[int, ...]) -> pd.DataFrame:
    tables = []
    for number, query in enumerate(queries):
        table = over_draws([[of_draw[number]] for of_draw in heads])
        table.insert(2, "query", query)
        tables.append(table)
    return pd.concat(tables).sort_values(["layer", "head", "query"], ignore_index=True)


def _numbered(tables: list[pd.DataFrame]) -> pd.DataFrame:
    joined = pd.concat(tables, keys=range(len(tables)), names=["draw"])
    return joined.reset_index("draw").reset_index(drop=True)


def over_draws(tables: list[list[pd.DataFrame]]) -> pd.DataFrame:
    """Mean over the queries of each draw, then mean and standard error over draws, row by row.

    The tables, one per draw and query, have the same rows in the same order. Scores have an `_se` (NaN for one draw)
    except for `tau` and `alpha_ess`. Queries and draws without a score are left out.
    """
    names = tables[0][0].drop(columns=list(_SCORES))
    for table in (table for draw in tables for table in draw):
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged")
    columns = {name: names[name].to_numpy() for name in names}
    for score in _SCORES:
        values = np.array([[table[score].to_numpy(np.float64) for table in draw] for draw in tables])
        by_draw = _mean(values, axis=1)
        columns[score] = _mean(by_draw, axis=0)
        if score in _WITH_ERRORS:
            columns[f"{score}_se"] = _standard_error(by_draw)
    return pd.DataFrame(columns)


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


def _mean(values: Float64[np.ndarray, "*shape"], axis: int) -> Float64[np.ndarray, "*rest"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def _standard_error(by_draw: Float64[np.ndarray, "draws rows"]) -> Float64[np.ndarray, "rows"]:
    count = (~np.isnan(by_draw)).sum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        return np.nanstd(by_draw, axis=0, ddof=1) / np.sqrt(np.maximum(count, 1))
