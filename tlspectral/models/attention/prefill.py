"""Several continuations of one prompt: its keys and values are computed once and shared."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.attention.replay import logits_at, unembedding_only
from tlspectral.models.attention.threads import Hook, hooks_on
from tlspectral.models.attention.view import AttentionView, _evaluating

_LAST = slice(-1, None)


@dataclass(frozen=True)
class Prefill:
    """Prompts of one length that a model has read, with its key/value cache.

    Attributes:
        view: of the model.
        tokens: what it has read.
        cache: the model's own.
    """

    view: AttentionView
    tokens: Int[Tensor, "prompts pos"]
    cache: Any

    def last_logits(
        self, suffixes: Int[Tensor, "suffixes pos"], hooks: Iterable[Hook] = ()
    ) -> Float[Tensor, "rows d_vocab"]:
        """Logits of the last token of every prompt with every suffix behind it, without gradients.

        Row `prompt * len(suffixes) + suffix`. Hooks see the positions of the suffix alone, except that patterns and
        scores have a column for each key that the layer keeps.
        """
        rows = suffixes.repeat(len(self.tokens), 1).to(self.view.device)
        with _cached_pass(self.view, hooks):
            found = self.view._reader.continued_logits(self.view.model, self.cache, rows, len(suffixes))
        return found[:, -1]


def prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    """Run a model on prompts of one length, without gradients, and keep its keys and values.

    Args:
        view: of the model; hooks that are on it stay in force.
        tokens: the prompts.
        hooks: for this run.

    Returns:
        None where the model keeps no keys and values (native bridges).
    """
    with _cached_pass(view, hooks):
        cache = view._reader.prefill_cache(view.model, tokens.to(view.device))
    return None if cache is None else Prefill(view, tokens, cache)


def last_logits(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], hooks: Iterable[Hook] = ()
) -> Float[Tensor, "batch d_vocab"]:
    """Logits of the last tokens from a plain pass under hooks, without gradients and without a cache."""
    with torch.no_grad(), hooks_on(view.model, view.model.hook_dict, hooks):
        return logits_at(view, tokens, _LAST)[:, -1]


@contextmanager
def _cached_pass(view: AttentionView, hooks: Iterable[Hook]) -> Iterator[None]:
    model, points = view.model, view.model.hook_dict
    with torch.no_grad(), _evaluating(model), hooks_on(model, points, hooks), unembedding_only(view, _LAST):
        yield
