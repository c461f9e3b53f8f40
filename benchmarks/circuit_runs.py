"""What a circuit costs, in forward passes of its prompts, of this source tree beside an older one.

    python benchmarks/circuit_runs.py smollm2-135m ../old .

16 pairs of indirect objects of 15 tokens; circuits of .1 % to 50 % of the edges, chosen at random. Counted are the CPU
seconds of `Pairs.scores`, less those of no more than one circuit, by the number of circuits, with one thread; beside
them those of a pass of the clean prompts alone. Printed are the medians over runs, in which the trees take turns.
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
) -> None:
    """Run the trees in turns and print seconds, and forward passes for a circuit."""
    if trees is not None:
        found = {
            job: [median(one) for one in of_tree]
            for job, of_tree in of_trees(__file__, trees, runs, model_name).items()
        }
        for job, (old, new) in found.items():
            typer.echo(f"{job}: {old:.3f} s -> {new:.3f} s")
        old, new = (a / b for a, b in zip(found["a circuit"], found["a forward pass"], strict=True))
        typer.echo(f"a circuit takes {old:.2f} -> {new:.2f} forward passes")
        return
    from tlspectral.hooks.circuits.pairs import pairs_of

    torch.set_num_threads(1)  # a process of `of_trees`
    model, drawn = tls.load_model(model_name), np.random.default_rng(0)
    names = [[str(name) for name in drawn.permutation(NAMES)[:2]] for _ in range(16)]
    prompts, other = ([f"When {a} and {b} went to the store, {c} gave a book to" for a, b, c in each]
        for each in ([(a, b, b) for a, b in names], [(a, b, a) for a, b in names]))  # fmt: skip
    right, wrong = ([f" {pair[at]}" for pair in names] for at in (0, 1))
    pairs = pairs_of(attention_view(model), tls.logit_difference(prompts, right, wrong, counterfactual=other))
    possible = pairs.graph.possible
    circuits = [possible & (drawn.random(possible.shape) < share) for share in np.geomspace(1e-3, 0.5, CIRCUITS)]
    pairs.circuit_values(circuits[:1])
    several, one = (
        min(seconds(lambda some=some: pairs.circuit_values(some)) for _ in range(2))
        for some in (circuits, circuits[-1:])
    )
    tokens = pairs.sequences.tokens
    with torch.no_grad():
        forward = min(seconds(lambda: model(tokens)) for _ in range(3))
    print(json.dumps({"a circuit": (several - one) / (CIRCUITS - 1), "a forward pass": forward}))


if __name__ == "__main__":
    typer.run(main)
