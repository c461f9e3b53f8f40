"""`SpectralHookedTransformer`: a HookedTransformer (TransformerLens 3.x) with learnable rotary positions of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.algebra.rotary import Frequencies, RotaryGeometry
from tlspectral.models.loading import load_model
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import hooked_transformer as reader
from tlspectral.selection import Heads
from tlspectral.spectral_rope.module import Scope
from tlspectral.spectral_rope.points import place
from tlspectral.spectral_rope.saving import HOOKED_CONFIG
from tlspectral.spectral_rope.saving_hooked import save_hooked
from tlspectral.spectral_rope.spectral_layers import by_layer, spectral_geometry, spectral_layers

_Base: Any
try:
    _Base = hooked_transformer_class()
except ImportError:
    _Base = object


def require_hooked_transformer(before: str = "") -> None:
    """Raise ImportError on TransformerLens 4, whose message begins with `before`."""
    if _Base is object:
        raise ImportError(
            f"{before}HookedTransformer was removed in TransformerLens 4: make a bridge spectral with "
            'tlspectral.to_spectral(model), or install "transformer-lens<4".'
        )


class SpectralHookedTransformer(_Base):
    """A HookedTransformer with spectral RoPE ("Bifocal Attention", section 3), for training from scratch.

    `parameters()` and `state_dict()` also have `spectral.{layer}.omega`, `.phase` and `.gain`. With the same weights
    the output at the start equals a HookedTransformer's to the bit. Caches, hooks and generation work as in
    TransformerLens; hooks at `hook_q` and `hook_k` see queries and keys before the spectral rotation.
    `save_pretrained` keeps all of it, and `load_model` loads that folder.

    Args:
        cfg: as for HookedTransformer, with rotary positions.
        given, named: as for HookedTransformer.
        scope, heads, frequencies, shared_phase, phase_noise, seed: as for `to_spectral`.
        log_omega: as for `SpectralRoPE`. False here, as there is no trained attention to lose and a task may need a
            frequency of 0. Long contexts need the slow rate of `parameter_groups` here too: at 1e-3 a step rotates
            each pair by a further radian at distance 1,000.

    Raises:
        ImportError: TransformerLens 4, which has no HookedTransformer.
        UnsupportedArchitecture: no rotary positions, or a layer cannot be read.
        BadHead: a head that does not exist.
        ValueError: choices that do not fit the model, or a noise or seed that is no finite number.

    What it does not establish: that a spectral model learns what another does not. That takes matched runs.
    """

    def __init__(
        self,
        cfg: Any,
        *given: Any,
        scope: Scope = "head",
        heads: Heads | None = None,
        frequencies: Frequencies | None = None,
        log_omega: bool = False,
        shared_phase: bool = False,
        phase_noise: float = 0.0,
        seed: int = 0,
        **named: Any,
    ):
        require_hooked_transformer()
        super().__init__(cfg, *given, **named)
        if not self.cfg.init_weights:
            # Without init_weights they are uninitialised memory; reading the layers' shapes requires finite values.
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.zero_()
        self.spectral = nn.ModuleDict()
        view = attention_view(self)
        self.spectral = spectral_layers(
            view,
            scope=scope,
            heads=heads,
            frequencies=frequencies,
            log_omega=log_omega,
            shared_phase=shared_phase,
            phase_noise=phase_noise,
            seed=seed,
        )
        place(view, by_layer(self.spectral))

    @classmethod
    def from_pretrained(cls, model_name: str | os.PathLike[str], *given: Any, **named: Any) -> Any:
        """Return the model of a folder of `save_pretrained`, as `load_model`; of another name, HookedTransformer's."""
        if isinstance(model_name, str | os.PathLike) and (Path(model_name).expanduser() / HOOKED_CONFIG).is_file():
            return load_model(model_name, *given, **named)
        require_hooked_transformer()
        return super().from_pretrained(model_name, *given, **named)

    def spectral_parameters(self) -> Any:
        """Return the learnable frequencies, phases and gains alone."""
        return self.spectral.parameters()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write weights, spectral parameters, config and tokenizer to a folder, which `load_model(folder)` loads.

        The loaded model has the same bits. A save to the folder of an earlier one replaces it: what is new is whole, or
        the earlier one stays. Not kept: hooks, gradients asked for, device, and functions that were replaced by hand,
        without which the model is refused when it is loaded.

        Raises:
            FileExistsError: the folder holds another model, or files of a tokenizer that no save wrote.
            ValueError: a value of the config that JSON does not hold, or parameters that the config does not ask for.
            BadWeights: a weight that is not finite; an earlier save stays.
            OSError: the disk is full; the message names the file, and what the folder held stays.
        """
        save_hooked(self, folder)

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer as it acts now, as `SpectralModel.spectral_geometry`."""
        geometry = reader.read_attention(self, layer).rotary
        return spectral_geometry(geometry, by_layer(self.spectral).get(layer), live=live)
