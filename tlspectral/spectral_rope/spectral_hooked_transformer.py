"""`SpectralHookedTransformer`: a HookedTransformer (TransformerLens 3.x) with learnable rotary positions."""

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
from tlspectral.errors.settings import checked_settings
from tlspectral.models.loading import load_model
from tlspectral.models.loading.damage import first_sentence
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.loading.weight_files import WHOLE
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import hooked_transformer as reader
from tlspectral.selection.heads_as_written import Heads
from tlspectral.spectral_rope.module import Scope
from tlspectral.spectral_rope.points import place
from tlspectral.spectral_rope.saving import ROTARY_TABLES, read_config, save_folder
from tlspectral.spectral_rope.spectral_file import HOOKED, first_not_finite, on_their_own, options_of
from tlspectral.spectral_rope.spectral_layers import by_layer, spectral_geometry, spectral_layers
from tlspectral.spectral_rope.weights_identity import identity_of
from tlspectral.tables.parquet import naming_file

_MACHINE_SETTINGS = ("device", "n_devices")
_REBUILT_TENSORS = (".attn.mask", ".attn.IGNORE")

_Base: Any
try:
    _Base = hooked_transformer_class()
except ImportError:
    _Base = object


def require_hooked_transformer(before: str = "") -> None:
    """Raise ImportError on TransformerLens 4, which has no HookedTransformer; the message begins with `before`."""
    if _Base is object:
        raise ImportError(
            f"{before}HookedTransformer was removed in TransformerLens 4: make a bridge spectral with "
            'tlspectral.to_spectral(model), or install "transformer-lens<4".'
        )


@checked_settings
class SpectralHookedTransformer(_Base):
    """A HookedTransformer with learnable rotary positions ("Bifocal Attention", section 3), for training from scratch.

    For a trained model use `tls.to_spectral`. `SpectralHookedTransformer` needs TransformerLens before version 4:

        from tlspectral.spectral_rope import SpectralHookedTransformer, parameter_groups

        config = dict(n_layers=2, d_model=64, n_ctx=128, d_head=16, d_vocab=50, act_fn="gelu",
                      positional_embedding_type="rotary")
        model = SpectralHookedTransformer(config)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3))

    With the same weights its output at the start equals a HookedTransformer's bit by bit. `parameters()` and
    `state_dict()` also have `spectral.{layer}.omega` (frequencies, radians per token), `.phase` (radians) and `.gain`.
    Caches, hooks and generation work as in TransformerLens; hooks at `hook_q` and `hook_k` see queries and keys before
    the learned rotation. `save_pretrained(folder)` writes everything, and `tls.load_model(folder)` reads it.

    Args:
        cfg: config of HookedTransformer, with rotary positions.
        given, named: further arguments of HookedTransformer.
        scope: heads that share parameters: "head" (default), "group" (heads that share keys), "layer" or "model".
        heads, frequencies: heads and rotary pairs that learn. Default: all.
        shared_phase: True lets the phase act on queries and keys, which cancels in every score. Default: False.
        phase_noise, seed: standard deviation of the phase at the start (radians), and seed of it. Defaults: 0.
        log_omega: True learns the logarithm of frequencies. Default: False, because there is no trained attention to
            lose and a task may need a frequency of 0.

    Raises:
        ImportError: TransformerLens 4, which has no HookedTransformer.
        UnsupportedArchitecture: no rotary positions, or a layer cannot be read.
        BadHead: a head that does not exist.
        ValueError: choices that do not fit the model, or a noise or seed that is not a finite number.

    Not established: that a spectral model learns what another model cannot; compare matched runs. More:
    docs/training.md.
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
        """Return the `SpectralHookedTransformer` in the folder `model_name`, written by `save_pretrained`; further
        arguments go to `tls.load_model`.

        Any other name is loaded by HookedTransformer's own `from_pretrained`, which gets the further arguments instead.
        """
        config = read_config(Path(model_name).expanduser()) if isinstance(model_name, str | os.PathLike) else None
        if config is not None and config.get("model") == SpectralHookedTransformer.__name__:
            return load_model(model_name, *given, **named)
        require_hooked_transformer()
        return super().from_pretrained(model_name, *given, **named)

    def spectral_parameters(self) -> Any:
        """Return an iterator over the learnable frequencies, phases and gains of all layers, without the model's
        weights.
        """
        return self.spectral.parameters()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write weights, spectral parameters, config and tokenizer to a folder, which `load_model(folder)` loads.

        The loaded model has the same bits. A save to the folder of an earlier save replaces it in one step. Not saved:
        hooks, `requires_grad`, device, and functions replaced by hand (loading then raises IncompatibleCheckpoint).

        Raises:
            FileExistsError: the folder holds another model, or files of a tokenizer that no save wrote.
            ValueError: a value of the config that JSON cannot hold, or parameters that the config does not describe.
            BadWeights: a weight is not finite; an earlier save stays.
            OSError: the disk is full; the message names the file, and the folder's earlier content stays.
        """
        record = {**options_of(self), HOOKED: _as_json(self.cfg)}
        tensors = on_their_own(_stored(self))
        _require_makeable(self, record, tensors)
        if (name := first_not_finite(tensors)) is not None:
            raise BadWeights(
                f"{name} has values that are not finite, so the model is not saved to {folder}: go back to an earlier "
                "state, and train with a lower learning rate"
            )

        def write_tokenizer(partial: Path) -> None:
            """Write the tokenizer, if any."""
            if self.tokenizer is not None:
                _write_tokenizer(self.tokenizer, partial, folder)

        save_folder(self, folder, WHOLE, tensors, record, identity_of(self), beside=write_tokenizer)

    @classmethod
    def from_save(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: Any) -> Any:
        """Return the model in a file of `save_pretrained`, on the CPU, in the types in which it was saved.

        `record`, `tensors`: options and tensors of the file, from `read_file`. `tokenizer`: for the model, or None.
        Nothing is downloaded, and no random seed changes. Raises TransformerLens' errors for an unknown config,
        RuntimeError for tensors that the config does not describe.
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
            # In 16 bits, frequencies read from the rotary tables depend on when the tables were rounded.
            module.theta.copy_(theta)
        # Copied, not assigned, because layers share parameters with scope="model".
        model.spectral.load_state_dict(
            {name.removeprefix("spectral."): value for name, value in tensors.items() if name.startswith("spectral.")}
        )
        return model

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Return a layer's rotary pairs as they act now, a `RotaryGeometry` with `theta` (radians per token), `gain`
        and `phase` (radians), each [heads, pairs] where the layer is learned.

        The result is None for a layer without rotary positions. `live`: True lets gradients pass through gain and phase
        to the spectral parameters.
        """
        geometry = reader.read_attention(self, layer).rotary
        return spectral_geometry(geometry, by_layer(self.spectral).get(layer), live=live)


