"""`HeadsRun` and `HeadWrite`: the output of heads at one position of a run, as a sum over keys."""

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
    """Activations of one prompt that determine the output of some heads at one position, the query.

    Attributes:
        tokens: token ids of the prompt.
        query: position of the query.
        kept: activations by hook name: streams and writes at the query, or at all keys up to it for layers in `whole`;
            values at the keys; the query's attention; the gate of gated attention at the query.
        whole: layers whose streams and writes are kept at all keys up to the query.
        logits: logits at the query; None if the run stopped before the end.
    """

    tokens: Int[Tensor, "one pos"]
    query: int
    kept: dict[str, Tensor]
    whole: Collection[int]
    logits: Float[Tensor, "d_vocab"] | None

    def stream(self, name: str) -> Float64[Tensor, "d_model"]:
        """Return the residual stream at the query, from the hook point with this name, in float64 on the CPU."""
        return in_float64(self.kept[name])[0, -1].cpu()

    def traced(self, view: AttentionView, layer: int, positions: list[int]) -> TracedRun:
        """Return the streams that enter a layer at some keys, and earlier layers' writes at these keys, as a
        `TracedRun`.

        `view` is the model, `positions` are the positions of the keys. `layer` must be in `whole`. The dict `captured`
        of the result is empty.
        """
        cut = {
            name: value[:, positions]
            for kept_layer in self.whole
            for point, name in view.hook_names(kept_layer).items()
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
    """Run one prompt and return the activations that determine the output of some heads at the query, as a `HeadsRun`.

    Kept are the value vectors at all keys up to the query, the query's attention, the gate of gated attention, and the
    streams and writes of the layers in `layers` and `whole`.

    Args:
        view: the model.
        tokens: token ids of the prompt.
        query: position of the query.
        layers: layers whose heads are measured.
        whole: layers whose streams and writes are kept at all keys up to the query; other layers keep them at the
            query.
        also: name of one more hook point of the stream to keep at the query.
        logits: True runs to the end and keeps the logits at the query.

    Raises:
        UnsupportedArchitecture: a layer does not show its attention or values.
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
            f"{unseen[0]} never fired, so the head's values and attention are unknown: load the model with "
            'attn_implementation="eager"'
        )
    return HeadsRun(tokens, query, kept, whole, at_query)


def _seen(view: AttentionView, layer: int) -> list[str]:
    """Return the full names of the two hook points of a layer that must fire in a run: attention pattern and values.

    `view` is the model.
    """
    names = view.hook_names(layer)
    return [names["pattern"], names["value"]]


def _keep(kept: dict[str, Tensor], name: str, cut: tuple[Any, ...], activation: Tensor, hook: Any) -> None:
    """Store `activation[cut]` in the dict `kept` under `name`, the name of its hook point.

    `cut` has an index or slice for each of the first axes. `hook` is not used.
    """
    kept[name] = activation.detach()[cut].clone()


@dataclass(frozen=True)
class HeadWrite:
    """The output of heads of a layer at the query, as the sum over keys j of `weights_j * gate * values_j @ w_o`.

    All tensors are in float64 on the CPU.

    Attributes:
        layer: the layer.
        heads: its heads that are measured.
        weights: attention of the query to each key.
        values: value vector of each key.
        gate: factors of gated attention; 1 in other models.
        w_o: output matrix W_O, with multiplier, gain and scale of a norm behind the attention.
        kv_heads: index of the key/value head of each head.
        own: the output of each head, computed from the model's own z (the head's output before W_O).
        remainder: largest distance between `own` and the sum over keys, as a share of the length of `own`.
        stored: dtype of the layer's weights.
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
    """Return the output of some heads of a layer at the query of a run, as a `HeadWrite` (a sum over keys).

    `view` is the model. `run` has the attention and the values. Raises ScoreMismatch if the run's z (the heads' output
    before W_O) is not attention times values (times the gate), and UnsupportedArchitecture if the layer adds something
    else to the stream than the output of its heads.
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
    problem = "its z is not the sum of pattern times values; they differ"
    nearest_bound(
        off,
        size.clamp_min(float(z.norm(dim=-1).mean())),
        raw.storage_dtype,
        "live z",
        [f"layer {layer}, head {head}: {problem}" for head in heads],
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
    to_stream = "head d_head, head d_head d_model -> head d_model"
    own = einsum(own_z, w_o, to_stream)
    rest = einsum(sum_z - own_z, w_o, to_stream).norm(dim=-1) / own.norm(dim=-1)
    remainder = float(rest.nan_to_num(0.0).max())
    groups = len(raw.w_q) // len(raw.w_v)
    return HeadWrite(
        layer, heads, weights, values, gate, w_o, [head // groups for head in heads], own, remainder, raw.storage_dtype
    )
