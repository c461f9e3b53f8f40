"""What every sender writes in a run. A head is held by its z: d_head numbers for a token in place of d_model.

Writes of heads are rebuilt by W_O where they are needed, for a few layers and tokens at a time. As each layer is then
rebuilt once for a window of receivers, and not for each layer of them, a window spans some layers where memory allows.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.hooks.circuits.graph import Graph
from tlspectral.models.running.batches import batch_on
from tlspectral.models.stream.writes import HeadWrites

# Measured on two cores: with fewer tokens or senders more time goes into reading W_O and what is summed, and windows of
# more layers take more sums of few senders.
_TOKENS = 64
_SENDERS = 64
_LAYERS = 8
_OF_HELD = 32  # share of what a batch may hold that rebuilt writes take
_OF_HELD_IN_WINDOW = 4


class Piece(NamedTuple):
    """What some senders write on some tokens."""

    senders: slice
    rows: slice
    tokens: slice
    written: Float[Tensor, "senders rows tokens d_model"]


@dataclass(frozen=True)
class HeldWrites:
    """What senders write, or a difference of it between two runs.

    Attributes:
        z: by layer, [heads, batch, pos, d_head], times the scale of the norm behind the attention.
        whole: of the other senders, by their place, [batch, pos, d_model].
    """

    graph: Graph
    z: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Tensor] = field(default_factory=dict)

    def note(self, sender: int, written: Float[Tensor, "batch pos d_model"], then: "HeldWrites | None" = None) -> None:
        """Keep a copy of what a sender writes, less what it wrote `then`, on one copy of the prompts or several."""
        self.whole[sender] = self._copied(written, None if then is None else then.whole[sender])

    def note_heads(
        self, layer: int, z: Float[Tensor, "batch pos heads d_head"], then: "HeldWrites | None" = None
    ) -> None:
        """Keep what the heads of a layer write, as `note` does."""
        by_head = self._writes(layer).scaled(z).permute(2, 0, 1, 3)
        self.z[layer] = self._copied(by_head, None if then is None else then.z[layer])

    def _copied(self, now: Float[Tensor, "*heads batch pos width"], then: Tensor | None) -> Tensor:
        weight = next(writes.w_o for writes in self.graph.writes if writes is not None)
        room = torch.empty(now.shape, dtype=weight.dtype, device=weight.device).copy_(now)
        if then is not None:
            room.unflatten(-3, (-1, then.shape[-3])).sub_(then.unsqueeze(-4))
        return room

    def less(self, other: "HeldWrites") -> None:
        """Subtract what is written in another run."""
        for mine, theirs in ((self.z, other.z), (self.whole, other.whole)):
            for place, held in mine.items():
                held.sub_(theirs[place])

    def each(self, change: Callable[[Tensor], Tensor]) -> "HeldWrites":
        """Return what a function, linear in the last axis, makes of all that is held, [*heads, batch, pos, width]."""
        z, whole = ({place: change(held) for place, held in held.items()} for held in (self.z, self.whole))
        return HeldWrites(self.graph, z, whole)

    def in_rows(self, n: int) -> "HeldWrites":
        """Return the same tokens as n rows."""
        return self.each(lambda held: held.reshape(*held.shape[:-3], n, -1, held.shape[-1]))

    @torch.no_grad()
    def written(
        self, senders: slice, rows: slice = slice(None), tokens: slice = slice(None)
    ) -> Float[Tensor, "senders rows tokens d_model"]:
        """Return what some senders write."""
        like = self.whole[0][rows, tokens]
        found = like.new_empty(senders.stop - senders.start, *like.shape)
        for layer, z in self.z.items():
            first = self.graph.n_before_layer[layer]
            start, stop = max(first, senders.start), min(first + len(z), senders.stop)
            if start < stop:
                heads = slice(start - first, stop - first)
                by_head = z[heads, rows, tokens].flatten(1, 2)
                room = found[start - senders.start : stop - senders.start].flatten(1, 2)
                torch.bmm(by_head, self._writes(layer).effective(heads).to(by_head), out=room)
        for place, written in self.whole.items():
            if senders.start <= place < senders.stop:
                found[place - senders.start] = written[rows, tokens]
        return found

    def pieces(self, senders: slice) -> Iterator[Piece]:
        """Yield what some senders write, piece by piece, so that few of their writes are held at once."""
        (n_rows, n_tokens, d_model), like = self.whole[0].shape, self.whole[0]
        groups = self._groups(senders)
        numbers = max((some.stop - some.start for some in groups), default=1) * d_model
        room = batch_on(like.device).held // _OF_HELD
        at_once = max(_TOKENS, room // (numbers * like.element_size()))
        step = max(1, at_once // n_tokens)
        for row in range(0, n_rows, step):
            rows = slice(row, min(row + step, n_rows))
            for token in range(0, n_tokens, at_once):
                tokens = slice(token, min(token + at_once, n_tokens))
                for some in groups:
                    yield Piece(some, rows, tokens, self.written(some, rows, tokens))

    def first_layers(self, receivers: Sequence[int]) -> Sequence[int]:
        """Return the receivers of the first layer or layers, for which streams are held together.

        These take no more than what is held of one run, or a share of what the device may hold; or they are one layer.
        """
        graph, (n_rows, n_tokens, d_model), like = self.graph, self.whole[0].shape, self.whole[0]
        held = batch_on(like.device).held // _OF_HELD_IN_WINDOW
        of_device = held // (n_rows * n_tokens * d_model * like.element_size())
        most = max(of_device, graph.numbers_held // d_model)
        layer = [graph.receivers[place].layer for place in receivers]
        ends = [at for at in range(1, len(layer) + 1) if at == len(layer) or layer[at] != layer[at - 1]]
        fitting = [end for end in ends[:_LAYERS] if end <= most]
        return receivers[: fitting[-1] if fitting else ends[0]]

    def _groups(self, senders: slice) -> list[slice]:
        """Return senders of consecutive layers together, up to some number of them."""
        inner = [end for end in self.graph.n_before_layer[1:] if senders.start < end < senders.stop]
        found, start = [], senders.start
        for end, behind in pairwise([*inner, senders.stop, senders.stop + _SENDERS + 1]):
            if behind - start > _SENDERS:
                found.append(slice(start, end))
                start = end
        return found

    def _writes(self, layer: int) -> HeadWrites:
        writes = self.graph.writes[layer]
        assert writes is not None
        return writes


class Window:
    """What cut edges carry to the receivers of one or some layers, summed as their senders write."""

    def __init__(
        self, written: HeldWrites, receivers: Sequence[int], cut: Float[Tensor, "circuits receivers senders"]
    ) -> None:
        n_rows, n_tokens, d_model = written.whole[0].shape
        self.receivers, self._written = receivers, written
        self._n_before = [written.graph.n_before(written.graph.receivers[place]) for place in receivers]
        self._cut, self._done = cut[:, receivers], 0
        self._sums = written.whole[0].new_zeros(len(receivers), n_rows, n_tokens, d_model)

    def carried(self, receivers: Sequence[int]) -> Float[Tensor, "chosen batch pos d_model"]:
        """Return what is carried to receivers of one kind, once all that they read is written."""
        first = self.receivers.index(receivers[0])
        if self._done < self._n_before[first]:
            self._add(slice(self._done, self._n_before[first]))
        return self._sums[first : first + len(receivers)]

    def _add(self, senders: slice) -> None:
        """Add what some senders write, to the receivers that read all of them."""
        reading = slice(bisect_left(self._n_before, senders.stop), None)
        by_circuit = self._sums[reading].unflatten(1, (len(self._cut), -1)).flatten(2, 3)
        for some, circuits, tokens, written in self._written.in_rows(len(self._cut)).pieces(senders):
            sums = by_circuit[:, circuits, tokens].flatten(2).transpose(0, 1)
            sums.baddbmm_(self._cut[circuits, reading, some], written.flatten(2).transpose(0, 1))
        self._done = senders.stop
