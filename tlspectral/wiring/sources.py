"""What writes to the residual stream: heads, MLPs and the embedding, as they did in one run."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.errors import BadHead
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.writes import HeadWrites, head_writes, require_sum_of_writes, z_of
from tlspectral.rotary import in_float64
from tlspectral.selection import head_name

_TOKENS = 2**11  # of one pass
_MLP = re.compile(r"L?(\d+)\.?MLP", re.IGNORECASE)

Replaced = Literal["mean", "zero"]


class Source(NamedTuple):
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


EMBEDDING = Source(-1, -1, "embedding")


def chosen_sources(view: AttentionView, sources: Any, below: int) -> list[Source]:
    """Return the chosen writers of layers below one, sorted by layer.

    Args:
        view: the model.
        sources: None for all heads; heads in any form; or a list of heads and of "embedding", "L3MLP", "mlps" (those of
            all layers) and "heads" (those of all layers).
        below: layer of the last target.

    Raises:
        BadHead: no such head or MLP.
    """
    if sources is None:
        return list(_heads(view, below))
    words = [sources] if isinstance(sources, str) else sources
    if not isinstance(words, list | tuple) or not any(isinstance(word, str) for word in words):
        return _of_heads(view, sources)
    chosen: list[Source] = []
    for word in words:
        name = word.strip() if isinstance(word, str) else ""
        mlp = _MLP.fullmatch(name)
        if name == "heads":
            chosen += _heads(view, below)
        elif name == "mlps":
            chosen += [Source(layer, -1, "mlp") for layer in range(below)]
        elif name == "embedding":
            chosen.append(EMBEDDING)
        elif mlp is not None:
            if int(mlp[1]) >= view.n_layers:
                raise BadHead(f"{word} does not exist: the model has layers 0 to {view.n_layers - 1}")
            chosen.append(Source(int(mlp[1]), -1, "mlp"))
        else:
            chosen += _of_heads(view, [word])
    return sorted(set(chosen))


def _heads(view: AttentionView, below: int) -> Iterator[Source]:
    return (Source(layer, head, "head") for layer in range(below) for head in range(view.n_heads(layer)))


def _of_heads(view: AttentionView, heads: Any) -> list[Source]:
    return [Source(layer, head, "head") for layer, chosen in heads_by_layer(view, heads).items() for head in chosen]


@dataclass(frozen=True)
class CachedRun:
    """What one run of the intact model wrote and read, as far as edges need it.

    Attributes:
        captured: activations by hook point, of all sequences.
        sequences: the run's sequences.
    """

    view: AttentionView
    sequences: PackedTokens
    captured: dict[str, Tensor]
    _writes: dict[int, HeadWrites] = field(default_factory=dict)

    def removed(
        self, sources: list[Source], replace: Replaced, frames: "Frames | None" = None
    ) -> Float64[Tensor, "sources sequences pos d_model"]:
        """Return what is taken away of the residual stream for sources of one layer.

        It is what they wrote ("zero"), or that less its mean over the real tokens of all sequences ("mean"). With
        frames it is turned into a random direction.
        """
        written = torch.stack(self._written(sources, frames))
        if replace == "zero":
            return written
        real = self.sequences.real.to(written.device)
        mean = (written * real[..., None]).sum((1, 2), keepdim=True) / real.sum()
        return written - mean

    def _written(self, sources: list[Source], frames: "Frames | None") -> list[Tensor]:
        names = self.view.hook_names(max(0, sources[0].layer))
        if sources[0].kind != "head":
            point = names["residual" if sources[0].kind == "embedding" else "mlp_out"]
            if point not in self.captured:
                raise BadHead(f"{sources[0].name} does not exist: {point} never fires in this model")
            written = in_float64(self.captured[point])
            return [written if frames is None else written @ frames.square(written)]
        layer, heads = sources[0].layer, [source.head for source in sources]
        if layer not in self._writes:
            self._writes.clear()  # of one layer at a time
            self._writes[layer] = head_writes(self.view, layer, in_float64)
        writes = self._writes[layer]
        z = z_of(in_float64(self.captured[names["z"]]), writes.w_o)
        scale = writes.token_scale(z)
        effective = writes.effective(heads)
        if frames is not None:
            effective = torch.stack(
                [frames.turned(w_o, layer, head) for w_o, head in zip(effective, heads, strict=True)]
            )
        return list(torch.einsum("bphd,hdm->hbpm", z[:, :, heads] * scale[..., None, None], effective))


@dataclass(frozen=True)
class Frames:
    """Random directions of one draw, that stand in for those in which sources write."""

    seed: int
    draw: int

    def turned(
        self, w_o: Float64[Tensor, "d_head d_model"], layer: int, head: int
    ) -> Float64[Tensor, "d_head d_model"]:
        """Return an output map into random directions, with the norms and angles of what it writes kept."""
        triangle = torch.linalg.qr(w_o.mT, mode="r").R
        drawn = self._frame(w_o.shape[1], w_o.shape[0], [layer, head]).to(w_o.device)
        return triangle.mT @ drawn[:, : len(triangle)].mT

    def square(self, written: Float64[Tensor, "*batch d_model"]) -> Float64[Tensor, "d_model d_model"]:
        """Return a random rotation of the residual stream, the same for all MLPs and the embedding."""
        d_model = written.shape[-1]
        return self._frame(d_model, d_model, []).to(written.device)

    def _frame(self, n_rows: int, n_columns: int, key: list[int]) -> Tensor:
        state = np.random.SeedSequence([self.seed, self.draw, *key]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(state))
        q, r = torch.linalg.qr(torch.randn(n_rows, n_columns, generator=generator, dtype=torch.float64))
        return q * r.diagonal().sign()  # without the signs QR would favour some rotations


def cached_run(
    view: AttentionView, sequences: PackedTokens, target_layers: Iterable[int], sources: list[Source]
) -> CachedRun:
    """Run the model once under the hooks that are on it, and keep what its sources wrote and its targets read.

    Raises UnsupportedArchitecture for a layer of which the residual stream is no sum of writes.
    """
    targets = sorted(target_layers)
    below = range(targets[-1])
    names = [view.hook_names(layer) for layer in range(targets[-1] + 1)]
    last = names[-1]["pattern"]
    points = ("residual", "residual_after", "attention_out", "mlp_out", "z")
    first = view.capture(sequences.tokens[:1], [names[layer][point] for layer in below for point in points], last=last)
    with torch.no_grad():
        for layer in below:
            require_sum_of_writes(view, layer, first, head_writes(view, layer, in_float64))
    kept = {names[source.layer]["z"] for source in sources if source.kind == "head" and source.layer in below}
    kept |= {names[source.layer]["mlp_out"] for source in sources if source.kind == "mlp" and source.layer in below}
    kept |= {names[0]["residual"]} if EMBEDDING in sources else set()
    for layer in targets:
        wanted = ("residual", "query", "key", "value", "cos", "sin", "scores", "pattern")
        kept |= {names[layer][point] for point in wanted if point in names[layer]}
    rows = max(1, _TOKENS // sequences.tokens.shape[1])
    runs = [
        view.capture(sequences.tokens[start : start + rows], kept, last=last)
        for start in range(0, len(sequences.tokens), rows)
    ]
    tables = {names[layer][point] for layer in targets for point in ("cos", "sin") if point in names[layer]}
    captured = {name: runs[0][name] if name in tables else torch.cat([run[name] for run in runs]) for name in runs[0]}
    return CachedRun(view, sequences, captured)
