"""Cost of positional and symbolic scores on SmolLM2-135M: by swapped words, by swapped keys, and per frequency.

Run `python benchmarks/positional.py`; some minutes on an idle core. One prompt of the binding task, 64 pairs of which 9
swap (36 swaps, block 0 included), one query, all alternately in one process. Times are CPU
seconds (process_time), medians over repeats; prompt mode is run once, as it takes 37 passes of the model each time.
"""

import statistics
from collections.abc import Callable
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import torch
import typer
from measuring import peak, seconds

import tlspectral as tls
from tlspectral.positional import BindingTask
from tlspectral.tasks.block_prompt import BlockPrompt

PAIRS, BLOCKS = 64, 9


def binding_prompt(model: Any) -> tuple[BlockPrompt, list[tuple[int, int]]]:
    """A binding prompt as text that asks about its middle pair, and the swaps of evenly spaced pairs."""
    task = BindingTask("plain", PAIRS)
    prompt = task.prompt(task.draw(0), PAIRS // 2, bos=model.tokenizer.bos_token)
    selected = np.linspace(0, PAIRS - 1, BLOCKS).round().astype(int).tolist()
    return prompt, list(combinations(selected, 2))


def main(
    repeats: Annotated[int, typer.Option(help="Runs of the quick measurements.")] = 3,
) -> None:
    """Print CPU seconds, ratios and memory."""
    torch.set_num_threads(1)
    model = tls.load_model("smollm2-135m")
    prompt, swaps = binding_prompt(model)
    tokens = prompt.tokenized(model).tokens()

    def scores(mode: str, *, per_frequency: bool, chosen: list[tuple[int, int]] = swaps) -> Callable[[], object]:
        return lambda: tls.positional_symbolic(
            model,
            prompt,
            mode=mode,  # type: ignore[arg-type]
            per_frequency=per_frequency,
            swaps=chosen,
        )

    with torch.no_grad():
        model(tokens[None], return_type=None)  # the first pass sets things up and is not counted
        forward = statistics.median(seconds(lambda: model(tokens[None], return_type=None)) for _ in range(repeats))
    typer.echo(f"SmolLM2-135M, {len(tokens)} tokens, {len(swaps)} swaps, one query; one thread")
    typer.echo(f"one forward pass of the model              {forward:8.2f} s")
    medians: dict[tuple[str, bool], float] = {}
    for per_frequency in (False, True):
        for mode in ("key", "prompt"):
            times = [seconds(scores(mode, per_frequency=per_frequency)) for _ in range(repeats if mode == "key" else 1)]
            medians[mode, per_frequency] = statistics.median(times)
            label = f"{mode} mode{', per frequency' if per_frequency else ''}"
            typer.echo(f"{label:<42} {medians[mode, per_frequency]:8.2f} s")
    for per_frequency in (False, True):
        ratio = medians["prompt", per_frequency] / medians["key", per_frequency]
        typer.echo(f"prompt / key{', per frequency' if per_frequency else '':<16}: {ratio:.1f}x (target: at least 5x)")
    for mode in ("prompt", "key"):
        share = medians[mode, True] / medians[mode, False] - 1
        target = " (target: at most 30 %)" if mode == "prompt" else ""
        typer.echo(f"frequencies add to {mode} mode: {share:.0%}{target}")
    few = swaps[:8]  # memory does not depend on the number of swaps beyond a batch of prompts
    for mode in ("prompt", "key"):
        most = peak(scores(mode, per_frequency=True, chosen=few))
        typer.echo(f"peak above the model, {mode} mode per frequency: {most:.0f} MiB (target: at most 1024)")


if __name__ == "__main__":
    typer.run(main)
