"""How fast a sweep at a position is, of this source tree beside an older one.

    python benchmarks/positions.py smollm2-135m ../old .

It removes each head of some layers at the last position of one prompt, of 18 and of 200 tokens, and at every position
of one of 18. Counted are the CPU seconds of the effects, with one thread: proofs and the run without ablation come
before, and with it the keys and values before the position (`keys kept` says what they take); at every position these
are counted. Printed are the medians over runs, in which the trees take turns, and their ratio.
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
from tlspectral.hooks.parts import part_of
from tlspectral.hooks.sweeps.effects import layer_effects
from tlspectral.models.reading import attention_view
from tlspectral.tasks.scoring import intact_values, scored_sequences

LENGTHS, PARTS, REPEATS = (18, 200), ("output", "rope_phase"), 3


def work(model_name: str, layers: list[int]) -> None:
    """Print the CPU seconds of each job, and the effects' sizes, in this process."""
    torch.set_num_threads(1)
    model = tls.load_model(model_name)
    view = attention_view(model)
    found: dict[str, float] = {}
    for length in LENGTHS:
        tokens = torch.randint(5, view.d_vocab - 5, (1, length), generator=torch.Generator().manual_seed(length))
        sequences = scored_sequences(view, tls.logit_difference(tokens, [20], [40]))
        intact, _ = intact_values(view, sequences, layers)
        for name in PARTS:
            for places in ([-1], range(length))[: 1 + (length < 100 and name == "output")]:

                def sweep(places: object = places, name: str = name) -> list[np.ndarray]:
                    values = []
                    for at in places:  # pyright: ignore[reportGeneralTypeIssues]
                        part = type(part_of(name))(at=at).fixed(view, sequences)
                        for layer in layers:
                            heads = list(range(view.n_heads(layer)))
                            bound = part.on(view, {layer: heads})[layer]
                            values.append(layer_effects(intact, sequences, layer, heads, bound).values)
                    return values

                alone = len(places) == 1
                first = seconds(sweep) if alone else 0.0  # proofs among it
                taken = min(seconds(sweep) for _ in range(REPEATS if alone else 1))
                job = f"{name}, {length} tokens, {'the last position' if alone else 'every position'}"
                found[job] = taken
                kept = getattr(intact, "continued", None)
                if kept is not None and alone:
                    from tlspectral.models.running.continued_runs import continued_run

                    kept.clear()
                    found[f"{job}: keys kept"] = seconds(lambda: continued_run(intact, length - 1))
                    assert first >= 0
    print(json.dumps(found))


def main(
    model_name: str,
    trees: Annotated[list[Path] | None, typer.Argument(help="The old tree and the new one.")] = None,
    layers: str = "0,7,15,22,29",
    runs: int = 3,
) -> None:
    """Run the trees in turns and print seconds and ratios."""
    if trees is None:
        work(model_name, [int(layer) for layer in layers.split(",")])
        return
    for job, of_tree in of_trees(__file__, trees, runs, model_name, "--layers", layers).items():
        old, new = (median(one) if one else None for one in of_tree)
        if old is None or new is None:
            typer.echo(f"{job}: {old or new:.3f} s")
        else:
            typer.echo(f"{job}: {old:.3f} s -> {new:.3f} s, {old / new:.1f} times as fast")


if __name__ == "__main__":
    typer.run(main)
