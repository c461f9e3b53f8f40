"""`gradient_screen`: estimate the effect of ablating each head to first order, by one backward pass for all heads."""

from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.parts.removal import Removal, root_mean_square
from tlspectral.hooks.probe import require_honoured
from tlspectral.hooks.sweeps.controls import unpadded
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import logits_at, require_gradients
from tlspectral.tasks.task_sequences import TaskSequences


def gradient_screen(
    view: AttentionView,
    sequences: TaskSequences,
    by_layer: dict[int, list[int]],
    part: Part,
) -> pd.DataFrame:
    """Estimate how much removing `part` from each head alone changes the metric (attribution patching: Nanda 2023).

    `view` is the model.

    Returns a DataFrame `layer, head, estimate, score_rms`. `estimate` is in units of the metric. `score_rms` is the RMS
    of the removed part in logits, NaN for a part of the mask or of z. An ablation adds a difference D to the head's
    scores S; the estimate is the sum over entries of (dL/dS) D. This takes one forward and one backward pass of
    `sequences` for all heads in `by_layer` (dict from layer to heads), and one more forward pass if the metric needs
    all prompts at once. Raises ValueError if the metric has no gradient, or PyTorch records none (inference mode).
    """
    # The estimate is the derivative in a gate g = 0 that multiplies D, so no gradient reaches the parameters.
    require_gradients(view, "screen='gradient'")
    gates: dict[int, Tensor] = {}
    squares = {layer: torch.zeros(len(heads), dtype=torch.float64) for layer, heads in by_layer.items()}
    of_batch: dict[int, Tensor] = {}
    hooks, batch = [], slice(0, 0)
    of_logits = None
    if not sequences.by_rows:
        with torch.no_grad():
            logits = sequences.in_batches(
                view, lambda each: logits_at(view, sequences.tokens[each], sequences.predicted_of(each))
            )
            of_logits = sequences.gradients(torch.cat([*logits]))

    def gated(layer: int, removal: Removal) -> Tensor:
        """Store the mean square of the removed part of each head in a layer; return the parts times their gates."""
        removal = unpadded(removal, sequences, batch)
        difference = removal.difference.detach()
        if removal.allowed is None:
            squares[layer].fill_(torch.nan)
        else:
            of_batch[layer] = root_mean_square(difference, removal.allowed).square().sum(0).cpu().double()
        return difference * gates[layer].to(difference)[:, None, None]

    bound, ablations = bound_parts(part, view, by_layer, every=True), []
    for layer, heads in by_layer.items():
        gates[layer] = torch.zeros(len(heads), device=view.device, requires_grad=True)
        ablation = LayerAblation(view, view.layer(layer), heads, bound[layer])
        ablations.append(ablation)
        if part.acts_on != "mask":
            ablation.alter = partial(gated, layer)
            hooks += ablation.hooks()
            continue
        # A part of the mask hides keys and so changes scores by infinity: the gate multiplies the change of z.
        squares[layer].fill_(torch.nan)
        require_honoured(view, layer, "z")
        hooks += [*ablation.measuring(), (ablation.names["z"], partial(_gated_output, ablation, gates[layer]))]
    estimates = {layer: torch.zeros(len(heads), dtype=torch.float64) for layer, heads in by_layer.items()}
    n = len(sequences.tokens)

    def gradients_of(sequences_run: slice) -> tuple[Tensor, ...]:
        """Return the gradient of the metric in each layer's gates, summed over some sequences."""
        nonlocal batch
        batch = sequences_run
        for ablation in ablations:
            ablation.part = bound[ablation.layer.layer].of_rows(batch)
        logits = logits_at(view, sequences.tokens[batch], sequences.predicted_of(batch))
        whole = sequences.gradients(logits, batch) if of_logits is None else of_logits[batch]
        return torch.autograd.grad(logits, list(gates.values()), whole.to(logits))

    with torch.enable_grad(), view.hooks_on(hooks):
        for gradients in sequences.in_batches(view, gradients_of, backward=True):
            for layer, gradient in zip(gates, gradients, strict=True):
                estimates[layer] += gradient.cpu().double()
            for layer, square in of_batch.items():
                squares[layer] += square
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


def _gated_output(ablation: LayerAblation, gates: Float[Tensor, "chosen"], z: Tensor, hook: Any) -> Tensor:
    """Return z plus the gates times the change of z without the part. The gates are 0, so z keeps its value.

    z is the heads' output before W_O, `ablation` the removal of the part from some of these heads, `gates` has a number
    per head of the ablation. The gradient in a gate is the estimate for its head. `hook` is not used.
    """
    by_head = z.reshape(*z.shape[:2], ablation.layer.n_heads, -1)
    change = ablation.change_of_head_output(by_head).detach() * gates.to(by_head)[:, None]
    return by_head.index_add(2, torch.tensor(ablation.heads, device=z.device), change.to(z)).reshape(z.shape)
