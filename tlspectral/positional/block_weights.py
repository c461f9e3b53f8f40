"""Attention of last queries to the blocks of a prompt, before and after two of them swap, as tables.

A table has a row per query, layer, head (and rotary pair) and the columns `pos, sym, variance` of the exclusion split,
`before_B` (mean weight of block B's tokens) and, for each swap of blocks I and J, `first_I_J` and `second_I_J`: the
mean weights of the two slots after it. The scores follow from these columns, so that long work can store them part by
part.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import AttentionView, RawAttention
from tlspectral.positional.exclusion import ExclusionSplit, frequency_exclusion, head_exclusion, swapped_key_means
from tlspectral.positional.passes import QueryPasses
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.positional.readout import LastQuery, require_reproduced
from tlspectral.positional.scores import SwapScores, block_means, swap_scores
from tlspectral.tables import stacked

Mode = Literal["prompt", "key"]
Swap = tuple[int, int]
Advance = Callable[[int], Any]

_Columns = dict[str, Tensor]
_Found = dict[str, dict[tuple[int, int], _Columns]]  # by resolution, then query and layer


class _Resolution(NamedTuple):
    """How logits and exclusion splits of heads, or of their frequencies, are made from what a query sees."""

    logits: Callable[..., Float64[Tensor, "*rows n"]]
    exclusion: Callable[[LastQuery], ExclusionSplit]


@dataclass(frozen=True)
class BlockReading:
    """Prompts that differ in their suffix alone, and what is read of their last queries.

    Attributes:
        prompts: token ids, one per suffix.
        swaps: every pair of blocks that swaps.
        mode: of `positional_symbolic`.
        resolutions: `"heads"` and, where asked for, `"frequencies"`.
        heads: by layer, those that get rows.
    """

    view: AttentionView
    layers: list[RawAttention]
    prompts: list[BlockPrompt]
    swaps: list[Swap]
    mode: Mode
    resolutions: dict[str, _Resolution]
    heads: dict[int, list[int]]

    @property
    def n_steps(self) -> int:
        """Steps of progress in all: every layer of every prompt, intact and swapped."""
        return len(self.prompts) * (1 + len(self.swaps)) * len(self.layers)

    def intact(self, advance: Advance) -> tuple[dict[str, pd.DataFrame], list[Float[Tensor, "d_vocab"]]]:
        """Read the unchanged prompts: tables by resolution, and the logits after each prompt.

        Under `mode="key"` the tables have the columns of all swaps too.
        """
        context, found = self.prompts[0], _Found()
        swap_keys = self.mode == "key"
        blocks = sorted({block for swap in self.swaps for block in swap})

        def take(prompt: int, query: int, layer: int, seen: LastQuery, pattern: Tensor) -> None:
            if layer in self.heads:
                require_reproduced(layer, seen, pattern, self.layers[layer])
                for name, resolution in self._rows_of(seen):
                    logits = resolution.logits(seen)
                    means = block_means(logits.softmax(-1), context.spans())
                    columns = resolution.exclusion(seen)._asdict()
                    columns |= {f"before_{block}": means[..., block] for block in blocks}
                    if swap_keys:
                        after = swapped_key_means(partial(resolution.logits, seen), logits, context.spans(), self.swaps)
                        columns |= _slots(self.swaps, after)
                    found.setdefault(name, {})[query, layer] = columns
            advance(1 + len(self.swaps) if swap_keys else 1)

        logits = self._passes().run(_fronts([context]), take)
        return self._tables(found), [logits[query][0] for query in range(len(self.prompts))]

    def swapped(self, swaps: Iterable[Swap], advance: Advance) -> dict[str, pd.DataFrame]:
        """Read the prompts with the words of two blocks swapped, for some of the swaps: tables by resolution."""
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
                if layer in self.heads:
                    for name, resolution in self._rows_of(seen):
                        means = block_means(resolution.logits(seen).softmax(-1), spans[prompt])
                        after.setdefault(name, {}).setdefault((query, layer), []).append(means)
                advance(1)

            passes.run(_fronts(contexts), take)
        return self._tables(
            {
                name: {key: _slots(swaps, torch.stack(means)) for key, means in by_layer.items()}
                for name, by_layer in after.items()
            }
        )

    def whole(self, advance: Advance) -> tuple[dict[str, pd.DataFrame], list[Float[Tensor, "d_vocab"]]]:
        """Read everything: the tables of `intact` with the columns of all swaps, and the logits."""
        tables, logits = self.intact(advance)
        if self.mode == "prompt":
            tables = joined_columns([tables, self.swapped(self.swaps, advance)])
        return tables, logits

    def _passes(self) -> QueryPasses:
        return QueryPasses(self.view, self.layers, [torch.as_tensor(prompt.suffix) for prompt in self.prompts])

    def _rows_of(self, seen: LastQuery) -> Iterator[tuple[str, _Resolution]]:
        """The resolutions; a layer without rotary pairs has no frequencies."""
        return (row for row in self.resolutions.items() if row[0] == "heads" or seen.n_pairs > 0)

    def _tables(self, found: _Found) -> dict[str, pd.DataFrame]:
        return {
            name: stacked(self._rows(query, layer, by_layer[query, layer]) for query, layer in sorted(by_layer))
            for name, by_layer in found.items()
        }

    def _rows(self, query: int, layer: int, columns: _Columns) -> pd.DataFrame:
        heads = np.array(self.heads[layer])
        values = {name: column.cpu()[heads] for name, column in columns.items()}
        shape = next(iter(values.values())).shape
        indices = np.indices(shape).reshape(len(shape), -1)
        keys: dict[str, Any] = {"query": query, "layer": layer, "head": heads[indices[0]]}
        keys |= {"frequency": indices[1]} if len(shape) > 1 else {}
        return pd.DataFrame(keys | {name: value.flatten().numpy() for name, value in values.items()})


def block_reading(
    view: AttentionView,
    prompts: list[BlockPrompt],
    swaps: list[Swap],
    *,
    mode: Mode,
    logit_scale: float | None = None,
    per_frequency: bool = False,
    heads: dict[int, list[int]] | None = None,
) -> BlockReading:
    """Plan the reading of tokenised prompts that share all but their suffix. Raises as `positional_symbolic`."""
    require_mode(mode)
    if not prompts:
        raise ValueError("no suffix was given, so there is no query to measure")
    layers = [view.raw(index) for index in range(view.n_layers)]
    require_valid_length(layers, max(len(prompt.tokens()) for prompt in prompts))
    every_head = {layer: list(range(view.n_heads(layer))) for layer in range(view.n_layers)}
    return BlockReading(
        view, layers, prompts, swaps, mode, _resolutions(layers, logit_scale, per_frequency), heads or every_head
    )


def joined_columns(parts: list[dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """The tables of several readings of the same prompts side by side: rows of the first, columns of all."""
    return {
        name: pd.concat([table, *(part[name].drop(columns=_KEYS, errors="ignore") for part in parts[1:])], axis=1)
        for name, table in parts[0].items()
    }


def scored_rows(
    rows: pd.DataFrame, swaps: list[Swap], tau: float | None
) -> tuple[pd.DataFrame, Float64[Tensor, "swaps rows 2"], SwapScores]:
    """The scores of the rows of one query from some of the swaps, with v of each swap and the weighting behind them."""

    def slots(names: list[tuple[str, str]]) -> Float64[Tensor, "swaps rows 2"]:
        return torch.from_numpy(np.stack([rows[list(pair)].to_numpy(np.float64) for pair in names]))

    before = slots([(f"before_{i}", f"before_{j}") for i, j in swaps])
    scores = swap_scores(before, slots([(f"first_{i}_{j}", f"second_{i}_{j}") for i, j in swaps]), tau)
    keys = [name for name in _KEYS[1:] if name in rows]
    split = ExclusionSplit(*(torch.tensor(rows[name].to_numpy(np.float64)) for name in ExclusionSplit._fields))
    values = {
        "s_pos": scores.s_pos,
        "s_sym": scores.s_sym,
        "exclusion_index": split.index,
        "logit_std": split.variance.sqrt(),
        "tau": scores.tau,
        "alpha_ess": scores.alpha_ess,
    }
    table = rows[keys].reset_index(drop=True)
    return table.assign(**{name: value.numpy() for name, value in values.items()}), before, scores


def require_mode(mode: str) -> None:
    """Refuse an unknown mode. Raises ValueError."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}; not {mode!r}")


