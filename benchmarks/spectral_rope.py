"""Cost of learnable rotary positions: forward and backward of a Llama with and without them, eager and compiled.

Run `python benchmarks/spectral_rope.py`; some minutes, most of them compilation. The models have the shape of
SmolLM2-135M (576 wide, 9 heads on 3 of keys), random weights, fewer layers and a smaller vocabulary. The plain model
and its `to_spectral` run alternately in one process on the same tokens, with gradients of all weights on both sides,
and of the spectral parameters on one. Times are CPU seconds (process_time), medians over turns.
"""

import statistics
from functools import partial
from typing import Any

import torch
import typer
from measuring import seconds
from transformers import LlamaConfig, LlamaForCausalLM

import tlspectral as tls


def loss_and_gradients(model: Any, tokens: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """One loss and its gradients."""
    torch.autograd.grad(model(input_ids=tokens, labels=tokens, use_cache=False).loss, parameters, allow_unused=True)


def main(
    length: int = typer.Option(256, help="Tokens of the sequence."),
    turns: int = typer.Option(9, help="Measurements of each model."),
    layers: int = typer.Option(6, help="Layers of the model."),
    compiled: bool = typer.Option(True, help="Also compiled by torch.compile."),
) -> None:
    """Print CPU seconds of both models and their ratio, for two scopes, eager and compiled."""
    torch.set_num_threads(1)
    shape: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_hidden_layers=layers, **shape))
    tokens = torch.randint(0, 8192, (1, length), generator=torch.Generator().manual_seed(0))
    typer.echo(f"Llama of {layers} layers, {length} tokens, forward and backward, one thread, medians of {turns} turns")
    for scope in ("head", "layer"):
        spectral = tls.to_spectral(plain, scope=scope, share_weights=False)
        count = sum(parameter.numel() for parameter in spectral.spectral_parameters())
        for how, target in (("eager", 1.15), ("compiled", 1.10))[: 1 + compiled]:
            models = {}
            for name, model in (("plain", plain), ("spectral", spectral)):
                torch._dynamo.reset()
                run = torch.compile(model, fullgraph=True) if how == "compiled" else model
                models[name] = (run, list(model.parameters()))
            times: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(turns + 2):  # the first turns compile and warm up
                for name, (run, parameters) in models.items():
                    duration = seconds(partial(loss_and_gradients, run, tokens, parameters))
                    if turn > 1:
                        times[name].append(duration)
            plain_seconds, spectral_seconds = (statistics.median(times[name]) for name in models)
            typer.echo(
                f"scope {scope!r} ({count} parameters), {how}: plain {plain_seconds:.3f} s, spectral "
                f"{spectral_seconds:.3f} s, {spectral_seconds / plain_seconds:.3f}x (target: at most {target:.2f}x)"
            )


if __name__ == "__main__":
    typer.run(main)
