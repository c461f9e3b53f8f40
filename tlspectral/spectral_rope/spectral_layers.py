"""Make one `SpectralRoPE` for each rotary layer of a model, from the model's own inverse frequencies."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.algebra.rotary import Frequencies, RotaryGeometry
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.heads_as_written import Heads
from tlspectral.spectral_rope.module import Scope, SpectralRoPE, checked_seed


def spectral_layers(
    view: AttentionView,
    *,
    scope: Scope,
    heads: Heads | None,
    frequencies: Frequencies | None,
    seed: int,
    **options: Any,
) -> nn.ModuleDict:
    """Return new `SpectralRoPE` modules for a model, as a ModuleDict from the layer's number (as text).

    `view`: the model, which is not changed. There is one module per rotary layer, or per layer with a head of `heads`.
    `scope`, `heads`, `frequencies`: which heads share parameters ("model", "layer", "group" of shared keys, or "head"
    for none) and which heads and rotary pairs learn (None: all). `seed`: of the noise on phases. `options`: further
    arguments of `SpectralRoPE`. With `scope="model"` the modules share their parameters.

    Raises:
        UnsupportedArchitecture: a chosen layer without rotary positions, or with an unsupported rotation.
        BadHead: a head that does not exist.
        ValueError: choices that do not fit the model.
    """
    geometries = {index: view.rotary(index) for index in view.layers}
    rotary = {index: geometry for index, geometry in geometries.items() if geometry is not None}
    if not rotary:
        raise UnsupportedArchitecture(
            f"none of the {len(view.layers)} layers has rotary positions, so there are no frequencies to learn: take a "
            "model with rotary positions"
        )
    chosen = dict.fromkeys(rotary) if heads is None else heads_by_layer(view, heads)
    if not chosen:
        raise ValueError("no head is chosen: give at least one, or leave heads= out for all")
    no_rotary = [index for index in chosen if index not in rotary]
    if no_rotary:
        raise UnsupportedArchitecture(f"layer {no_rotary[0]} has no rotary positions: leave its heads out of heads=")
    first_seed = checked_seed(seed)
    chosen_pairs = (
        list(frequencies) if isinstance(frequencies, Iterable) and not isinstance(frequencies, Tensor) else frequencies
    )
    layers = nn.ModuleDict()
    for index, in_layer in chosen.items():
        raw, geometry = view.raw(index), rotary[index]
        _require_plain_pairs(view, index, geometry)
        require_own_projections(raw, index, "its keys that rotate are shared by all heads, beside a latent")
        # At least float32: in 16 bits an optimizer's step rounds to no change of a frequency.
        precision = torch.promote_types(raw.storage_dtype, torch.float32)
        try:
            layers[str(index)] = SpectralRoPE(
                geometry.theta.to(raw.w_q.device, precision),
                len(raw.w_q),
                len(raw.w_k),
                real_index=geometry.real_index,
                imag_index=geometry.imag_index,
                scope=scope,
                heads=in_layer,
                frequencies=chosen_pairs,
                seed=first_seed + (0 if scope == "model" else 1_000_003 * index),
                **options,
            )
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from error
    if scope == "model":
        _tie(layers)
    return layers


def layers_of(model: Any) -> dict[int, SpectralRoPE]:
    """Return the `SpectralRoPE` modules of a spectral model as a dict from layer number; they are the model's own, not
    copies. Raises TypeError if it has none.
    """
    layers = getattr(model, "spectral", None)
    modules = by_layer(layers) if isinstance(layers, nn.ModuleDict) else {}
    if not modules:
        raise TypeError(
            f"{type(model).__name__} is not a spectral model: make one with to_spectral or SpectralHookedTransformer"
        )
    return modules


def by_layer(layers: nn.ModuleDict) -> dict[int, SpectralRoPE]:
    """Return the `SpectralRoPE` modules of a ModuleDict, which has layers as text, as a dict from the layer's
    number.
    """
    return {int(index): module for index, module in layers.items() if isinstance(module, SpectralRoPE)}


def spectral_geometry(
    geometry: RotaryGeometry | None, module: SpectralRoPE | None, *, live: bool = False
) -> RotaryGeometry | None:
    """Return a copy of a layer's rotary pairs (`geometry`) with the frequencies, gain and phase of `module`, its
    learned rotation.

    Without geometry or module, `geometry` is returned unchanged. `live`: True lets gradients pass through gain and
    phase to the module's parameters.
    """
    if geometry is None or module is None:
        return geometry
    theta = geometry.theta + module.shift_by_head()
    return replace(geometry, theta=theta, gain=module.gain_by_head(live=live), phase=module.phase_by_head(live=live))


def _require_plain_pairs(view: AttentionView, index: int, geometry: RotaryGeometry) -> None:
    """Raise UnsupportedArchitecture if a layer rotates backwards, or does not rotate the first columns in pairs.

    `view`: the model, for its name in the message. `index`: the layer. `geometry`: its rotary pairs.
    """
    apart, pairs = int(geometry.imag_index[0] - geometry.real_index[0]), len(geometry.theta)
    if apart < 0:
        fault = "rotates by the negative angle (nanochat), which learned rotations cannot do: take another model"
    elif apart > pairs:
        fault = (
            f"rotates {pairs} of {apart} pairs of columns (full layers of Gemma 4), and learned rotations need pairs "
            "of the first columns: give heads= of other layers"
        )
    else:
        return
    raise UnsupportedArchitecture(f"{view.source['model']}, layer {index}: it {fault}")


def _tie(layers: nn.ModuleDict) -> None:
    """Replace, in place, the parameters of all modules by the parameters of the first, so that all layers share them.

    Raises ValueError if their inverse frequencies differ.
    """
    modules = by_layer(layers)
    first_layer, first = next(iter(modules.items()))
    for index, module in modules.items():
        if not torch.equal(module.theta, first.theta):
            raise ValueError(
                f'scope="model": layers {first_layer} and {index} have different inverse frequencies, so no omega '
                'serves both; use scope="layer"'
            )
        for name, parameter in first.named_parameters():
            module.register_parameter(name, parameter)
