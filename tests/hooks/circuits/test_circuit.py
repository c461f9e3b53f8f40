"""Circuits: both ends, single edges, any set of edges beside nested loops of whole runs, estimates, faithfulness."""

import copy

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs, single_cuts

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.held_writes import HeldWrites
from tlspectral.hooks.circuits.pairs import Stream, pairs_of, run_with, written_by
from tlspectral.hooks.edges.reached import reached
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.selection.node_names import Receiver


def task_of(n=3):
    clean, other = prompt_pairs(n, 11, seed=0)
    return tls.logit_difference(clean, [7, 8, 9] * (n // 3), [10, 11, 12] * (n // 3), counterfactual=other)


@pytest.fixture
def double(monkeypatch):
    """Bridges in float64, so that rounding cannot hide a difference; transformers' RMS norms compute in float32."""

    def norm(self, x):
        gain = self.weight + 1.0 if type(self).__name__.startswith("Gemma") else self.weight
        eps = getattr(self, "variance_epsilon", None) or self.eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain

    def build(name):
        model = copy.deepcopy(zoo.hf_model(name))
        for kind in {type(module) for module in model.modules() if "RMSNorm" in type(module).__name__}:
            monkeypatch.setattr(kind, "forward", norm)
        return tls.load_model(model, dtype=torch.float64)

    return build


def some_edges(pairs, share, seed=0):
    """A random circuit."""
    possible = pairs.graph.possible
    return possible & (np.random.default_rng(seed).random(possible.shape) < share)


class Loops:
    """A circuit by whole runs of the model, one for each head and input: no norm or projection is computed here.

    The stream that a receiver reads is put in the place of the one that enters its layer, and what the receiver then
    computes is read off. Only W_O is used, to share out what the heads of a layer add.
    """

    def __init__(self, model, tokens):
        self.model, self.tokens, self.view = model, tokens, attention_view(model)

    def run(self, layer, stream, points, edits=()):
        """Run with a stream in front of a layer; return what passes some points of the layer."""
        names, seen = self.view.hook_names(layer), {}
        hooks = [(names["residual"], lambda x, hook: stream.to(x))] if stream is not None else []
        hooks += [(names[point], edit) for point, edit in edits]
        hooks += [(names[p], lambda x, hook, p=p: seen.__setitem__(p, x.clone())) for p in points if p in names]
        with torch.no_grad():
            self.logits = self.model.run_with_hooks(self.tokens, fwd_hooks=hooks)
        return seen

    def heads(self, layer, z):
        """What each head adds, from z of all heads."""
        w_o = self.view.raw(layer).w_o.detach()
        found = self.run(layer, None, ["attention_out"], [("z", lambda x, hook: z.reshape(x.shape).to(x))])
        parts = torch.einsum("bphd,hdm->hbpm", z.reshape(*z.shape[:2], *w_o.shape[:2]), w_o)
        bias = self.view.behind(layer)[0]
        if bias is not None and bool((bias != 0).any()):
            return parts
        total = parts.sum(0)
        scale = found["attention_out"] / total.where(total != 0, 1.0)  # of a norm behind the attention
        return parts * scale

    def writes(self):
        """What every sender writes in a plain run."""
        first = self.run(0, None, ["residual"])
        found = [first["residual"][None]]
        for layer in range(self.view.n_layers):
            seen = self.run(layer, None, ["z", "mlp_out"])
            found.append(self.heads(layer, seen["z"]))
            if "mlp_out" in seen:
                found.append(seen["mlp_out"][None])
        return torch.cat(found)

    def circuit(self, graph, kept, then):
        """Logits of a circuit; `then` are the writes of the counterfactual prompts."""
        now = [self.run(0, None, ["residual"])["residual"][None]]

        def stream(receiver):
            (end,) = reached(self.view, [receiver])
            row, n = graph.receiver_index[end.receiver], graph.n_before(end.receiver)
            written = torch.cat(now)[:n]
            weights = torch.as_tensor(kept[row, :n], dtype=written.dtype)[:, None, None, None]
            return self.biases[n] + (weights * (written - then[:n])).sum(0) + then[:n].sum(0)

        for layer in range(self.view.n_layers):
            n_heads = graph.n_heads[layer]
            z = []
            for head in range(n_heads):
                inputs = {
                    point: self.run(layer, stream(Receiver(layer, head, what)), [point])[point]
                    for what, point in (("q", "query"), ("k", "key"), ("v", "value"))
                }
                edits = [(point, lambda x, hook, value=value: value.to(x)) for point, value in inputs.items()]
                found = self.run(layer, None, ["z"], edits)["z"]
                z.append(found.reshape(*found.shape[:2], n_heads, -1)[:, :, [head]])
            now.append(self.heads(layer, torch.cat(z, 2)))
            if graph.mlps[layer] is not None:
                x = stream(Receiver(layer, -1, "mlp"))
                edits = [] if graph.mlps[layer].parallel else [("attention_out", lambda a, hook: torch.zeros_like(a))]
                now.append(self.run(layer, x, ["mlp_out"], edits)["mlp_out"][None])
        last, final = self.view.n_layers - 1, stream(Receiver(-1, -1, "logits"))
        self.run(last, None, [], [("residual_after", lambda x, hook: final.to(x))])
        return self.logits


@pytest.mark.parametrize("name", ["gpt2", *zoo.also_slow("gemma3", "llama", "gptj", "mistral")])
def test_any_set_of_edges_is_that_of_nested_loops(double, name):
    model, (clean, other) = double(name), prompt_pairs(2, 9 if name != "mistral" else 12, seed=0)
    pairs = pairs_of(attention_view(model), tls.logit_difference(clean, 7, 10, counterfactual=other))
    graph, view = pairs.graph, attention_view(model)
    loops, swapped = Loops(model, clean), Loops(model, other)
    then = swapped.writes()
    # The biases of attention belong to no sender: what the stream holds beyond the writes, by number of senders before.
    loops.biases, count = {1: torch.zeros_like(then[0])}, 1
    for layer in range(view.n_layers):
        seen = swapped.run(layer, None, ["residual", "attention_out", "residual_after"])
        with_heads = count + graph.n_heads[layer]
        beside = (seen["residual"] + seen["attention_out"]) - then[:with_heads].sum(0)
        loops.biases[with_heads] = beside
        count = with_heads + (graph.mlps[layer] is not None)
        loops.biases[count] = beside
    circuits = [some_edges(pairs, share, seed) for share, seed in ((0.5, 0), (0.9, 1), (0.1, 2))]
    assert not graph.useful(circuits[2]).all()  # receivers from which no path leads on, which are not edited
    found = pairs.circuit_values(circuits)  # stacked
    for kept, scores in zip(circuits, found, strict=True):
        logits = loops.circuit(graph, kept, then)[:, -1]
        expected = (logits[:, 7] - logits[:, 10]).numpy()
        # Rounding in float64: 2e-14 measured. A norm that is held moves the score by hundredths.
        np.testing.assert_allclose(scores, expected, atol=1e-10)
        np.testing.assert_allclose(pairs.circuit_values([kept])[0], expected, atol=1e-10)
    assert np.abs(found[:2, None] - pairs.plain_values()).min() > 1e-4  # neither end


@pytest.mark.slow
def test_several_batches_give_what_one_does(batch_size):
    """The answers of each prompt are those of its row, whichever batch it is in."""
    pairs = pairs_of(attention_view(zoo.shared("bridge", "llama")), task_of(6))
    edges, kept = np.argwhere(pairs.graph.possible)[::9], some_edges(pairs, 0.8)
    results = []
    # Two rows of 11 tokens: z of two layers and three other writes, of both runs, and the streams of nine receivers.
    for size in (2**29, 2 * 11 * 4 * (2 * 5 + 9) * 48 // 3 + 4):
        batch_size(held=size)
        results.append(
            (edge_estimates(pairs, "EAP-IG").terms.sum(0)[0], pairs.circuit_values([kept]), single_cuts(pairs, edges))
        )
    assert pairs.rows_at_once == 2
    for whole, parts in zip(*results, strict=True):
        np.testing.assert_allclose(parts, whole, atol=2e-6)  # float32 in other batches: 1e-7, effects of 1e-2


def test_both_ends_are_compared_in_batches_of_one_size():
    """A card rounds a batch of two otherwise than one of one: logits of a deep model in bfloat16 differ by half."""
    model = zoo.bridge("llama")
    mlp = model.blocks[0].mlp.original_component
    handle = mlp.register_forward_hook(lambda module, args, out: out * (1 + 0.3 * len(out)))
    try:
        pairs = pairs_of(attention_view(model), task_of())
        one, two = (logits_at(pairs.view, pairs.sequences.tokens[:1].repeat(n, 1), slice(-1, None)) for n in (1, 2))
    finally:
        handle.remove()
    assert (one[0] - two[0]).abs().max() > 0.05  # the stand-in for rounding; what is allowed is 1e-4 of the largest


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "name", ["llama", "deepseek_v3", *zoo.also_slow("gemma3", "gpt2", "gptj", "olmo2", "deepseek_v2_lite")]
)
def test_the_estimate_of_an_edge_is_the_slope_of_its_effect(double, name):
    pairs = pairs_of(attention_view(double(name)), task_of())
    [estimates] = edge_estimates(pairs, "EAP").terms.sum(0)
    edges = np.argwhere(pairs.graph.possible)
    edges = edges[np.random.default_rng(2).permutation(len(edges))[:10]]
    step = 3e-3
    for row, column in edges:
        slope = (partly_cut(pairs, row, column, step) - partly_cut(pairs, row, column, -step)) / (2 * step)
        # Central differences; transformers takes softmax and angles in float32. Measured: 4e-6, slopes 1e-3 to
        # 1e-1. A norm held fixed, or a path that another reader shares, is off by tenths of a slope.
        assert slope == pytest.approx(estimates[row, column], rel=1e-3, abs=2e-5)
    assert not estimates[~pairs.graph.possible].any()


def partly_cut(pairs, row, column, share):
    """Mean change of the score when a share of one edge is cut."""
    cut = torch.zeros(pairs.graph.possible.shape, dtype=torch.float64)
    cut[row, column] = share
    then = written_by(pairs.graph, pairs.other.tokens)
    stream = Stream(pairs.graph, HeldWrites(pairs.graph), then, cut[None])
    with torch.no_grad():
        logits = run_with(stream, pairs.sequences.tokens, pairs.sequences.predicted)
    return float((pairs.sequences.measured(logits).numpy() - pairs.plain_values()[0]).mean())


EDGES = [("embedding", "L0MLP"), ("L1MLP", "logits")]
ENDS = [[*side] for side in zip(*EDGES, strict=True)]


@pytest.mark.parametrize(
    "edges",
    [
        pd.DataFrame(EDGES, columns=["sender", "receiver"]),
        pl.DataFrame(EDGES, schema=["sender", "receiver"], orient="row"),
        pa.table({"receiver": ENDS[1], "sender": ENDS[0]}),
        dict(zip(("sender", "receiver"), ENDS, strict=True)),
        [{"receiver": receiver, "sender": sender} for sender, receiver in EDGES],
        np.array(EDGES),
        pd.Series(EDGES),
        zip(*ENDS, strict=True),
        [("embedding", "L-2MLP"), ("L-1MLP", "logits")],
        [(" embedding ", "l0mlp"), ("l1mlp", "LOGITS")],
    ],
    ids=lambda edges: type(edges).__module__,
)
def test_edges_of_every_library_are_rows(edges):
    """Read by columns they would be embedding -> L1MLP and L0MLP -> logits, which are edges as well."""
    graph = pairs_of(attention_view(zoo.shared("bridge", "llama")), task_of()).graph
    rows, columns = graph.places(edges)
    assert [graph.senders[column].name for column in columns] == ENDS[0]
    assert [graph.receivers[row].name for row in rows] == ENDS[1]


@pytest.mark.parametrize("side", [np.array, pd.Series, pa.array, list], ids=["numpy", "pandas", "pyarrow", "lists"])
def test_senders_beside_receivers_have_two_readings(side):
    graph = pairs_of(attention_view(zoo.shared("bridge", "llama")), task_of()).graph
    with pytest.raises(ValueError, match="two readings: all senders and all receivers, or one edge in each"):
        graph.places(tuple(map(side, ENDS)))
