"""Measure the exact effect of cutting each edge, on a task or on attention, and return table columns."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64_on_cpu, summed
from tlspectral.heads.composition import composition_into
from tlspectral.hooks.edges.cut import Cut, ReceiverInput, receiver_inputs
from tlspectral.hooks.edges.reached import Reached
from tlspectral.hooks.edges.senders import CachedRun, Sender
from tlspectral.models.attention.head_scores import HeadScores, rotation_tables
from tlspectral.models.attention.run_scores import require_own_pattern, visible_keys
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import LayerSettings, require_even_scale
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.models.stream.mlp import mlp_reads
from tlspectral.models.stream.writes import INPUT_POINTS, Cast, Input, LayerReads, change_of_reads, layer_reads
from tlspectral.selection.node_names import head_name
from tlspectral.tasks.control_tests import beside_control, draws_floor
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.task_sequences import Replays, TaskSequences, replayed_values

Deltas = Float64[np.ndarray, "edges draws sequences"]


class Edge(NamedTuple):
    """A sender and a receiver: one row of the table of `edge_effects`.

    Attributes:
        sender: the head, MLP, mixer or embedding that writes.
        end: the receiver.
        head: head of the receiver whose attention is measured; for a task the first head that the user named, -1 for an
            MLP and the logits.
        place: name of the position at which the edge is cut; None for all positions.
    """

    sender: Sender
    end: Reached
    head: int
    place: str | None

    @property
    def names(self) -> dict[str, Any]:
        """Dict with the columns of the table that name the edge.

        Keys: `sender, layer, head` (of the sender), `receiver, receiver_layer, receiver_head, input` ("q", "k", "v",
        "mlp" or "logits"), `reached` (heads that the edit changes) and, for an edge at one position, `position`.
        """
        sender, receiver = self.sender, self.end.receiver
        return {
            "sender": sender.name,
            "layer": sender.layer,
            "head": sender.head,
            "receiver": receiver.name,
            "receiver_layer": receiver.layer,
            "receiver_head": self.head,
            "input": receiver.input,
            "reached": ", ".join(head_name(receiver.layer, head) for head in self.end.heads),
            **({} if self.place is None else {"position": self.place}),
        }


def edges_between(
    view: AttentionView, senders: list[Sender], ends: list[Reached], *, each_head: bool, places: list[str | None]
) -> list[Edge]:
    """Return a list of the edges from each sender to each later receiver in `ends`, at each position in `places`.

    `view` is the model. `each_head`: True makes one edge per head that the user named; False one edge for all heads of
    the receiver. `places`: names of positions at which edges are cut; [None] cuts at all positions together.
    """
    edges = []
    for end in ends:
        receiver, heads = end.receiver, end.asked if each_head else end.asked[:1] or (-1,)
        mlp = mlp_reads(view, receiver.layer) if receiver.input == "mlp" else None
        own = ("head", "mix") if mlp is not None and not mlp.parallel else ()
        before = [
            sender
            for sender in senders
            if sender.layer < receiver.layer or (sender.layer == receiver.layer and sender.kind in own)
        ]
        edges += [Edge(sender, end, head, place) for place in places for head in heads for sender in before]
    return edges


@dataclass(frozen=True)
class Prepared:
    """Runs of the intact model that all edges of a call are compared with.

    Attributes:
        run: writes of the senders.
        intact: the run from which layers are run again with an edge cut, and its value of each sequence; None if
            attention is measured.
        places: from the name of a position (`at=`) to the position in each sequence.
    """

    run: CachedRun
    intact: tuple[IntactRun, Float64[np.ndarray, "sequences"]] | None
    places: dict[str, Int[Tensor, "sequences"]]

    def removed(self, edge: Edge, draw: int) -> Float[Tensor, "sequences pos d_model"]:
        """Return the write to subtract to cut an edge: the sender's own write (draw -1), or a random control.

        It is the write minus its replacement, such as the write on the counterfactual prompt. Controls are numbered
        draw 0, 1, ... The tensor is 0 outside the edge's position, if it has one.
        """
        removed = self.run.removed(edge.sender, draw)
        if edge.place is None:
            return removed
        there = self.places[edge.place][:, None] == torch.arange(removed.shape[1])
        return removed * there[..., None].to(removed.device)


@dataclass(frozen=True)
class QueryKeyPairs:
    """Pairs of positions whose attention is measured: the i-th query of a sequence and the i-th key.

    Attributes:
        queries, keys: positions of the queries and of the keys in each sequence, counted from 0.
    """

    queries: Int[Tensor, "sequences pairs"]
    keys: Int[Tensor, "sequences pairs"]

    def on(self, device: torch.device) -> "QueryKeyPairs":
        """Return the same pairs, copied to a device. This object stays where it is."""
        return QueryKeyPairs(self.queries.to(device), self.keys.to(device))


def by_kind(edges: list[Edge], rows: Iterable[int]) -> dict[tuple[int, str], list[int]]:
    """Group edges by layer and input of their receiver.

    Return a dict from (layer, input) to indices into `edges`, sorted by its keys; an input is "q", "k", "v", "mlp" or
    "logits". `rows` are the indices to group.
    """
    rows_of: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        receiver = edges[row].end.receiver
        rows_of.setdefault((receiver.layer, receiver.input), []).append(row)
    return dict(sorted(rows_of.items()))


@torch.no_grad()
def edge_columns(
    edges: list[Edge],
    sequences: TaskSequences,
    draws: int,
    pairs: QueryKeyPairs | None,
    prepared: Prepared,
) -> pd.DataFrame:
    """Cut each edge and return a DataFrame with a row per edge, in the order of `edges`.

    Its columns are `attention` (NaN on a task), `delta, delta_se`, with draws also the comparison with controls
    (`control_delta`, ..., `pvalue, pvalue_floor`), and `k_composition` unless replaced by counterfactual writes. All
    edges of a receiver must be given together. `sequences` are the prompts with the metric, `draws` the number of
    random control writes per edge. `pairs`: queries and keys whose attention is measured; None: the effect is measured
    on the task. `prepared`: runs of the intact model.
    """
    kinds, attention = by_kind(edges, range(len(edges))), np.full(len(edges), np.nan)
    if pairs is None:
        deltas = _task_deltas(edges, sequences, draws, prepared)
    else:
        deltas = np.empty((len(edges), draws + 1, len(pairs.queries)))
        for rows in kinds.values():
            attention[rows], deltas[rows] = _attention_deltas([edges[row] for row in rows], pairs, draws, prepared)
    if prepared.run.replace == "counterfactual" and sequences.counterfactual is not None:
        # A prompt equal to its counterfactual loses nothing. Set 0: batches of another size round differently.
        deltas[..., (sequences.tokens == sequences.counterfactual.tokens).all(1).numpy()] = 0.0
    delta, controls = deltas[:, 0], deltas[:, 1:]
    table = pd.DataFrame(
        {
            "attention": attention,
            "delta": delta.mean(1),
            "delta_se": [standard_error(effect, sequences.distinct) for effect in delta],
        }
    )
    if draws:
        drawn = controls.mean(2)  # [edges, draws]
        table = table.assign(**beside_control(delta, controls, sequences.distinct))
        of_receiver: dict[Any, list[int]] = {}
        for row, edge in enumerate(edges):
            of_receiver.setdefault(edge[1:], []).append(row)  # all fields but the sender
        for rows in of_receiver.values():
            larger = (np.abs(drawn[rows]).ravel() >= np.abs(delta[rows].mean(1))[:, None]).sum(1)
            table.loc[rows, "pvalue"] = (1 + larger) / (1 + drawn[rows].size)
            table.loc[rows, "pvalue_floor"] = draws_floor(drawn[rows].size)
    if prepared.run.replace != "counterfactual":
        composition = np.full(len(edges), np.nan)
        for (layer, what), rows in kinds.items():
            if what in INPUT_POINTS:
                composition[rows] = _composition([edges[row] for row in rows], layer, what, prepared)
        table["k_composition"] = composition
    return table


def _task_deltas(edges: list[Edge], sequences: TaskSequences, draws: int, prepared: Prepared) -> Deltas:
    """Return the metric with each edge cut minus the intact metric, [edges, 1 + draws, sequences].

    On axis 1, entry 0 is the edge itself and the others are its random controls. `sequences` are the prompts with the
    metric, `prepared` the runs of the intact model.
    """
    assert prepared.intact is not None
    intact, values = prepared.intact
    replays: list[Replays] = []
    measured: list[tuple[int, int]] = []
    for (layer, what), rows in by_kind(edges, range(len(edges))).items():
        reading = receiver_inputs(intact.view, layer, what)
        # In this order the writes of all senders of a layer are computed once.
        cut = sorted(product(range(-1, draws), rows), key=lambda draw_row: (draw_row[0], edges[draw_row[1]].sender))
        hooks_of = partial(_cutting, reading, [(edges[row], draw) for draw, row in cut], prepared)
        replays.append(Replays(reading[0].layer, len(cut), hooks_of))
        measured += cut
    effects = replayed_values(intact, sequences, replays).numpy() - values
    deltas = np.empty((len(edges), draws + 1, len(values)))
    for (draw, row), effect in zip(measured, effects, strict=True):
        deltas[row, draw + 1] = effect
    return deltas


def _cutting(
    reading: list[ReceiverInput], cut: list[tuple[Edge, int]], prepared: Prepared, chunk: slice, batch: slice
) -> list[Hook]:
    """Return hooks that cut the edges `cut[chunk]` on the sequences `batch`, each edge on its own copy of the batch.

    `reading` says how the receivers of these edges read the stream. An entry of `cut` is (edge, draw): draw -1
    subtracts the sender's write, 0, 1, ... a random control. `prepared` has the writes; `chunk` and `batch` are slices.
    """
    cuts: list[Cut] = []
    for edge, draw in cut[chunk]:
        # Copied, because a view would keep the writes of all senders of the layer in memory.
        removed = prepared.removed(edge, draw)[batch].clone()
        rows = slice(len(cuts) * len(removed), (len(cuts) + 1) * len(removed))
        cuts.append(Cut([max(0, edge.end.receiver.head)], rows, removed[None]))
    return [hook for receiver_input in reading for hook in receiver_input.hooks(lambda: cuts)]


def _attention_deltas(
    edges: list[Edge], pairs: QueryKeyPairs, draws: int, prepared: Prepared
) -> tuple[Float64[np.ndarray, "edges"], Deltas]:
    """Return the intact attention of each edge's head, mean over sequences, and its change when the edge is cut.

    `pairs` are the queries and keys, `prepared` the run of the intact model. The change is [edges, 1 + draws,
    sequences]: entry 0 of axis 1 is the edge itself, the others are random controls. All edges end in one layer and one
    input.
    """
    first_receiver = edges[0].end.receiver
    view, captured = prepared.run.view, prepared.run.captured
    receiver = receiver_layer(view, captured, first_receiver.layer, first_receiver.input, in_float64_on_cpu)
    pairs = pairs.on(receiver.query.device)
    intact: dict[int, Tensor] = {}
    for head in dict.fromkeys(edge.head for edge in edges):
        receiver.require_own_pattern(head, pairs.queries)
        intact[head] = receiver.attention(head, pairs)
    deltas = np.empty((len(edges), draws + 1, len(pairs.queries)))
    group = [(edge.sender.layer, edge.sender.kind, str(edge.place)) for edge in edges]
    for draw in range(-1, draws):
        for _, some in groupby(sorted(range(len(edges)), key=group.__getitem__), key=group.__getitem__):
            rows = list(some)
            written = {edges[row].sender: prepared.removed(edges[row], draw) for row in rows}
            change = receiver.change(torch.stack([*written.values()]), pairs)
            place = {sender: index for index, sender in enumerate(written)}
            effects = {head: receiver.attention(head, pairs, change) - intact[head] for head in intact}
            for row in rows:
                deltas[row, draw + 1] = effects[edges[row].head][place[edges[row].sender]].cpu().numpy()
    return np.array([float(intact[edge.head].mean()) for edge in edges]), deltas


def _composition(edges: list[Edge], layer: int, what: Any, prepared: Prepared) -> list[float]:
    """Return for each edge the composition score of its sender with the receiver's heads, mean over heads.

    The score is computed from weights. NaN for senders that are not heads. `layer` and `what` are layer and input ("q",
    "k" or "v") of the receivers, `prepared` has the model.
    """
    heads_of_edges = [list(edge.end.asked) if prepared.intact is not None else [edge.head] for edge in edges]
    all_heads = sorted({head for heads in heads_of_edges for head in heads})
    layers = sorted({edge.sender.layer for edge in edges if edge.sender.kind == "head"})
    scores = composition_into(prepared.run.view, layer, all_heads, what, layers)
    return [
        float(scores[edge.sender.layer][[all_heads.index(head) for head in heads], edge.sender.head].mean())
        if edge.sender.kind == "head"
        else float("nan")
        for edge, heads in zip(edges, heads_of_edges, strict=True)
    ]


@dataclass(frozen=True)
class ReceiverLayer:
    """Queries, keys and residual stream of one layer in a run, from which attention after a cut is computed.

    Attributes:
        index: index of the layer.
        settings: weights of the layer that attention needs.
        what: the input that cuts change: "q", "k" or "v".
        reads: norm and weights by which heads read this input from the stream.
        residual: the residual stream of the run.
        query, key: before query/key norm and rotation. In latent attention they are after the latent's norm, and
            `settings` has no norm.
        allowed: True for pairs of query and key that are not masked.
        pattern: attention of the run.
        tables: cos and sin that the run applied, per rotary pair; None without rotary positions.
    """

    index: int
    settings: LayerSettings
    what: Input
    reads: list[LayerReads]
    residual: Float[Tensor, "sequences pos d_model"]
    query: Float[Tensor, "sequences pos heads d_head"]
    key: Float[Tensor, "sequences pos kv_heads d_head"]
    allowed: Bool[Tensor, "*sequences pos pos"]
    pattern: Float[Tensor, "sequences heads pos pos"]
    tables: tuple[Tensor, Tensor] | None

    def change(
        self, removed: Float[Tensor, "senders sequences pos d_model"], pairs: QueryKeyPairs
    ) -> Float[Tensor, "senders sequences rows heads d_head"]:
        """Return the change of queries or keys when the write of each sender is subtracted from the stream.

        `removed` are the writes. Queries change at the queries of `pairs` (then `rows` are these), keys at all
        positions. The run in this object stays as it is.
        """
        x = self.residual
        if self.what == "q":
            rows = pairs.queries[..., None].expand(-1, -1, x.shape[-1])
            x, removed = x.gather(1, rows), removed.gather(2, rows.expand(len(removed), -1, -1, -1))
        return change_of_reads(self.reads, x, removed)

    def attention(
        self,
        head: int,
        pairs: QueryKeyPairs,
        change: Float[Tensor, "*copies sequences rows heads d_head"] | None = None,
    ) -> Float64[Tensor, "*copies sequences"]:
        """Return the head's attention from query to key, mean over the pairs of positions of a sequence.

        `change` is the change of queries or keys after a cut, from the method `change`; None: the intact run.
        """
        weights = self.weights(head, pairs.queries, change)
        keys = pairs.keys[..., None].expand(*weights.shape[:-1], 1)
        return summed(weights.gather(-1, keys)[..., 0], -1) / pairs.keys.shape[-1]

    def weights(
        self,
        head: int,
        rows: Int[Tensor, "sequences rows"],
        change: Float[Tensor, "*copies sequences changed heads d_head"] | None = None,
    ) -> Float[Tensor, "*copies sequences rows pos"]:
        """Return the head's attention of the queries at positions `rows` to all keys.

        `change` is added to the queries at these positions if `what` is "q", else to keys at all positions; None: the
        intact run.
        """
        return self._scores(head, rows, change).softmax(-1)

    def _scores(
        self, head: int, rows: Int[Tensor, "sequences rows"], change: Tensor | None = None
    ) -> Float[Tensor, "*copies sequences rows pos"]:
        """Return the head's scaled scores of the queries at positions `rows` with all keys, -inf where masked.

        `change` is added to the queries at these positions if `what` is "q", else to keys at all positions; None: the
        intact run.
        """
        of_query, of_key = (change, None) if self.what == "q" else (None, change)
        queries = self.query.gather(1, rows[..., None, None].expand(-1, -1, *self.query.shape[2:]))
        scores = HeadScores.of_rows(
            self.settings, head, queries, self.key, self.tables, rows, query_change=of_query, key_change=of_key
        )
        allowed = _rows_of(self.allowed.expand(len(rows), -1, -1), rows)
        return scores.own()[..., 0, :, :].masked_fill(~allowed, -torch.inf)

    def require_own_pattern(self, head: int, rows: Int[Tensor, "sequences rows"]) -> None:
        """Raise ScoreMismatch if the head's attention in the run does not follow from its queries and keys.

        `rows` are the positions of the queries that are compared.
        """
        of_run = _rows_of(self.pattern[:, head], rows)
        require_own_pattern(self._scores(head, rows), of_run, self.pattern.dtype, head_name(self.index, head))


def receiver_layer(
    view: AttentionView, captured: dict[str, Tensor], index: int, what: Input, cast: Cast
) -> ReceiverLayer:
    """Return the `ReceiverLayer` of layer `index` from the activations of a run; cuts change its input `what`.

    `view` is the model, `captured` the activations by hook name: stream, queries, keys, rotary cos and sin, scores and
    pattern of the layer. `cast`: function that converts activations to the dtype to compute in. Raises ValueError if
    the sequences are longer than the layer's score scale allows, ScoreMismatch if the rotary tables do not follow from
    the layer's frequencies, UnsupportedArchitecture if the layer cannot be read.
    """
    names, raw = view.hook_names(index), view.raw(index)
    residual, pattern = (captured[names[point]] for point in ("residual", "pattern"))
    n_positions = residual.shape[1]
    require_even_scale(raw, index, n_positions)
    query, key = (cast(captured[names[point]]) for point in ("query", "key"))
    settings: LayerSettings = raw
    if isinstance(raw.k_norm, Latent):
        query, key = raw.normed("query", query), raw.normed("key", key)
        settings = replace(raw, q_norm=None, k_norm=None)
    else:
        query, key = (x.reshape(*x.shape[:2], -1, raw.w_q.shape[2]) for x in (query, key))
        key = key[:, :, :: key.shape[2] // len(raw.w_k)]  # some models repeat keys, one per query head
    tables = rotation_tables(view, raw.rotary, index, n_positions, captured)
    return ReceiverLayer(
        index,
        settings,
        what,
        layer_reads(raw, what, cast),
        cast(residual),
        query,
        key,
        visible_keys(view, index, n_positions, captured)[:, 0].to(query.device),
        pattern,
        None if tables is None else (tables[0].to(query), tables[1].to(query)),
    )


def _rows_of(matrix: Tensor, rows: Int[Tensor, "sequences rows"]) -> Tensor:
    return matrix.gather(1, rows[..., None].expand(-1, -1, matrix.shape[-1]))