def require_valid_length(layers: list[RawAttention], length: int) -> None:
    """Refuse a prompt beyond the length up to which rotary frequencies and score scale hold. Raises ValueError."""
    limits = [raw.valid_up_to for raw in layers if raw.valid_up_to is not None]
    if limits and length > min(limits):
        raise ValueError(
            f"the prompt has {length} tokens, but this model's rotary frequencies or score scale change beyond "
            f"{min(limits)}: use fewer blocks"
        )


_KEYS = ["query", "layer", "head", "frequency"]


def _resolutions(layers: list[RawAttention], scale: float | None, per_frequency: bool) -> dict[str, _Resolution]:
    heads = _Resolution(partial(LastQuery.head_logits, scale=scale), partial(head_exclusion, scale=scale))
    if not per_frequency:
        return {"heads": heads}
    if all(raw.rotary is None for raw in layers):
        raise UnsupportedArchitecture("no layer of this model has rotary positions: there are no frequencies to score")
    pairs = _Resolution(partial(LastQuery.frequency_logits, scale=scale), partial(frequency_exclusion, scale=scale))
    return {"heads": heads, "frequencies": pairs}


def _slots(swaps: list[Swap], after: Float64[Tensor, "swaps *rows 2"]) -> _Columns:
    columns: _Columns = {}
    for (i, j), of_swap in zip(swaps, after, strict=True):
        columns |= {f"first_{i}_{j}": of_swap[..., 0], f"second_{i}_{j}": of_swap[..., 1]}
    return columns


def _fronts(prompts: list[BlockPrompt]) -> Int[Tensor, "prompts pos"]:
    """Tokens of each prompt before its suffix; swaps do not change their number."""
    return torch.stack([prompt.tokens()[: -len(prompt.suffix)] for prompt in prompts])
