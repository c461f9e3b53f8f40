"""Cost of learnable rotary positions: forward and backward of SmolLM2-135M with and without them.

Run `python benchmarks/spectral_rope.py`; a minute or two on an idle core. The plain model and its `to_spectral` run
alternately in one process on the same tokens, with gradients for the weights of the backbone on both sides, and for
the spectral parameters on one. Times are CPU seconds (process_time), medians over turns.
"""

import statistics
from functools import partial
from typing import Any

import torch
import typer
from measuring import seconds

import tlspectral as tls


def loss_and_gradients(model: Any, tokens: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """One loss and its gradients."""
    torch.autograd.grad(model(tokens, return_type="loss"), parameters, allow_unused=True)


def main(
    length: int = typer.Option(256, help="Tokens of the sequence."),
    turns: int = typer.Option(7, help="Measurements of each model."),
) -> None:
    """Print CPU seconds of both models and their ratio, for every scope."""
    torch.set_num_threads(1)
    plain = tls.load_model("smollm2-135m")
    weights = list(plain.parameters())
    tokens = torch.randint(0, plain.cfg.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))
    typer.echo(f"SmolLM2-135M, {length} tokens, forward and backward, one thread, medians of {turns} turns")
    for scope in ("head", "layer"):
        spectral = tls.to_spectral(plain, scope=scope)
        models = {"plain": (plain, weights), "spectral": (spectral, [*weights, *spectral.spectral_parameters()])}
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(turns + 1):  # the first turn warms up
            for name, (model, parameters) in models.items():
                duration = seconds(partial(loss_and_gradients, model, tokens, parameters))
                if turn:
                    times[name].append(duration)
        plain_seconds, spectral_seconds = (statistics.median(times[name]) for name in models)
        count = sum(parameter.numel() for parameter in spectral.spectral_parameters())
        typer.echo(
            f"scope {scope!r} ({count} parameters): plain {plain_seconds:.2f} s, spectral {spectral_seconds:.2f} s, "
            f"{spectral_seconds / plain_seconds:.3f}x (target: at most 1.15x)"
        )


if __name__ == "__main__":
    typer.run(main)
