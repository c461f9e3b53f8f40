"""Values without a part of each head at one position of each sequence: queries from there on are run alone.

What a head writes at the position is computed without the part from one run of its layer, for all heads together. It is
then put in the place of what the head writes in runs that begin at that layer and position, several in a batch.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.hooks.probe import require_honoured
from tlspectral.hooks.sweeps.layer_effects import LayerEffects, LayerReplays, by_layer
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.running.continued_runs import ContinuedRun
from tlspectral.models.running.passes import capture_until
from tlspectral.tasks.task_sequences import Replays, TaskSequences, replayed_values


def effects_at_position(
    run: ContinuedRun, sequences: TaskSequences, at: Int[Tensor, "sequences"], layers: list[LayerReplays]
) -> list[LayerEffects]:
    """Ablate heads of some layers in turn, by parts that act at one position of each sequence."""
    view = run.view
    with evaluating(view.model):
        written = [_written(run, at, replays) for replays in layers]
        replays = [
            Replays(one.layer, len(one.replays), partial(_putting, run, at, one, of_layer))
            for one, of_layer in zip(layers, written, strict=True)
        ]
        return by_layer(layers, replayed_values(run, sequences, replays))


def _written(
    run: ContinuedRun, at: Int[Tensor, "sequences"], replays: LayerReplays
) -> Float[Tensor, "replays sequences d_head"]:
    """Return z of the head of each replay at the position, without the part."""
    view, layer, names = run.view, replays.layer, run.view.hook_names(replays.layer)
    require_honoured(view, layer, "z")
    by_draw = [slice(draw, None, replays.drawn + 1) for draw in range(replays.drawn + 1)]  # every head once

    def of_batch(batch: slice) -> Tensor:
        found: Any = None
        for chunk in by_draw:
            hooks = replays.hooks(chunk, batch, stacked=False)  # whose proofs are whole passes
            with run.intact.begun(layer, batch), view.hooks_on(hooks):
                # Some layers hand on an edited pattern behind z.
                z = capture_until(view, run.intact.tokens[batch], [names["z"]], last=names["attention_out"])[names["z"]]
            z = z.reshape(*z.shape[:2], view.n_heads(layer), -1)[range(len(z)), at[batch]]
            found = z.new_empty(len(replays.replays), len(z), z.shape[-1]) if found is None else found
            found[chunk] = z[:, replays.heads].transpose(0, 1)
        return found

    return torch.cat([*replays.sequences.in_batches(view, of_batch)], dim=1)


def _putting(
    run: ContinuedRun,
    at: Int[Tensor, "sequences"],
    replays: LayerReplays,
    written: Float[Tensor, "replays sequences d_head"],
    chunk: slice,
    batch: slice,
) -> list[Hook]:
    """Return the hook that puts what the heads of some replays write at the position of some sequences."""
    n_heads = run.view.n_heads(replays.layer)
    what, places = written[chunk, batch].flatten(0, 1), at[batch] - run.first
    heads = torch.tensor([head for head, _ in replays.replays[chunk]]).repeat_interleave(len(places))
    places = places.repeat(len(heads) // len(places))

    def put(z: Tensor, hook: Any) -> Tensor:
        by_head = z.reshape(*z.shape[:2], n_heads, -1).clone()
        by_head[torch.arange(len(heads)), places, heads] = what
        return by_head.reshape(z.shape)

    return [(run.view.hook_names(replays.layer)["z"], put)]
