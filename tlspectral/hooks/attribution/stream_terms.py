"""The residual stream at some tokens of a run as a sum of what was written there, and what else the run shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.models.hooking.placing import holding
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import run_until
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes, mixed, require_equal_streams, z_of
from tlspectral.selection import head_name

_OF_SCORES = ("query", "key", "cos", "sin", "scores", "pattern")
_UNDIVIDED = "a score cannot be divided among sources"


@dataclass(frozen=True)
class StreamTerms:
    """What a residual stream at one token is the sum of."""

    names: list[str]
    written: Float64[Tensor, "terms d_model"]


@dataclass(frozen=True)
class TracedRun:
    """What a run of one prompt shows at some tokens in front of a layer, in float64 on the CPU.

    Attributes:
        positions: of the tokens.
        residual: what enters the layer there.
        captured: whole activations of the layer's hook points, by name.
        kept: activations of earlier layers at these tokens alone, of which `source_terms` are made.
    """

    tokens: Int[Tensor, "one pos"]
    layer: int
    positions: list[int]
    residual: Float64[Tensor, "tokens d_model"]
    captured: dict[str, Tensor]
    kept: dict[str, Tensor]


@torch.no_grad()
def traced_run(
    view: AttentionView,
    tokens: Int[Tensor, "one pos"],
    layer: int,
    positions: list[int],
    *,
    sources: bool,
) -> TracedRun:
    """Run one prompt up to the attention of a layer and keep what `TracedRun` holds.

    `sources`: keep what earlier layers write too, for `source_terms`.
    """
    kept, names = {}, view.hook_names(layer)
    hooks: list[tuple[str, Callable[..., None]]] = []
    for earlier in range(layer if sources else 0):
        wanted = [name for point, name in view.hook_names(earlier).items() if point in WRITE_POINTS]
        hooks += [(name, partial(_keep, kept, name, positions)) for name in wanted if name in view.hook_points]
    entered = {names["residual"], view.hook_names(0)["residual"]} if sources else {names["residual"]}
    hooks += [(name, partial(_keep, kept, name, positions)) for name in entered if name not in dict(hooks)]
    captured: dict[str, Tensor] = {}
    hooks += holding(captured, [names[point] for point in _OF_SCORES if point in names])
    run_until(view, tokens, hooks, last=names["pattern"])
    residual = in_float64(kept[names["residual"]])[0].cpu()
    return TracedRun(tokens, layer, positions, residual, captured, kept)


def _keep(kept: dict[str, Any], name: str, positions: list[int], activation: Tensor, hook: Any) -> None:
    kept[name] = activation[:, positions].detach()


@torch.no_grad()
def source_terms(view: AttentionView, run: TracedRun) -> tuple[list[str], Float64[Tensor, "tokens sources d_model"]]:
    """Return what wrote to the stream at the tokens of a run in front of its layer, by name, and what it wrote.

    Sources are the embedding, learned positions, each earlier head and MLP, and biases of attention that are no head's.
    Raises UnsupportedArchitecture where the stream is not the sum of them.
    """
    first = run.kept[view.hook_names(0)["residual"]]
    entered = in_float64(first)[0].cpu()
    names, written = ["embedding"], [entered]
    positions = view.position_embedding()
    if positions is not None:
        positions = in_float64(positions[run.positions].detach()).cpu()
        ids = run.tokens[0, run.positions].to(view.device)
        embedded = in_float64(view.embedding()[ids].detach()).cpu()
        problem = "layer 0: what enters it is not the sum of the embedding and the learned positions"
        require_equal_streams(embedded + positions, entered, first.dtype, problem, _UNDIVIDED)
        names, written = ["embedding", "positions"], [entered - positions, positions]
    biases = torch.zeros_like(entered)
    for earlier in range(run.layer):
        points, writes = view.hook_names(earlier), checked_writes(view, earlier, run.kept, in_float64)
        if writes is not None:
            z = z_of(in_float64(run.kept[points["z"]]), writes.w_o)
            scale = writes.token_scale(z)
            heads = writes.written(z, scale)[:, 0].detach().cpu()
            names += [head_name(earlier, head) for head in range(len(heads))]
            written += list(heads)
            biases = biases + writes.of_biases(scale)[0].detach().cpu()
        if view.writes_more(earlier):
            names, written = [*names, f"L{earlier}MIX"], [*written, mixed(view, earlier, run.kept, in_float64)[0].cpu()]
        if points["mlp_out"] in run.kept:  # an attention-only layer has none
            names, written = [*names, f"L{earlier}MLP"], [*written, in_float64(run.kept[points["mlp_out"]])[0].cpu()]
    if bool(biases.any()):
        names, written = [*names, "attention biases"], [*written, biases]
    total, stored = torch.stack(written, dim=1), run.kept[view.hook_names(run.layer)["residual"]].dtype
    problem = f"layer {run.layer}: what enters it is not the sum of what earlier layers wrote"
    require_equal_streams(total.sum(1), run.residual, stored, problem, _UNDIVIDED)
    return names, total
