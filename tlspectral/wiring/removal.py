"""What a score loses when sources are really taken out of the streams that a head reads, every norm taken again."""

from collections.abc import Set

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.wiring.score_form import HeadForm, Side


def removed_pairs(
    form: HeadForm,
    written: Float64[Tensor, "two sources d_model"],
    residual: Float64[Tensor, "two d_model"],
    pairs: Int[Tensor, "pairs two"],
) -> Float64[Tensor, "pairs"]:
    """Return S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b) of each pair of sources (a, b).

    The source behind the last written one is the bias of the projection: that projection then has none.
    """
    queries = _without(form.query, residual[0], written[0], pairs[:, 0])
    keys = _without(form.key, residual[1], written[1], pairs[:, 1])
    query, key = form.query.of(residual[0]).expand_as(queries), form.key.of(residual[1]).expand_as(keys)
    score = form.score
    return score(query, key) - score(queries, key) - score(query, keys) + score(queries, keys)


def removed_key_sources(
    form: HeadForm,
    written: Float64[Tensor, "two sources d_model"],
    residual: Float64[Tensor, "two d_model"],
    sources: Set[int],
) -> Float64[Tensor, ""]:
    """Return S(x, y) - S(x, y - sum of the sources): what the score loses without all of them in the key."""
    n_sources = written.shape[1]
    gone = [source for source in sources if source < n_sources]
    key = form.key.of(residual[1] - written[1, gone].sum(0), bias=n_sources not in sources)
    query = form.query.of(residual[0])[None]
    return (form.score(query, form.key.of(residual[1])[None]) - form.score(query, key[None]))[0]


def _without(
    side: Side, x: Float64[Tensor, "d_model"], written: Float64[Tensor, "sources d_model"], sources: Tensor
) -> Float64[Tensor, "pairs d_head"]:
    removed = torch.cat([written, torch.zeros_like(written[:1])])[sources]
    is_bias = (sources == len(written))[:, None]
    return torch.where(is_bias, side.of(x, bias=False), side.of(x - removed))