def _as_json(cfg: Any) -> dict[str, Any]:
    """Return a model's config as a dict for JSON, without settings of the machine.

    Raises ValueError for a value that JSON cannot hold, such as a function.
    """
    kept = {name: value for name, value in vars(cfg).items() if name not in _MACHINE_SETTINGS}
    kept["dtype"] = str(cfg.dtype).removeprefix("torch.")
    for name, value in kept.items():
        try:
            held = json.loads(json.dumps(value)) == value
        except TypeError:
            held = False
        if not held:
            raise ValueError(
                f"cfg.{name} is {repr(value)[:80]}, which a config file cannot hold: set it to a number, a text, a "
                "list of these or None"
            )
    return kept


def _made(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict, the config of a HookedTransformer on the CPU, from `config`, a dict that `_as_json` made.

    A model made with it draws no weights, sets no seed and downloads nothing.
    """
    dtype = getattr(torch, config["dtype"])
    return {**config, "dtype": dtype, "device": "cpu", "seed": None, "init_weights": False, "tokenizer_name": None}


def _stored(model: Any) -> dict[str, Tensor]:
    """Return the state dict of a model (a dict by name; the tensors are not copied) without tensors that are rebuilt
    when a model is made.

    For Qwen 1 these include the rotary tables, because they depend on the length of the last run.
    """
    anew = (
        (*_REBUILT_TENSORS, *ROTARY_TABLES) if getattr(model.cfg, "use_dynamic_ntk_rope", False) else _REBUILT_TENSORS
    )
    return {name: value for name, value in model.state_dict().items() if not name.endswith(anew)}


def _require_makeable(model: Any, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a model made from the config in `record` (the options of a file) does not have the names and
    shapes of `tensors`.

    Such a model could not be loaded again. `model`: the model to be saved, for the message.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            _fill(hooked_transformer_class()(_made(record[HOOKED]), move_to_device=False), tensors)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"this {type(model).__name__} cannot be saved, because its config describes another model ({error}): keep "
            "its state_dict()"
        ) from error


def _fill(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put all tensors except the spectral ones into a model, in place; its weights become these tensors, in their own
    types.

    Raises RuntimeError if names or shapes do not fit.
    """
    plain = {name: value for name, value in tensors.items() if not name.startswith("spectral.")}
    expected = {name for name in _stored(model) if not name.startswith("spectral.")}
    if plain.keys() != expected:
        missing, unknown = sorted(expected - plain.keys())[:4], sorted(plain.keys() - expected)[:4]
        raise RuntimeError(f"missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    nn.Module.load_state_dict(model, plain, strict=False, assign=True)


def _write_tokenizer(tokenizer: Any, partial: Path, folder: str | os.PathLike[str]) -> None:
    """Write the files of a tokenizer to the folder `partial`, which becomes part of `folder` later.

    `folder` is the name in messages. Raises OSError, for example for a full disk.
    """
    try:
        with naming_file(folder):
            tokenizer.save_pretrained(partial)
    except Exception as error:  # the tokenizers package raises plain Exception for a full disk
        if isinstance(error, OSError):
            raise
        raise OSError(f"cannot write the tokenizer to {folder}: {first_sentence(error)}") from error
