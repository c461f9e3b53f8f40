"""Head detectors: how much attention goes to the previous token, the duplicate, and the token after it (FP section 3).

All are measured on sequences `[BOS, r, r]` of a random segment r and its copy, on the queries of the copy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.attention import AttentionView, attention_view
from tlspectral.errors import UnsupportedArchitecture

DETECTORS = ("prev", "dup", "ind")
SMALL_VOCABULARY = 64
BATCH = 25


def detect_heads(
    model: Any,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    exclude_special: bool = False,
    seed: int = 0,
    show_progress: bool = False,
) -> pd.DataFrame:
    """Attention of every head on random repeated sequences, averaged over the queries of the second copy.

    With a segment of L tokens, queries are positions L+1 .. 2L and the mass is read on p - 1 (`prev`), p - L (`dup`,
    the same token before) and p - L + 1 (`ind`, the token that followed it). Hooks that are on the model stay in force.

    Args:
        model: a TransformerBridge or HookedTransformer.
        n_sequences: sequences drawn; standard errors are over them.
        segment_length: L, at most (n_ctx - 1) // 2.
        tokens: sequences of your own, [sequences, 1 + 2 L], the copy equal to the segment; None draws them.
        exclude_special: leave the tokenizer's special ids out of the draw.
        seed: of the draw, on the CPU: the same on every device and for every batch size.
        show_progress: a bar over batches.

    Returns:
        DataFrame `layer, head, prev, prev_se, dup, dup_se, ind, ind_se`; `attrs` hold L, the number of sequences, the
        opening token and `chance`, what uniform attention would score.

    Raises:
        ValueError: fewer than two sequences, or `tokens` that are no repeated sequences.
        UnsupportedArchitecture: the model exposes no attention pattern.

    What it does not establish: what the head does on text, or that the model needs it.
    """
    view = attention_view(model)
    if tokens is None:
        tokens = repeated_sequences(view, n_sequences, segment_length, exclude_special=exclude_special, seed=seed)
    length = _segment_length(tokens)
    with tqdm(total=len(tokens), desc="detectors", unit="seq", leave=False, disable=not show_progress) as bar:
        scores = _mean_and_error(view, tokens, length, bar.update)
    rows = []
    for layer, (mean, error) in enumerate(scores):
        for head in range(mean.shape[1]):
            row: dict[str, Any] = {"layer": layer, "head": head}
            for i, name in enumerate(DETECTORS):
                row |= {name: mean[i, head], f"{name}_se": error[i, head]}
            rows.append(row)
    table = pd.DataFrame(rows)
    table.attrs = {
        "n_sequences": len(tokens),
        "segment_length": length,
        "bos": int(tokens[0, 0]),
        "seed": seed,
        "chance": chance_level(length),
    }
    return table


def repeated_sequences(
    view: AttentionView, n_sequences: int, segment_length: int, *, exclude_special: bool = False, seed: int = 0
) -> Int[Tensor, "sequences pos"]:
    """Sequences `[BOS, r, r]` of random ids, [n_sequences, 1 + 2 L].

    BOS is the tokenizer's BOS, else its EOS, else 0. Under a vocabulary of 64 a segment is a permutation of ids other
    than BOS instead of a draw: a token that came twice in a segment would split the induction target.

    Raises:
        ValueError: fewer than two sequences, or no room for a segment of two tokens.
    """
    bos = view.start_token
    length = min(segment_length, (view.n_ctx - 1) // 2)
    allowed = torch.arange(view.d_vocab)
    if exclude_special:
        allowed = allowed[~torch.isin(allowed, torch.tensor(view.special_tokens, dtype=allowed.dtype))]
    generator = torch.Generator().manual_seed(seed)
    if view.d_vocab < SMALL_VOCABULARY:
        allowed = allowed[allowed != bos]
        length = min(length, len(allowed))
    if n_sequences < 2 or length < 2:
        raise ValueError(
            f"detectors need two sequences and segments of two tokens, found {n_sequences} sequences and "
            f"L = {length} (context {view.n_ctx}, {len(allowed)} usable ids)"
        )
    if view.d_vocab < SMALL_VOCABULARY:
        drawn = [torch.randperm(len(allowed), generator=generator)[:length] for _ in range(n_sequences)]
        segment = allowed[torch.stack(drawn)]
    else:
        segment = allowed[torch.randint(0, len(allowed), (n_sequences, length), generator=generator)]
    return torch.cat([torch.full((n_sequences, 1), bos), segment, segment], dim=1)


def chance_level(length: int) -> float:
    """Mass that uniform causal attention puts on one earlier token, averaged over the queries of the second copy."""
    return float(np.mean(1.0 / np.arange(length + 2, 2 * length + 2)))


def _segment_length(tokens: Int[Tensor, "sequences pos"]) -> int:
    length = (tokens.shape[1] - 1) // 2
    repeats = tokens.shape[1] == 1 + 2 * length and torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :])
    if not repeats or len(tokens) < 2 or length < 2:
        raise ValueError(
            "tokens must be at least two sequences [BOS, r, r]: one token, then a segment of two or more tokens, "
            f"then the same segment again; found shape {tuple(tokens.shape)}"
        )
    return length


def _mean_and_error(
    view: AttentionView, tokens: Int[Tensor, "sequences pos"], length: int, advance: Callable[[int], Any]
) -> Iterator[tuple[Float64[np.ndarray, "detectors heads"], Float64[np.ndarray, "detectors heads"]]]:
    """Mean and standard error over sequences, layer by layer; patterns are reduced as they pass."""
    count = len(tokens)
    total: list[Tensor] = [torch.zeros(0)] * view.n_layers
    squares: list[Tensor] = [torch.zeros(0)] * view.n_layers
    offsets = {"prev": 1, "dup": length, "ind": length - 1}

    def reducer(layer: int) -> Callable[[Tensor, Any], None]:
        def reduce(pattern: Tensor, hook: Any) -> None:
            mass = [
                # Entry i of the diagonal is query i + offset, key i.
                pattern.diagonal(-offsets[name], dim1=-2, dim2=-1)[..., length + 1 - offsets[name] :].double().mean(-1)
                for name in DETECTORS
            ]
            scores = torch.stack(mass).cpu()  # [detectors, batch, heads]
            seen = len(total[layer]) > 0
            total[layer] = scores.sum(1) + (total[layer] if seen else 0)
            squares[layer] = scores.square().sum(1) + (squares[layer] if seen else 0)

        return reduce

    names = [view.hook_names(layer)["pattern"] for layer in range(view.n_layers)]
    hooks = [(name, reducer(layer)) for layer, name in enumerate(names)]
    for batch in tokens.split(BATCH):
        view.run(batch, hooks, last=names[-1])
        advance(len(batch))
    for layer in range(view.n_layers):
        if len(total[layer]) == 0:
            raise UnsupportedArchitecture(
                f"layer {layer}: the attention never returned its pattern; "
                'load the model with attn_implementation="eager"'
            )
        mean = total[layer] / count
        variance = (squares[layer] / count - mean.square()).clamp_min(0) * count / (count - 1)
        yield mean.numpy(), (variance / count).sqrt().numpy()
