"""Largest pairs of all heads on the packaged text: CPU seconds beside bare passes, and the table beside a full cache.

Run `python benchmarks/top_pairs.py`; some six minutes of CPU for SmolLM2-135M on one thread. A bare pass runs the same
tokens in the same batches up to the last layer's pattern, without hooks. Times are CPU seconds (process_time), taken in
turns, and the smallest of each are compared. The cache keeps the patterns of one layer, and its pairs are sorted.
"""

import statistics

import numpy as np
import torch
import typer
from measuring import seconds

import tlspectral as tls
from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.heads.detectors.top_pairs import LENGTH, SEQUENCES
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until, run_until
from tlspectral.models.running.text import text_tokens


def main(
    model_name: str = typer.Option("smollm2-135m", "--model", help="Model to load, one with a tokenizer."),
    repeats: int = typer.Option(3, help="Runs of each timed call."),
) -> None:
    """Print the times and their ratio, the share of each kind, and the difference from a cache of the middle layer."""
    torch.set_num_threads(1)
    model = tls.load_model(model_name)
    view = attention_view(model)
    tokens = text_tokens(view, None, n_sequences=SEQUENCES, sequence_length=LENGTH)
    last = view.hook_names(view.layers[-1])["pattern"]

    def bare() -> None:
        for batch in tokens.split(sequences_at_once(view, LENGTH)):
            run_until(view, batch, [], last=last)

    bare()  # the first pass of a process takes longer, and the first call imports what it needs
    tls.top_pairs(model, "L0H0", tokens[:1])
    times = [(seconds(lambda: tls.top_pairs(model)), seconds(bare)) for _ in range(repeats)]
    ours, plain = (min(column) for column in zip(*times, strict=True))
    print(f"{SEQUENCES} x {LENGTH} tokens: {ours:.1f} s, bare passes {plain:.1f} s, ratio {ours / plain:.2f}")
    median = statistics.median(one / other for one, other in times)
    print(f"median of {repeats} ratios {median:.2f}", flush=True)

    pairs = tls.top_pairs(model)
    ranked = pairs[pairs["rank"].notna()]
    print("kinds of the ranked pairs:", ranked.groupby("kind").size().div(len(ranked)).round(3).to_dict())
    layer = view.layers[len(view.layers) // 2]
    name = view.hook_names(layer)["pattern"]
    kept = torch.cat([capture_until(view, batch, [name], last=name)[name] for batch in tokens.split(16)]).float()
    kept[:, :, 0] = 0
    kept[..., 0] = 0
    worst = 0.0
    for head in range(kept.shape[1]):
        largest = kept[:, head].topk(2, dim=-1).values.flatten().sort(descending=True).values[:10]
        own = ranked.loc[(ranked["layer"] == layer) & (ranked["head"] == head), "attention"]
        worst = max(worst, float(np.abs(largest.numpy() - own.to_numpy()).max()))
    print(f"layer {layer} beside its kept patterns: {worst:.1e} at most")


if __name__ == "__main__":
    typer.run(main)
