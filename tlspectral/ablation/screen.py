"""First-order estimates of every head's effect, from one backward pass over all of them."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from tlspectral.ablation.control import root_mean_square
from tlspectral.ablation.scoring import ScoredSequences
from tlspectral.hooks.ablation import LayerAblation, Removal
from tlspectral.hooks.parts import Part
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.replay import logits_at
from tlspectral.models.attention.threads import hooks_on

_GRAPH_TOKENS = 4  # the graph of all layers stays in memory: so many times fewer rows than without gradients


def gradient_screen(
    view: AttentionView, sequences: ScoredSequences, by_layer: dict[int, list[int]], part: Part
) -> pd.DataFrame:
    """Estimate what removing `part` from each head alone would add to the loss.

    With a factor g on the difference D that an ablation adds to a head's scores S, the estimate is the derivative of
    the loss in g at g = 0, `sum over entries of (dL/dS) D`: one forward and one backward pass for all heads
    (attribution patching: Nanda 2023). No gradient reaches the model's parameters.

    Returns:
        DataFrame `layer, head, estimate, score_rms`.

    What it does not establish: the effect. A softmax saturates, and an edit as large as the score itself is not small.
    """
    gates: dict[int, Tensor] = {}
    squares = {layer: torch.zeros(len(heads), dtype=torch.float64) for layer, heads in by_layer.items()}
    hooks, batch = [], slice(0, 0)

    def unpadded(removal: Removal) -> Removal:
        return sequences.unpadded(removal, batch)

    for layer, heads in by_layer.items():
        gates[layer] = torch.zeros(len(heads), device=view.device, requires_grad=True)
        alter = _gated(gates[layer], squares[layer], unpadded)
        hooks += LayerAblation(view, view.layer(layer), heads, part, alter=alter).hooks()
    estimates = {layer: torch.zeros(len(heads), dtype=torch.float64) for layer, heads in by_layer.items()}
    n, rows = len(sequences.tokens), max(1, sequences.rows_at_once(view) // _GRAPH_TOKENS)
    with torch.enable_grad(), hooks_on(view.model, view.model.hook_dict, hooks):
        for start in range(0, n, rows):
            batch = slice(start, min(start + rows, n))
            loss = sequences.losses(logits_at(view, sequences.tokens[batch], sequences.scored), batch).sum()
            for layer, gradient in zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True):
                estimates[layer] += gradient.cpu().double()
    tables = [
        pd.DataFrame(
            {
                "layer": layer,
                "head": heads,
                "estimate": (estimates[layer] / n).numpy(),
                "score_rms": (squares[layer] / n).sqrt().numpy(),
            }
        )
        for layer, heads in by_layer.items()
    ]
    return pd.concat(tables, ignore_index=True)


def _gated(gate: Tensor, squares: Tensor, unpadded: Callable[[Removal], Removal]) -> Callable[[Removal], Tensor]:
    def alter(removal: Removal) -> Tensor:
        removal = unpadded(removal)
        difference = removal.difference.detach()
        if removal.allowed is None:
            squares.fill_(torch.nan)
        else:
            squares.add_(root_mean_square(difference, removal.allowed).square().sum(0).cpu().double())
        return difference * gate.to(difference)[:, None, None]

    return alter
