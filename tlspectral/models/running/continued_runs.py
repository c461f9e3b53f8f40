"""Replays from a position on: where edits act there alone, nothing before it changes.

Queries are of the position and of what follows it. Keys and values before it are the intact run's, kept in the model's
own cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.user_hooks import user_hooks
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import batch_on, in_batches, rows_of_pass, rows_of_scores
from tlspectral.models.running.growing_batch import BlockArguments, growing_batch
from tlspectral.models.running.key_value_cache import Prefill, joined, prefill
from tlspectral.models.running.partial_runs import IntactRun, begins_whole, noting_arguments, unembedding_only

# Relative root mean square of what the unembedding reads, in the intact run and behind the kept keys. Measured over the
# zoo in float32: 4e-7 at most. Where a position or a window is lost it is off by hundredths.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-5, 0.1


@dataclass(frozen=True)
class ContinuedRun:
    """An intact run that goes on from one position of all sequences, `first`, behind the keys and values of `read`.

    `arguments` are by layer what its block was given besides the residual stream, in the first replay of all layers.
    """

    intact: IntactRun
    first: int
    read: Prefill
    arguments: dict[int, BlockArguments] = field(default_factory=dict, repr=False, compare=False)

    @property
    def view(self) -> AttentionView:
        """The model."""
        return self.intact.view

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence that a replay computes."""
        return self.intact.n_tokens - self.first

    @property
    def n_keys(self) -> int:
        """Keys of the last query of a replay."""
        return self.intact.n_tokens

    @property
    def bytes_kept(self) -> int:
        """Size of the keys and values that a replay copies for each of its rows."""
        return self.read.bytes_of_prompt

    def replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]] = ()
    ) -> Float[Tensor, "rows predicted d_vocab"]:
        """Return the logits of `IntactRun.replay`, under hooks that see positions from `first` on and change no other.

        Scored positions before it are unembedded as the intact run had them.
        """
        return self._replay(layers, sequences, hooks, [])

    def _replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]], off: list[Tensor]
    ) -> Tensor:
        intact, copies = self.intact, len(layers)
        assert intact.unembedded is not None
        predicted, before = _positions(intact)[sequences], intact.unembedded[sequences]
        predicted = predicted.to(before.device)[..., None].repeat(copies, 1, 1)
        before = before.repeat(copies, 1, 1)

        def chosen(values: Tensor) -> Tensor:
            found = values.take_along_dim((predicted - self.first).clamp_min(0), dim=1)
            found = torch.where(predicted >= self.first, found, before)
            off.append((found - before).float().square().mean())
            return found

        rows = torch.arange(len(intact.tokens))[sequences]
        batch = growing_batch(self.view, layers, len(rows), self.arguments)
        rows = rows.repeat(copies)
        tokens = intact.tokens[rows, self.first :]
        with (
            checked_at_end(),
            self.view.hooks_on(batch.of_copies(hooks)),
            intact.joining(batch, sequences, self.first),
            evaluating(self.view.model),
            unembedding_only(self.view, chosen),
        ):
            return self.read.logits(tokens, rows, [*map(batch.alive, range(self.view.n_layers))])

    @torch.no_grad()
    def is_intact(self) -> bool:
        """Return whether a replay under no hooks is the intact run, as it is not where a window or position is lost."""
        intact, at_once = self.intact, rows_at_once(self)
        off: list[Tensor] = []
        blocks = self.view.blocks
        with noting_arguments(blocks, self.arguments, range(len(blocks))):
            for _ in in_batches(len(intact.tokens), at_once, lambda rows: self._replay([0], rows, (), off)):
                pass
        assert intact.unembedded is not None
        size = intact.unembedded.float().square().mean()
        half = intact.unembedded.dtype in (torch.float16, torch.bfloat16)
        allowed = (_TOLERANCE_OF_HALF if half else _TOLERANCE) ** 2
        return bool(torch.stack(off).max() <= allowed * size)


def continued_run(intact: IntactRun, first: int) -> ContinuedRun | None:
    """Return a run that goes on from a position, or None where all of each sequence has to be run.

    That is at position 0, in models whose later blocks need more than a stream and a cache, where no cache is kept or a
    step from it differs from the uncached pass (`prefill`, `ContinuedRun.is_intact`), and under hooks of the user,
    which expect all positions. The latest is kept for the next call.
    """
    view = intact.view
    if first <= 0 or begins_whole(view) or intact.unembedded is None:
        return None
    if first not in intact.continued:
        if user_hooks(view.model):
            return None
        at_once = rows_of_pass(view, first)
        reads = [*in_batches(len(intact.tokens), at_once, lambda rows: prefill(view, intact.tokens[rows, :first]))]
        read = joined(reads)
        found = None if read is None else ContinuedRun(intact, first, read)
        intact.continued.clear()
        intact.continued[first] = found if found is not None and found.is_intact() else None
    return intact.continued[first]


def rows_at_once(run: IntactRun | ContinuedRun) -> int:
    """Return how many rows of a replay the device has room for, by tokens, scores and the keys that are copied."""
    batch, by_scores = batch_on(run.view.device), rows_of_scores(run.view, run.n_tokens, run.n_keys)
    return max(1, min(batch.tokens // run.n_tokens, by_scores, batch.held // max(1, run.bytes_kept)))


def _positions(intact: IntactRun) -> Tensor:
    """Return the predicted positions of each sequence."""
    if not isinstance(intact.predicted, slice):
        return intact.predicted
    return torch.arange(intact.n_tokens)[intact.predicted].expand(len(intact.tokens), -1)
