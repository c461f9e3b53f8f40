"""Tables of the last query's attention to the blocks of a prompt, before and after two blocks swap.

A table has a row per query, layer and head (or rotary pair of a head). Columns:

* `pos, sym, variance`: the exclusion split (`exclusion.ExclusionSplit`).
* `before_B`: mean attention weight of the tokens of block B; NaN if a window hides all of them from the query.
* `first_I_J`, `second_I_J`: for each swap of blocks I and J, the mean weights of its two slots after the swap.

The scores follow from these columns, so long work stores such tables part by part.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import RawAttention
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import batch_on, score_bytes
from tlspectral.models.running.key_value_cache import prefill
from tlspectral.models.running.partial_runs import last_logits
from tlspectral.positional.exclusion import ExclusionSplit, frequency_exclusion, head_exclusion, swapped_key_means
from tlspectral.positional.readout import (
    ContextKeys,
    LastQuery,
    LastQueryReader,
    context_hooks,
    require_reproduced,
    require_valid_length,
)
from tlspectral.positional.scores import SwapScores, block_means, score_correlation, swap_scores
from tlspectral.tables.measurement import stacked
from tlspectral.tasks.block_prompt import BlockPrompt

SwapMode = Literal["prompt", "key"]
"""Kind of swap: "prompt" swaps words and runs the model for each swap; "key" swaps the keys of one run."""
Swap = tuple[int, int]

WITH_ERRORS = ("s_pos", "s_sym", "exclusion_index", "logit_std")
SCORES = (*WITH_ERRORS, "tau", "alpha_ess")
_KEYS = ["query", "layer", "head", "frequency"]
_RESOLUTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[LastQuery], ExclusionSplit]]] = {
    "heads": (LastQuery.head_logits, head_exclusion),
    "frequencies": (LastQuery.frequency_logits, frequency_exclusion),
}
"""For whole heads and for their frequencies: functions from a `LastQuery` to logits and to the exclusion split."""

_Columns = dict[str, Tensor]
_Measured = dict[str, dict[tuple[int, int], _Columns]]  # by "heads" or "frequencies", then by query and layer


@dataclass(frozen=True)
class QueryPasses:
    """Runs a model over contexts (prompts without their suffix), each followed by every suffix.

    Attributes:
        view: the model.
        layers: dict from layer to its attention weights, for all layers.
        suffixes: token ids [tokens] of each suffix; the last token is the query.
    """

    view: AttentionView
    layers: dict[int, RawAttention]
    suffixes: list[Int[Tensor, "_"]]

    def run(
        self, contexts: Int[Tensor, "prompts pos"], reduce: Callable[[int, int, int, LastQuery, Tensor], None]
    ) -> dict[int, Float[Tensor, "prompts d_vocab"]]:
        """Run every context with every suffix, and call `reduce` for every attention layer of every run.

        Args:
            contexts: token ids of prompts without their suffix, a row per prompt.
            reduce: function of five arguments: the row of the context, the number of the suffix, the layer, its
                `LastQuery` (factors of the last query's logits), and the last query's row of the model's own attention
                pattern [heads, keys]. Its result is not used.

        Returns:
            Dict from the number of a suffix to the logits after its last token, one row per context.

        Raises UnsupportedArchitecture if the model returns no pattern for a layer, or runs a layer several times.
        """
        # Several suffixes share one pass over the contexts, with keys and values kept. A single suffix gets a plain
        # pass, because hooks may refuse a cache. So does each suffix if the model has no cache or loses it.
        front: ContextKeys = {}
        read, at_once = None, 1
        if len(self.suffixes) > 1:
            read = prefill(self.view, contexts, context_hooks(self.view, front))
        if read is not None:
            at_once = max(1, self._held // (len(contexts) * self._cache_bytes(contexts.shape[1])))
        logits_of = {}
        for numbers in self._groups(at_once):

            def handed_on(layer: int, row: int, seen: LastQuery, pattern: Tensor, numbers: list[int] = numbers) -> None:
                reduce(row // len(numbers), numbers[row % len(numbers)], layer, seen, pattern)

            reader = LastQueryReader(self.view, self.layers, handed_on, front if read else {}, copies=len(numbers))
            ends = torch.stack([self.suffixes[number] for number in numbers])
            if read is None:
                tokens = torch.cat([contexts, ends.expand(len(contexts), -1)], dim=1)
                logits = last_logits(self.view, tokens, reader.hooks())
            else:
                logits = read.last_logits(ends, reader.hooks())
            reader.require_all()
            of_each = logits.unflatten(0, (len(contexts), len(numbers)))
            logits_of |= {number: of_each[:, column] for column, number in enumerate(numbers)}
        return logits_of

    def contexts_at_once(self, n_tokens: int) -> int:
        """Return how many contexts of `n_tokens` tokens one batch may have, so that patterns and cached keys fit into
        memory.
        """
        cached = self._cache_bytes(n_tokens) if len(self.suffixes) > 1 else 0
        return max(1, self._held // (score_bytes(self.view, n_tokens) + cached))

    @property
    def _held(self) -> int:
        """Bytes that a batch may hold on the model's device."""
        return batch_on(self.view.device).held // 2

    def _groups(self, at_once: int) -> Iterator[list[int]]:
        """Yield lists of the numbers of suffixes that run together: of equal length, at most `at_once` in a list."""
        for length in sorted({len(suffix) for suffix in self.suffixes}):
            same = [number for number, suffix in enumerate(self.suffixes) if len(suffix) == length]
            yield from (same[start : start + at_once] for start in range(0, len(same), at_once))

    def _cache_bytes(self, n_tokens: int) -> int:
        """Return the bytes of keys and values of all layers for a prompt of `n_tokens`, with the keys counted twice."""
        widths = sum(raw.w_k.shape[0] * raw.w_k.shape[2] for raw in self.layers.values())
        return 3 * n_tokens * widths * next(iter(self.layers.values())).w_k.element_size()


@dataclass(frozen=True)
class BlockReading:
    """Reads the attention of last queries to the blocks of prompts that differ only in their suffix.

    Attributes:
        view: the model.
        prompts: token-id prompts, one per suffix.
        swaps: all pairs (i, j) of blocks to swap.
        mode: "prompt" swaps words and runs the model again; "key" swaps the keys of one run.
        logit_scale: factor on query-key products; None for the model's own.
        per_frequency: True to measure also each rotary pair.
        heads: dict from layer to the heads that get rows; None for all.

    Raises ValueError for a prompt that is too long, UnsupportedArchitecture if `per_frequency` finds no rotary layer.
    """

    view: AttentionView
    prompts: list[BlockPrompt]
    swaps: list[Swap]
    mode: SwapMode
    logit_scale: float | None = None
    per_frequency: bool = False
    heads: dict[int, list[int]] | None = None

    def __post_init__(self) -> None:
        require_valid_length(self.layers.values(), max(len(prompt.tokens()) for prompt in self.prompts))
        if self.per_frequency and all(self.layers[layer].rotary is None for layer in self.chosen):
            raise UnsupportedArchitecture(
                "no layer of these heads has rotary positions, so they have no frequencies: leave per_frequency= out"
            )

    @cached_property
    def layers(self) -> dict[int, RawAttention]:
        """Dict from layer to its attention weights, for all layers of the model."""
        return {index: self.view.raw(index) for index in self.view.layers}

    @cached_property
    def chosen(self) -> dict[int, list[int]]:
        """Dict from layer to the list of heads that get rows: `heads`, or all heads if it is None."""
        return self.heads or heads_by_layer(self.view, None)

    def intact(self) -> tuple[dict[str, pd.DataFrame], list[Float[Tensor, "d_vocab"]]]:
        """Run the unchanged prompts. Return a dict of tables with the keys "heads" and "frequencies", and a list of
        logits.

        Each table has a row per query, layer and head (or rotary pair). Columns: the exclusion split `pos`, `sym` and
        `variance` (squared logits), and `before_B` (mean attention weight of block B; NaN if hidden). With `mode="key"`
        it also has, for each swap of the keys of blocks I and J, the mean weights in both slots after it, `first_I_J`
        and `second_I_J`. "frequencies" is missing without `per_frequency`. The list has the logits [d_vocab] after each
        prompt. Raises ScoreMismatch if a chosen layer's attention is not the softmax of our logits.
        """
        context, measured = self.prompts[0], _Measured()
        swap_keys = self.mode == "key"
        blocks = sorted({block for swap in self.swaps for block in swap})

        def take(prompt: int, query: int, layer: int, seen: LastQuery, pattern: Tensor) -> None:
            if layer in self.chosen:
                require_reproduced(layer, seen, pattern, self.layers[layer])
                scaled = self._scaled(seen)
                shown = torch.stack([seen.visible[start:stop].any() for start, stop in context.spans()])
                for name in self._resolutions(seen):
                    logits_of, exclusion_of = _RESOLUTIONS[name]
                    logits = logits_of(scaled)
                    # A hidden block has weight 0 before and after a swap, which is positional whatever the keys are.
                    means = block_means(logits.softmax(-1), context.spans()).where(shown, torch.nan)
                    columns = exclusion_of(scaled)._asdict()
                    columns |= {f"before_{block}": means[..., block] for block in blocks}
                    if swap_keys:
                        after = swapped_key_means(partial(logits_of, scaled), logits, context.spans(), self.swaps)
                        columns |= _slots(self.swaps, after)
                    measured.setdefault(name, {})[query, layer] = columns

        logits = self._passes().run(_fronts([context]), take)
        return self._tables(measured), [logits[query][0] for query in range(len(self.prompts))]

    def swapped(self, swaps: Iterable[Swap]) -> dict[str, pd.DataFrame]:
        """Run the prompts once per swap (i, j) in `swaps`, with the words of blocks i and j exchanged. Return a dict of
        tables.

        The tables "heads" and "frequencies" have a row per query, layer and head (or rotary pair), and for each swap of
        blocks I and J the mean attention weights in its two slots, `first_I_J` and `second_I_J`.
        """
        context, passes, swaps = self.prompts[0], self._passes(), list(swaps)
        after: dict[str, dict[tuple[int, int], list[Tensor]]] = {}
        at_once = passes.contexts_at_once(max(len(prompt.tokens()) for prompt in self.prompts))
        for start in range(0, len(swaps), at_once):
            batch = swaps[start : start + at_once]
            contexts = [context.swapped(i, j) for i, j in batch]
            spans = [[prompt.spans()[i], prompt.spans()[j]] for prompt, (i, j) in zip(contexts, batch, strict=True)]

            def take(
                prompt: int, query: int, layer: int, seen: LastQuery, pattern: Tensor, spans: list[Any] = spans
            ) -> None:
                if layer in self.chosen:
                    scaled = self._scaled(seen)
                    for name in self._resolutions(seen):
                        means = block_means(_RESOLUTIONS[name][0](scaled).softmax(-1), spans[prompt])
                        after.setdefault(name, {}).setdefault((query, layer), []).append(means)

            passes.run(_fronts(contexts), take)
        return self._tables(
            {
                name: {key: _slots(swaps, torch.stack(means)) for key, means in by_layer.items()}
                for name, by_layer in after.items()
            }
        )

    def _passes(self) -> QueryPasses:
        """Return the `QueryPasses` that run this model over contexts with the suffixes of these prompts."""
        return QueryPasses(self.view, self.layers, [torch.as_tensor(prompt.suffix) for prompt in self.prompts])

    def _scaled(self, seen: LastQuery) -> LastQuery:
        """Return the factors `seen` with `logit_scale` in place of the model's score scale, as a copy; `seen` itself if
        `logit_scale` is None.
        """
        return seen if self.logit_scale is None else replace(seen, score_scale=self.logit_scale)

    def _resolutions(self, seen: LastQuery) -> list[str]:
        """Return ["heads", "frequencies"] if `per_frequency` is True and the layer of `seen` has rotary pairs,
        otherwise ["heads"].
        """
        return ["heads", "frequencies"] if self.per_frequency and seen.n_pairs > 0 else ["heads"]

    def _tables(self, measured: _Measured) -> dict[str, pd.DataFrame]:
        """Turn tensors into DataFrames: return a dict with the keys of `measured`, rows sorted by query and layer.

        `measured`: for "heads" and "frequencies" a dict from (query, layer) to a dict of tensors, one per column.
        """
        return {
            name: stacked(self._rows(query, layer, by_layer[query, layer]) for query, layer in sorted(by_layer))
            for name, by_layer in measured.items()
        }

    def _rows(self, query: int, layer: int, columns: _Columns) -> pd.DataFrame:
        """Return a DataFrame with the rows of one query and layer: a row per chosen head, or per head and rotary pair.

        `columns`: dict from column name to a tensor [heads] or [heads, pairs] over all heads of the layer.
        """
        heads = np.array(self.chosen[layer])
        values = {name: column.cpu()[heads] for name, column in columns.items()}
        shape = next(iter(values.values())).shape
        indices = np.indices(shape).reshape(len(shape), -1)
        keys: dict[str, Any] = {"query": query, "layer": layer, "head": heads[indices[0]]}
        keys |= {"frequency": indices[1]} if len(shape) > 1 else {}
        return pd.DataFrame(keys | {name: value.flatten().numpy() for name, value in values.items()})


def joined_columns(parts: list[dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Join tables of several readings of the same prompts side by side. Return a dict with the keys of the readings.

    `parts`: for each reading a dict from "heads" and "frequencies" to a table; all have the same rows. Columns that
    name the rows (query, layer, head, frequency) are kept once.
    """
    return {
        name: pd.concat([table, *(part[name].drop(columns=_KEYS, errors="ignore") for part in parts[1:])], axis=1)
        for name, table in parts[0].items()
    }


def query_scores(
    tables: dict[str, pd.DataFrame], swaps: list[list[Swap]], tau: float | None, seed: int
) -> tuple[list[dict[str, pd.DataFrame]], list[dict[str, Any]]]:
    """Return two lists with an entry per query: a dict of score tables ("heads", "frequencies"), and a dict about a
    correlation.

    A score table has a row per layer and head (or rotary pair): s_pos, s_sym, tau, alpha_ess, exclusion_index,
    logit_std. The second dict compares s_pos with s_sym over heads: pearson, null_mean, null_sd, null_share, draws,
    n_heads.

    `tables`: tables of `BlockReading` with attention weights before and after swaps, by the same names. `swaps`: for
    each query the pairs of blocks that count. `tau`: temperature of the weights of swaps; None for 0.1 of the largest
    difference of the weights of two blocks. `seed`: of the random null of the correlations.
    """
    score_tables, correlations = [], []
    for query, of_query in enumerate(swaps):
        scored = {name: _scored(table.loc[table["query"] == query], of_query, tau) for name, table in tables.items()}
        score_tables.append({name: table for name, (table, _, _) in scored.items()})
        _, before, weighted = scored["heads"]
        correlations.append(score_correlation(before, weighted, seed=seed))
    return score_tables, correlations


def _scored(
    rows: pd.DataFrame, swaps: list[Swap], tau: float | None
) -> tuple[pd.DataFrame, Float64[Tensor, "swaps rows 2"], SwapScores]:
    """Score the rows of one query. Return the score table, the weights before each swap [swaps, rows, 2], and
    `SwapScores`.

    `rows`: rows of a table of `BlockReading`, one per head (or rotary pair). `swaps`: the pairs (i, j) of blocks that
    count. `tau`: temperature of the weights of swaps; None for the default. The score table has the columns that name
    the rows, the scores, exclusion_index and logit_std. The weights are the mean attention weights (d_i, d_j) of both
    blocks.
    """

    def slots(names: list[str]) -> Float64[Tensor, "swaps rows 2"]:
        return torch.tensor(rows[names].to_numpy(np.float64).T).unflatten(0, (-1, 2)).mT.contiguous()

    before = slots([f"before_{block}" for swap in swaps for block in swap])
    after = slots([f"{slot}_{i}_{j}" for i, j in swaps for slot in ("first", "second")])
    scores = swap_scores(before, after, tau)
    keys = [name for name in _KEYS[1:] if name in rows]
    split = ExclusionSplit(*(torch.tensor(rows[name].to_numpy(np.float64)) for name in ExclusionSplit._fields))
    values = scores._asdict() | {"exclusion_index": split.index, "logit_std": split.variance.sqrt()}
    table = rows[keys].reset_index(drop=True)
    return table.assign(**{name: values[name].numpy() for name in SCORES}), before, scores


def _slots(swaps: list[Swap], after: Float64[Tensor, "swaps *rows 2"]) -> _Columns:
    """Return a dict of tensors by column name: `first_I_J` and `second_I_J` for each swap of blocks I and J.

    `after`: mean attention weights in the two slots of each swap, after the swap.
    """
    columns: _Columns = {}
    for (i, j), of_swap in zip(swaps, after, strict=True):
        columns |= {f"first_{i}_{j}": of_swap[..., 0], f"second_{i}_{j}": of_swap[..., 1]}
    return columns


def _fronts(prompts: list[BlockPrompt]) -> Int[Tensor, "prompts pos"]:
    """Return the token ids of each prompt before its suffix [prompts, pos]. Swaps do not change the number of these
    tokens.
    """
    return torch.stack([prompt.tokens()[: -len(prompt.suffix)] for prompt in prompts])
