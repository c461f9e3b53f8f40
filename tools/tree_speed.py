"""How fast one source tree is beside another: CPU seconds of `ablate` and `edge_effects`.

    python tools/tree_speed.py ../old . --runs 10

A run is a process of its own, with one thread, and the trees take turns at going first. Each job is called once without
being counted, then `--repeats` times. Printed is the ratio of the second tree to the first: the geometric mean over
runs with its 95 % interval (Student's t over the logarithms).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import scipy.stats
from compare_trees import HERE, environment


def measured(tree: Path, repeats: int) -> dict[str, float]:
    """CPU seconds of each job in a new process that imports a tree."""
    command = [sys.executable, __file__, str(tree), "--work", "--repeats", str(repeats)]
    done = subprocess.run(command, env=environment(tree), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def work(tree: Path, repeats: int) -> None:
    """Print the CPU seconds of each job in this process."""
    sys.path[1:1] = [str(HERE.parent / folder) for folder in ("tests/support", "benchmarks")]
    import torch
    import tree_calls
    import zoo
    from measuring import seconds
    from tree_items import saved_folder

    torch.set_num_threads(1)
    calls, found = tree_calls.Calls(saved_folder), {}
    if calls.root.parent != tree:
        raise SystemExit(f"{calls.root} was imported in place of {tree}")
    for name, model in (("llama", zoo.bridge("llama")), ("tiny-rope", calls.get("load_model")("tiny-rope"))):
        jobs = {
            f"ablate {part}, {name}": lambda model=model, part=part: calls.ablate(model, heads="L1H0", part=part)
            for part in ("rope_phase", "output")
        }
        if name == "llama":
            clean = zoo.prompt()
            task = calls.get("logit_difference")(clean, 7, 10, counterfactual=(clean + 7) % 90)
            jobs["every edge, llama"] = lambda model=model, task=task: calls.get("edge_effects")(
                model, task=task, screen="gradient"
            )
        jobs[f"edge_effects, {name}"] = lambda model=model: calls.edges(model, heads="L1H0", what="k", measure="ind")
        for job, call in jobs.items():
            call()
            found[job] = seconds(lambda call=call: [call() for _ in range(repeats)]) / repeats
    print(json.dumps(found))


def main() -> None:
    """Run the trees in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="+", help="The old tree and the new one.")
    parser.add_argument("--runs", type=int, default=10, help="Runs of each tree, at least 2.")
    parser.add_argument("--repeats", type=int, default=20, help="Calls of a job in a run.")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.trees[0], options.repeats)
        return
    old, new = (tree.resolve() for tree in options.trees)
    ratios: dict[str, list[float]] = {}
    for run in range(options.runs):
        order = (old, new) if run % 2 == 0 else (new, old)
        found = {tree: measured(tree, options.repeats) for tree in order}
        for job in found[old]:
            ratios.setdefault(job, []).append(found[new][job] / found[old][job])
    for job, values in ratios.items():
        logs = np.log(values)
        low, high = scipy.stats.t.interval(0.95, len(logs) - 1, logs.mean(), scipy.stats.sem(logs))
        print(f"{job}: {np.exp(logs.mean()):.3f} ({np.exp(low):.3f} to {np.exp(high):.3f})")


if __name__ == "__main__":
    main()
