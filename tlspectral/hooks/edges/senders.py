"""What writes to the residual stream: heads, mixers, MLPs and the embedding, as they did in one run."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import haar_frame
from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import BadHead
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.writes import WRITE_POINTS, checked_writes, head_writes, mixed, z_of
from tlspectral.selection import head_name

_TOKENS = 2**11  # of one pass
_WHOLE = re.compile(r"L?(\d+)\.?(MLP|MIX)", re.IGNORECASE)

Replaced = Literal["mean", "zero"]


class Sender(NamedTuple):
    """One writer. `head` is -1 for all but heads, `layer` -1 for the embedding.

    A mixer is what a layer has in the place of heads or beside them: a state-space block, a convolution, linear
    attention. It is one with the MLP of its layer where that has no hook point.
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


EMBEDDING = Sender(-1, -1, "embedding")
_KEPT = {"head": ("z",), "mlp": ("mlp_out",), "mix": ("residual", "residual_after", "attention_out", "mlp_out")}


def chosen_senders(view: AttentionView, senders: Any, below: int) -> list[Sender]:
    """Return the chosen writers of layers below one, sorted by layer. Raises BadHead for one that does not exist.

    `senders`: None for all heads; heads in any form; or a list of heads and of "embedding", "L3MLP", "L2MIX", and of
    "heads", "mlps" and "mixers" (those of all layers).
    """
    if senders is None:
        return list(_heads(view, below))
    words = [senders] if isinstance(senders, str) else senders
    if not isinstance(words, list | tuple) or not any(isinstance(word, str) for word in words):
        return _of_heads(view, senders)
    chosen: list[Sender] = []
    for word in words:
        name = word.strip() if isinstance(word, str) else ""
        whole = _WHOLE.fullmatch(name)
        if name == "heads":
            chosen += _heads(view, below)
        elif name == "mlps":
            chosen += [Sender(layer, -1, "mlp") for layer in range(below)]
        elif name == "mixers":
            chosen += [Sender(layer, -1, "mix") for layer in range(below) if view.writes_more(layer)]
        elif name == "embedding":
            chosen.append(EMBEDDING)
        elif whole is not None:
            layer, kind = int(whole[1]), "mix" if whole[2].upper() == "MIX" else "mlp"
            if layer >= view.n_layers:
                raise BadHead(f"{word} does not exist: the model has layers 0 to {view.n_layers - 1}")
            if kind == "mix" and not view.writes_more(layer):
                raise BadHead(f"{word} does not exist: layer {layer} has heads and an MLP alone")
            chosen.append(Sender(layer, -1, kind))
        else:
            chosen += _of_heads(view, [word])
    return sorted(set(chosen))


def _heads(view: AttentionView, below: int) -> Iterator[Sender]:
    return (
        Sender(layer, head, "head") for layer in view.layers if layer < below for head in range(view.n_heads(layer))
    )


def _of_heads(view: AttentionView, heads: Any) -> list[Sender]:
    return [Sender(layer, head, "head") for layer, chosen in heads_by_layer(view, heads).items() for head in chosen]


@dataclass(frozen=True)
class CachedRun:
    """What one run of the intact model wrote and read, as far as edges need it: activations by hook point."""

    view: AttentionView
    sequences: PackedTokens
    captured: dict[str, Tensor]

    def removed(
        self, senders: list[Sender], replace: Replaced, *, draws: int = 0, seed: int = 0
    ) -> Iterator[Float64[Tensor, "senders sequences pos d_model"]]:
        """Yield what is taken out of the residual stream for senders of one layer and kind, then a control per draw.

        It is what they wrote (`"zero"`), or that less its mean over the real tokens of all sequences (`"mean"`). A
        control writes in random directions, with the norms and angles of what the sender wrote.
        """
        real = self.sequences.real[..., None]
        for written in (self._heads if senders[0].kind == "head" else self._whole)(senders, draws, seed):
            if replace == "mean":
                counted = real.to(written.device)
                yield written - (written * counted).sum((1, 2), keepdim=True) / counted.sum()
            else:
                yield written

    def _whole(self, senders: list[Sender], draws: int, seed: int) -> Iterator[Tensor]:
        """Yield the write of a mixer, an MLP or the embedding, then rotated: all of them alike in a draw."""
        layer, _, kind = senders[0]
        names = self.view.hook_names(max(0, layer))
        point = names["mlp_out" if kind == "mlp" else "residual"]
        if point not in self.captured:
            raise BadHead(f"{senders[0].name} does not exist: {point} never fires in this model")
        written = mixed(self.view, layer, self.captured, in_float64) if kind == "mix" else self.captured[point]
        written = in_float64(written)[None]
        yield written
        for draw in range(draws):
            yield written @ haar_frame(written.shape[-1], written.shape[-1], [seed, draw]).to(written.device)

    def _heads(self, senders: list[Sender], draws: int, seed: int) -> Iterator[Tensor]:
        """Yield the writes of heads, then those of maps that differ from W_O in their directions alone."""
        layer, heads = senders[0].layer, [sender.head for sender in senders]
        writes = head_writes(self.view, layer, in_float64)
        z = z_of(in_float64(self.captured[self.view.hook_names(layer)["z"]]), writes.w_o)
        z = z[:, :, heads] * writes.token_scale(z)[..., None, None]
        maps = writes.effective(heads)
        yield torch.einsum("bphd,hdm->hbpm", z, maps)
        triangles = torch.linalg.qr(maps.mT, mode="r").R if draws else maps
        for draw in range(draws):
            frames = [haar_frame(maps.shape[2], triangles.shape[1], [seed, draw, layer, head]) for head in heads]
            yield torch.einsum("bphd,hdm->hbpm", z, triangles.mT @ torch.stack(frames).mT.to(z.device))


def cached_run(
    view: AttentionView, sequences: PackedTokens, receiver_layers: Iterable[int], senders: list[Sender]
) -> CachedRun:
    """Run the model once under the hooks that are on it, and keep what its senders wrote and its receivers read.

    Raises UnsupportedArchitecture for a layer of which the residual stream is no sum of writes.
    """
    receiving = sorted(receiver_layers)
    below = range(receiving[-1])
    names = [view.hook_names(layer) for layer in range(receiving[-1] + 1)]
    last = names[-1]["pattern"]
    shown = [name for layer in below for point, name in names[layer].items() if point in WRITE_POINTS]
    first = view.capture(sequences.tokens[:1], shown, last=last)
    for layer in below:
        checked_writes(view, layer, first, in_float64)
    kept = {names[0]["residual"]} if EMBEDDING in senders else set()
    for layer, _, kind in senders:
        if layer in below:
            kept |= {names[layer][point] for point in _KEPT[kind] if point in names[layer]}
    for layer in receiving:
        wanted = ("residual", "query", "key", "cos", "sin", "scores", "pattern")
        kept |= {names[layer][point] for point in wanted if point in names[layer]}
    rows = max(1, _TOKENS // sequences.tokens.shape[1])
    runs = [
        view.capture(sequences.tokens[start : start + rows], kept, last=last)
        for start in range(0, len(sequences.tokens), rows)
    ]
    tables = {names[layer][point] for layer in receiving for point in ("cos", "sin") if point in names[layer]}
    captured = {name: runs[0][name] if name in tables else torch.cat([run[name] for run in runs]) for name in runs[0]}
    return CachedRun(view, sequences, captured)
