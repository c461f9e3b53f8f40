"""Head detectors: how much attention goes to the previous token, the duplicate, and the token after it (FP section 3).

All three are measured on sequences `[BOS, r, r]` of a random segment r and its copy, on the queries of the copy.
`relative_position_kernel` gives mean scores by offset, on any tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models import AttentionView, attention_view, heads_by_layer
from tlspectral.models.attention.padding import refuse_padding
from tlspectral.rotary import in_float64
from tlspectral.selection import Heads
from tlspectral.tables import COLUMNS, Column, Table, named

DETECTORS = ("prev", "dup", "ind")
SMALL_VOCABULARY = 64
BATCH = 25
FARTHEST_OFFSET = 20
_KERNEL_SEQUENCES, _KERNEL_LENGTH = 48, 96

_FIRST_COPY = (
    Column("prev_first",
        "Mean attention from each query of the first copy, the first one left out, to the token before it. On the "
        "sequences of prev.", "attention probability", range="0 .. 1",
        also_known_as="previous-token score without repetition",
        does_not_establish="Its chance level differs from that of prev, since its queries see fewer keys."),
    Column("prev_first_se", "Standard error of prev_first over sequences.", "attention probability", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither another task nor another seed of the model."),
)  # fmt: skip
_KERNEL = (
    Column("offset", "Position of the key less that of the query; -1 is the previous token, 0 the query itself.",
        "token", range="-20 .. 0, or as far back as prompts reach", source="FP 7, figure 3",
        also_known_as="relative position"),
    Column("score",
        "Mean attention score at the offset, scaled and before the softmax, over sequences and all queries that have "
        "such a key unmasked. NaN where every such key is masked.", "logit", range="-inf .. inf",
        source="FP 7, figure 3", also_known_as="relative-position kernel",
        does_not_establish="That the head attends by position: contents contribute to the mean, and a softmax sees "
        "only differences within a query's row."),
)  # fmt: skip
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_DETECTOR_COLUMNS = tuple(COLUMNS[f"{name}{end}"] for name in DETECTORS for end in ("", "_se"))
DETECT_HEADS = Table("detect_heads", "`tls.detect_heads`", (*_HEAD, *_DETECTOR_COLUMNS, *_FIRST_COPY))
RELATIVE_POSITION_KERNEL = Table("relative_position_kernel", "`tls.relative_position_kernel`", (*_HEAD, *_KERNEL))
TABLES = (DETECT_HEADS, RELATIVE_POSITION_KERNEL)


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
    """Measure the attention of every head on random repeated sequences, averaged over the queries of the second copy.

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
        DataFrame `layer, head, prev, prev_se, dup, dup_se, ind, ind_se` on the queries of the copy, and `prev_first,
        prev_first_se` on those of the segment itself, where nothing has been repeated yet (`dup` and `ind` have no
        target there). `attrs` hold L, the number of sequences, the opening token, `chance`, what uniform attention
        would score on the copy, and `reliability`: the rank correlation, over the model's heads, of each score between
        even and odd sequences; and `user_hooks`, as in `analyze_heads`.

    Raises:
        ValueError: fewer than two sequences, or `tokens` that are no repeated sequences.
        UnsupportedArchitecture: the model exposes no attention pattern.

    What it does not establish: what the head does on text, or that the model needs it.
    """
    view = attention_view(model)
    if tokens is None:
        tokens = repeated_sequences(view, n_sequences, segment_length, exclude_special=exclude_special, seed=seed)
    length = _segment_length(view, tokens)
    with tqdm(total=len(tokens), desc="detectors", unit="seq", leave=False, disable=not show_progress) as bar:
        scores = _mean_and_error(view, tokens, length, bar.update)
    rows = []
    halves = []
    for layer, (mean, error, by_half) in enumerate(scores):
        halves.append(by_half)
        for head in range(mean.shape[1]):
            row: dict[str, Any] = {"layer": layer, "head": head}
            for i, name in enumerate((*DETECTORS, "prev_first")):
                row |= {name: mean[i, head], f"{name}_se": error[i, head]}
            rows.append(row)
    table = pd.DataFrame(rows)
    table.attrs = {
        "n_sequences": len(tokens),
        "segment_length": length,
        "bos": int(tokens[0, 0]),
        "seed": seed,
        "chance": chance_level(length),
        "reliability": split_half_reliability(np.concatenate(halves, axis=2)),
        **{key: value for key, value in view.source.items() if key == "user_hooks"},
    }
    return named(table, DETECT_HEADS)


def split_half_reliability(halves: Float64[np.ndarray, "2 scores heads"]) -> dict[str, float | None]:
    """Return the Spearman correlation over heads between scores of even and of odd sequences, per detector.

    It is 1 where the order of the heads does not depend on the sequences drawn. It concerns the order of all heads,
    most of which are near chance. It is None for fewer than three heads or equal scores.
    """
    reliability: dict[str, float | None] = {}
    for name, (even, odd) in zip(DETECTORS, halves.swapaxes(0, 1), strict=False):
        constant = len(even) < 3 or np.ptp(even) == 0 or np.ptp(odd) == 0
        reliability[name] = None if constant else float(pd.Series(even).corr(pd.Series(odd), method="spearman"))
    return reliability


def relative_position_kernel(
    model: Any, heads: Heads, tokens: Int[Tensor, "sequences pos"] | None = None
) -> pd.DataFrame:
    """Return the mean attention score by how far the key lies behind the query (FP section 7, figure 3).

    Scores are captured as the model computes them, scaled and before the softmax, so that inside `ablate(...)` they are
    those of the ablated model. The mean is over sequences and all queries that have such a key unmasked.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: (layer, head) pairs or a DataFrame with these columns.
        tokens: prompts, [sequences, pos]; None draws 48 seeded sequences of BOS and 95 random ids. FP used text.

    Returns:
        DataFrame `layer, head, offset, score`; offset = key - query, from -20 (or as far as prompts reach) to 0; NaN
        where every such key is masked. `attrs` say which model and weights.

    Raises:
        BadHead: a head that does not exist.
        UnsupportedArchitecture: a layer computes its attention itself and exposes no scores.
        ValueError: tokens that look padded.

    What it does not establish: that the head attends by position. Contents contribute to the mean as well, and a
    softmax sees only differences within a query's row.
    """
    view = attention_view(model)
    chosen = heads_by_layer(view, heads)
    columns = ["layer", "head", "offset", "score"]
    if not chosen:
        return named(pd.DataFrame.from_records([], columns=columns), RELATIVE_POSITION_KERNEL)
    for layer in chosen:
        if "scores" not in view.hook_names(layer):
            raise UnsupportedArchitecture(
                f"layer {layer}: this bridge computes attention itself and exposes no scores, only the pattern; "
                "read the kernel on HookedTransformer, or use detect_heads"
            )
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        length = min(_KERNEL_LENGTH, view.n_ctx)
        tokens = torch.randint(0, view.d_vocab, (_KERNEL_SEQUENCES, length), generator=generator)
        tokens[:, 0] = view.start_token
    else:
        refuse_padding(view, tokens, "give prompts of one length, without padding")
    n_offsets = min(FARTHEST_OFFSET + 1, tokens.shape[1])
    totals = {layer: torch.zeros(2, n_offsets, len(indices), dtype=torch.float64) for layer, indices in chosen.items()}
    hooks = [(view.hook_names(layer)["scores"], _by_offset(chosen[layer], totals[layer])) for layer in chosen]
    for batch in tokens.split(BATCH):
        view.run(batch, hooks, last=hooks[-1][0])
    rows = []
    for layer, indices in chosen.items():
        means = (totals[layer][0] / totals[layer][1]).numpy()  # [offsets, heads]; 0 / 0 is NaN
        rows += [
            (layer, head, -offset, means[offset, column])
            for column, head in enumerate(indices)
            for offset in reversed(range(n_offsets))
        ]
    table = pd.DataFrame.from_records(rows, columns=columns)
    table.attrs = dict[Any, Any](view.origin())
    return named(table, RELATIVE_POSITION_KERNEL)


def _by_offset(heads: list[int], total: Float64[Tensor, "two offsets heads"]) -> Callable[[Tensor, Any], None]:
    """Return a hook that adds the sum of unmasked scores and their number to `total`, by offset and head."""

    def add(scores: Tensor, hook: Any) -> None:
        chosen = scores[:, heads]
        for offset in range(total.shape[1]):
            diagonal = in_float64(chosen.diagonal(-offset, dim1=-2, dim2=-1))  # [batch, heads, queries]
            unmasked = diagonal > torch.finfo(scores.dtype).min / 2
            total[0, offset] += diagonal.where(unmasked, 0.0).sum((0, 2)).cpu()
            total[1, offset] += unmasked.sum((0, 2)).cpu()

    return add


def repeated_sequences(
    view: AttentionView, n_sequences: int, segment_length: int, *, exclude_special: bool = False, seed: int = 0
) -> Int[Tensor, "sequences pos"]:
    """Return sequences `[BOS, r, r]` of random ids, [n_sequences, 1 + 2 L].

    BOS is the tokenizer's BOS, else its EOS, else 0. Under a vocabulary of 64 a segment is a permutation of ids other
    than BOS instead of a draw: a token that occurred twice in a segment would have two induction targets.

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
    """Return the mass that uniform causal attention puts on one earlier token, averaged over the second copy."""
    return float(np.mean(1.0 / np.arange(length + 2, 2 * length + 2)))


