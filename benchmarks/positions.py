"""How fast a sweep at a position is, of this source tree beside an older one.

    python benchmarks/positions.py smollm2-135m ../old .

It removes each head of some layers at the last position of one prompt, of 18 and of 200 tokens, and at every position
of one of 18. Counted are the CPU seconds of `ablation_sweep` with one thread, after a first call with its proofs, less
those of a call of one head of the last layer: with it go the run without ablation, the keys that are kept, and the
table. Printed are the medians over runs, in which the trees take turns, and their ratio. `--layers` chooses layers.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from measuring import of_trees, seconds

import tlspectral as tls

CASES = ((18, "output", -1), (18, "rope_phase", -1), (18, "output", None), (200, "output", -1), (200, "rope_phase", -1))
REPEATS = 3


def effects_in(model: Any, length: int, part: str, at: int | None, layers: list[str]) -> float:
    """CPU seconds of the effects of all heads of some layers but one."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(5, model.cfg.d_vocab - 5, (1, length), generator=generator)
    task = tls.logit_difference(tokens, [20], [40])
    places = [at] if at is not None else list(range(length))
    one = f"L{model.cfg.n_layers - 1}H0"
    tls.ablation_sweep(model, part, task=task, at=places[:1], heads=layers)
    repeats = REPEATS if len(places) == 1 else 1
    calls = [
        min(seconds(lambda heads=heads: tls.ablation_sweep(model, part, task=task, at=places, heads=heads))
            for _ in range(repeats))
        for heads in (layers, one)
    ]  # fmt: skip
    return calls[0] - calls[1]


def main(
    model_name: str,
    trees: Annotated[list[Path] | None, typer.Argument(help="The old tree and the new one.")] = None,
    layers: str = "0,7,15,22,29",
    runs: int = 3,
) -> None:
    """Run the trees in turns and print seconds and ratios."""
    if trees is None:  # in a process of `of_trees`
        torch.set_num_threads(1)
        model, chosen = tls.load_model(model_name), [f"L{layer}" for layer in layers.split(",")]
        said = {
            f"{part}, {length} tokens, {'every position' if at is None else 'the last position'}": effects_in(
                model, length, part, at, chosen
            )
            for length, part, at in CASES
        }
        print(json.dumps(said))
        return
    for job, of_tree in of_trees(__file__, trees, runs, model_name, "--layers", layers).items():
        old, new = map(median, of_tree)
        typer.echo(f"{job}: {old:.3f} s -> {new:.3f} s, {old / new:.1f} times as fast")


if __name__ == "__main__":
    typer.run(main)
