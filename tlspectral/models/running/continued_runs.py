"""Replays from one position on, for edits that act only at or after that position.

Queries are computed only from that position on. Keys and values before it come from the run without edits, kept in the
model's own key/value cache.
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
from tlspectral.models.running.long_prompts import is_long
from tlspectral.models.running.partial_runs import IntactRun, begins_whole, noting_arguments, unembedding_only

# Relative root mean square difference of the unembedding's input, between the intact run and a run after kept keys.
# Measured over the zoo in float32: 4e-7 at most. If a position or a window is lost it is off by hundredths.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-5, 0.1


@dataclass(frozen=True)
class ContinuedRun:
    """A run without edits that can be continued from one position of all sequences.

    intact: the run without edits.
    first: the position.
    read: keys and values before it.
    arguments: from layer to the shapes of its block's arguments besides the residual stream, from the first replay of
    all layers.
    """

    intact: IntactRun
    first: int
    read: Prefill
    arguments: dict[int, BlockArguments] = field(default_factory=dict, repr=False, compare=False)

    @property
    def view(self) -> AttentionView:
        """The view of the model that was run."""
        return self.intact.view

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence that a replay (another run from `first` on, under hooks) computes."""
        return self.intact.n_tokens - self.first

    @property
    def n_keys(self) -> int:
        """Number of keys of the last query in a replay: all tokens of the sequence."""
        return self.intact.n_tokens

    @property
    def bytes_kept(self) -> int:
        """Bytes of keys and values that a replay copies for each of its rows."""
        return self.read.bytes_of_prompt

    def replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]] = ()
    ) -> Float[Tensor, "rows predicted d_vocab"]:
        """Run copies of some sequences from position `first` on, each copy from its own layer on, and return their
        logits.

        layers: for each copy of the sequences the layer at which it begins, in ascending order.
        sequences: slice of the stored sequences.
        hooks: pairs of a slice of copies and the hooks that act only on them. They see only positions from `first` on
        and may edit only these.

        Logits of earlier positions come from the run without edits. Rows are one whole copy after another, as in
        `IntactRun.replay`.
        """
        return self._replay(layers, sequences, hooks, [])

    def _replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]], off: list[Tensor]
    ) -> Tensor:
        """Return the logits of `replay`, and append to `off` how far the replay is from the intact run.

        layers: for each copy the layer at which it begins. sequences: slice of the stored sequences. hooks: pairs of a
        slice of copies and their hooks. off: a list, to which a tensor is appended: the mean squared difference of the
        unembedding's input.
        """
        intact, copies = self.intact, len(layers)
        assert intact.unembedded is not None
        predicted, before = _positions(intact)[sequences], intact.unembedded[sequences]
        predicted = predicted.to(before.device)[..., None].repeat(copies, 1, 1)
        before = before.repeat(copies, 1, 1)

        def chosen(values: Tensor) -> Tensor:
            selected = values.take_along_dim((predicted - self.first).clamp_min(0), dim=1)
            selected = torch.where(predicted >= self.first, selected, before)
            off.append((selected - before).float().square().mean())
            return selected

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
        """Run a replay without hooks and return True if it gives the intact run up to rounding; False if a window or
        position is lost.
        """
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
    """Return a run that continues an intact run from position `first`, or None if whole sequences have to be run.

    It is None at position 0; if so many queries follow that they run strip by strip; if later layers need more than a
    stream and a cache; if no cache is kept or a cached step differs from an uncached pass; and under hooks of the user,
    which expect all positions. The latest result is kept in `intact.continued` for the next call.
    """
    view = intact.view
    if first <= 0 or is_long(intact.n_tokens - first) or begins_whole(view) or intact.unembedded is None:
        return None
    if first not in intact.continued:
        if user_hooks(view.model):
            return None
        at_once = rows_of_pass(view, first)
        reads = [*in_batches(len(intact.tokens), at_once, lambda rows: prefill(view, intact.tokens[rows, :first]))]
        read = joined(reads)
        continued = None if read is None else ContinuedRun(intact, first, read)
        intact.continued.clear()
        intact.continued[first] = continued if continued is not None and continued.is_intact() else None
    return intact.continued[first]


def rows_at_once(run: IntactRun | ContinuedRun) -> int:
    """Return how many rows of a replay of this run fit on the device, at least 1, by tokens, scores and copied keys.

    A replay is another run from a later layer or position on, under hooks.
    """
    batch, by_scores = batch_on(run.view.device), rows_of_scores(run.view, run.n_tokens, run.n_keys)
    return max(1, min(batch.tokens // run.n_tokens, by_scores, batch.held // max(1, run.bytes_kept)))


def _positions(intact: IntactRun) -> Tensor:
    """Return the predicted positions of each sequence of the run `intact`, a tensor [sequences, predicted]."""
    if not isinstance(intact.predicted, slice):
        return intact.predicted
    return torch.arange(intact.n_tokens)[intact.predicted].expand(len(intact.tokens), -1)
