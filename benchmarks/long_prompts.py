"""Cost of long prompts: attention strip by strip beside the model's own attention, CPU seconds and memory of tensors.

Run `python benchmarks/long_prompts.py` (some 5 CPU minutes on one core; `--small` for a smoke run). The model is a
random Llama with 2 layers and 8 heads. `detect_heads(prompts=)` runs on one prompt of each length. "Own" is the model's
own attention, which the same call uses up to 2,047 tokens; beyond, its memory grows as the square, so that it is run up
to 4,096 tokens. Memory is the peak of tensors alive during the call. A slope is that of the logarithms over the last
two lengths: 1 is linear, 2 the square. The share of arithmetic is the time of plain matrix products of the same sizes
(queries by keys and pattern by values, whole matrices) over the time of the call: strips compute half of these
products, because no query sees a later key.
"""

import sys
from math import log2
from typing import Annotated, Any

import torch
import transformers
import typer
from measuring import peak, seconds

import tlspectral as tls
from tlspectral.models.running.long_prompts import LONG, STRIP, strips_of

LAYERS, HEADS, D_HEAD = 2, 8, 32
OWN, STRIPS = (512, 1024, 2048, 4096), (512, 1024, 2048, 4096, 8192)
LONGEST = 32_768


def llama() -> Any:
    """A random Llama whose rotary positions do not end."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=997,
        hidden_size=HEADS * D_HEAD,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=2 * LONGEST,
    )
    return tls.load_model(transformers.LlamaForCausalLM(config).eval())


def products(length: int) -> None:
    """The matrix products of attention in all layers."""
    queries, values = torch.randn(2, HEADS, length, D_HEAD)
    for _ in range(LAYERS):
        for head in range(HEADS):
            _ = queries[head] @ queries[head].T @ values[head]


def main(*, small: Annotated[bool, typer.Option(help="Short prompts, for a smoke run.")] = False) -> None:
    """Print a table of costs by length, the slopes, and one pass over the longest prompt."""
    torch.set_num_threads(1)
    model, cut = llama(), 8 if small else 1

    def detect(length: int, least: int) -> Any:
        ids = torch.randint(3, 997, (1, length), generator=torch.Generator().manual_seed(0))
        with strips_of(STRIP // cut, least):
            return tls.detect_heads(model, prompts=ids)

    detect(512 // cut, 2)  # what is checked once per model
    print(
        f"{'tokens':>7} {'own s':>8} {'own MiB':>8} {'strips s':>9} {'strips MiB':>10} {'time':>6} {'arithmetic':>10}"
    )
    measured: dict[str, list[tuple[int, float, float]]] = {"own": [], "strips": []}
    for length in (length // cut for length in STRIPS):
        row = [f"{length:>7,}"]
        for way, least in (("own", sys.maxsize), ("strips", 2)):
            if way == "own" and length * cut not in OWN:
                row.append(f"{'-':>8} {'-':>8}")
                continue
            spent, used = seconds(lambda: detect(length, least)), peak(lambda: detect(length, least))  # noqa: B023
            measured[way].append((length, spent, used))
            row.append(f"{spent:>8.2f} {used:>8.0f}")
        own, strips = measured["own"][-1], measured["strips"][-1]
        row.append(f"{strips[1] / own[1]:>6.2f}" if own[0] == length else f"{'-':>6}")
        row.append(f"{seconds(lambda: products(length)) / strips[1]:>10.2f}")  # noqa: B023
        print(" ".join(row))
    for way, found in measured.items():
        (n, spent, used), (further, later, more) = found[-2:]
        steps = log2(further / n)
        print(f"{way}: slope of time {log2(later / spent) / steps:.2f}, of memory {log2(more / used) / steps:.2f}")
    longest = LONGEST // cut**2
    spent = seconds(lambda: detect(longest, LONG // cut))
    print(f"one pass over {longest:,} tokens: {spent:.0f} CPU seconds")


if __name__ == "__main__":
    typer.run(main)
