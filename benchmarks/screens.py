"""Estimates of edges into queries and keys beside their exact effects, by each method of `edge_effects(screen=)`.

Run `python benchmarks/screens.py`. On SmolLM2-135M and indirect objects it prints CPU seconds of the estimates of all
edges; what the edges out of L20H0, the case of notebook 10, are estimated and measured to be; and the same of all
edges into the keys of layers 1 to 3. Some seven minutes on one thread.
"""

import time
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
import typer
from tlspectral_studies.common.pair_tasks import IOI_TEMPLATES, NAMES

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.models.reading import attention_view
from tlspectral.tasks import Task

HEAD, PAIRS = "L20H0", 16
EARLY = [f"L{layer}KV{head}.k" for layer in (1, 2, 3) for head in range(3)]
WORDS = (" Mary", " John", " Tom", " Anna", " Paul", " Lisa", " Mark", " Emma")
OF_NOTEBOOK = "When{0} and{1} went to the store,{2} gave a drink to"


def notebook_task() -> Task:
    """The 19 pairs of notebook 10."""
    couples = [(a, b) for a in WORDS for b in WORDS if a != b][::3]
    clean, other = ([OF_NOTEBOOK.format(a, b, (a, b)[s]) for a, b in couples] for s in (1, 0))
    return tls.logit_difference(clean, [a for a, _ in couples], [b for _, b in couples], counterfactual=other)


def short_task() -> Task:
    """The 16 pairs of `python benchmarks/circuits.py smollm2-135m speed`."""
    drawn = np.random.default_rng(0)
    names = [drawn.permutation(NAMES[:8])[:2] for _ in range(PAIRS)]
    clean, other = (
        [IOI_TEMPLATES[0].format(a=a, b=b, s=(a, b)[s], place="store", object="book") for a, b in names] for s in (1, 0)
    )
    return tls.logit_difference(clean, *([f" {two[at]}" for two in names] for at in (0, 1)), counterfactual=other)


def compare(title: str, estimates: dict[str, Any], delta: pd.Series) -> None:
    """Print how estimates agree with exact effects."""
    print(f"{title}: {len(delta)} edges, sum of |delta| {delta.abs().sum():.3f}, of delta {delta.sum():.2f}")
    for method, found in estimates.items():
        rank = pd.Series(found).corr(pd.Series(delta.to_numpy()), method="spearman")
        off = np.abs(found - delta)
        print(
            f"  {method}: rank correlation {rank:.3f}, |error| mean {off.mean():.2g}, largest {off.max():.3f}; sum of "
            f"|estimate| {np.abs(found).sum():.3f}, of estimate {found.sum():.2f}",
            flush=True,
        )


def main() -> None:
    """Estimate every edge of two tasks by each method, and measure those that are compared."""
    torch.set_num_threads(1)
    model = tls.load_model("smollm2-135m")
    for task, early in ((notebook_task(), False), (short_task(), True)):
        pairs, found = pairs_of(attention_view(model), task), {}
        for method in get_args(Method):
            start = time.process_time()
            found[method] = edge_estimates(pairs, method).terms.sum((0, 1))
            seconds = time.process_time() - start
            print(f"{method}: {tuple(pairs.sequences.tokens.shape)} tokens, {seconds:.1f} CPU s", flush=True)
        if early:
            table = tls.edge_effects(model, EARLY, senders=["embedding", "heads", "mlps"], task=task)
            groups = {"into the keys of layers 1 to 3": table}
        else:
            behind = [one for one in pairs.graph.receivers if one.layer > 19]
            table = tls.edge_effects(model, behind, senders=[HEAD], task=task, measure="task")
            groups = {f"out of {HEAD}": table, "into queries and keys": table[table["input"].isin(["q", "k"])]}
        for title, rows in groups.items():
            at = pairs.graph.places(rows)
            compare(title, {method: each[at] for method, each in found.items()}, rows["delta"])


if __name__ == "__main__":
    typer.run(main)
