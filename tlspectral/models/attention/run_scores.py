"""Scores of some queries of a run from its own queries and keys, the keys that they see, the check of its attention."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.head_scores import HeadScores, Rotation, Side, Tables, side
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, require_close
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import LayerSettings
from tlspectral.models.reading.norms import QueryKeyNorm, double
from tlspectral.models.reading.view import AttentionView


def visible_keys(
    view: AttentionView, index: int, n_positions: int, captured: dict[str, Tensor]
) -> Bool[Tensor, "batch heads queries keys"]:
    """Return which keys the queries of a layer see, from the scores that it exposes, or causal ones without padding.

    `captured` has these scores, or some of them. Batch and heads are 1 where all are alike.
    """
    name = view.hook_names(index).get("scores")
    return view.seen_keys(index, n_positions)[None, None] if name is None else view.unmasked(index, captured[name])


def row_scores(
    layer: LayerSettings,
    head: int,
    query: Float[Tensor, "sequences pos heads d_head"],
    key: Float[Tensor, "sequences pos kv_heads d_head"],
    tables: Tables | None,
    rows: Int[Tensor, "sequences queries"],
    *,
    query_change: Float[Tensor, "*copies sequences queries heads d_head"] | None = None,
    key_change: Float[Tensor, "*copies sequences pos kv_heads d_head"] | None = None,
) -> HeadScores:
    """Return the scores of one head between the queries at some rows of each sequence and all keys.

    Queries and keys come from a run, for all heads, before a query/key norm and rotation, and may change before that
    norm. Keys may be repeated per query head. `tables` are cos and sin of each pair, of a spectral layer per head.
    """
    at_query = at_key = None
    if tables is not None and layer.rotary is not None:
        geometry = layer.rotary.of_heads([head])
        cos, sin = (table[head] if table.ndim == 3 else table for table in tables)
        at_query, at_key = Rotation(geometry, cos[rows][:, None], sin[rows][:, None]), Rotation(geometry, cos, sin)
    asked = query.gather(1, rows[..., None, None].expand(-1, -1, *query.shape[2:]))
    q_norm, k_norm = (norm and norm.as_(double) for norm in (layer.q_norm, layer.k_norm))
    return HeadScores(
        layer,
        [head],
        _changed_side(asked, query_change, head, q_norm, at_query, queries=True),
        _changed_side(key, key_change, head * key.shape[2] // query.shape[2], k_norm, at_key),
    )


def _changed_side(
    projected: Float[Tensor, "*batch rows heads d_head"],
    change: Float[Tensor, "*copies rows heads d_head"] | None,
    head: int,
    norm: QueryKeyNorm | Latent | None,
    rotation: Rotation | None,
    *,
    queries: bool = False,
) -> Side:
    """Return the side of one head whose queries or keys change before the norm; the other heads keep theirs.

    `projected` and `change` are of all heads: a norm whose mean runs over them is taken again. Biases are not told
    apart.
    """
    changed = projected[..., [head], :] if change is None else projected[..., [head], :] + change[..., [head], :]
    scale = None
    if norm is not None and norm.over_heads:
        every = projected.expand(*changed.shape[:-2], *projected.shape[-2:]).clone()
        every[..., [head], :] = changed
        scale = norm.token_scale(every)[..., [head]]
    if norm is not None and norm.gain is not None and norm.gain.ndim == 2:  # some models repeat keys, gains they do not
        norm = norm.of_heads([head * len(norm.gain) // projected.shape[-2]])
    return side(changed, None, norm, rotation, queries=queries, token_scale=scale)


def require_own_pattern(
    scores: Float[Tensor, "*rows keys"],
    pattern: Float[Tensor, "*rows keys"],
    stored: torch.dtype,
    where: str,
    *,
    largest: float | None = None,
) -> None:
    """Refuse attention of a run that is not the softmax of the scores of its queries and keys, -inf where masked.

    `largest` is the largest |score| of the layer where it is known, else the largest of these. Raises ScoreMismatch.
    """
    size = scores.masked_fill(scores.isinf(), 0.0).abs().max()
    require_close(
        (scores.softmax(-1) - pattern.to(scores.device).to(scores)).abs().max(),  # widened where there is float64
        size if largest is None else torch.full_like(size, largest),
        stored,
        "pattern",
        f"{where}: the attention of the run differs from that of its queries and keys",
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