def _segment_length(view: AttentionView, tokens: Int[Tensor, "sequences pos"]) -> int:
    length = (tokens.shape[1] - 1) // 2
    repeats = tokens.shape[1] == 1 + 2 * length and torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :])
    if not repeats or len(tokens) < 2 or length < 2:
        refuse_padding(view, tokens, "sequences [BOS, r, r] have none")
        raise ValueError(
            "tokens must be at least two sequences [BOS, r, r]: one token, then a segment of two or more tokens, "
            f"then the same segment again; found shape {tuple(tokens.shape)}"
        )
    return length


def _mean_and_error(
    view: AttentionView, tokens: Int[Tensor, "sequences pos"], length: int, advance: Callable[[int], Any]
) -> Iterator[
    tuple[
        Float64[np.ndarray, "scores heads"], Float64[np.ndarray, "scores heads"], Float64[np.ndarray, "2 scores heads"]
    ]
]:
    """Yield, by layer, mean and standard error over sequences, and the means of even and of odd ones.

    The scores are those of `DETECTORS` on the copy, then `prev` on the segment. Hooks reduce the patterns, so that none
    is stored.
    """
    count = len(tokens)
    total: list[Tensor] = [torch.zeros(0)] * view.n_layers  # [2 halves, scores, heads]
    squares: list[Tensor] = [torch.zeros(0)] * view.n_layers
    offsets = {"prev": 1, "dup": length, "ind": length - 1}
    batch_start = 0

    def reducer(layer: int) -> Callable[[Tensor, Any], None]:
        def reduce(pattern: Tensor, hook: Any) -> None:
            mass = [
                # Entry i of the diagonal is query i + offset, key i.
                in_float64(pattern.diagonal(-offsets[name], dim1=-2, dim2=-1)[..., length + 1 - offsets[name] :]).mean(
                    -1
                )
                for name in DETECTORS
            ]
            mass.append(in_float64(pattern.diagonal(-1, dim1=-2, dim2=-1)[..., 1:length]).mean(-1))
            scores = torch.stack(mass).cpu()  # [scores, batch, heads]
            odd = (batch_start + torch.arange(scores.shape[1])) % 2 == 1
            halves = torch.stack([scores[:, ~odd].sum(1), scores[:, odd].sum(1)])
            started = len(total[layer]) > 0
            total[layer] = halves + (total[layer] if started else 0)
            squares[layer] = scores.square().sum(1) + (squares[layer] if started else 0)

        return reduce

    names = [view.hook_names(layer)["pattern"] for layer in range(view.n_layers)]
    hooks = [(name, reducer(layer)) for layer, name in enumerate(names)]
    for batch in tokens.split(BATCH):
        view.run(batch, hooks, last=names[-1])
        batch_start += len(batch)
        advance(len(batch))
    for layer in range(view.n_layers):
        if len(total[layer]) == 0:
            raise UnsupportedArchitecture(
                f"layer {layer}: the attention never returned its pattern; "
                'load the model with attn_implementation="eager"'
            )
        mean = total[layer].sum(0) / count
        variance = (squares[layer] / count - mean.square()).clamp_min(0) * count / (count - 1)
        sizes = torch.tensor([(count + 1) // 2, count // 2], dtype=torch.float64)
        yield mean.numpy(), (variance / count).sqrt().numpy(), (total[layer] / sizes[:, None, None]).numpy()
