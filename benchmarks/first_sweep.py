"""Seconds of a first and of later `ablation_sweep` on one prompt, of one source tree beside another.

    python benchmarks/first_sweep.py ../old . --runs 3

A run is a process of its own on one thread, in CPU seconds, and the trees take turns at going first. A first sweep of
all heads proves that edits of each layer reach the output and hashes the weights. A later one of one head of the last
layer is a forward pass, a block more, and what looks whether the weights are those that were hashed; beside it stands
a forward pass alone. Tables of the two trees have to be equal. Then the operations of a sweep of one layer are counted.
SmolLM2-135M takes two CPU minutes a run; `--model tiny-rope` is a rehearsal.
"""

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

COUNTED = ("aten::item", "aten::nonzero", "aten::_to_copy")
TEXT = "The war lasted from the year 1743 to the year 17"


def work(model_name: str, part: str) -> dict[str, Any]:
    """Return seconds, counts and effects of the tree that this process imports."""
    import torch
    from measuring import seconds
    from torch.profiler import ProfilerActivity, profile

    import tlspectral as tls
    from tlspectral.models.reading import attention_view
    from tlspectral.models.running.partial_runs import last_logits

    torch.set_num_threads(1)
    model = tls.load_model(model_name)
    view = attention_view(model)
    if getattr(model, "tokenizer", None) is None:
        prompts = torch.arange(18)[None] % view.d_vocab
        task = tls.logit_difference(prompts, correct=1, wrong=2)
    else:
        prompts = model.to_tokens(TEXT)
        task = tls.logit_difference([TEXT], correct=[list("56789")], wrong=[list("0123")])
    tls.evaluate(model, task)  # the first pass of a process takes longer
    tables: dict[str, Any] = {}

    def sweep(name: str, **which: Any) -> None:
        tables[name] = tls.ablation_sweep(model, part, task=task, **which)["delta"].tolist()

    last = f"L{view.layers[-1]}H0"
    found = {
        "first sweep": seconds(lambda: sweep("first")),
        "second sweep": seconds(lambda: sweep("second")),
        "sweep of one head": min(seconds(lambda: sweep("one", heads=last)) for _ in range(3)),
        "forward pass": min(seconds(lambda: last_logits(view, prompts)) for _ in range(3)),
    }
    with profile(activities=[ProfilerActivity.CPU]) as run:
        sweep("layer", heads=f"L{view.layers[len(view.layers) // 2]}")
    operations = Counter(event.name for event in run.events() if event.name.startswith("aten::"))
    counts = {name: operations[name] for name in COUNTED} | {"operations": operations.total()}
    return {"seconds": found, "counts": counts, "tables": tables}


def measured(tree: Path, model: str, part: str) -> dict[str, Any]:
    """Return what `work` finds in a new process that imports a tree."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **one_thread, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(tree), str(tree), "--work", "--model", model, "--part", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main(
    old: Annotated[Path, typer.Argument(help="Source tree before.")],
    new: Annotated[Path, typer.Argument(help="Source tree after.")],
    runs: Annotated[int, typer.Option(help="Runs of each tree.")] = 3,
    model: Annotated[str, typer.Option(help="Model, by its name for load_model.")] = "smollm2-135m",
    part: Annotated[str, typer.Option(help="What is removed.")] = "output",
    working: Annotated[bool, typer.Option("--work", hidden=True)] = False,
) -> None:
    """Run the trees in turns and print the smallest seconds of each, the median of the ratios, and the counts."""
    if working:
        print(json.dumps(work(model, part)))
        return
    trees = old.resolve(), new.resolve()
    found: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
    for run in range(runs):
        for tree in trees if run % 2 == 0 else trees[::-1]:
            found[tree].append(measured(tree, model, part))
    before, after = (found[tree] for tree in trees)
    for name in before[0]["seconds"]:
        old_seconds, new_seconds = ([one["seconds"][name] for one in each] for each in (before, after))
        ratio = statistics.median(b / a for a, b in zip(old_seconds, new_seconds, strict=True))
        print(f"{name:18s} {min(old_seconds):7.2f} -> {min(new_seconds):6.2f} CPU s, ratio {ratio:.2f}")
    for name in before[0]["counts"]:
        print(f"{name:18s} {before[0]['counts'][name]:7d} -> {after[0]['counts'][name]:6d}, sweep of one layer")
    for name, effects in before[0]["tables"].items():
        off = max(abs(a - b) for a, b in zip(effects, after[0]["tables"][name], strict=True))
        print(f"effects of the {name} sweep differ by {off:.1e} at most")


if __name__ == "__main__":
    typer.run(main)
