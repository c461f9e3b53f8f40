"""CPU seconds of sweeps on one prompt, where proofs and hashes weigh most: a first, a second, and one of one head.

Run `python benchmarks/first_sweep.py --old ../old`, with another source tree of the package: each tree runs twice, in
turn, in processes of its own, on one thread; the ratios are of the smaller times. Loading is not counted.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import seconds

HERE = Path(__file__).resolve().parent
SWEEPS = {"all heads, first": None, "all heads, again": None, "one head, first": "L-1H0", "one head, again": "L-1H0"}


def measure(name: str) -> None:
    """Print the CPU seconds of each sweep, one after the other."""
    import tlspectral as tls

    torch.set_num_threads(1)
    model = tls.load_model(name)
    ids = torch.arange(100, 118)[None] % model.cfg.d_vocab
    task = tls.logit_difference(ids, [5], [6])
    print(
        *(
            seconds(lambda heads=heads: tls.ablation_sweep(model, "output", heads=heads, task=task))
            for heads in SWEEPS.values()
        )
    )


def main(
    name: Annotated[str, typer.Argument(help="Name or path of the model.")] = "smollm2-135m",
    old: Annotated[Path, typer.Option(help="Source tree that is compared with.")] = HERE.parent,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print the seconds of both trees and their ratio."""
    if here:
        measure(name)
        return
    found: dict[str, list[list[float]]] = {"old": [], "new": []}
    for label, tree in [("old", old.resolve()), ("new", HERE.parent)] * 2:
        paths = os.pathsep.join(map(str, (tree, tree / "studies")))
        command = [sys.executable, __file__, name, "--here"]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
        )
        found[label].append([float(one) for one in done.stdout.splitlines()[-1].split()])
    for sweep, before, now in zip(SWEEPS, *(map(min, *runs) for runs in found.values()), strict=True):
        typer.echo(f"{sweep}: {before:.2f} CPU s, now {now:.2f}, ratio {now / before:.2f}")


if __name__ == "__main__":
    typer.run(main)
