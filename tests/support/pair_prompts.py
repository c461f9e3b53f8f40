"""Random prompts, each with a pair that differs from it in one token."""

import numpy as np
import pandas as pd
import torch

from tlspectral.hooks.edges.measuring import Edge, Prepared, _task_deltas
from tlspectral.hooks.edges.reached import reached
from tlspectral.hooks.edges.senders import cached_run
from tlspectral.tasks.task_sequences import intact_values


def prompt_pairs(n, length, *, seed, at=4):
    """Token ids of n prompts and of their pairs, [n, length] each, which differ at position `at`."""
    clean = torch.randint(5, 90, (n, length), generator=torch.Generator().manual_seed(seed))
    other = clean.clone()
    other[:, at] = (other[:, at] - 4) % 85 + 5
    return clean, other


def patched_by_pair(model, clean, other, layer, head, at=None):
    """Logit 7 less logit 10 of each prompt with z of a head, or that at one position, from its pair; one at a time."""
    name, values = f"blocks.{layer}.attn.hook_z", []
    for one, pair, place in zip(clean, other, [slice(None)] * len(clean) if at is None else at, strict=True):
        seen = {}
        with torch.no_grad():
            model.run_with_hooks(pair[None], fwd_hooks=[(name, lambda z, hook, seen=seen: seen.update(z=z.clone()))])

            def patch(z, hook, seen=seen, place=place):
                z = z.clone()
                z[:, place, head] = seen["z"][:, place, head]
                return z

            logits = model.run_with_hooks(one[None], fwd_hooks=[(name, patch)])[0, -1]
        values.append(float(logits[7] - logits[10]))
    return np.array(values)


def first_order(model, clean, other, layer):
    """The gradient of logit 7 less logit 10 in z, times what the pair changes there, [batch, pos, heads, d_head]."""
    name, z, swapped = f"blocks.{layer}.attn.hook_z", {}, {}
    with torch.no_grad():
        model.run_with_hooks(other, fwd_hooks=[(name, lambda x, hook: swapped.update(z=x.clone()))])

    def leaf(x, hook):
        z["z"] = x.detach().requires_grad_()
        return z["z"]

    logits = model.run_with_hooks(clean, fwd_hooks=[(name, leaf)])[:, -1]
    (gradient,) = torch.autograd.grad((logits[:, 7] - logits[:, 10]).mean(), z["z"])
    return (gradient * (swapped["z"] - z["z"])).detach()


def edges_of(graph, mask):
    """The names of the edges of a mask."""
    ends = [(graph.senders[place].name, graph.receivers[row].name) for row, place in np.argwhere(mask)]
    return pd.DataFrame(ends, columns=["sender", "receiver"])


def single_cuts(pairs, edges):
    """Score with one edge cut less the intact one, [edges, pairs], of rows (receiver, sender)."""
    graph, found = pairs.graph, []
    for row, place in edges:
        (end,) = reached(pairs.view, [graph.receivers[row]])
        intact = intact_values(pairs.view, pairs.sequences, [min(end.receiver.layer, pairs.view.n_layers - 1)])
        run = cached_run(pairs.view, pairs.sequences, graph.senders, pairs.view.n_layers, replace="counterfactual")
        prepared = Prepared(run, intact, {})
        edge = Edge(graph.senders[place], end, -1, None)
        found.append(_task_deltas([edge], pairs.sequences, 0, prepared)[0, 0])
    return np.stack(found)


def accuracy(logits, tokens, mask):
    return (logits[:, -1].argmax(-1) == 3).float()
