"""Attention sinks: keys that most later queries of a layer attend to, found prompt by prompt.

A key is a sink of a layer on a prompt if its mean attention exceeds max(.15, 4 / n). The mean is over the heads of the
layer and over the queries that see the key and stand at least 8 tokens after it (in an encoder, before or after). n is
the mean number of keys that these queries see. A key with fewer than 16 such queries is undecided.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.heads.detectors.chance import one_or_by_layer
from tlspectral.models.hooking.strips import Strip
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, in_batches
from tlspectral.models.running.long_prompts import strips_for
from tlspectral.models.running.passes import read_patterns
from tlspectral.tables.progress import bar

LEAST, UNIFORM_TIMES = 0.15, 4.0
"""A sink gets more attention than `LEAST`, and more than `UNIFORM_TIMES` times uniform attention."""

DISTANCE, QUERIES = 8, 16
"""The queries that judge a key stand at least `DISTANCE` tokens away from it; at least `QUERIES` of them are needed."""

ByKey = dict[int, Float64[Tensor, "prompts pos"]]


@dataclass(frozen=True)
class Sinks:
    """How much attention each key of some prompts gets in some layers, and which keys are sinks.

    Attributes:
        share: from layer to a tensor [prompts, pos]: mean attention that each key gets from the queries that judge it;
            0 without such queries.
        n_seen: from layer to a tensor [prompts, pos]: mean number of keys that these queries see.
        decided: from layer to a mask: True for keys with enough such queries.
        n_keys: number of keys in all prompts together, without padding.
        least: the least share of a sink. `dataclasses.replace(sinks, least=.1)` gives the sinks at another value.
    """

    share: ByKey
    n_seen: ByKey
    decided: dict[int, Bool[Tensor, "prompts pos"]]
    n_keys: int
    least: float = LEAST

    @cached_property
    def found(self) -> dict[int, Bool[Tensor, "prompts pos"]]:
        """A dict from layer to a mask [prompts, pos]: True for the keys that are sinks. Undecided keys (fewer than 16
        queries) are False.
        """
        return {
            layer: keys & (self.share[layer] > (UNIFORM_TIMES / self.n_seen[layer].clamp_min(1)).clamp_min(self.least))
            for layer, keys in self.decided.items()
        }

    @property
    def noted(self) -> dict[str, Any]:
        """The entry `sinks` for the attrs of a table: a dict {"sinks": dict} of `least`, `n_keys`, `n_undecided` and
        `n_found`.

        `least` is the least share of a sink; the other values are numbers of keys.
        """
        undecided = {layer: self.n_keys - int(keys.sum()) for layer, keys in self.decided.items()}
        n_found = {layer: int(keys.sum()) for layer, keys in self.found.items()}
        counts = {"n_undecided": one_or_by_layer(undecided), "n_found": one_or_by_layer(n_found)}
        return {"sinks": {"least": self.least, "n_keys": self.n_keys, **counts}}

    def prompts(self, layer: int) -> Bool[Tensor, "prompts"]:
        """Return a mask [prompts]: True for prompts in which enough queries see some key of the layer; other prompts do
        not count.
        """
        return self.decided[layer].any(1)

    def require(self, layers: Iterable[int]) -> None:
        """Raise ValueError if no key of any of the layers is seen by enough queries to be judged as a sink."""
        if not any(bool(self.decided[layer].any()) for layer in layers):
            raise ValueError(
                f'sinks="found": no key has {QUERIES} queries that see it from {DISTANCE} or more tokens away: prompts '
                f"or windows of the layers are too short. Give prompts of {DISTANCE + QUERIES} tokens or more, or "
                'leave out sinks="found"'
            )


def asked_for_sinks(sinks: str | None, *, sink: bool = False) -> bool:
    """Return True if `sinks`, an argument of a public function, is "found", False if it is None.

    Raises ValueError for another value, or for "found" if `sink` (keep the first token) is True.
    """
    if not (sinks is None or (isinstance(sinks, str) and sinks == "found")):
        raise ValueError(
            f'sinks={shown(sinks)} is unknown: give sinks="found" to leave out attention sinks, or sinks=None'
        )
    if sinks is not None and sink:
        raise ValueError(
            'sink=True keeps the first key, but sinks="found" leaves out every attention sink, also the first key: '
            "give one of the two"
        )
    return sinks is not None


def found_sinks(view: AttentionView, packed: PackedTokens, layers: Iterable[int], at_once: int) -> Sinks:
    """Run the prompts `packed`, `at_once` in a batch, and return the attention sinks of `layers` as `Sinks`: keys that
    most later queries attend to.

    `view` is the open model. Raises UnsupportedArchitecture for a layer that exposes no attention pattern.
    """
    layers, (n_prompts, width) = sorted(layers), packed.tokens.shape
    share = {layer: torch.zeros(n_prompts, width, dtype=torch.float64) for layer in layers}

    def judging(layer: int, strip: Strip) -> tuple[Tensor, Tensor]:
        """Return two masks [query, key] of a strip: which keys queries see, and for which keys they judge."""
        behind = torch.arange(strip.start, strip.stop)[:, None] - torch.arange(strip.n_keys)
        far = (behind if view.causal else behind.abs()) >= DISTANCE
        seen = view.reader.seen_keys(view.model, layer, strip.n_keys, strip.start).cpu()
        # A query judges only if an indexer (if any) picks all of its keys: otherwise the keys that it sees are unknown.
        every = seen.sum(1) <= (view.reader.selected_keys(view.model, layer) or width)
        return seen, far & seen & every[:, None]

    def add(rows: slice, layer: int, pattern: Tensor, strip: Strip) -> None:
        counted = judging(layer, strip)[1] & packed.real[rows, strip.queries][:, :, None]
        attention = pattern.detach().float().mean(1).cpu().double()
        if strip.is_first:  # a batch that ran out of memory runs again
            share[layer][rows] = 0.0
        share[layer][rows, : strip.n_keys] += attention.masked_fill(~counted, 0.0).sum(1)

    def run(rows: slice) -> int:
        read_patterns(view, packed.tokens[rows], layers, partial(add, rows))
        return rows.stop - rows.start

    if layers:
        with bar(n_prompts, "attention sinks", "seq") as shown:
            for done in in_batches(n_prompts, at_once, run):
                shown.update(done)
    decided, n_seen = {}, {}
    real = packed.real.double()
    for layer in layers:
        n_queries, n_keys = torch.zeros(2, n_prompts, width, dtype=torch.float64)
        for strip in strips_for(view, width):
            seen, judges = judging(layer, strip)
            by_query = real[:, strip.queries]
            n_queries[:, : strip.n_keys] += by_query @ judges.double()
            n_keys[:, : strip.n_keys] += (by_query * seen.sum(1)) @ judges.double()
        n_seen[layer] = n_keys / n_queries.clamp_min(1)
        share[layer] /= n_queries.clamp_min(1)
        decided[layer] = (n_queries >= QUERIES) & packed.real
    return Sinks(share, n_seen, decided, int(packed.real.sum()))
