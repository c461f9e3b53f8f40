"""Copy suppression: heads that write against a token that they attend to, where that token would be predicted."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.heads.types.attention import core_of
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import folded_weight
from tlspectral.nulls import block_generator, haar_blocks

TOP = 10
"""A token would be predicted if it is among so many of the largest logits at the head's input."""


@torch.no_grad()
def suppression_scores(
    view: AttentionView, tokens: Int[Tensor, "sequences pos"], *, draws: int, seed: int
) -> tuple[Float64[np.ndarray, "sequences heads"], Float64[np.ndarray, "draws heads"]] | None:
    """Return how much logit heads take from the earlier token that is predicted most, by attending to it.

    At each query from position 2 on, the token is that of the earlier ones, the query's own left out, with the largest
    logit at the head's input (the residual stream through final norm and unembedding). Queries where it is among the
    `TOP` largest of the vocabulary count. The score is what the head writes directly to its logit, less the mean over
    the vocabulary, through attention to where it stands, with the sign changed; the final norm divides by what it does
    in the intact run. Under the null W_V becomes O W_V with a Haar-random rotation O of the residual stream, which
    keeps the singular values of W_V and of OV's columns. Left out: biases of values, norms behind the attention.

    Returns means over the queries of a sequence, NaN without any, and under the null draws of their mean over
    sequences; None where input and output vocabularies differ.
    """
    w_u, norm = view.unembedding()
    if w_u.shape[1] != len(view.embedding()):
        return None
    unembedding = folded_weight(w_u.detach().cpu().float()[None], norm)[0]  # its bias is the same for all heads
    centred = unembedding - unembedding.mean(1, keepdim=True)
    names = [view.hook_names(layer) for layer in range(view.n_layers)]
    last = f"blocks.{view.n_layers - 1}.hook_resid_post"
    wanted = [name[point] for name in names for point in ("residual", "pattern")]
    captured = view.capture(tokens, [*wanted, last], last=last)
    scale = norm.token_scale(captured[last].cpu().double()).float()[..., None]
    scores, null = [], []
    diagonals: dict[tuple[int, int], Tensor] = {}  # layers of one size share the draws
    for index, name in enumerate(names):
        residual = captured[name["residual"]].cpu().double()
        queries = _predicted(tokens, norm.normalized(residual).float(), unembedding)
        toward = centred.T[queries.token] * scale  # [sequences, query, d_model]
        by_sequence, singular_values = _of_layer(
            view, index, residual, captured[name["pattern"]].cpu(), queries, toward
        )
        scores.append(by_sequence)
        size = view.d_model - (view.raw(index).norm.kind == "LN"), singular_values.shape[1]
        if size not in diagonals:
            blocks = haar_blocks(*size, draws, block_generator(seed, *size))
            diagonals[size] = blocks.diagonal(dim1=1, dim2=2).clone()
        null.append(diagonals[size] @ singular_values.mT)
    return torch.cat(scores, dim=1).numpy(), torch.cat(null, dim=1).numpy()


class _Queries(NamedTuple):
    """The token that each query is scored on, [sequences, query], whether the query counts, and where the token is."""

    token: Int[Tensor, "sequences query"]
    counts: Bool[Tensor, "sequences query"]
    keys: Bool[Tensor, "sequences query key"]


def _predicted(
    tokens: Int[Tensor, "sequences pos"],
    n: Float[Tensor, "sequences pos d_model"],
    unembedding: Float[Tensor, "d_model d_vocab"],
) -> _Queries:
    """Return, for each query, the other earlier token with the largest logit."""
    position = torch.arange(tokens.shape[1])
    earlier = (position[:, None] > position) & (tokens[:, :, None] != tokens[:, None, :])
    chosen, ranked = [], []
    for row, inputs in enumerate(n):
        logits = inputs @ unembedding
        of_context = logits[:, tokens[row]].masked_fill(~earlier[row], -torch.inf)
        best, key = of_context.max(1)
        chosen.append(tokens[row][key])
        ranked.append((logits > best[:, None]).sum(1))
    token = torch.stack(chosen)
    counts = (torch.stack(ranked) < TOP) & earlier.any(-1) & (position >= 2)
    keys = (tokens[:, None, :] == token[:, :, None]) & (position[:, None] > position) & counts[:, :, None]
    return _Queries(token, counts, keys)


def _of_layer(
    view: AttentionView,
    index: int,
    residual: Float64[Tensor, "sequences pos d_model"],
    pattern: Float[Tensor, "sequences heads query key"],
    queries: _Queries,
    toward: Float[Tensor, "sequences query d_model"],
) -> tuple[Float64[Tensor, "sequences heads"], Float64[Tensor, "heads rank"]]:
    """Return scores by sequence, and the singular values of X, with `score = tr(O^T X)` of a head read through O."""
    output, raw = view.output(index), view.raw(index)
    groups = len(output.w_o) // len(output.w_v)
    n = raw.norm.normalized(residual).float()
    gathered = torch.einsum("bhqk,bkd->bhqd", pattern.float() * queries.keys[:, None], n)
    written = torch.einsum("hkd,bqd->bhqk", output.w_o.float(), toward)
    values = output.w_v.float().repeat_interleave(groups, dim=0)
    by_query = -(torch.einsum("bhqd,hdk->bhqk", gathered, values) * written).sum(-1)  # 0 where a query does not count
    n_queries = queries.counts.sum(1).double()
    by_sequence = by_query.sum(2).double() / n_queries.where(n_queries > 0, torch.nan)[:, None]
    share = torch.where(n_queries > 0, 1 / n_queries.clamp_min(1), 0.0) / (n_queries > 0).sum().clamp_min(1)
    product = -torch.einsum("bhqd,bhqk,b->hdk", gathered, written, share.float())
    rank = min(values.shape[2], view.d_model - (raw.norm.kind == "LN"))
    core = core_of(output.w_v, rank).repeat_interleave(groups, dim=0)
    return by_sequence, torch.linalg.svdvals(product @ core.mT).double()[:, :rank]
