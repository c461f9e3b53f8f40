"""`merge`: turn a spectral model into an ordinary model that computes the same."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.rotary import with_gain_and_phase
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.placing import without_hooks
from tlspectral.models.loading import load_model
from tlspectral.models.loading.copies import deep_copy
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.packed import refuse_packed
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.passes import whole_logits
from tlspectral.spectral_rope.hugging_face import is_spectral_object, plain_object
from tlspectral.spectral_rope.model import PROBE_LENGTH, SpectralModel
from tlspectral.spectral_rope.module import SpectralRoPE
from tlspectral.spectral_rope.spectral_layers import layers_of, spectral_geometry
from tlspectral.spectral_rope.swapped import swap_back
from tlspectral.spectral_rope.weights_identity import logits_of

_KEEP = "keep the model with save_pretrained"


def merge(model: Any) -> Any:
    """Turn a spectral model into an ordinary model with the same output, by folding gain and phase into W_Q.

    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import merge
    >>> type(merge(tls.to_spectral(tls.load_model("tiny-rope")))).__name__
    'TransformerBridge'

    For each query head and rotary pair, `W_Q[:, pair] <- gain R(phase) W_Q[:, pair]`, and the same for the bias.
    Learned frequencies cannot be folded into weights. Only the config of a Hugging Face model can hold them, and only
    if all heads of all layers share them (`scope="model"`): as LongRoPE factors, equal for short and long texts.

    Args:
        model: made by `tls.to_spectral` or `SpectralHookedTransformer`. It is not changed.

    Returns:
        A TransformerBridge, HookedTransformer or Hugging Face model, like the model that was made spectral, with its
            own weights. If a bridge holds W_Q apart from a joint QKV matrix (GPT-NeoX), only the separate W_Q is
            changed.

    Raises:
        TypeError: the model is not spectral.
        ValueError: a frequency has changed since the start, and an ordinary model of this kind cannot hold it; the
            message says why.
        BadWeights: quantised weights.
        UnsupportedArchitecture: a query norm stands between W_Q and a changed gain or phase, or the merged model
            computes other logits.

    Logits of both models are compared on a short prompt, up to rounding.
    """
    layers = layers_of(model)
    keep = "into which gain and phase cannot be folded exactly: keep the model with save_spectral"
    refuse_packed(getattr(model, "rotated", model), "merge", keep)
    of_transformers = is_spectral_object(model)
    if not of_transformers:
        for index, module in layers.items():
            _require_unmoved(index, module, _keep(model))
    merged = plain_object(model) if of_transformers else _copy_without_rotations(model)
    # The view of `target` shares its weights with `merged`.
    target = attention_view(load_model(merged) if of_transformers else merged)
    for index, module in layers.items():
        raw = target.raw(index)
        _require_foldable(index, module, _keep(model), normed=raw.q_norm is not None)
        geometry: Any = spectral_geometry(target.rotary(index), module)
        with torch.no_grad():
            raw.w_q.copy_(with_gain_and_phase(raw.w_q.cpu().double(), geometry))
            if raw.b_q is not None:
                raw.b_q.copy_(with_gain_and_phase(raw.b_q.cpu().double()[:, None], geometry)[:, 0])
    tokens = probe_tokens(target.d_vocab, PROBE_LENGTH)
    if of_transformers:
        merged = _with_frequencies(merged, target, layers)
        _require_equal(lambda: logits_of(model, tokens), lambda: logits_of(merged, tokens))
        return merged
    view = attention_view(model)
    with without_hooks(merged, target.hook_points), without_hooks(model, view.hook_points):
        _require_equal(lambda: whole_logits(view, tokens), lambda: whole_logits(target, tokens))
    return merged


def _copy_without_rotations(model: Any) -> Any:
    """Return a copy of a spectral TransformerLens model without learned rotations; the copy has its own weights, which
    require gradients.
    """
    rotated = model.rotated if isinstance(model, SpectralModel) else model
    merged = deep_copy(rotated, {})
    swap_back(merged)
    for parameter in merged.parameters():
        parameter.requires_grad_()
    if not isinstance(model, SpectralModel):
        del merged.spectral
        merged.__class__ = hooked_transformer_class()
    return merged


def _keep(model: Any) -> str:
    """Return advice for error messages as text: with which function to save this spectral model, such as "keep the
    model with save_spectral".
    """
    return "keep the model with save_spectral" if isinstance(model, SpectralModel) else _KEEP


def _require_unmoved(layer: int, module: SpectralRoPE, keep: str) -> None:
    """Raise ValueError if a frequency of `module`, the learned rotation of a layer, differs from its start.

    `layer`: its number, for the message. `keep`: advice at the end of the message.
    """
    moved = module.shift_by_head().abs()
    if bool((moved > 0).any()):
        head, pair = divmod(int(moved.argmax()), moved.shape[1])
        raise ValueError(
            f"layer {layer}: omega has moved (most in head {head}, pair {pair}: by {float(moved.max()):.1e} radians "
            f"per token), which the weights of an ordinary model cannot hold: set omega back to its start, or {keep}"
        )


def _require_foldable(layer: int, module: SpectralRoPE, keep: str, *, normed: bool) -> None:
    """Raise UnsupportedArchitecture if the layer has a query norm and a gain other than 1 or a phase other than 0.

    `module`: the learned rotation of the layer. `normed`: True if the layer has a query norm. `keep`: advice at the end
    of the message.
    """
    acts = bool((module.gain_by_head() != 1).any() or (module.phase_by_head() != 0).any())
    if normed and acts:
        raise UnsupportedArchitecture(
            f"layer {layer}: a query norm stands between W_Q and the spectral gain and phase, so they cannot be folded "
            f"into W_Q: {keep}"
        )


def _require_equal(run: Callable[[], Tensor], run_merged: Callable[[], Tensor]) -> None:
    """Raise UnsupportedArchitecture unless `run` (the spectral model) and `run_merged` (the merged model) return the
    same logits up to rounding.
    """
    with torch.no_grad():
        expected, logits = run(), run_merged()
    # Rounding of the folded weights: 3e-6 of the largest logit in float32. If a weight was not reached, the error is
    # the effect of gain and phase themselves.
    allowed = (1e-4 if logits.dtype.itemsize >= 4 else 0.1) * float(expected.abs().max())
    worst = float((logits - expected).abs().max())
    if not worst <= allowed:
        raise UnsupportedArchitecture(
            f"the merged model's logits differ from the spectral model's by {worst:.1e}, because this backend does not "
            "compute queries from the weights that it shows: keep the spectral model"
        )


def _with_frequencies(plain: Any, view: AttentionView, layers: Mapping[int, SpectralRoPE]) -> Any:
    """Return a Hugging Face model with the weights of `plain` and the learned frequencies in its config.

    It is a new model with copied weights; if no frequency has changed, `plain` itself. `plain` is not changed. `view`:
    view of `plain`, which still has the frequencies of the start. `layers`: the learned modules by layer. Raises
    ValueError if the config cannot hold the frequencies.
    """
    if not any(bool(module.shift_by_head().any()) for module in layers.values()):
        return plain
    omega = _shared(view, layers)
    settings = getattr(plain.config, "rope_parameters", None) or {}
    if "rope_theta" not in settings:
        raise ValueError(
            f"{type(plain.config).__name__} has no single set of rotary settings that could hold omega: {_KEEP}"
        )
    rotary = view.rotary(next(iter(layers)))
    # LongRoPE divides the frequencies of the plain base by these factors, which are the same for any length of text.
    plain_theta = settings["rope_theta"] ** (-torch.arange(len(omega), dtype=torch.float64) / len(omega))
    factors = (plain_theta / omega).tolist()
    config = copy.deepcopy(plain.config)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": settings["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": float(1.0 if rotary is None else rotary.attention_scaling),
        "original_max_position_embeddings": config.max_position_embeddings,
        **{name: value for name, value in settings.items() if name == "partial_rotary_factor"},
    }
    merged = type(plain)(config).to(plain.dtype).to(plain.device)
    merged.load_state_dict(plain.state_dict())
    return merged.train(plain.training)


def _shared(view: AttentionView, layers: Mapping[int, SpectralRoPE]) -> Float64[Tensor, "pairs"]:
    """Return the learned frequencies [pairs], in radians per token, that all heads of all layers share.

    `view`: the model with its frequencies of the start. `layers`: the learned modules by layer. Raises ValueError if
    they differ, or if one is 0, which the config cannot express.
    """
    first: Tensor | None = None
    for index in view.layers:
        geometry = spectral_geometry(view.rotary(index), layers.get(index))
        if geometry is None:
            continue
        omega = geometry.theta.expand(view.n_heads(index), -1)
        first = omega[0] if first is None else first
        # The config's frequencies are read back in float32.
        if not torch.allclose(omega, first.expand_as(omega), rtol=1e-6, atol=0):
            raise ValueError(
                f"layer {index} has frequencies of its own, or its heads have, but a model's config has one set for "
                f'all heads: learn them with scope="model", or {_KEEP}'
            )
    if first is None or bool((first == 0).any()):
        raise ValueError(f"a frequency is 0, which the config's factors cannot express: {_KEEP}")
    return first
