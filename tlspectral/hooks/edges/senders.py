"""What writes to the residual stream: heads, MLPs and the embedding, as they did in one run."""

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
from tlspectral.models.attention.writes import head_writes, require_sum_of_writes, z_of
from tlspectral.selection import head_name

_TOKENS = 2**11  # of one pass
_MLP = re.compile(r"L?(\d+)\.?MLP", re.IGNORECASE)

Replaced = Literal["mean", "zero"]


class Sender(NamedTuple):
    """One writer. `head` is -1 for an MLP and for the embedding, `layer` -1 for the embedding."""

    layer: int
    head: int
    kind: Literal["head", "mlp", "embedding"]

    @property
    def name(self) -> str:
        """Name in tables: L16H0, L3MLP or embedding."""
        if self.kind == "head":
            return head_name(self.layer, self.head)
        return f"L{self.layer}MLP" if self.kind == "mlp" else "embedding"


EMBEDDING = Sender(-1, -1, "embedding")


def chosen_senders(view: AttentionView, senders: Any, below: int) -> list[Sender]:
    """Return the chosen writers of layers below one, sorted by layer. Raises BadHead for no such head or MLP.

    `senders`: None for all heads; heads in any form; or a list of heads and of "embedding", "L3MLP", "mlps" (those of
    all layers) and "heads" (those of all layers).
    """
    if senders is None:
        return list(_heads(view, below))
    words = [senders] if isinstance(senders, str) else senders
    if not isinstance(words, list | tuple) or not any(isinstance(word, str) for word in words):
        return _of_heads(view, senders)
    chosen: list[Sender] = []
    for word in words:
        name = word.strip() if isinstance(word, str) else ""
        mlp = _MLP.fullmatch(name)
        if name == "heads":
            chosen += _heads(view, below)
        elif name == "mlps":
            chosen += [Sender(layer, -1, "mlp") for layer in range(below)]
        elif name == "embedding":
            chosen.append(EMBEDDING)
        elif mlp is not None:
            if int(mlp[1]) >= view.n_layers:
                raise BadHead(f"{word} does not exist: the model has layers 0 to {view.n_layers - 1}")
            chosen.append(Sender(int(mlp[1]), -1, "mlp"))
        else:
            chosen += _of_heads(view, [word])
    return sorted(set(chosen))


def _heads(view: AttentionView, below: int) -> Iterator[Sender]:
    return (Sender(layer, head, "head") for layer in range(below) for head in range(view.n_heads(layer)))


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
        """Yield the write of an MLP or of the embedding, then rotated: all of them alike in a draw."""
        names = self.view.hook_names(max(0, senders[0].layer))
        point = names["residual" if senders[0].kind == "embedding" else "mlp_out"]
        if point not in self.captured:
            raise BadHead(f"{senders[0].name} does not exist: {point} never fires in this model")
        written = in_float64(self.captured[point])[None]
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
    points = ("residual", "residual_after", "attention_out", "mlp_out", "z")
    first = view.capture(sequences.tokens[:1], [names[layer][point] for layer in below for point in points], last=last)
    with torch.no_grad():
        for layer in below:
            require_sum_of_writes(view, layer, first, head_writes(view, layer, in_float64))
    kept = {names[sender.layer]["z"] for sender in senders if sender.kind == "head" and sender.layer in below}
    kept |= {names[sender.layer]["mlp_out"] for sender in senders if sender.kind == "mlp" and sender.layer in below}
    kept |= {names[0]["residual"]} if EMBEDDING in senders else set()
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
