"""All pairs of K-composition: one call of `k_composition(model)` beside a call for each receiver.

Run `python benchmarks/k_composition.py MODEL` (smollm2-135m: a minute of one core). Every `--every`-th receiver, in the
order of the model, gets a call of its own, and their seconds are multiplied by that number. `--old ../old` makes these
calls in another source tree, in a process of its own. Seconds are CPU seconds of one thread, without loading; of the
scores the largest difference is printed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from measuring import seconds

HERE = Path(__file__).resolve().parent
PAIR = ["layer", "head", "receiver"]


def by_receiver(name: str, every: int, file: Path) -> None:
    """Score the senders of every n-th receiver, one call each; write scores and print the CPU seconds of all calls."""
    import tlspectral as tls

    torch.set_num_threads(1)
    model = tls.load_model(name)
    ends = [f"L{layer}H{head}.k" for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)][::every]
    tables = []
    tls.k_composition(model, ends[-1])  # what a process pays once
    spent = seconds(lambda: tables.extend(tls.k_composition(model, end).assign(receiver=end) for end in ends))
    pd.concat(tables)[[*PAIR, "score"]].to_pickle(file)
    print(spent)


def main(
    name: Annotated[str, typer.Argument(help="Name or path of the model.")] = "smollm2-135m",
    old: Annotated[Path, typer.Option(help="Source tree of the calls for each receiver.")] = HERE.parent,
    every: Annotated[int, typer.Option(help="Every which receiver gets a call of its own.")] = 10,
    file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the CPU seconds of both ways, their ratio and the largest difference."""
    if file is not None:
        by_receiver(name, every, file)
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "scores.pkl"
        command = [sys.executable, __file__, name, "--every", str(every), "--file", str(kept)]
        paths = os.pathsep.join(map(str, (old.resolve(), old.resolve() / "studies")))
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
        )
        single = pd.read_pickle(kept)
    import tlspectral as tls

    torch.set_num_threads(1)
    model = tls.load_model(name)
    found: dict[str, pd.DataFrame] = {}
    once = seconds(lambda: found.update(table=tls.k_composition(model)))
    again = seconds(lambda: tls.k_composition(model))
    both = single.merge(found["table"], on=PAIR)
    assert len(both) == len(single)
    calls = float(done.stdout.splitlines()[-1]) * every
    typer.echo(
        f"{name}, {len(found['table'])} pairs: {again:.1f} CPU s in one call ({once:.1f} at first), {calls:.0f} in one "
        f"for each receiver (every {every}th was called), {calls / again:.0f}x; largest difference "
        f"{np.abs(both['score_x'] - both['score_y']).max():.0e}"
    )


if __name__ == "__main__":
    typer.run(main)
