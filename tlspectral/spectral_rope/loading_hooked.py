"""A folder of `SpectralHookedTransformer.save_pretrained`, made into the model that was saved."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.loaders import Source
from tlspectral.models.loading.damage import refusing
from tlspectral.models.loading.pretrained import find_tokenizer
from tlspectral.models.loading.roads import copied_tokenizer
from tlspectral.spectral_rope.saving import HOOKED_CONFIG
from tlspectral.spectral_rope.saving_hooked import (
    WEIGHTS,
    Saved,
    differing_shapes,
    made_config,
    read_saved,
    stored_shapes,
)
from tlspectral.spectral_rope.spectral_hooked_transformer import SpectralHookedTransformer, require_hooked_transformer
from tlspectral.spectral_rope.spectral_layers import by_layer
from tlspectral.spectral_rope.weights_identity import function_difference


def load_saved(
    source: Source, *, backend: str, device: torch.device, dtype: torch.dtype | None, tokenizer: Any
) -> SpectralHookedTransformer:
    """Return the model of a folder, in evaluation mode and, without a `dtype`, in the types that it was saved in.

    Spectral parameters stay in float32 or more under `dtype`, as `to_spectral` makes them.

    Raises:
        ImportError: TransformerLens 4, which has no HookedTransformer.
        ValueError: the backend is a bridge.
        FileNotFoundError: the folder has no weights.
        IncompatibleCheckpoint, BadWeights: config or weights that are damaged, do not fit each other, or are read
            otherwise by this version of TransformerLens.
    """
    folder = Path(source.location)
    require_hooked_transformer(f"{folder} holds a SpectralHookedTransformer. ")
    if backend == "bridge":
        raise ValueError(
            f'{folder} holds a SpectralHookedTransformer, of which there is no bridge: leave backend="bridge" out'
        )
    saved = read_saved(folder)
    tokenizer = find_tokenizer(source, folder, None) if tokenizer is None else tokenizer
    with copied_tokenizer(tokenizer) as own_tokenizer:
        model = _built(folder, saved, own_tokenizer)
    _fill(folder, saved, model)
    model.to(device, print_details=False)
    model.eval()
    # Before another type rounds what it computes.
    difference = function_difference(saved.probe, model)
    if difference is not None:
        raise IncompatibleCheckpoint(
            f"{folder / WEIGHTS}: the model that was saved computed something else (log-probabilities of a prompt are "
            f"off by {difference:.1e}), as after a function of it was replaced by hand, or under another version of "
            "TransformerLens"
        )
    if dtype is not None:
        for name, module in model.named_children():
            module.to(torch.promote_types(dtype, torch.float32) if name == "spectral" else dtype)
        model.cfg.dtype = dtype
    model.tlspectral_source = source.record
    return model


def _built(folder: Path, saved: Saved, tokenizer: Any) -> SpectralHookedTransformer:
    """Return a model of the saved shape and options, without its weights; nothing is fetched, and no seed changes."""
    config, options = saved.config["hooked_transformer"], saved.config["spectral"]
    unmade = f"{folder / HOOKED_CONFIG} describes no model that this version of TransformerLens makes"
    with refusing(unmade), torch.random.fork_rng(devices=[]):
        model = SpectralHookedTransformer(made_config(config), tokenizer, move_to_device=False, **options)
    if differing := differing_shapes(saved.tensors, stored_shapes(model)):
        raise IncompatibleCheckpoint(f"{folder / WEIGHTS} has other tensors than {HOOKED_CONFIG} asks for: {differing}")
    for name in ("seed", "init_weights", "tokenizer_name"):
        setattr(model.cfg, name, config.get(name))
    return model


def _fill(folder: Path, saved: Saved, model: Any) -> None:
    """Put the saved tensors into a model, in the types that they were saved in."""
    spectral = {
        name.removeprefix("spectral."): value for name, value in saved.tensors.items() if name.startswith("spectral.")
    }
    plain = {name: value for name, value in saved.tensors.items() if not name.startswith("spectral.")}
    nn.Module.load_state_dict(model, plain, strict=False, assign=True)
    for index, module in by_layer(model.spectral).items():
        theta: Tensor = spectral[f"{index}.theta"]
        module.to(theta.dtype)
        # In 16 bits, what is read from the rotary tables depends on when they were rounded.
        module.theta.copy_(theta)
    try:
        # Not assigned: under scope="model" the layers share parameters.
        model.spectral.load_state_dict(spectral)
    except RuntimeError as error:
        raise IncompatibleCheckpoint(f"{folder / WEIGHTS}: {error}") from error
