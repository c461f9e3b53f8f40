"""`HeldWrites`: the writes of all senders in a run. A head is stored by its z, its output before W_O, to save memory.

Writes of heads are rebuilt by W_O for a few layers and tokens at a time. A `Window` collects them for the receivers of
several layers at once, so that each sender is rebuilt once per window.
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

# Fastest values measured on two cores. Smaller numbers of tokens or senders read W_O more often; windows of more layers
# make more sums over few senders.
_TOKENS = 64  # fewest tokens of a piece
_SENDERS = 64  # most senders of a piece
_LAYERS = 8  # most layers of a window
_OF_HELD = 32  # rebuilt writes take 1/32 of the memory of a batch
_OF_HELD_IN_WINDOW = 4  # the sums of a window take 1/4 of it


class Piece(NamedTuple):
    """The writes of some senders on some rows and tokens.

    Attributes:
        senders, rows, tokens: which entries of `HeldWrites` these are, as slices.
        written: the vectors that are added to the residual stream.
    """

    senders: slice
    rows: slice
    tokens: slice
    written: Float[Tensor, "senders rows tokens d_model"]


@dataclass(frozen=True)
class HeldWrites:
    """The writes of all senders (heads, mixers, MLPs, embedding) in a run, or their difference between two runs.

    Attributes:
        graph: the senders and receivers.
        z: heads' outputs before W_O, by layer, [heads, batch, pos, d_head], times the scale of a norm behind attention.
        whole: writes of all other senders, by index of the sender, [batch, pos, d_model].
    """

    graph: Graph
    z: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Tensor] = field(default_factory=dict)

    def note(self, sender: int, written: Float[Tensor, "batch pos d_model"], then: "HeldWrites | None" = None) -> None:
        """Store a copy of a sender's write, minus its write in the run `then` if that is given.

        `sender` is the index of the sender, which is not a head. The batch axis of `written` may have several copies of
        the prompts of `then`.
        """
        self.whole[sender] = self._copied(written, None if then is None else then.whole[sender])

    def note_heads(
        self, layer: int, z: Float[Tensor, "batch pos heads d_head"], then: "HeldWrites | None" = None
    ) -> None:
        """Store a copy of z of the heads of a layer, minus their z in the run `then` if that is given.

        z is the heads' output before W_O; it is stored times the scale of a norm behind the attention. The batch axis
        of `z` may have several copies of the prompts of `then`.
        """
        by_head = self._writes(layer).scaled(z).permute(2, 0, 1, 3)
        self.z[layer] = self._copied(by_head, None if then is None else then.z[layer])

    def _copied(self, now: Float[Tensor, "*heads batch pos width"], then: Tensor | None) -> Tensor:
        """Return a copy of `now`, minus `then` for each copy of the prompts, with dtype and device of W_O.

        `then` is the same quantity in another run with one copy of the prompts; None subtracts nothing.
        """
        weight = next(writes.w_o for writes in self.graph.writes if writes is not None)
        room = torch.empty(now.shape, dtype=weight.dtype, device=weight.device).copy_(now)
        if then is not None:
            room.unflatten(-3, (-1, then.shape[-3])).sub_(then.unsqueeze(-4))
        return room

    def less(self, other: "HeldWrites") -> None:
        """Subtract the writes of another run from these writes, in place. `other` is not changed."""
        for mine, theirs in ((self.z, other.z), (self.whole, other.whole)):
            for place, held in mine.items():
                held.sub_(theirs[place])

    def each(self, change: Callable[[Tensor], Tensor]) -> "HeldWrites":
        """Return new writes: `change` applied to every stored tensor, [*heads, batch, pos, width].

        These writes stay as they are. `change` must be linear and keep the last axis, because z is multiplied by W_O
        later.
        """
        z, whole = ({place: change(held) for place, held in held.items()} for held in (self.z, self.whole))
        return HeldWrites(self.graph, z, whole)

    def in_rows(self, n: int) -> "HeldWrites":
        """Return the same writes with batch and positions reshaped to n rows.

        The new object shares its memory with these writes where reshaping allows it.
        """
        return self.each(lambda held: held.reshape(*held.shape[:-3], n, -1, held.shape[-1]))

    @torch.no_grad()
    def written(
        self, senders: slice, rows: slice = slice(None), tokens: slice = slice(None)
    ) -> Float[Tensor, "senders rows tokens d_model"]:
        """Return the vectors that some senders add to the residual stream, on some rows and tokens, as a new tensor.

        `senders`, `rows` and `tokens` are slices; default: all rows and tokens. Writes of heads are computed from z by
        W_O.
        """
        like = self.whole[0][rows, tokens]
        writes = like.new_empty(senders.stop - senders.start, *like.shape)
        for layer, z in self.z.items():
            first = self.graph.n_before_layer[layer]
            start, stop = max(first, senders.start), min(first + len(z), senders.stop)
            if start < stop:
                heads = slice(start - first, stop - first)
                by_head = z[heads, rows, tokens].flatten(1, 2)
                room = writes[start - senders.start : stop - senders.start].flatten(1, 2)
                torch.bmm(by_head, self._writes(layer).effective(heads).to(by_head), out=room)
        for place, written in self.whole.items():
            if senders.start <= place < senders.stop:
                writes[place - senders.start] = written[rows, tokens]
        return writes

    def pieces(self, senders: slice) -> Iterator[Piece]:
        """Yield the writes of the senders in this slice as `Piece`s that fit into memory.

        A piece has `.senders`, `.rows`, `.tokens` (slices) and `.written` (the vectors). Together the pieces cover
        every sender, row and token once.
        """
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
        """Return the receivers of the first layer, or of the first few layers whose streams fit into memory together.

        `receivers` are indices into `Graph.receivers` in the order of a forward pass; the result is the beginning of
        this list. The limit is the memory of one run's writes, or a share of a batch's memory.
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
        """Divide a slice of senders into slices of whole consecutive layers with up to 64 senders each.

        Return the list of slices. A layer with more than 64 senders is one slice.
        """
        inner = [end for end in self.graph.n_before_layer[1:] if senders.start < end < senders.stop]
        groups, start = [], senders.start
        for end, behind in pairwise([*inner, senders.stop, senders.stop + _SENDERS + 1]):
            if behind - start > _SENDERS:
                groups.append(slice(start, end))
                start = end
        return groups

    def _writes(self, layer: int) -> HeadWrites:
        """Return the `HeadWrites` of a layer with heads: the maps from their z to the residual stream."""
        writes = self.graph.writes[layer]
        assert writes is not None
        return writes


