"""Runs of a model on prompts with several ends, reduced layer by layer to what their last queries see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.attention import AttentionView, RawAttention
from tlspectral.models.attention.replay import Prefill, last_logits, prefill
from tlspectral.positional.readout import ContextKeys, LastQuery, LastQueryReader

Reduce = Callable[[int, int, int, LastQuery, Tensor], None]

# A model's own eager attention holds about four matrices [heads, pos, pos] in float32 at a time.
_PATTERN_BYTES = 4 * 4
_BYTES_AT_ONCE = 2**28


@dataclass(frozen=True)
class QueryPasses:
    """The ends of some prompts and the model that reads them.

    Attributes:
        view: of the model.
        layers: its layers.
        suffixes: the ends, each 1-D token ids; the query is the last token.
    """

    view: AttentionView
    layers: list[RawAttention]
    suffixes: list[Int[Tensor, "_"]]

    def run(self, contexts: Int[Tensor, "prompts pos"], reduce: Reduce) -> dict[int, Float[Tensor, "prompts d_vocab"]]:
        """Read every context with every suffix behind it.

        Several suffixes share one pass over the contexts, whose keys and values are kept. For one suffix a plain pass
        is run, as hooks may refuse a cache, and also for models that keep none.

        Args:
            contexts: fronts of equal length.
            reduce: called with context, suffix, layer, `LastQuery` and the last row of the model's own pattern.

        Returns:
            Per suffix, logits of the last token.
        """
        if len(self.suffixes) > 1:
            front = ContextKeys()
            read = prefill(self.view, contexts, front.hooks(self.view))
            if read is not None:
                return self._continued(read, front, reduce)
        found = {}
        for number, suffix in enumerate(self.suffixes):

            def handed_on(layer: int, row: int, seen: LastQuery, pattern: Tensor, number: int = number) -> None:
                reduce(row, number, layer, seen, pattern)

            reader = LastQueryReader(self.view, self.layers, handed_on)
            tokens = torch.cat([contexts, suffix.expand(len(contexts), -1)], dim=1)
            found[number] = last_logits(self.view, tokens, reader.hooks())
            reader.require_all()
        return found

    def contexts_at_once(self, n_tokens: int) -> int:
        """Prompts of a length that are run in one batch, so that what the model holds for them stays bounded."""
        patterns = _PATTERN_BYTES * max(len(raw.w_q) for raw in self.layers) * n_tokens**2
        kept = self._kept_bytes(n_tokens) if len(self.suffixes) > 1 else 0
        return max(1, _BYTES_AT_ONCE // (patterns + kept))

    def _continued(self, read: Prefill, front: ContextKeys, reduce: Reduce) -> dict[int, Tensor]:
        found = {}
        n_prompts, n_tokens = read.tokens.shape
        at_once = max(1, _BYTES_AT_ONCE // (n_prompts * self._kept_bytes(n_tokens)))
        for numbers in self._groups(at_once):

            def handed_on(layer: int, row: int, seen: LastQuery, pattern: Tensor, numbers: list[int] = numbers) -> None:
                reduce(row // len(numbers), numbers[row % len(numbers)], layer, seen, pattern)

            reader = LastQueryReader(self.view, self.layers, handed_on, front, copies=len(numbers))
            ends = torch.stack([self.suffixes[number] for number in numbers])
            logits = read.last_logits(ends, reader.hooks()).unflatten(0, (n_prompts, len(numbers)))
            reader.require_all()
            found |= {number: logits[:, place] for place, number in enumerate(numbers)}
        return found

    def _groups(self, at_once: int) -> Iterator[list[int]]:
        """Suffixes of equal length, at most some at a time."""
        for length in sorted({len(suffix) for suffix in self.suffixes}):
            same = [number for number, suffix in enumerate(self.suffixes) if len(suffix) == length]
            yield from (same[start : start + at_once] for start in range(0, len(same), at_once))

    def _kept_bytes(self, n_tokens: int) -> int:
        """Keys and values of all layers for one prompt, and the keys once more."""
        widths = sum(raw.w_k.shape[0] * raw.w_k.shape[2] for raw in self.layers)
        return 3 * n_tokens * widths * self.layers[0].w_k.element_size()
