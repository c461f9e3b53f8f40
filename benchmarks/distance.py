"""Kernels with their prediction for all heads: CPU seconds beside a bare forward pass, and how good the prediction is.

Run `python benchmarks/distance.py`; some six minutes of CPU for SmolLM2-135M on one thread. The bare pass runs as many
tokens up to the last layer's scores, without hooks. Times are CPU seconds (process_time), medians over the repeats,
alternately. For every head with `prev` above --strong it drops the band that `kernel_prediction` names, and as a
control the band with the smallest share, and gives the offset of the largest mean score, how far the previous token
stands above the best other offset (lead, logits) and `prev`.
"""

import statistics

import pandas as pd
import torch
import typer
from measuring import seconds

import tlspectral as tls
from tlspectral.heads import kernel_prediction
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import run_until

SEQUENCES, LENGTH, BATCH = 48, 96, 25  # as `relative_position_kernel` draws and runs them
BANDS = ("high", "middle", "low")


def peak(model, head: tuple[int, int]) -> tuple[int, float]:
    """Offset of the largest mean score, and how far the previous token stands above the best other offset."""
    score = tls.relative_position_kernel(model, [head]).set_index("offset")["score"]
    return int(score.idxmax()), float(score[-1] - score.drop(-1).max())


def bands_dropped(model, heads: pd.DataFrame) -> None:
    """Print the peak of each head and its attention to the previous token, as it is and without a band."""
    view = attention_view(model)
    for _, row in heads.iterrows():
        head = (int(row["layer"]), int(row["head"]))
        rotary = view.rotary(head[0])
        assert rotary is not None
        thirds = torch.tensor_split(torch.arange(rotary.n_pairs), len(BANDS))
        smallest = min(range(len(BANDS)), key=lambda band: row[f"share_{BANDS[band]}"])
        offset, lead = peak(model, head)
        text = f"L{head[0]}H{head[1]}: r {row['r']:.4f}; intact: peak {offset}, lead {lead:.2f}, prev {row['prev']:.2f}"
        for band, pairs in (
            (row["band"], range(row["first"], row["last"] + 1)),
            (BANDS[smallest], thirds[smallest].tolist()),
        ):
            with tls.ablate(model, [head], tls.parts.Band(pairs)):
                offset, lead = peak(model, head)
                scores = tls.detect_heads(model, n_sequences=20).set_index(["layer", "head"])
            text += f"; without {band} (share {row['share_' + band]:.3f}): peak {offset}, lead {lead:.2f}, "
            text += f"prev {scores.loc[head, 'prev']:.2f}"
        print(text, flush=True)


def main(
    model_name: str = typer.Option("smollm2-135m", "--model", help="Model to load."),
    repeats: int = typer.Option(3, help="Runs of each timed call."),
    strong: float = typer.Option(0.4, help="Heads with a larger `prev` are shown one by one."),
) -> None:
    """Print times, the agreement of prediction and measurement, and what dropping a band does to strong heads."""
    torch.set_num_threads(1)
    model = tls.load_model(model_name)
    view = attention_view(model)
    tokens = torch.randint(0, view.d_vocab, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    last = view.hook_names(view.n_layers - 1)["scores"]

    def bare() -> None:
        for batch in tokens.split(BATCH):
            run_until(view, batch, [], last=last)

    times = [(seconds(lambda: tls.relative_position_kernel(model)), seconds(bare)) for _ in range(repeats)]
    ours, plain = (statistics.median(column) for column in zip(*times, strict=True))
    size = f"{SEQUENCES} x {LENGTH} tokens"
    print(f"all heads, {size}: {ours:.1f} s, bare forward {plain:.1f} s, ratio {ours / plain:.2f}")

    scores = tls.detect_heads(model, n_sequences=20)
    text = tls.tasks.language(n_sequences=SEQUENCES, sequence_length=LENGTH).prompts.packed(view).tokens
    for name, prompts in (("random tokens", None), ("text", text)):
        judged = kernel_prediction(model, None, prompts).merge(scores)
        chosen = judged[judged["prev"] > strong]
        print(
            f"{name}: median r {judged['r'].median():.3f}, above .9 {(judged['r'] > 0.9).mean():.3f} of {len(judged)}; "
            f"{len(chosen)} heads with prev > {strong}: {(chosen['predicted_peak'] == -1).sum()} predicted and "
            f"{(chosen['peak'] == -1).sum()} measured peaks at -1"
        )
        if prompts is None:
            bands_dropped(model, chosen)


if __name__ == "__main__":
    typer.run(main)