class Window:
    """The change that cut edges make to the residual streams of the receivers of a few layers.

    It is summed over senders while the run goes on, because later senders have not written yet. `receivers` are the
    indices of these receivers, `written` the writes of the run so far, `cut` the share of each edge that is cut.
    """

    def __init__(
        self, written: HeldWrites, receivers: Sequence[int], cut: Float[Tensor, "circuits receivers senders"]
    ) -> None:
        """Prepare the sums for the receivers with these indices.

        `written` are the writes of the run so far. `cut` has for each circuit the share of each edge that is cut, 0 to
        1.
        """
        n_rows, n_tokens, d_model = written.whole[0].shape
        self.receivers, self._written = receivers, written
        self._n_before = [written.graph.n_before(written.graph.receivers[place]) for place in receivers]
        self._cut, self._done = cut[:, receivers], 0
        self._sums = written.whole[0].new_zeros(len(receivers), n_rows, n_tokens, d_model)

    def carried(self, receivers: Sequence[int]) -> Float[Tensor, "chosen batch pos d_model"]:
        """Return the tensors to subtract from the streams of receivers of one kind (given by indices).

        The result is a view of the sums. Each tensor is a sum over the receiver's cut edges. Their senders must have
        written. Sums that are not complete yet are completed first.
        """
        first = self.receivers.index(receivers[0])
        if self._done < self._n_before[first]:
            self._add(slice(self._done, self._n_before[first]))
        return self._sums[first : first + len(receivers)]

    def _add(self, senders: slice) -> None:
        """Add the writes of the senders in this slice, in place, to the sums of all receivers that read them."""
        reading = slice(bisect_left(self._n_before, senders.stop), None)
        by_circuit = self._sums[reading].unflatten(1, (len(self._cut), -1)).flatten(2, 3)
        for some, circuits, tokens, written in self._written.in_rows(len(self._cut)).pieces(senders):
            sums = by_circuit[:, circuits, tokens].flatten(2).transpose(0, 1)
            sums.baddbmm_(self._cut[circuits, reading, some], written.flatten(2).transpose(0, 1))
        self._done = senders.stop
