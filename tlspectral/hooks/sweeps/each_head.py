"""Logits of prompts without the output of each head, one head after the other."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.sweeps.layer_effects import LayerReplays
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.running.batches import in_batches
from tlspectral.models.running.continued_runs import rows_at_once
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.tasks.task_sequences import TaskSequences


def logits_without_each(
    intact: IntactRun, sequences: TaskSequences, by_layer: dict[int, list[int]], part: Part
) -> Iterator[Float[Tensor, "sequences predicted d_vocab"]]:
    """Yield the logits without `part` of each head, in the order of layers and heads.

    Blocks from the head's layer on run again, several heads of a layer in one batch. `part` is settled on the
    sequences (`Part.fixed`).
    """
    view, n = intact.view, len(sequences.tokens)
    rows = min(rows_at_once(intact), sequences.rows_at_once(view))
    bound = bound_parts(part, view, by_layer, every=True)
    for layer, heads in by_layer.items():
        replays = LayerReplays(view, sequences, layer, heads, bound[layer])

        def of_heads(chosen: slice, layer: int = layer, replays: LayerReplays = replays) -> Tensor:
            copies = chosen.stop - chosen.start

            def of_batch(batch: slice) -> Tensor:
                with view.hooks_on(replays.hooks(chosen, batch)):
                    return intact.replay(layer, batch, copies).unflatten(0, (copies, -1))

            return torch.cat([*in_batches(n, max(1, rows // copies), of_batch)], dim=1)

        with evaluating(view.model), torch.no_grad():
            for found in in_batches(len(heads), max(1, rows // n), of_heads):
                yield from found
