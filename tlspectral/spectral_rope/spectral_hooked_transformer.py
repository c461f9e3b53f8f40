"""`SpectralHookedTransformer`: a HookedTransformer (TransformerLens 3.x) with learnable rotary positions of its own."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.algebra.rotary import Frequencies, RotaryGeometry
from tlspectral.errors import BadWeights
from tlspectral.models.loading import load_model
from tlspectral.models.loading.damage import first_sentence
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.loading.weight_files import WHOLE
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import hooked_transformer as reader
from tlspectral.selection import Heads
from tlspectral.spectral_rope.module import Scope
from tlspectral.spectral_rope.points import place
from tlspectral.spectral_rope.saving import ROTARY_TABLES, read_config, save_folder
from tlspectral.spectral_rope.spectral_file import HOOKED, first_not_finite, on_their_own, options_of
from tlspectral.spectral_rope.spectral_layers import by_layer, spectral_geometry, spectral_layers
from tlspectral.spectral_rope.weights_identity import identity_of
from tlspectral.tables.parquet import naming_file

_OF_THE_MACHINE = ("device", "n_devices")
_MADE_ANEW = (".attn.mask", ".attn.IGNORE")

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
        config = read_config(Path(model_name).expanduser()) if isinstance(model_name, str | os.PathLike) else None
        if config is not None and config.get("model") == SpectralHookedTransformer.__name__:
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
        record = {**options_of(self), HOOKED: _as_json(self.cfg)}
        tensors = on_their_own(_stored(self))
        _require_makeable(self, record, tensors)
        if (name := first_not_finite(tensors)) is not None:
            raise BadWeights(f"{name} has values that are not finite, so the model is not saved to {folder}")

        def write_tokenizer(partial: Path) -> None:
            if self.tokenizer is not None:
                _write_tokenizer(self.tokenizer, partial, folder)

        save_folder(self, folder, WHOLE, tensors, record, identity_of(self), beside=write_tokenizer)

    @classmethod
    def from_save(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: Any) -> Any:
        """Return the model of a file of `save_pretrained`, on the CPU, in the types that it was saved in.

        Nothing is fetched, and no seed changes. Raises what TransformerLens does for a config that it does not know,
        RuntimeError for tensors that the config does not ask for.
        """
        options = {name: value for name, value in record.items() if name != HOOKED}
        with torch.random.fork_rng(devices=[]):
            model = cls(_made(record[HOOKED]), tokenizer, move_to_device=False, **options)
        for name in ("seed", "init_weights", "tokenizer_name"):
            setattr(model.cfg, name, record[HOOKED].get(name))
        _fill(model, tensors)
        for index, module in by_layer(model.spectral).items():
            theta = tensors[f"spectral.{index}.theta"]
            module.to(theta.dtype)
            # In 16 bits, what is read from the rotary tables depends on when they were rounded.
            module.theta.copy_(theta)
        # Not assigned: under scope="model" the layers share parameters.
        model.spectral.load_state_dict(
            {name.removeprefix("spectral."): value for name, value in tensors.items() if name.startswith("spectral.")}
        )
        return model

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer as it acts now, as `SpectralModel.spectral_geometry`."""
        geometry = reader.read_attention(self, layer).rotary
        return spectral_geometry(geometry, by_layer(self.spectral).get(layer), live=live)


def _as_json(cfg: Any) -> dict[str, Any]:
    """Return a config as JSON. Raises ValueError for a value that JSON does not hold, such as a function."""
    kept = {name: value for name, value in vars(cfg).items() if name not in _OF_THE_MACHINE}
    kept["dtype"] = str(cfg.dtype).removeprefix("torch.")
    for name, value in kept.items():
        try:
            held = json.loads(json.dumps(value)) == value
        except TypeError:
            held = False
        if not held:
            raise ValueError(
                f"cfg.{name} is {value!r}, which a config file does not hold: numbers, texts, lists of them and None "
                "are kept"
            )
    return kept


def _made(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of `_as_json` as HookedTransformer takes it, so that nothing is drawn, seeded or fetched."""
    dtype = getattr(torch, config["dtype"])
    return {**config, "dtype": dtype, "device": "cpu", "seed": None, "init_weights": False, "tokenizer_name": None}


def _stored(model: Any) -> dict[str, Tensor]:
    """Return the state of a model but what is made anew, as Qwen 1's tables, which depend on the last run's length."""
    anew = (*_MADE_ANEW, *ROTARY_TABLES) if getattr(model.cfg, "use_dynamic_ntk_rope", False) else _MADE_ANEW
    return {name: value for name, value in model.state_dict().items() if not name.endswith(anew)}


def _require_makeable(model: Any, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for tensors that the model's config does not ask for, since no load would make the model."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            _fill(hooked_transformer_class()(_made(record[HOOKED]), move_to_device=False), tensors)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"this {type(model).__name__} cannot be saved, since its config makes another model: {error}; keep it by "
            "state_dict()"
        ) from error


def _fill(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors but the spectral ones into a model, in their types. Raises RuntimeError for those that do not fit."""
    plain = {name: value for name, value in tensors.items() if not name.startswith("spectral.")}
    wanted = {name for name in _stored(model) if not name.startswith("spectral.")}
    if plain.keys() != wanted:
        missing, unknown = sorted(wanted - plain.keys())[:4], sorted(plain.keys() - wanted)[:4]
        raise RuntimeError(f"missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    nn.Module.load_state_dict(model, plain, strict=False, assign=True)


def _write_tokenizer(tokenizer: Any, partial: Path, folder: str | os.PathLike[str]) -> None:
    try:
        with naming_file(folder):
            tokenizer.save_pretrained(partial)
    except Exception as error:  # the tokenizers package raises plain Exception for a full disk
        if isinstance(error, OSError):
            raise
        raise OSError(f"cannot write the tokenizer to {folder}: {first_sentence(error)}") from error
