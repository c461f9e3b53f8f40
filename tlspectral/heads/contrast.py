"""What tells one key of a prompt from the others: a contrast of covariances of queries and keys in a head's space."""

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.attention import AttentionLayer, AttentionView, QueryKeyNorm, unmasked
from tlspectral.models.attention.padding import PackedTokens, attention_positions
from tlspectral.models.attention.prompts import packed_prompts
from tlspectral.rotary import in_float64, widened, with_gain_and_phase

BATCH = 16


def key_contrast(
    view: AttentionView, layer: AttentionLayer, head: int, task: Any
) -> tuple[Float64[Tensor, "d_head d_head"], int]:
    """Return E[q k^T | +] - E[q k^T | -] of one head over the prompts of a task, and their number.

    + is the task's pair of query and key, - the mean over the other keys that the query sees. Queries carry the gain
    and phase of a spectral layer; both are before rotation.

    Raises:
        TypeError: a task that is none.
        ValueError: a task without attention, a query that sees no other key, or one that does not see its key.
    """
    if not hasattr(task, "prompts") or not hasattr(task, "attention"):
        raise TypeError(f"task is a tls.Task with attention=, query and key positions; found {type(task).__name__}")
    ready = hasattr(task.prompts, "packed")
    prompts: PackedTokens = task.prompts.packed(view) if ready else packed_prompts(view, task.prompts)
    pairs = attention_positions(prompts.lengths, task.attention)
    if pairs is None:
        raise ValueError("the task has no attention=: give the query and the key position of each prompt")
    names = view.hook_names(layer.layer)
    total = torch.zeros(layer.d_head, layer.d_head, dtype=torch.float64)
    points = [names[point] for point in ("query", "key", "scores") if point in names]
    for start in range(0, len(prompts.tokens), BATCH):
        rows = slice(start, start + BATCH)
        captured = view.capture(prompts.tokens[rows], points, last=names["pattern"])
        q = _of_head(captured[names["query"]], head, layer.q_norm, layer)
        k = _of_head(captured[names["key"]], head, layer.k_norm, layer)
        if layer.rotary is not None:
            q = with_gain_and_phase(q[:, None], layer.rotary.of_heads([head]))[:, 0]
        for row, (query, key) in enumerate(pairs[rows].tolist()):
            seen = _seen(view, layer.layer, captured.get(names.get("scores", "")), row, head, query, k.shape[1])
            others = seen.clone()
            others[key] = False
            if not bool(seen[key]) or not bool(others.any()):
                what = "does not see its key" if not bool(seen[key]) else "sees no other key to compare with"
                raise ValueError(
                    f"attention of sequence {start + row}: in layer {layer.layer} the query at {query} {what}"
                )
            total += torch.outer(q[row, query], k[row, key] - k[row, others].mean(0))
    return total / len(prompts.tokens), len(prompts.tokens)


def _of_head(
    captured: Tensor, head: int, norm: QueryKeyNorm | None, layer: AttentionLayer
) -> Float64[Tensor, "batch pos d_head"]:
    """Return queries or keys of a query head, after the norm of queries or keys."""
    x = widened(captured)
    if norm is not None:
        x = norm.applied(x)
    return in_float64(x[:, :, head // (layer.n_heads // x.shape[2])]).cpu()


def _seen(
    view: AttentionView, layer: int, scores: Tensor | None, row: int, head: int, query: int, width: int
) -> Tensor:
    """Return which keys a query sees, [pos]."""
    if scores is None:
        return view.causal_mask(layer, width)[query].cpu()
    return unmasked(scores[row, head, query]).cpu()
