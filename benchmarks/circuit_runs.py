"""What a circuit costs, in forward passes of its prompts, of this source tree beside an older one.

    python benchmarks/circuit_runs.py smollm2-135m ../old .

16 pairs of indirect objects of 15 tokens; circuits of .1 % to 50 % of the edges, chosen at random. Counted are the CPU
seconds of `Pairs.circuit_values`, less those of no more than one circuit, by the number of circuits, with one thread;
beside them those of a pass of the clean prompts alone. Then those of `run_circuit` on one circuit of 2 % of the edges,
called for the first time and again, beside a pass of the prompts and pairs that it scores. Printed are the medians over
runs, in which the trees take turns.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from measuring import of_trees, seconds

import tlspectral as tls
from tlspectral.models.reading import attention_view

CIRCUITS = 12
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
        for job, (old, new) in found.items():
            typer.echo(f"{job}: {old:.3f} s -> {new:.3f} s")
        old, new = (a / b for a, b in zip(found["a circuit"], found["a forward pass"], strict=True))
        typer.echo(f"a circuit takes {old:.2f} -> {new:.2f} forward passes")
        for job in ("a first call", "a second call"):
            old, new = (a / b for a, b in zip(found[job], found["a pass of all rows"], strict=True))
            typer.echo(f"{job} takes {old:.2f} -> {new:.2f} passes of all rows that it scores")
        return
    from tlspectral.hooks.circuits.graph import Graph
    from tlspectral.hooks.circuits.pairs import pairs_of

    torch.set_num_threads(1)  # a process of `of_trees`
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
    tokens = pairs.sequences.tokens
    rows = torch.cat([tokens, pairs.other.tokens])
    with torch.no_grad():
        forward, of_rows = (min(seconds(lambda some=some: model(some)) for _ in range(3)) for some in (tokens, rows))
    print(
        json.dumps(
            {
                "a circuit": (several - one) / (CIRCUITS - 1),
                "a forward pass": forward,
                "a first call": first,
                "a second call": min(again),
                "a pass of all rows": of_rows,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
