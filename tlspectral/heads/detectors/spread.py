"""How widely and how far a head attends: to all keys, without the first token of a prompt, and without its sinks.

Each measure is a ratio N / D of sums over prompts, with the standard error of a ratio. For a mean over prompts, N of a
prompt is its mean over queries and D is 1.
"""

from collections.abc import Callable, Sequence
from math import nan

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.heads.detectors.chance import ByLayer, SeenKeys, one_or_by_layer
from tlspectral.heads.detectors.sinks import Sinks
from tlspectral.models.hooking.strips import Strip
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.long_prompts import strips_for

MEASURES = ("entropy", "distance", "start_share", "entropy_sinkless", "distance_sinkless", "sinkless_rows")
WITHOUT_SINKS = ("sink_share", "entropy_no_sinks", "distance_no_sinks", "no_sinks_rows")
"""Measures without the attention sinks, over prompts in which some key of the layer could be judged."""

KEPT = 0.05
"""The least attention to the remaining keys for a row's entropy to count, when some keys are left out."""

Parts = Float64[Tensor, "2 measures batch heads"]
"""N and D of each measure, for each prompt and head."""


class Spread:
    """Entropy, distance and start share of the attention of all heads, as sums that grow batch by batch.

    Each measure is a ratio N / D of sums over prompts. `view` is the open model, `prompts` are the prompts to run.
    `copies` is the number of prompts equal to each prompt (itself included), which count as one observation; None: all
    differ. With `sinks`, the measures without attention sinks (`WITHOUT_SINKS`) follow.
    """

    def __init__(
        self,
        view: AttentionView,
        prompts: PackedTokens,
        copies: Float64[Tensor, "sequences"] | None,
        sinks: Sinks | None = None,
    ):
        self.view, self.sinks = view, sinks
        self.queries = prompts.real & (torch.arange(prompts.tokens.shape[1]) >= 2)
        self.times = torch.ones(len(prompts.tokens), dtype=torch.float64) if copies is None else copies
        self._of_batch: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}  # by layer, [N, D, then N N, N D, D D times copies; measures; heads]

    def read(self, layer: int, pattern: Float[Tensor, "batch heads query key"], strip: Strip, rows: slice) -> None:
        """Compute the measures of layer `layer` for the prompts in `rows` from its attention `pattern` in a strip, and
        store them until `end_batch`. Measures of all strips of a prompt add up.

        A measure is a numerator and a denominator for each prompt and head. Nothing is returned.
        """
        parts = _parts(pattern, self.queries[rows], strip)
        if self.sinks is not None:
            counted = self._queries_without_sinks(layer)[rows]
            parts = torch.cat([parts, _parts_without(pattern, counted, self.sinks.found[layer][rows], strip)], dim=1)
        self._of_batch[layer] = parts if strip.is_first else self._of_batch[layer] + parts

    def _queries_without_sinks(self, layer: int) -> Bool[Tensor, "sequences query"]:
        """Return a mask [sequences, query]: True for queries (real tokens from position 2 on) of prompts that can be
        judged for attention sinks in layer `layer`.

        A prompt can be judged if enough of its queries see some key.
        """
        assert self.sinks is not None
        return self.queries & self.sinks.prompts(layer)[:, None]

    def end_batch(self, rows: slice) -> None:
        """Add the stored measures of the prompts in `rows` to the sums, after all layers have been read, and forget
        them.
        """
        for layer, parts in self._of_batch.items():
            self._sums[layer] = _moments(parts, self.times[rows]) + self._sums.get(layer, 0)
        self._of_batch.clear()

    def measured(self) -> dict[str, Float64[np.ndarray, " heads"]]:
        """Return a dict of arrays [heads]: each measure, such as "entropy" (nats), and its standard error as
        "entropy_se".

        The standard error is over distinct prompts, NaN for fewer than two.
        """
        sums = torch.cat([self._sums[layer] for layer in self.view.layers], dim=-1)
        over = sums[0] / sums[1]
        squares = sums[2] - 2 * over * sums[3] + over.square() * sums[4]
        n = torch.cat([self._n_distinct(layer) for layer in self.view.layers], dim=-1)
        factor = torch.where(n > 1, n / (n - 1), torch.nan)
        error = (factor * squares.clamp_min(0)).sqrt() / sums[1]
        columns: dict[str, Float64[np.ndarray, " heads"]] = {}
        for place, name in enumerate(MEASURES if self.sinks is None else MEASURES + WITHOUT_SINKS):
            columns |= {name: over[place].numpy(), f"{name}_se": error[place].numpy()}
        return columns

    def _n_distinct(self, layer: int) -> Float64[Tensor, "measures heads"]:
        """Return how many distinct prompts count for each measure of a layer, [measures, heads] with equal columns."""
        counting = [self.queries] * len(MEASURES)
        counting += [] if self.sinks is None else [self._queries_without_sinks(layer)] * len(WITHOUT_SINKS)
        n = torch.stack([(queries.any(1) / self.times).sum().round() for queries in counting])
        return n[:, None].expand(-1, self._sums[layer].shape[-1])

    def uniform(self, seen: SeenKeys) -> dict[str, ByLayer]:
        """Return a dict from measure to its value for uniform attention to the keys that a query sees (`seen`).

        A value is one number, or a dict by layer if layers differ. None where no prompt counts.
        """
        all_strips = strips_for(self.view, self.queries.shape[1])
        distinct = _distinct(self.queries)

        def of_masks(parts: Callable[[int, Tensor, Strip], Tensor]) -> list[Tensor]:
            """Return the measures of each mask: the sums over strips of `parts(mask, uniform attention, strip)`."""
            by_strip = [
                [parts(place, pattern[None, None].float(), strip) for place, pattern in enumerate(seen.uniform(strip))]
                for strip in all_strips
            ]
            return [_sum(parts_of_mask) for parts_of_mask in zip(*by_strip, strict=True)]

        def over_prompts(place: int, pattern: Tensor, strip: Strip) -> Tensor:
            return _sum([times * _parts(pattern, counted[None], strip) for counted, times in distinct])

        values = [_ratios(parts) for parts in of_masks(over_prompts)]
        levels = {name: seen.by_layer([ratios[place] for ratios in values]) for place, name in enumerate(MEASURES)}
        if self.sinks is None:
            return levels
        by_layer = {}
        for layer, mask in seen.mask_of.items():
            judged = torch.cat([self._queries_without_sinks(layer), self.sinks.found[layer]], dim=1)
            prompts = [(*row[None].chunk(2, dim=1), times) for row, times in _distinct(judged)]
            without = [
                times * _parts_without(seen.uniform(strip)[mask][None, None].float(), counted, left_out, strip)
                for strip in all_strips
                for counted, left_out, times in prompts
            ]
            by_layer[layer] = _ratios(_sum(without))
        of_layers = enumerate(WITHOUT_SINKS)
        return levels | {
            name: one_or_by_layer(
                {layer: nan if layer in seen.picked else ratios[place] for layer, ratios in by_layer.items()}
            )
            for place, name in of_layers
        }


