"""Heads that need the far context of a text: attention beyond a window, a gradient screen, and what removing it costs.

Run `python benchmarks/long_range.py smollm2-135m` (some five CPU minutes). Text is the packaged book in rows of 256
tokens; a head without its far context sees the first 4 tokens and the last 32. The 20 heads with the largest estimate
are measured beside 20 drawn from the others. p is that of sign flips over rows; q is over the measured heads.
"""

import time

import torch
import typer

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import text_tokens
from tlspectral.stats import benjamini_hochberg

LENGTH, ROWS, WINDOW, SINKS = 256, 16, 32, 4


def far(row: torch.Tensor) -> torch.Tensor:
    """Mark the keys between the first tokens and the window of each query."""
    behind = torch.arange(len(row))[:, None] - torch.arange(len(row))
    return (behind >= WINDOW) & (torch.arange(len(row)) >= SINKS)


def main(model: str) -> None:
    """Print the heads whose far context costs most, and how estimate, attention and cost agree."""
    began = time.process_time()
    loaded = tls.load_model(model)
    task = tls.tasks.language(n_sequences=ROWS, sequence_length=LENGTH)
    sweep = tls.ablation_sweep(loaded, tls.parts.LongRange(WINDOW, SINKS), task=task, screen="gradient")
    text = text_tokens(attention_view(loaded), None, n_sequences=ROWS, sequence_length=LENGTH)
    attention = tls.detect_heads(loaded, prompts=text, pattern=far).rename(columns={"pattern": "attention"})
    table = sweep.merge(attention[["layer", "head", "attention"]], on=["layer", "head"])
    measured = table[table["measured"] != ""].copy()
    measured["qvalue"] = benjamini_hochberg(measured["delta_p"].to_numpy()).q
    measured = measured.sort_values("delta", ascending=False)
    columns = ["name", "measured", "attention", "estimate", "delta", "delta_se", "delta_p", "qvalue"]
    typer.echo(measured[columns].round(4).to_string(index=False))
    for kind, rows in measured.groupby("measured"):
        typer.echo(
            f"{kind}: {(rows['qvalue'] < 0.05).sum()} of {len(rows)} with q < .05, mean {rows['delta'].mean():.4f} nats"
        )
    for column in ("estimate", "attention"):
        agreement = measured["delta"].corr(measured[column], method="spearman")
        typer.echo(f"rank correlation of delta with {column}: {agreement:.2f}")
    typer.echo(f"intact {sweep.attrs['intact_value']:.3f} nats; {time.process_time() - began:.0f} CPU s")


if __name__ == "__main__":
    typer.run(main)
