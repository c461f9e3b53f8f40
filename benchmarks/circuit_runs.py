"""What a circuit and an estimate of all edges cost, of this source tree beside an older one.

    python benchmarks/circuit_runs.py smollm2-135m ../old .
    python benchmarks/circuit_runs.py memory ../old . --runs 1

16 pairs of indirect objects of 15 tokens; circuits of .1 % to 50 % of the edges, chosen at random. Counted are the CPU
seconds of `Pairs.circuit_values`, less those of no more than one circuit, by the number of circuits, with one thread;
beside them those of `edge_estimates` by EAP and of a pass of the clean prompts alone. Then those of `run_circuit` on
one circuit of 2 % of the edges, called for the first time and again, beside a pass of the prompts and pairs that it
scores. Printed are the medians over runs, in which the trees take turns.

`memory` prints MiB of tensors alive at most beside the model, of a circuit and of EAP, on one pair of 256 and of 1,024
tokens in a random Llama: 8 layers, 32 heads of 64 columns, 8 groups of keys.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from measuring import of_trees, peak, seconds

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.models.reading import attention_view

CIRCUITS = 12
LENGTHS = (256, 1_024)
NAMES = ("Mary", "John", "Tom", "Anna", "Paul", "Kate")


def main(
    model_name: str,
    trees: Annotated[list[Path] | None, typer.Argument(help="The old tree and the new one.")] = None,
    runs: int = 3,
    n_pairs: int = 16,
) -> None:
    """Run the trees in turns and print seconds, and forward passes for a circuit."""
    if trees is not None:
        found = {
            job: [median(one) for one in of_tree]
            for job, of_tree in of_trees(__file__, trees, runs, model_name, f"--n-pairs={n_pairs}").items()
        }
        unit = "MiB" if model_name == "memory" else "s"
        for job, (old, new) in found.items():
            typer.echo(f"{job}: {old:.4g} {unit} -> {new:.4g} {unit}, {new / old:.3f}")
        if model_name == "memory":
            return
        old, new = (a / b for a, b in zip(found["a circuit"], found["a forward pass"], strict=True))
        typer.echo(f"a circuit takes {old:.2f} -> {new:.2f} forward passes")
        for job in ("a first call", "a second call"):
            old, new = (a / b for a, b in zip(found[job], found["a pass of all rows"], strict=True))
            typer.echo(f"{job} takes {old:.2f} -> {new:.2f} passes of all rows that it scores")
        return
    torch.set_num_threads(1)  # a process of `of_trees`
    if model_name == "memory":
        print(
            json.dumps({f"{job}, {length} tokens": used for length in LENGTHS for job, used in memory(length).items()})
        )
        return
    model, drawn = tls.load_model(model_name), np.random.default_rng(0)
    names = [[str(name) for name in drawn.permutation(NAMES)[:2]] for _ in range(n_pairs)]
    prompts, other = ([f"When {a} and {b} went to the store, {c} gave a book to" for a, b, c in each]
        for each in ([(a, b, b) for a, b in names], [(a, b, a) for a, b in names]))  # fmt: skip
    right, wrong = ([f" {pair[at]}" for pair in names] for at in (0, 1))
    task = tls.logit_difference(prompts, right, wrong, counterfactual=other)
    graph = Graph(attention_view(model))
    edges = [
        (graph.senders[column].name, graph.receivers[row].name)
        for row, column in np.argwhere(graph.possible & (drawn.random(graph.possible.shape) < 0.02))
    ]
    first, *again = (seconds(lambda: tls.run_circuit(model, edges, task)) for _ in range(4))
    pairs = pairs_of(attention_view(model), task)
    possible = pairs.graph.possible
    circuits = [possible & (drawn.random(possible.shape) < share) for share in np.geomspace(1e-3, 0.5, CIRCUITS)]
    pairs.circuit_values(circuits[:1])
    several, one = (
        min(seconds(lambda some=some: pairs.circuit_values(some)) for _ in range(2))
        for some in (circuits, circuits[-1:])
    )
    estimate = min(seconds(lambda: edge_estimates(pairs, "EAP")) for _ in range(2))
    tokens = pairs.sequences.tokens
    rows = torch.cat([tokens, pairs.other.tokens])
    with torch.no_grad():
        forward, of_rows = (min(seconds(lambda some=some: model(some)) for _ in range(3)) for some in (tokens, rows))
    print(
        json.dumps(
            {
                "a circuit": (several - one) / (CIRCUITS - 1),
                "EAP": estimate,
                "a forward pass": forward,
                "a first call": first,
                "a second call": min(again),
                "a pass of all rows": of_rows,
            }
        )
    )


def memory(length: int) -> dict[str, float]:
    """MiB of tensors alive at most in a circuit and in EAP of one pair."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=2048, intermediate_size=4096, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048)  # fmt: skip
    model = tls.load_model(transformers.LlamaForCausalLM(config).eval())
    prompt = torch.randint(5, 500, (1, length))
    other = prompt.clone()
    other[:, 4] = prompt[:, 4] % 500 + 5
    task = tls.logit_difference(prompt, [7], [9], counterfactual=other)
    pairs = pairs_of(attention_view(model), task)
    kept = pairs.graph.possible & (np.random.default_rng(0).random(pairs.graph.possible.shape) < 0.3)
    return {
        "a circuit": peak(lambda: pairs.circuit_values([kept])),
        "EAP": peak(lambda: edge_estimates(pairs, "EAP")),
    }


if __name__ == "__main__":
    typer.run(main)