def _distinct(rows: Bool[Tensor, "prompts columns"]) -> list[tuple[Tensor, int]]:
    """Return a list of (row, count): each distinct row of a mask [prompts, columns], and the number of prompts with
    this row.
    """
    distinct, times = torch.unique(rows, dim=0, return_counts=True)
    return list(zip(distinct, times.tolist(), strict=True))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return parts[0] if len(parts) == 1 else torch.stack([*parts]).sum(0)


def _ratios(parts: Float64[Tensor, "2 measures batch heads"]) -> list[float]:
    """Return the measures of a single head as a list, from the numerators and denominators in `parts`; NaN where no
    prompt counts.
    """
    above, below = parts[..., 0, 0]
    return (above / below).tolist()


def _parts(pattern: Float[Tensor, "batch heads query key"], counted: Bool[Tensor, "batch pos"], strip: Strip) -> Parts:
    """Return a tensor [2, measures, batch, heads]: numerator and denominator of the six `MEASURES` for each prompt and
    head. Those of all strips add up.

    These are entropy, distance and start share of the attention, entropy and distance without the first token, and the
    share of rows that count for these. `pattern` is the attention of a layer in a strip; `counted` marks the queries of
    the whole prompt that count.
    """
    weights = pattern.detach().float()
    behind = _distances(strip, pattern)[:, 1:]
    first, rest, far, spread, kept, within = _rows_without(weights[..., 0], weights[..., 1:], behind)
    query = torch.arange(strip.start, strip.stop, dtype=torch.float64)
    rows = torch.stack([spread - torch.xlogy(first, first), far + first * query, first, kept, within, far, rest])
    sums = (rows * counted[:, None, strip.queries]).sum(-1)  # [rows, batch, heads]
    means, present = _means(sums[:4], counted, strip)
    return torch.stack(
        [
            torch.stack([means[0], means[1], means[2], sums[4], sums[5], means[3]]),
            torch.stack([present, present, present, sums[3], sums[6], present]),
        ]
    )


