"""What heads of some layers wrote at one position of a run, as sums over keys, and the streams that went into it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.hooks.attribution.stream_terms import TracedRun
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, nearest_bound
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import run_until, whole_logits
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes, layer_reads, z_of


@dataclass(frozen=True)
class HeadsRun:
    """One run of a prompt, seen from a query.

    Attributes:
        kept: activations by hook point: streams and writes at the query alone or at all keys up to it, values at the
            keys, patterns of the query.
        whole: layers whose streams and writes are kept at all keys.
        logits: at the query; None where the run ended before.
    """

    tokens: Int[Tensor, "one pos"]
    query: int
    kept: dict[str, Tensor]
    whole: Collection[int]
    logits: Float[Tensor, "d_vocab"] | None

    def stream(self, name: str) -> Float64[Tensor, "d_model"]:
        """Return what passed a hook point of the stream at the query."""
        return in_float64(self.kept[name])[0, -1].cpu()

    def traced(self, view: AttentionView, layer: int, positions: list[int]) -> TracedRun:
        """Return what the run shows of the streams that enter a layer of `whole` at some keys."""
        cut = {
            name: value[:, positions]
            for each in self.whole
            for point, name in view.hook_names(each).items()
            if point in WRITE_POINTS and (value := self.kept.get(name)) is not None
        }
        residual = in_float64(cut[view.hook_names(layer)["residual"]])[0].cpu()
        return TracedRun(self.tokens, layer, positions, residual, {}, cut)


@torch.no_grad()
def heads_run(
    view: AttentionView,
    tokens: Int[Tensor, "one pos"],
    query: int,
    layers: Collection[int],
    *,
    whole: Collection[int],
    also: str | None = None,
    logits: bool = False,
) -> HeadsRun:
    """Run one prompt and keep what `HeadsRun` holds of some layers, and the stream at the hook point `also`.

    With `logits` the run goes to its end. Raises UnsupportedArchitecture for a layer that shows no pattern.
    """
    keys, here, every = slice(query + 1), slice(query, query + 1), slice(None)
    cuts: dict[str, tuple[Any, ...]] = {}
    for layer in sorted({*layers, *whole}):
        cut = every, keys if layer in whole else here
        cuts |= {name: cut for point, name in view.hook_names(layer).items() if point in WRITE_POINTS}
    for layer in layers:
        names = view.hook_names(layer)
        cuts |= {names["value"]: (every, keys), names["pattern"]: (every, every, query, keys)}
        if "gate" in names:
            cuts[names["gate"]] = (every, here)
    last = view.hook_names(max(layers))["residual_after"] if also is None else also
    cuts.setdefault(last, (every, here))
    kept: dict[str, Tensor] = {}
    hooks = [(name, partial(_keep, kept, name, cut)) for name, cut in cuts.items() if name in view.hook_points]
    at_query = None
    if logits:
        with view.hooks_on(hooks):
            at_query = whole_logits(view, tokens)[0, query].detach()
    else:
        run_until(view, tokens, hooks, last=last)
    unseen = [name for layer in layers for name in _seen(view, layer) if name not in kept]
    if unseen:
        raise UnsupportedArchitecture(
            f"{unseen[0]} never fired, so it is not known what the head reads of each token; load the model with "
            'attn_implementation="eager"'
        )
    return HeadsRun(tokens, query, kept, whole, at_query)


def _seen(view: AttentionView, layer: int) -> list[str]:
    names = view.hook_names(layer)
    return [names["pattern"], names["value"]]


def _keep(kept: dict[str, Tensor], name: str, cut: tuple[Any, ...], activation: Tensor, hook: Any) -> None:
    kept[name] = activation.detach()[cut].clone()


@dataclass(frozen=True)
class HeadWrite:
    """What heads of a layer write at the query, `sum_j weights_j * gate * values_j @ w_o`, in float64 on the CPU.

    Attributes:
        w_o: with multiplier, gain and scale of a norm behind the attention.
        gate: factors of a gated attention, 1 elsewhere.
        kv_heads: key/value head of each head.
        own: what the heads write by the model's own z.
        remainder: largest distance between that and the sum, over heads, as a share of its length.
        stored: type of the layer's weights.
    """

    layer: int
    heads: list[int]
    weights: Float64[Tensor, "heads keys"]
    values: Float64[Tensor, "heads keys d_head"]
    gate: Float64[Tensor, "heads d_head"]
    w_o: Float64[Tensor, "heads d_head d_model"]
    kv_heads: list[int]
    own: Float64[Tensor, "heads d_model"]
    remainder: float
    stored: torch.dtype


@torch.no_grad()
def head_write(view: AttentionView, run: HeadsRun, layer: int, heads: list[int]) -> HeadWrite:
    """Return what heads of a layer of a run write at its query.

    Raises ScoreMismatch where z is not pattern times values (times the gate), and UnsupportedArchitecture where the
    attention does not add what its heads write, as under hooks that edit it.
    """
    names, raw = view.hook_names(layer), view.raw(layer)
    at_query = {
        name: value[:, -1:]
        for point, name in names.items()
        if point in WRITE_POINTS and (value := run.kept.get(name)) is not None
    }
    writes = checked_writes(view, layer, at_query, in_float64)
    assert writes is not None
    z = z_of(in_float64(at_query[names["z"]]), writes.w_o)
    scale = writes.token_scale(z)
    w_o = (writes.effective(heads) * scale[0, 0]).cpu()
    weights = in_float64(run.kept[names["pattern"]])[0, heads].cpu()
    values = raw.values(in_float64(run.kept[names["value"]]))[0].cpu()
    kv_heads = [head * values.shape[1] // len(raw.w_q) for head in heads]
    values = rearrange(values[:, kv_heads], "key head d_head -> head key d_head")
    gate = torch.ones(len(heads), values.shape[2], dtype=torch.float64)
    if "gate" in names:
        gate = torch.sigmoid(layer_reads(raw, "q", in_float64)[1].by_head(in_float64(run.kept[names["gate"]])))
        gate = gate[0, 0, heads].cpu()
    own_z = z[0, 0, heads].cpu()
    sum_z = einsum(weights, values, "head key, head key d_head -> head d_head") * gate
    off, size = (sum_z - own_z).norm(dim=-1), own_z.norm(dim=-1)
    said = "what it writes is not the sum of pattern times values; they differ"
    nearest_bound(
        off,
        size.clamp_min(float(z.norm(dim=-1).mean())),
        raw.w_q.dtype,
        "live z",
        [f"layer {layer}, head {head}: {said}" for head in heads],
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
    to_stream = "head d_head, head d_head d_model -> head d_model"
    own = einsum(own_z, w_o, to_stream)
    rest = einsum(sum_z - own_z, w_o, to_stream).norm(dim=-1) / own.norm(dim=-1)
    remainder = float(rest.nan_to_num(0.0).max())
    groups = len(raw.w_q) // len(raw.w_v)
    return HeadWrite(
        layer, heads, weights, values, gate, w_o, [head // groups for head in heads], own, remainder, raw.w_q.dtype
    )
