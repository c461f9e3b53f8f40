"""Attention of every head to the keys of each pattern, and the same with keys read from random directions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from scipy.linalg import helmert
from torch import Tensor

from tlspectral.detectors.targets import weighted_attention
from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention import AttentionLayer, AttentionView, softcapped
from tlspectral.models.attention.scores import (
    pattern_tolerance,
    rebuilt_scores,
    rotated_keys,
    rotated_queries,
    rotation_tables,
)
from tlspectral.nulls import haar_frame

BATCH = 8


def attention_scores(
    view: AttentionView, tokens: Int[Tensor, "sequences pos"], keys: Bool[Tensor, "types sequences query key"]
) -> Float64[np.ndarray, "types sequences heads"]:
    """Return the attention of a query to its keys, averaged over the queries of a sequence that have any."""
    names = [view.hook_names(layer)["pattern"] for layer in range(view.n_layers)]
    batches = []
    for start in range(0, len(tokens), BATCH):
        rows = slice(start, start + BATCH)
        by_layer: dict[int, Tensor] = {}
        hooks = [(name, partial(_scored, by_layer, layer, keys[:, rows])) for layer, name in enumerate(names)]
        view.run(tokens[rows], hooks, last=names[-1])
        batches.append(torch.cat([by_layer[layer] for layer in range(view.n_layers)], dim=2))
    return torch.cat(batches, dim=1).numpy()


def _scored(by_layer: dict[int, Tensor], layer: int, keys: Tensor, pattern: Tensor, hook: Any) -> None:
    by_layer[layer] = torch.stack([weighted_attention(pattern, marked.double()) for marked in keys])


@dataclass(frozen=True)
class _FixedQueries:
    """What a layer's attention depends on beside W_K, in float32: its queries, its inputs and what is added to scores.

    `core` is that of W_K (see `core_of`), `bias` that of the keys, and `layer` holds norms.
    """

    layer: AttentionLayer
    n: Float[Tensor, "batch pos d_model"]
    queries: Float[Tensor, "batch heads pos d_head"]
    core: Float[Tensor, "kv_heads rank d_head"]
    bias: Float[Tensor, "kv_heads d_head"]
    tables: tuple[Tensor, Tensor] | None
    added: Float[Tensor, "#batch #heads pos pos"]

    def pattern(self, frame: Float[Tensor, "d_model rank"]) -> Float[Tensor, "batch heads query key"]:
        """Return the attention of all heads whose keys are read through a frame."""
        layer = self.layer
        keys = torch.einsum("bpr,hrk->bphk", self.n @ frame, self.core) + self.bias
        keys = rotated_keys(layer, keys, keys, self.tables)
        groups = layer.n_heads // layer.n_kv_heads
        scores = layer.score_scale * self.queries @ keys.repeat_interleave(groups, dim=1).mT
        return (softcapped(scores, layer.softcap) + self.added).softmax(-1)


def core_of(weight: Float64[Tensor, "heads d_model d_head"], rank: int) -> Float[Tensor, "heads rank d_head"]:
    """Return C with `C^T C = W^T W`, so that `F C` has the singular values and column products of W for any frame F."""
    values, vectors = torch.linalg.eigh(weight.mT @ weight)
    values, vectors = values[:, -rank:].clamp_min(0), vectors[:, :, -rank:]
    return (values.sqrt()[:, :, None] * vectors.mT).float()


def rotated_key_scores(
    view: AttentionView,
    tokens: Int[Tensor, "sequences pos"],
    keys: Bool[Tensor, "types sequences query key"],
    *,
    draws: int,
    seed: int,
    advance: Callable[[], Any],
) -> Float[np.ndarray, "draws types heads"]:
    """Return scores, averaged over sequences, of heads that read their keys from random directions of their inputs.

    W_K becomes O W_K with O a Haar-random rotation of the residual stream, one per draw. Singular values, biases, norms
    and rotary positions stay, and so do the queries.

    Raises ScoreMismatch where the model's pattern is not that of its weights (learned sinks, hooks that edit scores).
    """
    layers = _fixed_queries(view, tokens)
    n_queries = keys.any(-1).sum(-1).clamp_min(1)[:, :, None, None]
    weights = keys.float() / n_queries / len(tokens)
    of_mean_zero = torch.from_numpy(helmert(view.d_model)).T  # an orthonormal basis
    null = np.empty((draws, len(keys), sum(fixed.layer.n_heads for fixed in layers)), dtype=np.float32)
    with torch.no_grad():
        for draw in range(draws):
            frames: dict[tuple[int, int], Tensor] = {}
            scores = []
            for fixed in layers:
                n, rank = fixed.layer.effective_dimension, fixed.core.shape[1]
                if (n, rank) not in frames:
                    frame = haar_frame(n, rank, [seed, draw])
                    frames[n, rank] = (frame if n == view.d_model else of_mean_zero @ frame).float()
                scores.append(torch.einsum("bhqk,wbqk->wh", fixed.pattern(frames[n, rank]), weights))
            null[draw] = torch.cat(scores, dim=1).numpy()
            advance()
    return null


def _fixed_queries(view: AttentionView, tokens: Int[Tensor, "sequences pos"]) -> list[_FixedQueries]:
    names = [view.hook_names(layer) for layer in range(view.n_layers)]
    points = ("residual", "cos", "sin", "scores", "pattern")
    wanted = [name[point] for name in names for point in points if point in name]
    captured = view.capture(tokens, wanted, last=names[-1]["pattern"])
    return [_fixed(view, index, tokens.shape[1], captured) for index in range(view.n_layers)]


def _fixed(view: AttentionView, index: int, n_positions: int, captured: dict[str, Tensor]) -> _FixedQueries:
    """Return one layer's part. Raises as `rotated_key_scores`."""
    names, layer = view.hook_names(index), view.layer(index)
    pattern, residual = captured[names["pattern"]].cpu(), captured[names["residual"]].cpu().double()
    if "scores" in names:
        hidden = ~view.unmasked(index, captured[names["scores"]]).cpu().all(1, keepdim=True)
    else:
        hidden = ~view.causal_mask(index, n_positions).cpu()[None, None]
    rebuilt = rebuilt_scores(view, index, captured).total
    error = float((rebuilt.masked_fill(hidden, -torch.inf).softmax(-1) - pattern.double()).abs().max())
    largest = float(rebuilt.masked_fill(hidden, 0.0).abs().max())
    # An error of a score is at most one of its attention: that of `verify_scores`, 1e-5 of the largest score.
    if not error <= pattern_tolerance(pattern.dtype, largest) * (1 + largest):
        raise ScoreMismatch(
            f"layer {index}: the attention pattern differs by {error:.1e} from the softmax of the scores that the "
            "weights give, so that its null cannot be drawn; leave `ablate` blocks, and take off hooks that edit "
            "queries, keys, scores or the pattern"
        )
    tables = rotation_tables(view, layer.rotary, index, n_positions, captured)
    n = layer.norm.normalized(residual)
    q = torch.einsum("bpd,hdk->bphk", n, layer.w_q) + layer.b_q
    added = torch.zeros(1, 1, n_positions, n_positions, dtype=torch.float64)
    if layer.alibi is not None:
        added = added + layer.alibi.bias(torch.arange(n_positions))[:, None]
    core = core_of(layer.w_k, min(layer.d_head, layer.effective_dimension))
    return _FixedQueries(
        layer,
        n.float(),
        rotated_queries(layer, q, q, tables).float(),
        core,
        layer.b_k.float(),
        None if tables is None else (tables[0].float(), tables[1].float()),
        added.float().masked_fill(hidden, torch.finfo(torch.float32).min),
    )
