"""Checks that the view reproduces a model's own attention scores. Nothing is reported for a model where it does not."""

from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.attention.head_scores import rebuilt_scores
from tlspectral.models.attention.tolerances import nearest_bound
from tlspectral.models.hooking.user_hooks import not_without_hooks
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, even_rows
from tlspectral.models.running.passes import capture_until
from tlspectral.models.running.prompts import packed_prompts

CHECK_LENGTH = 24
_NOT_BILINEAR = "this model's attention is not the bilinear form that was read from it, so no table is returned"


class LayerCheck(NamedTuple):
    """The result of checking a layer.

    `record` is what tables store: the worst |ours - model's| over unmasked entries, the largest error allowed, the
    layer, and what was compared. `outside_m` is the share of score variance, within a query's row, outside M.
    """

    record: dict[str, Any]
    outside_m: Float64[np.ndarray, "heads"]


def verify_scores(model: Any, prompts: Any = None) -> pd.Series:
    """Rebuild every layer's attention scores from its folded weights and compare them with the model's own.

    >>> import tlspectral as tls
    >>> bool(tls.verify_scores(tls.load_model("tiny-rope")).max() < 1e-4)
    True

    The input of each layer is taken from a pass of the model; norm, biases, M, rotation (the model's own cos and sin
    tables), scale and softcap are ours, in float64. Masked entries are left out. Where a bridge exposes no scores, the
    softmax is compared with the model's pattern. ALiBi is compared up to a shift of each query's row, which the softmax
    does not see.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompts: in any form that `Task` takes: strings, ids [batch, pos], or a tokenizer's batch, whose padding is left
            out. None takes 24 ids drawn at random (seed 0), so that no tokenizer is needed.

    Returns:
        Series, index `layer`: the worst absolute error of that layer.

    Raises:
        ScoreMismatch: an error exceeds 1e-5 + 1e-5 max|score| (float32 and wider) or 4 eps max|score| (16-bit); for
            patterns 1e-5 or eps max|score|. Or a rotary layer has no frequencies: its pairs do not rotate by one angle
            per token.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.
        ValueError, TypeError: prompts that cannot be read (as in `Task`), longer than the positions that the model has,
            or than the length up to which its score scale holds.

    What it does not establish: that TransformerLens reproduces the published model (`load_model` compares them).
    """
    with measured(model) as view:
        errors = {layer: check.record["worst_error"] for layer, check in check_scores(view, prompts).items()}
        return pd.Series(errors, name="worst_error").rename_axis("layer")


def check_scores(view: AttentionView, prompts: Any = None) -> dict[int, LayerCheck]:
    """Check the scores of a view as `verify_scores` does, and return all results by layer.

    Raises ScoreMismatch for a score that differs, UnsupportedArchitecture and BadWeights for a layer that cannot be
    read.
    """
    packed = checked_prompts(view, prompts)
    names = {index: view.hook_names(index) for index in view.layers}
    points = ("residual", "scores", "pattern", "cos", "sin")
    wanted = [name for points_of_layer in names.values() for point, name in points_of_layer.items() if point in points]
    captured = capture_until(view, packed.tokens, wanted, last=names[max(names)]["pattern"])
    return {index: _check_layer(view, index, names[index], captured, packed.real) for index in names}


def checked_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the caller's prompts, or for None the random one of `check_prompt`.

    Raises ValueError, TypeError for prompts that cannot be read or are too long.
    """
    return even_rows(check_prompt(view)) if prompts is None else packed_prompts(view, prompts)


def check_prompt(view: AttentionView) -> Int[Tensor, "1 pos"]:
    """Return 24 ids drawn at random (seed 0), fewer where the context or the valid length of a layer is shorter."""
    limits = [view.raw(index).valid_up_to for index in view.layers]
    length = min([CHECK_LENGTH, view.n_ctx, *(limit for limit in limits if limit)])
    return torch.randint(0, view.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))


def _check_layer(
    view: AttentionView, index: int, names: dict[str, str], captured: dict[str, Tensor], real: Bool[Tensor, "batch pos"]
) -> LayerCheck:
    view.rotary(index)  # the prompt can be too short to show that the layer has no frequencies
    raw = view.raw(index)
    pattern = captured[names["pattern"]].cpu().double()
    allowed = _allowed(pattern, index, view.causal) & real[:, None, :, None]
    ours, inside, outside = rebuilt_scores(view, index, captured)
    share = _row_variance(outside, allowed) / (_row_variance(outside, allowed) + _row_variance(inside, allowed))
    if "scores" in names:
        compared: Literal["scores", "pattern"] = "scores"
        theirs = captured[names["scores"]].cpu().double()
        allowed = allowed & view.reader.unmasked(view.model, index, captured[names["scores"]]).cpu()
        scale = theirs[allowed].abs().max()
        if raw.alibi is not None:
            theirs, ours = _centred_rows(theirs, allowed), _centred_rows(ours, allowed)
        error = (ours - theirs)[allowed].abs().max()
    else:
        compared = "pattern"
        scale = ours[allowed].abs().max()
        rebuilt = ours.masked_fill(~allowed, -torch.inf).softmax(-1)
        error = (rebuilt - pattern)[allowed].abs().max()
    found, allowed_difference = nearest_bound(
        error,
        scale,
        raw.w_q.dtype,
        compared,
        f"layer {index}: the {compared} rebuilt from the folded weights differ from the model's own",
        not_without_hooks(view.model, _NOT_BILINEAR),
        ScoreMismatch,
    )
    record = {"worst_error": found, "tolerance": allowed_difference, "layer": index, "compared": compared}
    return LayerCheck(record, share.numpy())


def _allowed(
    pattern: Float64[Tensor, "batch heads pos pos"], index: int, causal: bool
) -> Bool[Tensor, "batch heads pos pos"]:
    """Return the entries that the model attends to: causal, and not zeroed by a window; in an encoder all."""
    if not causal:
        return torch.ones_like(pattern, dtype=torch.bool)
    above = torch.ones(pattern.shape[-2:], dtype=torch.bool).triu(1)
    if bool((pattern[..., above] > 0).any()):
        raise UnsupportedArchitecture(
            f"layer {index}: queries attend to later keys; of encoders, BERT and RoBERTa are read"
        )
    return pattern > 0


def _centred_rows(scores: Tensor, allowed: Tensor) -> Tensor:
    unmasked = torch.where(allowed, scores, 0.0)
    return unmasked - unmasked.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)


def _row_variance(scores: Tensor, allowed: Tensor) -> Float64[Tensor, "heads"]:
    centred = torch.where(allowed, _centred_rows(scores, allowed), 0.0)
    return centred.square().sum((0, 2, 3)) / allowed.sum((0, 2, 3))
