"""Senders: heads, mixers, MLPs and the embedding, and their writes to the residual stream in one run."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.nulls import haar_frame
from tlspectral.algebra.rotary import in_float64_on_cpu, summed
from tlspectral.containers import column_names, is_array, plain, values
from tlspectral.errors import BadHead
from tlspectral.hooks.parts.output import Output
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, in_batches, rows_of_pass
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes, head_writes, mixed, z_of
from tlspectral.selection.heads_as_written import from_end, which_exist
from tlspectral.selection.node_names import head_name
from tlspectral.selection.receivers_as_written import named_column

_WHOLE = re.compile(r"L?(-?\d+)\.?(MLP|MIX)", re.IGNORECASE)

Replaced = Literal["mean", "zero", "resample", "counterfactual"]


class Sender(NamedTuple):
    """One component that writes to the residual stream.

    `head` is -1 unless the sender is a head, `layer` is -1 for the embedding. A mixer (`kind="mix"`) is a state-space
    block, convolution or linear attention that a layer has instead of heads or in addition to them. If the MLP has no
    hook point, the mixer's write includes it.
    """

    layer: int
    head: int
    kind: Literal["head", "mix", "mlp", "embedding"]

    @property
    def name(self) -> str:
        """Name in tables: L16H0, L2MIX, L3MLP or embedding."""
        if self.kind == "head":
            return head_name(self.layer, self.head)
        return "embedding" if self.kind == "embedding" else f"L{self.layer}{self.kind.upper()}"


SENDER_FORMS = 'a sender is "embedding", "L16H0", "L3MLP" or "L2MIX"'
EMBEDDING = Sender(-1, -1, "embedding")
READ_POINTS = ("residual", "query", "key", "cos", "sin", "scores", "pattern")
"""Hook points of a layer's attention, by their short names in `AttentionView.hook_names`."""

_KEPT = {"head": ("z",), "mlp": ("mlp_out",), "mix": ("residual", "residual_after", "attention_out", "mlp_out")}


def chosen_senders(view: AttentionView, senders: Any, below: int) -> list[Sender]:
    """Return the senders that a user named, as `Sender`s without duplicates, sorted by layer.

    `senders`: None for all heads; heads in any form; a table with a column `sender`; or a list of heads and of
    "embedding", "L3MLP", "L2MIX". "heads", "mlps" and "mixers" stand for all of their kind in the layers 0 to `below` -
    1. Raises BadHead for a sender that the model does not have.
    """
    if senders is None:
        return list(_heads(view, below))
    senders = plain(senders)
    if "sender" in (column_names(senders) or []):
        senders = named_column(senders, "sender", SENDER_FORMS)
    listed = [senders] if isinstance(senders, str) else values(senders) if is_array(senders) else senders
    if not isinstance(listed, list | tuple) or not any(isinstance(plain(word), str) for word in listed):
        return _of_heads(view, senders)
    chosen: list[Sender] = []
    for word in map(plain, listed):
        name = word.strip() if isinstance(word, str) else ""
        if name == "heads":
            chosen += _heads(view, below)
        elif name == "mlps":
            chosen += [Sender(layer, -1, "mlp") for layer in range(below)]
        elif name == "mixers":
            chosen += [Sender(layer, -1, "mix") for layer in range(below) if view.writes_more(layer)]
        else:
            other = other_sender(view, name)
            chosen += _of_heads(view, [word]) if other is None else [other]
    return sorted(set(chosen))


def other_sender(view: AttentionView, name: str) -> Sender | None:
    """Return the embedding, MLP or mixer with a name such as "L3MLP"; None for other names, such as heads.

    Raises BadHead if the model does not have it.
    """
    if name == "embedding":
        return EMBEDDING
    whole = _WHOLE.fullmatch(name)
    if whole is None:
        return None
    layer, kind = from_end(int(whole[1]), view.n_layers), "mix" if whole[2].upper() == "MIX" else "mlp"
    if layer is None:
        raise BadHead(f"{name} does not exist: the model has layers {which_exist(int(whole[1]), view.n_layers)}")
    if kind == "mix" and not view.writes_more(layer):
        raise BadHead(f"{name} does not exist: layer {layer} has only heads and an MLP, no mixer; leave it out")
    return Sender(layer, -1, kind)


def _heads(view: AttentionView, below: int) -> Iterator[Sender]:
    return (
        Sender(layer, head, "head") for layer in view.layers if layer < below for head in range(view.n_heads(layer))
    )


def _of_heads(view: AttentionView, heads: Any) -> list[Sender]:
    return [Sender(layer, head, "head") for layer, chosen in heads_by_layer(view, heads).items() for head in chosen]


