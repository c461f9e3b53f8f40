"""How much of six behaviours circuits carry, beside circuits of equal size: the tables of docs/circuits.md.

Run `python benchmarks/circuits.py smollm2-135m` and `gemma3-270m`; an hour each on an idle core. What is there already
is not made again. For each task of `studies/common/pair_tasks.py`, 64 pairs are drawn with seed 0 and split in halves.
Edges are ranked on one half by EAP-IG, and the 50 largest and 50 random ones are measured. Circuits of .001 to 1 of all
edges are scored on the other half, with 10 relabelled and 10 random circuits of each size. How often the model is right
is said beside each curve.

`--speed` writes nothing: it prints CPU seconds of all estimates, memory, and how they agree with exact effects, on 16
pairs of 15 tokens.
"""

import resource
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import typer

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.studies.common.pair_tasks import IOI_TEMPLATES, NAMES, PairTask, pair_task

PAIRS, NULL, KEPT = 64, 10, 2_000


def print_speed(model: Any) -> None:
    """Estimate every edge of one short task by both methods, and measure some."""
    drawn = np.random.default_rng(0)
    names = [drawn.permutation(NAMES[:8])[:2] for _ in range(16)]
    prompts, pairs = ([IOI_TEMPLATES[0].format(a=a, b=b, s=s, place="store", object="book") for a, b, s in each]
        for each in ([(a, b, b) for a, b in names], [(a, b, a) for a, b in names]))  # fmt: skip
    right, wrong = ([f" {pair[at]}" for pair in names] for at in (0, 1))
    task = tls.logit_difference(prompts, right, wrong, counterfactual=pairs)
    for method in get_args(Method):
        made = pairs_of(model, task)
        start = time.process_time()
        edge_estimates(made, method)
        seconds = time.process_time() - start
        attrs = tls.edge_effects(model, task=task, screen="gradient", method=method).attrs
        agree = {kind: round(attrs[f"rank_correlation_{kind}"], 2) for kind in ("top", "control")}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        n_edges = int(made.graph.possible.sum())
        print(f"{method}: {n_edges:,} edges of {tuple(made.sequences.tokens.shape)} tokens in {seconds:.1f} CPU s, "
            f"peak {peak:.1f} GiB, rank correlation with exact effects {agree}")  # fmt: skip


def main(model_name: str, folder: Path = Path("docs/results/circuits"), only: str = "", speed: bool = False) -> None:
    """Write edges and faithfulness of every task on one model."""
    model = tls.load_model(model_name)
    if speed:
        print_speed(model)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in get_args(PairTask):
        file = folder / f"{model_name}-{name.replace(' ', '-')}"
        if (only and only != name) or file.with_suffix(".faithfulness.parquet").exists():
            continue
        task = pair_task(model, name, n=PAIRS)
        fit, held_out = task.split(0.5)
        right = {
            "clean": float((tls.evaluate(model, held_out).per_sequence > 0).mean()),
            "counterfactual": float((tls.evaluate(model, held_out.denoising()).per_sequence < 0).mean()),
        }
        edges = tls.edge_effects(model, task=fit, screen="gradient", method="EAP-IG")
        found = {kind: edges.attrs[f"rank_correlation_{kind}"] for kind in ("top", "control")}
        table = tls.faithfulness(model, edges, held_out, null=NULL)
        table.attrs |= {"right": right, **found}
        kept = edges.head(KEPT).copy()
        tls.write_table(kept, file.with_suffix(".edges.parquet"))
        tls.write_table(table, file.with_suffix(".faithfulness.parquet"))
        curve = table[table["circuit"] == "edges"].set_index("share")["faithfulness"].round(2)
        print(f"{model_name}, {name}: right {right}, {found}, {curve.to_dict()}", flush=True)


if __name__ == "__main__":
    typer.run(main)
