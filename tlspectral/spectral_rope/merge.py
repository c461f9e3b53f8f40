"""`merge`: an ordinary model that computes the same as a spectral one whose frequencies have not moved."""

import copy
from typing import Any

import torch

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.probe import without_hooks
from tlspectral.models.attention import attention_view
from tlspectral.models.loading.hooked import hooked_transformer_class
from tlspectral.rotary import with_gain_and_phase
from tlspectral.spectral_rope.layers import layers_of
from tlspectral.spectral_rope.model import SpectralModel, probe_tokens
from tlspectral.spectral_rope.module import SpectralRoPE


def merge(model: Any) -> Any:
    """A new model of the base's kind, with gain and phase folded into W_Q and its bias: the same function.

    Per query head and pair, `W_Q[:, pair] <- gain R(phase) W_Q[:, pair]`: the two are gauge. `omega` is not: no
    weights of an ordinary model can hold it.

    Args:
        model: what `to_spectral` or `SpectralHookedTransformer` made; it is left as it is.

    Returns:
        A TransformerBridge or HookedTransformer with weights of its own. In a bridge that splits a joint projection
        (NeoX) the split query weights are changed, as they are by training it.

    Raises:
        TypeError: not a spectral model.
        ValueError: a frequency has moved.
        UnsupportedArchitecture: a query norm stands between W_Q and a gain or phase that has moved, or the merged model
            does not compute what the spectral one does.
    """
    layers = layers_of(model)
    view = attention_view(model)
    for index, module in layers.items():
        _require_foldable(index, module, normed=view.raw(index).q_norm is not None)
    merged = _copy_without_rotations(model)
    target = attention_view(merged)
    for index in layers:
        geometry = model.spectral_geometry(index)
        raw = target.raw(index)
        with torch.no_grad():
            raw.w_q.copy_(with_gain_and_phase(raw.w_q.cpu().double(), geometry))
            if raw.b_q is not None:
                raw.b_q.copy_(with_gain_and_phase(raw.b_q.cpu().double()[:, None], geometry)[:, 0])
    _require_equal(model, merged)
    return merged


def _copy_without_rotations(model: Any) -> Any:
    if isinstance(model, SpectralModel):
        return copy.deepcopy(model.base)
    merged = copy.deepcopy(model)
    del merged.spectral, merged._placement
    merged.__class__ = hooked_transformer_class()
    return merged


def _require_foldable(layer: int, module: SpectralRoPE, *, normed: bool) -> None:
    moved = module.shift_by_head().abs()
    if bool((moved > 0).any()):
        head, pair = divmod(int(moved.argmax()), moved.shape[1])
        raise ValueError(
            f"layer {layer}: omega has moved (most in head {head}, pair {pair}: by {float(moved.max()):.1e} radians a "
            "token), and no weights of an ordinary model can hold that; set omega back, or keep the model with "
            "save_spectral"
        )
    acts = bool((module.gain_by_head() != 1).any() or (module.phase_by_head() != 0).any())
    if normed and acts:
        raise UnsupportedArchitecture(
            f"layer {layer}: a query norm stands between W_Q and the spectral gain and phase, so they do not fold; "
            "keep the model with save_spectral"
        )


def _require_equal(model: Any, merged: Any) -> None:
    view = attention_view(merged)
    tokens = probe_tokens(view)
    with torch.no_grad(), without_hooks(merged):
        logits = view.logits(tokens)
        with without_hooks(getattr(model, "base", model)):
            expected = attention_view(model).logits(tokens)
    # Rounding of the folded weights: 3e-6 of the largest logit in float32. If a weight was not reached, the error is
    # the effect of gain and phase themselves.
    allowed = (1e-4 if logits.dtype.itemsize >= 4 else 0.1) * float(expected.abs().max())
    worst = float((logits - expected).abs().max())
    if not worst <= allowed:
        raise UnsupportedArchitecture(
            f"the merged model's logits differ from the spectral model's by {worst:.1e}: this backend does not compute "
            "queries from the weights that it shows"
        )
