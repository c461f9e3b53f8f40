"""Ablate heads at one position of each sequence; only queries from this position on are run again.

One run of a layer gives z (a head's output before W_O) without the part, for all its heads together. Then runs that
begin at this layer and position are made, several in a batch; in each run z of one head is replaced.
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
    """Ablate the heads of `layers` one at a time, at position `at` of each sequence; return the effects per layer.

    The list has a `LayerEffects` for each of `layers`, in their order. `run` is the run without ablation, from which
    layers are run again from the earliest of these positions on. `sequences` are the prompts with the metric.
    """
    view = run.view
    with evaluating(view.model):
        z_of_layers = [_z_without(run, at, replays) for replays in layers]
        replays = [
            Replays(layer.layer, len(layer.replays), partial(_putting, run, at, layer, z))
            for layer, z in zip(layers, z_of_layers, strict=True)
        ]
        return by_layer(layers, replayed_values(run, sequences, replays))


def _z_without(
    run: ContinuedRun, at: Int[Tensor, "sequences"], replays: LayerReplays
) -> Float[Tensor, "replays sequences d_head"]:
    """Return z (output before W_O) without the part, or without a random control, at position `at` of each sequence.

    Axis 0 has the runs of `replays`, each with one head ablated; a run has the z of its own head. `run` is the run
    without ablation, which is continued to the end of the attention of this layer.
    """
    view, layer, names = run.view, replays.layer, run.view.hook_names(replays.layer)
    require_honoured(view, layer, "z")
    by_draw = [slice(draw, None, replays.drawn + 1) for draw in range(replays.drawn + 1)]  # every head once

    def of_batch(batch: slice) -> Tensor:
        z_of_replays: Any = None
        for chunk in by_draw:
            hooks = replays.hooks(chunk, batch, stacked=False)  # made first: it runs whole passes as proofs
            with run.intact.begun(layer, batch), view.hooks_on(hooks):
                # Run to the end of attention: in some layers the hook on the pattern acts after z.
                z = capture_until(view, run.intact.tokens[batch], [names["z"]], last=names["attention_out"])[names["z"]]
            z = z.reshape(*z.shape[:2], view.n_heads(layer), -1)[range(len(z)), at[batch]]
            if z_of_replays is None:
                z_of_replays = z.new_empty(len(replays.replays), len(z), z.shape[-1])
            z_of_replays[chunk] = z[:, replays.heads].transpose(0, 1)
        return z_of_replays

    return torch.cat([*replays.sequences.in_batches(view, of_batch)], dim=1)


def _putting(
    run: ContinuedRun,
    at: Int[Tensor, "sequences"],
    replays: LayerReplays,
    z_without: Float[Tensor, "replays sequences d_head"],
    chunk: slice,
    batch: slice,
) -> list[Hook]:
    """Return a list with the hook that sets z of the ablated heads at the position, on the sequences `batch`.

    `chunk` (a slice) selects runs of `replays`, each with one head ablated and its own copy of the batch. `z_without`
    is z (output before W_O) after the ablation. `at` are the positions, `run` is the run that is continued. The hook
    returns an edited copy of z.
    """
    n_heads = run.view.n_heads(replays.layer)
    new_z, places = z_without[chunk, batch].flatten(0, 1), at[batch] - run.first
    heads = torch.tensor([head for head, _ in replays.replays[chunk]]).repeat_interleave(len(places))
    places = places.repeat(len(heads) // len(places))

    def put(z: Tensor, hook: Any) -> Tensor:
        by_head = z.reshape(*z.shape[:2], n_heads, -1).clone()
        by_head[torch.arange(len(heads)), places, heads] = new_z
        return by_head.reshape(z.shape)

    return [(run.view.hook_names(replays.layer)["z"], put)]
