"""Compare the attention scores computed from the folded weights with the model's own. A model that differs gets no
table.
"""

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
    """The result of comparing the rebuilt scores of one layer with the model's own.

    Attributes:
        record: dict stored with tables: `worst_error` (largest |ours - model's| over unmasked entries), `tolerance`,
            `layer`, `compared` ("scores" or "pattern").
        outside_m: share of the score variance within a query's row that does not come from M, for each head.
    """

    record: dict[str, Any]
    outside_m: Float64[np.ndarray, "heads"]


def verify_scores(model: Any, prompts: Any = None) -> pd.Series:
    """Rebuild every layer's attention scores from its folded weights and compare them with the model's own.

    Use it before you trust a number from the weights of a new model; the head table runs it by itself.

    >>> import tlspectral as tls
    >>> bool(tls.verify_scores(tls.load_model("tiny-rope")).max() < 1e-4)
    True

    The input of each layer comes from a run of the model. Norm, biases, M, rotation, scale and softcap are computed
    here in float64, with the model's cos and sin tables.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompts: strings, ids [batch, pos], or a tokenizer's batch. Default: 24 random ids (seed 0), so no tokenizer is
            needed.

    Returns:
        Series with index `layer`: the largest absolute error of each layer, over heads and unmasked pairs of tokens.
        The unit is a score before the softmax (a logit), or an attention probability in models that expose only the
        pattern. A returned Series means that all layers passed.

    Raises:
        ScoreMismatch: an error exceeds its tolerance, or the rotary pairs of a layer do not rotate by one angle per
            token.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.
        ValueError, TypeError: prompts cannot be read, or are longer than the model or its score scale allows.

    Not established: that TransformerLens reproduces the published model; `load_model` compares these. More:
    docs/table.md.
    """
    with measured(model) as view:
        errors = {layer: check.record["worst_error"] for layer, check in check_scores(view, prompts).items()}
        return pd.Series(errors, name="worst_error").rename_axis("layer")


def check_scores(view: AttentionView, prompts: Any = None) -> dict[int, LayerCheck]:
    """Compare the scores of each layer, rebuilt from its folded weights, with the model's own.

    Return a dict from layer to `LayerCheck`: `.record` (error and tolerance) and `.outside_m` (share of score variance
    outside M, per head). `view` is the open model, which is run. `prompts`: strings, token ids, or a tokenizer's batch;
    None: 24 random ids. Raises ScoreMismatch for scores that differ by more than the tolerance; UnsupportedArchitecture
    or BadWeights for a layer that cannot be read.
    """
    packed = checked_prompts(view, prompts)
    names = {index: view.hook_names(index) for index in view.layers}
    points = ("residual", "scores", "pattern", "cos", "sin")
    wanted = [name for points_of_layer in names.values() for point, name in points_of_layer.items() if point in points]
    captured = capture_until(view, packed.tokens, wanted, last=names[max(names)]["pattern"])
    return {index: _check_layer(view, index, names[index], captured, packed.real) for index in names}


def checked_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the caller's prompts as `PackedTokens` (token ids and lengths); for None, one prompt of 24 random ids
    (seed 0).

    `view` has tokenizer, vocabulary and context. Raises ValueError or TypeError for prompts that cannot be read or are
    too long.
    """
    return even_rows(check_prompt(view)) if prompts is None else packed_prompts(view, prompts)


def check_prompt(view: AttentionView) -> Int[Tensor, "1 pos"]:
    """Return one prompt of 24 random ids (seed 0) of the model's vocabulary, a tensor [1, 24]; fewer where the context
    or a layer's valid length is shorter.
    """
    limits = [view.raw(index).valid_up_to for index in view.layers]
    length = min([CHECK_LENGTH, view.n_ctx, *(limit for limit in limits if limit)])
    return torch.randint(0, view.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))


def _check_layer(
    view: AttentionView, index: int, names: dict[str, str], captured: dict[str, Tensor], real: Bool[Tensor, "batch pos"]
) -> LayerCheck:
    """Return the `LayerCheck` of layer `index`: the largest error of its rebuilt scores, and the score variance outside
    M.

    `view` is the open model. `names` has the hook names of the layer, `captured` the activations of the run by hook
    name, `real` is True at tokens. Raises ScoreMismatch if the error exceeds its tolerance.
    """
    view.rotary(index)  # raises if pairs have no frequencies, which a short prompt may not show
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
        if raw.alibi is not None:  # equal up to a shift of each row, which the softmax does not see
            theirs, ours = _centred_rows(theirs, allowed), _centred_rows(ours, allowed)
        error = (ours - theirs)[allowed].abs().max()
    else:
        compared = "pattern"
        scale = ours[allowed].abs().max()
        rebuilt = ours.masked_fill(~allowed, -torch.inf).softmax(-1)
        error = (rebuilt - pattern)[allowed].abs().max()
    worst, allowed_difference = nearest_bound(
        error,
        scale,
        raw.storage_dtype,
        compared,
        f"layer {index}: the {compared} rebuilt from the folded weights differ from the model's own",
        not_without_hooks(view.model, _NOT_BILINEAR),
        ScoreMismatch,
    )
    record = {"worst_error": worst, "tolerance": allowed_difference, "layer": index, "compared": compared}
    return LayerCheck(record, share.numpy())


def _allowed(
    pattern: Float64[Tensor, "batch heads pos pos"], index: int, causal: bool
) -> Bool[Tensor, "batch heads pos pos"]:
    """Return a mask of the entries that the model attends to: in a decoder (`causal`), those with a positive weight in
    the attention `pattern`; in an encoder, all.

    `index` is the layer, for the message. Raises UnsupportedArchitecture if a decoder attends to later keys.
    """
    if not causal:
        return torch.ones_like(pattern, dtype=torch.bool)
    above = torch.ones(pattern.shape[-2:], dtype=torch.bool).triu(1)
    if bool((pattern[..., above] > 0).any()):
        raise UnsupportedArchitecture(
            f"layer {index}: queries attend to later keys, as in an encoder; supported encoders are BERT and RoBERTa: "
            "take one of these or a causal model"
        )
    return pattern > 0


def _centred_rows(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return a copy of the scores [batch, heads, query, key] less the mean of each query's row over the entries that
    the mask `allowed` marks.
    """
    unmasked = torch.where(allowed, scores, 0.0)
    return unmasked - unmasked.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)


def _row_variance(scores: Tensor, allowed: Tensor) -> Float64[Tensor, "heads"]:
    """Return the variance of each head's scores [batch, heads, query, key] within a query's row, over the entries that
    the mask `allowed` marks.
    """
    centred = torch.where(allowed, _centred_rows(scores, allowed), 0.0)
    return centred.square().sum((0, 2, 3)) / allowed.sum((0, 2, 3))
