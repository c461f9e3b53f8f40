"""Passes of a model over contexts with several suffixes, reduced layer by layer to what the last queries see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.attention import AttentionView, RawAttention
from tlspectral.models.attention.replay import last_logits, prefill
from tlspectral.positional.readout import ContextKeys, LastQuery, LastQueryReader, context_hooks

Reduce = Callable[[int, int, int, LastQuery, Tensor], None]

# A model's own eager attention holds about four matrices [heads, pos, pos] in float32 at a time.
_PATTERN_BYTES = 4 * 4
_BYTES_AT_ONCE = 2**28


@dataclass(frozen=True)
class QueryPasses:
    """A model and the suffixes that it reads behind each context; the query is the last token of a suffix."""

    view: AttentionView
    layers: dict[int, RawAttention]
    suffixes: list[Int[Tensor, "_"]]

    def run(self, contexts: Int[Tensor, "prompts pos"], reduce: Reduce) -> dict[int, Float[Tensor, "prompts d_vocab"]]:
        """Read every context with every suffix behind it.

        Several suffixes share one pass over the contexts, whose keys and values are kept. For one suffix a plain pass
        is run, as hooks may refuse a cache, and for each of several where the model keeps none. `reduce` is called with
        context, suffix, layer, `LastQuery` and the last row of the model's own pattern.

        Returns:
            Per suffix, logits of the last token.
        """
        front: ContextKeys = {}
        read, at_once = None, 1
        if len(self.suffixes) > 1:
            read = prefill(self.view, contexts, context_hooks(self.view, front))
        if read is not None:
            at_once = max(1, _BYTES_AT_ONCE // (len(contexts) * self._cache_bytes(contexts.shape[1])))
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
        """Number of prompts of a length in one batch, so that the memory for their patterns and keys stays bounded."""
        patterns = _PATTERN_BYTES * max(len(raw.w_q) for raw in self.layers.values()) * n_tokens**2
        cached = self._cache_bytes(n_tokens) if len(self.suffixes) > 1 else 0
        return max(1, _BYTES_AT_ONCE // (patterns + cached))

    def _groups(self, at_once: int) -> Iterator[list[int]]:
        """Indices of suffixes of equal length, at most `at_once` of them at a time."""
        for length in sorted({len(suffix) for suffix in self.suffixes}):
            same = [number for number, suffix in enumerate(self.suffixes) if len(suffix) == length]
            yield from (same[start : start + at_once] for start in range(0, len(same), at_once))

    def _cache_bytes(self, n_tokens: int) -> int:
        """Bytes of the keys and values of all layers for one prompt, and of the keys once more."""
        widths = sum(raw.w_k.shape[0] * raw.w_k.shape[2] for raw in self.layers.values())
        return 3 * n_tokens * widths * next(iter(self.layers.values())).w_k.element_size()
