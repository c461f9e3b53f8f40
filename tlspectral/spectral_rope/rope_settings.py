"""Learned frequencies in the config of a model of transformers, as the factors of LongRoPE."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.attention import AttentionView
from tlspectral.spectral_rope.layers import spectral_geometry
from tlspectral.spectral_rope.module import SpectralRoPE

_KEEP = "keep the model with save_pretrained"


def with_frequencies(plain: Any, view: AttentionView, layers: Mapping[int, SpectralRoPE]) -> Any:
    """Return a model with the weights of `plain` whose config has the learned frequencies; itself if none has moved.

    `view` is that of `plain`, which has the frequencies that were learned from.

    Raises ValueError where the config cannot hold them: heads or layers differ, a layer type has frequencies of its
    own, or a frequency is 0.
    """
    if not any(bool(module.shift_by_head().any()) for module in layers.values()):
        return plain
    omega = _shared(view, layers)
    settings = getattr(plain.config, "rope_parameters", None) or {}
    if "rope_theta" not in settings:
        raise ValueError(f"{type(plain.config).__name__} has no single set of rotary settings to put omega in; {_KEEP}")
    rotary = view.rotary(next(iter(layers)))
    # LongRoPE divides the frequencies of the plain base by these; a text of any length has the same ones.
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
    other = type(plain)(config).to(plain.dtype).to(plain.device)
    other.load_state_dict(plain.state_dict())
    return other.train(plain.training)


def _shared(view: AttentionView, layers: Mapping[int, SpectralRoPE]) -> Float64[Tensor, "pairs"]:
    first: Tensor | None = None
    for index in range(view.n_layers):
        geometry = spectral_geometry(view.rotary(index), layers.get(index))
        if geometry is None:
            continue
        omega = geometry.theta.expand(view.n_heads(index), -1)
        first = omega[0] if first is None else first
        # Frequencies of the config are read back in float32.
        if not torch.allclose(omega, first.expand_as(omega), rtol=1e-6, atol=0):
            raise ValueError(
                f"layer {index} has frequencies of its own, or its heads have, and the config of a model has one set "
                f'for all: learn them with scope="model", or {_KEEP}'
            )
    if first is None or bool((first == 0).any()):
        raise ValueError(f"a frequency is 0, which no factor of the config gives; {_KEEP}")
    return first
