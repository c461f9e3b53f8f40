"""The null of `detect_heads`: heads that read their keys from random directions of the residual stream.

W_K of a head, with the gain of the input norm folded in, becomes O W_K. O is a random rotation of the residual stream
(Haar-distributed; under LayerNorm, of vectors without mean). Singular values of W_K, queries, inputs, biases, query/key
norms, positions and masks stay as they are. In a freshly initialised model all rotations of W_K are equally likely, so
a head and its draws are exchangeable.

With W_K = Q R, the columns of O Q are a random orthonormal frame F, and O W_K = F R. A draw therefore needs F only. The
heads of a layer share draws; each layer has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.nulls import haar_frame
from tlspectral.errors import ScoreMismatch
from tlspectral.heads.detectors.targets import Reduce
from tlspectral.models.attention.head_scores import HeadScores, rotation_tables
from tlspectral.models.attention.run_scores import visible_keys
from tlspectral.models.attention.score_side import key_side
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.placing import holding
from tlspectral.models.hooking.strips import strip_of
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import AttentionLayer, require_even_scale
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import run_until

TIE = 1e-6
"""Relative difference within which a draw counts as equal to the observed score; rounding to float32 is 1e-7.

Without it, a score that no key can change (a pattern that marks all keys) would not get a p of 1.
"""


def rotated_key_pvalues(
    view: AttentionView,
    tokens: Int[Tensor, "sequences pos"],
    reduce: Reduce,
    counts: Bool[Tensor, "scores sequences"],
    *,
    draws: int,
    seed: int,
    advance: Callable[[], Any],
) -> Float64[np.ndarray, "scores heads"]:
    """Return a p for each score and head, an array [scores, heads]: (1 + draws whose score is at least the head's) / (1
    + draws).

    A draw is the head with its W_K rotated by a random rotation of the residual stream; `draws` and `seed` fix the
    draws. A score is the mean over the sequences that `counts` marks; NaN without any. `reduce` maps attention [batch,
    heads, query, key] and its strip to scores [scores, batch, heads], 0 where a sequence does not count. `advance` is
    called after each draw of a layer. The model in `view` runs once on `tokens`. Memory does not grow with draws or
    layers.

    Raises ScoreMismatch if a layer's weights do not give its attention (learned sinks, hooks that edit scores);
    UnsupportedArchitecture for a layer that cannot be read or exposes no pattern.
    """
    sizes = counts.sum(1).double()[:, None]
    by_layer: list[Tensor] = []

    def measure(index: int, captured: dict[str, Tensor], pattern: Tensor) -> None:
        layer, observed = _fixed_queries(view, index, captured, pattern)
        captured.clear()
        whole = strip_of(pattern)
        score = reduce(observed, whole).sum(1) / sizes
        least = score - TIE * score.abs()
        reached = torch.zeros_like(score)
        for draw in range(draws):
            frame = haar_frame(layer.n.shape[-1], layer.core.shape[1], [seed, index, draw]).float()
            reached += reduce(layer.pattern(frame), whole).sum(1) / sizes >= least
            advance()
        by_layer.append(torch.where(score.isnan(), torch.nan, (1 + reached) / (1 + draws)))

    hooks = [hook for index in view.layers for hook in at_pattern(view, index, partial(measure, index))]
    run_until(view, tokens, hooks, last=hooks[-1][0])
    return torch.cat(by_layer, dim=1).numpy()


def at_pattern(
    view: AttentionView, index: int, measure: Callable[[dict[str, Tensor], Tensor], None]
) -> list[tuple[str, Callable[[Tensor, Any], None]]]:
    """Return (hook name, function) pairs that call `measure(captured, pattern)` when a run of the model in `view`
    reaches the attention pattern of layer `index`.

    `captured` is a dict by hook name: the layer's input and, where they exist, scores and cos and sin tables. `measure`
    must clear it.
    """
    names, captured = view.hook_names(index), {}
    points = [names[point] for point in ("residual", "cos", "sin", "scores") if point in names]
    return [
        *holding(captured, (name for name in points if name in view.hook_points)),
        (names["pattern"], lambda pattern, hook: measure(captured, pattern.detach().cpu())),
    ]


@dataclass(frozen=True)
class _FixedQueries:
    """Everything that a layer's attention depends on except the directions of W_K, in float32.

    Attributes:
        layer: the folded layer.
        n: normalised residual stream without gain and bias; under LayerNorm in a basis of the vectors without mean.
        scores: queries and settings; the keys are replaced in each draw.
        core: R of W_K = Q R for each key head. With a latent shared by all heads, R of its down-projection.
        bias: bias of the keys, or of the latent.
        hidden: True where a query does not see a key.
    """

    layer: AttentionLayer
    n: Float[Tensor, "batch pos dimension"]
    scores: HeadScores
    core: Float[Tensor, "kv_heads rank d_head"]
    bias: Float[Tensor, "kv_heads d_head"]
    hidden: Bool[Tensor, "#batch 1 pos pos"]

    def pattern(self, frame: Float[Tensor, "dimension rank"]) -> Float[Tensor, "batch heads query key"]:
        """Return the attention of all heads if their keys are read through the orthonormal columns of `frame`, a random
        draw.
        """
        read = self.n @ frame
        keys = einsum(read, self.core, "batch pos rank, kv_head rank d_head -> batch pos kv_head d_head") + self.bias
        scale = None
        if isinstance(self.layer.k_norm, Latent):
            keys, scale = self.layer.k_norm.inputs(keys[:, :, 0])
        scores = replace(self.scores, key=key_side(self.layer, keys, None, self.scores.key.rotation, scale)).own()
        return scores.masked_fill(self.hidden, torch.finfo(torch.float32).min).softmax(-1)


def _without_mean(vectors: Float64[Tensor, "*rows d_model"]) -> Float64[Tensor, "*rows dimension"]:
    """Return vectors of mean 0 in an orthonormal basis of such vectors; the result has one dimension less.

    A reflection maps the direction (1, 1, ...) to the first axis, which is then dropped.
    """
    axis = vectors.new_full((vectors.shape[-1],), vectors.shape[-1] ** -0.5)
    axis[0] -= 1
    return (vectors - (vectors @ axis)[..., None] * axis * 2 / (axis @ axis))[..., 1:]


def _core(
    weight: Float64[Tensor, "kv_heads dimension d_head"], *, together: bool
) -> Float[Tensor, "kv_heads rank d_head"]:
    """Return R of W_K = Q R with a non-negative diagonal, for each key head of `weight`.

    With `together`, all heads are decomposed as one matrix, and R is cut into heads.
    """
    if together:
        joined = rearrange(weight, "kv_head dimension d_head -> 1 dimension (kv_head d_head)")
        core = _core(joined, together=False)
        return rearrange(core, "1 rank (kv_head d_head) -> kv_head rank d_head", kv_head=len(weight))
    factor = torch.linalg.qr(weight, mode="r").R
    return (factor * torch.where(factor.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)[:, :, None]).float()


def _fixed_queries(
    view: AttentionView, index: int, captured: dict[str, Tensor], pattern: Float[Tensor, "batch heads query key"]
) -> tuple[_FixedQueries, Float64[Tensor, "batch heads query key"]]:
    """Return the parts of layer `index` that stay the same in all draws of W_K, as `_FixedQueries`, and its attention
    rebuilt from the weights, [batch, heads, query, key].

    `view` is the open model, `captured` the activations of its run by hook name, which stay unchanged. Raises
    ScoreMismatch if the rebuilt attention differs from the model's `pattern`.
    """
    names, layer = view.hook_names(index), view.layer(index)
    residual, n_positions = captured[names["residual"]].cpu().double(), pattern.shape[-1]
    hidden = ~visible_keys(view, index, n_positions, captured).cpu().all(1, keepdim=True)
    require_even_scale(layer, index, n_positions)
    tables = rotation_tables(view, layer.rotary, index, n_positions, captured)
    scores = HeadScores.of_stream(layer, residual, tables)
    rebuilt = scores.own()
    observed = rebuilt.masked_fill(hidden, -torch.inf).softmax(-1)
    # Attention differs by no more than the scores do.
    require_close(
        (observed - pattern.double()).abs().max(),
        rebuilt.masked_fill(hidden, 0.0).abs().max(),
        pattern.dtype,
        "scores",
        f"layer {index}: the attention pattern rebuilt from the folded weights differs from the model's own",
        "its null cannot be drawn: leave `ablate` blocks and remove hooks that edit queries, keys, scores or the "
        "pattern, or set null_draws=0",
        ScoreMismatch,
    )
    n, w_k, b_k = layer.norm.normalized(residual), layer.w_k, layer.b_k
    if isinstance(layer.k_norm, Latent):
        w_k, b_k = layer.k_norm.down[None], layer.k_norm.bias_or_zero[None]
    if layer.effective_dimension < view.d_model:
        n, w_k = _without_mean(n), _without_mean(w_k.mT).mT
    fixed = _FixedQueries(
        layer,
        n.float(),
        scores.in_float32(),
        # A norm over all heads of a token depends on all keys together: one rotation for all heads.
        _core(w_k, together=layer.k_norm is not None and layer.k_norm.over_heads),
        b_k.float(),
        hidden,
    )
    return fixed, observed