def _parts_without(
    pattern: Float[Tensor, "#batch heads query key"],
    counted: Bool[Tensor, "batch pos"],
    left_out: Bool[Tensor, "batch pos"],
    strip: Strip,
) -> Parts:
    """Return a tensor [2, measures, batch, heads]: numerator and denominator of the four measures `WITHOUT_SINKS` for
    each prompt and head. Those of all strips add up.

    These are the attention to the sinks, entropy and distance without them, and the share of rows that count for these.
    `left_out` marks the sinks, `counted` the queries that count, both of the whole prompt; `pattern` is the attention
    of a layer in a strip.
    """
    weights = pattern.detach().float()
    sinks = left_out[:, None, None, : strip.n_keys].to(pattern.device)
    left = weights.masked_fill(~sinks, 0.0).sum(-1)
    behind = _distances(strip, pattern)
    left, rest, far, _, kept, within = _rows_without(left, weights.masked_fill(sinks, 0.0), behind)
    sums = (torch.stack([left, kept, within, far, rest]) * counted[:, None, strip.queries]).sum(-1)
    (share, kept_rows), present = _means(sums[:2], counted, strip)
    return torch.stack(
        [torch.stack([share, sums[2], sums[3], kept_rows]), torch.stack([present, sums[1], sums[4], present])]
    )


def _distances(strip: Strip, like: Tensor) -> Float[Tensor, "query key"]:
    """Return how many tokens lie between each query and key of a strip, on the device of `like`."""
    query, key = (torch.arange(end, device=like.device) for end in (strip.stop, strip.n_keys))
    return (query[strip.start :, None] - key).abs().float()


def _rows_without(
    left: Float[Tensor, "batch heads query"], remaining: Float[Tensor, "batch heads query key"], behind: Tensor
) -> tuple[Float64[Tensor, "batch heads query"], ...]:
    """Return six tensors with an entry for each row of attention (a query), when some keys are left out.

    `left` is the attention to the left-out keys, `remaining` to the remaining keys, `behind` their distance [query,
    key]. The tensors: `left`; the sum over the remaining keys; their attention times distance; their sum of -a log a;
    whether they get at least .05 (0 or 1); if so, the entropy of the remaining attention scaled to 1, else 0.
    """
    by_row = [left, remaining.sum(-1), (remaining * behind).sum(-1), -torch.xlogy(remaining, remaining).sum(-1)]
    left, rest, far, spread = torch.stack(by_row).cpu().double()
    kept = (rest >= KEPT).double()
    within = kept * (spread / rest.clamp_min(KEPT) + rest.clamp_min(KEPT).log())
    return left, rest, far, spread, kept, within


def _means(
    sums: Float64[Tensor, "rows batch heads"], counted: Bool[Tensor, "batch pos"], strip: Strip
) -> tuple[Float64[Tensor, "rows batch heads"], Float64[Tensor, "batch heads"]]:
    """Return two tensors: the means of `sums` over the queries that `counted` marks, and 1 for each prompt with such a
    query, else 0.

    `sums` are sums over the queries of a strip. Each is divided by the number of queries of the whole prompt, and only
    the first strip gives the 1, so that both add up over strips.
    """
    n_queries: Int[Tensor, "batch 1"] = counted.sum(1)[:, None]
    present = (n_queries > 0).double() * strip.is_first
    return sums / n_queries.clamp_min(1), present.expand_as(sums[0])


def _moments(
    parts: Float64[Tensor, "2 measures batch heads"], times: Float64[Tensor, "batch"]
) -> Float64[Tensor, "5 measures heads"]:
    """Return sums over a batch of N, D, N N, N D and D D, [5, measures, heads], for the standard error of the ratio N /
    D.

    `parts` has N and D of each measure, prompt and head. Products are multiplied by `times`, the copies of a prompt.
    """
    numerator, denominator = parts
    products = torch.stack([numerator.square(), numerator * denominator, denominator.square()])
    return torch.cat([parts.sum(2), (products * times[:, None]).sum(2)])
