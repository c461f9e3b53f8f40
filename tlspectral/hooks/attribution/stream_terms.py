"""The residual stream at some tokens of a run as a sum of the writes of earlier components."""

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
from tlspectral.selection.node_names import head_name

_OF_SCORES = ("query", "key", "cos", "sin", "scores", "pattern")
_UNDIVIDED = "a score cannot be divided among sources"


@dataclass(frozen=True)
class StreamTerms:
    """The residual stream at one token as a sum of named terms.

    Attributes:
        names: name of each term, such as "embedding" or "L0H3".
        written: the vector of each term.
    """

    names: list[str]
    written: Float64[Tensor, "terms d_model"]


@dataclass(frozen=True)
class TracedRun:
    """Activations of one prompt at some tokens, up to the attention of one layer.

    Attributes:
        tokens: token ids of the prompt.
        layer: the layer.
        positions: positions of the chosen tokens.
        residual: the stream that enters the layer at these tokens, in float64 on the CPU.
        captured: queries, keys, rotary cos and sin, scores and pattern of the layer at all tokens, by hook name.
        kept: activations of the stream, z, attention outputs and MLP outputs of earlier layers at the chosen tokens, by
            hook name, for `source_terms`.
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
    """Run one prompt up to the attention of a layer; return the stream that enters the layer and its attention.

    The `TracedRun` has the stream at `positions` (`residual`, [tokens, d_model]), and queries, keys, rotary cos and
    sin, scores and pattern of the layer at all tokens (`captured`, by hook name). `view` is the model. `sources`: True
    also keeps, at `positions`, the stream that enters layer 0 and the streams, z (heads' outputs before W_O), attention
    outputs and MLP outputs of all earlier layers (`kept`), for `source_terms`.
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
    """Store the activation at the tokens `positions` in the dict `kept` under `name`, the name of its hook point.

    `hook` is not used.
    """
    kept[name] = activation[:, positions].detach()


@torch.no_grad()
def source_terms(view: AttentionView, run: TracedRun) -> tuple[list[str], Float64[Tensor, "tokens sources d_model"]]:
    """Return the names of the sources of the stream that enters the run's layer, and the vector that each source wrote.

    `view` is the model. `run` is a `traced_run` with sources=True; the vectors are at its tokens, in float64 on the
    CPU. Sources are the embedding, learned positions, each earlier head, mixer and MLP ("L0H3", "L0MIX", "L0MLP"), and
    attention biases that belong to no head. Raises UnsupportedArchitecture if the sources do not add up to the stream.
    """
    first = run.kept[view.hook_names(0)["residual"]]
    entered = in_float64(first)[0].cpu()
    names, written = ["embedding"], [entered]
    positions = view.position_embedding()
    if positions is not None:
        positions = in_float64(positions[run.positions].detach()).cpu()
        ids = run.tokens[0, run.positions].to(view.device)
        embedded = in_float64(view.embedding()[ids].detach()).cpu()
        problem = "layer 0: its input is not the sum of the embedding and the learned positions"
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
    problem = f"layer {run.layer}: its input is not the sum of the writes of earlier layers"
    require_equal_streams(total.sum(1), run.residual, stored, problem, _UNDIVIDED)
    return names, total