@dataclass(frozen=True)
class CachedRun:
    """Activations of one run of the intact model, from which the write of each sender is computed.

    Attributes:
        view: the model.
        sequences: the tokens of the run.
        senders: all senders (heads, MLPs, mixers, embedding) whose writes can be computed.
        captured: from hook point to activation: z of heads, outputs of MLPs, the stream around mixers and the
            embedding; stream, queries, keys and attention of layers with receivers, if these are read.
        replace: what replaces a removed write: "zero", its "mean", or "resample" or "counterfactual" for its write in
            another run.
        other: activations of this other run, or None.
        seed: seed of random control writes.
        _latest: the writes that `removed` computed last, by (layer, kind, draw).
    """

    view: AttentionView
    sequences: PackedTokens
    senders: list[Sender]
    captured: dict[str, Tensor]
    replace: Replaced = "zero"
    other: dict[str, Tensor] | None = None
    seed: int = 0
    _latest: dict[Any, Tensor] = field(default_factory=dict)

    def removed(self, sender: Sender, draw: int = -1) -> Float[Tensor, "sequences pos d_model"]:
        """Return the tensor to subtract from the residual stream: the sender's write minus its replacement.

        `draw=-1`: the sender's own write. `draw` 0, 1, ...: a random control write with other directions, which keeps
        norms and angles. A mean is taken over the real tokens of all sequences.
        """
        # All senders of one kind in a layer are computed together and kept until another layer or kind is needed.
        key = sender.layer, sender.kind, draw
        if key not in self._latest:
            written = self._written(sender, draw, self.captured)
            if self.other is not None:
                written = written - self._written(sender, draw, self.other)
            if self.replace == "mean":
                real = self.sequences.real
                total = summed(written * real[..., None].to(written.device), (1, 2), keepdim=True)
                written = written - (total / real.sum()).to(written)
            self._latest.clear()
            self._latest[key] = written
        return self._latest[key][self._heads_of(sender).index(sender.head)]

    def _heads_of(self, sender: Sender) -> list[int]:
        """Return the head numbers of all senders of the same layer and kind, in their order; [-1] for an MLP."""
        return [other.head for other in self.senders if (other.layer, other.kind) == (sender.layer, sender.kind)]

    def _written(
        self, sender: Sender, draw: int, captured: dict[str, Tensor]
    ) -> Float[Tensor, "senders sequences pos d_model"]:
        """Return the writes of all senders of the kind and layer of `sender`, or their control writes of a draw.

        `draw` is -1 for the writes themselves, 0, 1, ... for a random control. `captured` has the activations of the
        run, by hook point.
        """
        layer, heads = max(0, sender.layer), self._heads_of(sender)
        names = self.view.hook_names(layer)
        if sender.kind != "head":  # a control draw rotates the whole write
            point = names["mlp_out" if sender.kind == "mlp" else "residual"]
            if point not in captured:
                raise BadHead(f"{sender.name} does not exist: {point} never fires in this model; leave it out")
            whole = mixed(self.view, layer, captured, in_float64_on_cpu) if sender.kind == "mix" else captured[point]
            written = in_float64_on_cpu(whole)[None]
            size = written.shape[-1]
            return written if draw < 0 else written @ haar_frame(size, size, [self.seed, draw]).to(written)
        writes = head_writes(self.view, layer, in_float64_on_cpu)
        z = z_of(in_float64_on_cpu(captured[names["z"]]), writes.w_o)
        z, maps = z[:, :, heads] * writes.token_scale(z)[..., None, None], writes.effective(heads)
        if draw >= 0:  # replace W_O by maps that differ only in their directions
            triangles = torch.linalg.qr(maps.mT, mode="r").R
            frames = [haar_frame(maps.shape[2], triangles.shape[1], [self.seed, draw, layer, head]) for head in heads]
            maps = triangles.mT @ torch.stack(frames).mT.to(z)
        return einsum(z, maps, "batch pos head d_head, head d_head d_model -> head batch pos d_model")


def cached_run(
    view: AttentionView,
    sequences: PackedTokens,
    senders: list[Sender],
    below: int,
    reading: Iterable[int] = (),
    replace: Replaced = "zero",
    seed: int = 0,
) -> CachedRun:
    """Run the model once, under the hooks that are on it, and keep the writes of the senders, as a `CachedRun`.

    Kept are z (output before W_O) for heads, the output of MLPs, the stream around mixers, and the embedding. Senders
    stand in layers 0 to `below` - 1. For the layers `reading`, stream, queries, keys, rotary cos and sin, scores and
    pattern are kept too. `replace` says what replaces a removed write; "resample" and "counterfactual" take a second
    run. `seed` draws the sequences of "resample" and later controls. Raises UnsupportedArchitecture if the residual
    stream of a layer is not the sum of its writers' outputs, and ValueError if `replace` needs other sequences and the
    task has none.
    """
    names, reading = [view.hook_names(layer) for layer in range(view.n_layers)], list(reading)
    last = names[below - 1]["residual_after"] if below else names[0]["residual"]
    last = names[max(reading)]["pattern"] if reading else last
    shown = [name for layer in range(below) for point, name in names[layer].items() if point in WRITE_POINTS]
    first = capture_until(view, sequences.tokens[:1], shown, last=last)
    for layer in range(below):
        checked_writes(view, layer, first, in_float64_on_cpu)
    kept = {names[0]["residual"]} if EMBEDDING in senders else set()
    for layer, _, kind in senders:
        if 0 <= layer < below:
            kept |= {names[layer][point] for point in _KEPT[kind] if point in names[layer]}
    tables = {names[layer][point] for layer in reading for point in ("cos", "sin") if point in names[layer]}
    of_reading = {names[layer][point] for layer in reading for point in READ_POINTS if point in names[layer]}
    rows = rows_of_pass(view, sequences.tokens.shape[1])

    def captured(tokens: Tensor, points: set[str]) -> dict[str, Tensor]:
        runs = [*in_batches(len(tokens), rows, lambda batch: capture_until(view, tokens[batch], points, last=last))]
        return {name: runs[0][name] if name in tables else torch.cat([run[name] for run in runs]) for name in runs[0]}

    other = None
    if replace in ("resample", "counterfactual"):
        settled: Any = Output(replace, seed=seed).fixed(view, sequences)
        other = captured(settled.reference.sequences.tokens[settled.reference.donors], kept)
    return CachedRun(view, sequences, senders, captured(sequences.tokens, kept | of_reading), replace, other, seed)
