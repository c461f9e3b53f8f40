"""Load spectral models: saved parameters put into an ordinary model, and whole saved models."""

import os
from pathlib import Path
from typing import Any

import torch

from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError, UnsupportedArchitecture
from tlspectral.errors.settings import checked_settings
from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.models.loading.damage import refusing
from tlspectral.models.loading.pretrained import find_tokenizer
from tlspectral.models.loading.roads import copied_tokenizer
from tlspectral.models.loading.weight_files import WHOLE
from tlspectral.spectral_rope.hugging_face import plain_object
from tlspectral.spectral_rope.model import to_spectral
from tlspectral.spectral_rope.saving import SPECTRAL_CONFIG, parameters_file, read_config
from tlspectral.spectral_rope.spectral_file import HOOKED, options_of, read_file, spectral_file_of
from tlspectral.spectral_rope.weights_identity import require_identity

_GIVE_ITS_MODEL = "Give the model on which the parameters were learned"


@checked_settings
def load_spectral(model: Any, path: str | os.PathLike[str]) -> Any:
    """Put saved spectral parameters into an ordinary model and return the spectral model.

    >>> import tlspectral as tls, tempfile
    >>> from tlspectral.spectral_rope import load_spectral, save_spectral
    >>> model = tls.load_model("tiny-rope")
    >>> file = f"{tempfile.mkdtemp()}/learned.safetensors"
    >>> save_spectral(tls.to_spectral(model), file)
    >>> type(load_spectral(model, file)).__name__
    'SpectralModel'

    Use it with a file of `save_spectral`, which has learned rotary frequencies, phases and gains without weights.

    Args:
        model: the ordinary model on which the parameters were learned, of TransformerLens or Hugging Face. It is not
            changed.
        path: the file, or the folder written by `save_pretrained`.

    Returns:
        A `SpectralModel` (or a Hugging Face model of the model's own class), as `to_spectral(model)` makes it, with the
            parameters of the file.

    Raises:
        TypeError: `path` is not a path, for example a model in its place.
        FileNotFoundError: the file does not exist.
        IncompatibleCheckpoint: the file is damaged, of another version or of another kind; or it belongs to a model
            with other layers, heads, inverse frequencies or weights; or a parameter is not finite.
        UnsupportedArchitecture: the model has no rotary positions, or a layer cannot be read.
        EditNotHonored: the model does not use queries or keys that are rotated at its hook points.
        ScoreMismatch: the logits at the start differ from the model's own.

    Not established: that the weights are the same, where their bits cannot be compared: between a HookedTransformer and
    a bridge or Hugging Face model, and in lower precision. Log-probabilities of 24 tokens are compared there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load_spectral(model, path) takes the model first, then its file; found {type(model).__name__}, then "
            f"{type(path).__name__}"
        )
    path = Path(path).expanduser()
    if path.is_dir():
        path = parameters_file(path)
    tensors, record, identity = read_file(path)
    if HOOKED in record:
        raise IncompatibleCheckpoint(
            f"{path} holds a whole SpectralHookedTransformer with its own weights: load it by load_model("
            f"{str(path.parent)!r})"
        )
    try:
        spectral = to_spectral(model, **record)
    except (BadHead, UnsupportedArchitecture, ValueError) as error:
        raise IncompatibleCheckpoint(
            f"{path} does not fit this model: {str(error).rstrip('.')}. {_GIVE_ITS_MODEL}"
        ) from error
    try:
        spectral.spectral.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise IncompatibleCheckpoint(f"{path} does not fit this model: {reason}. {_GIVE_ITS_MODEL}") from error
    require_identity(identity, spectral, path)
    return spectral


def load_claimed(model: Any, **options: Any) -> Any:
    """Return the TransformerLens model of a spectral Hugging Face model, or of a saved spectral model.

    `model`: the Hugging Face model, or the `Source` of a saved folder or file. A Hugging Face model gives copies of its
    weights and parameters. A folder of a whole model gives this model in evaluation mode; without `dtype` it keeps its
    types. A folder of parameters gives the model they were learned on, with these parameters. `options`: the other
    arguments of `load_model`.

    Raises:
        ValueError: a file of spectral parameters alone; or backend="bridge" for a whole model, which has no bridge.
        ImportError: a whole model on TransformerLens 4, which has no HookedTransformer.
        FileNotFoundError: a folder without its file, or without the model that its parameters belong to.
        IncompatibleCheckpoint, BadWeights: files that are damaged, of two saves or of another version, or a model that
            computes other numbers than the saved model.

    Errors of `load_model` for the underlying model are raised with the names of the folder and of that model.
    """
    if isinstance(model, Source):
        return _load_saved(model, options)
    spectral = to_spectral(load_model(plain_object(model), **options), **options_of(model))
    spectral.spectral.load_state_dict(model.spectral.state_dict())
    return spectral


def _load_saved(source: Source, options: dict[str, Any]) -> Any:
    """Return the model of a saved folder or file: a whole spectral model, or an ordinary model made spectral.

    `source`: where it is saved. `options`: the arguments of `load_model` except the model (backend, device, dtype,
    tokenizer). Raises FileNotFoundError, ValueError or IncompatibleCheckpoint if the folder is incomplete, has
    parameters alone, or mixes two saves; errors of `load_model` for the ordinary model are raised with the folder's
    name in front.
    """
    path = Path(source.location)
    config = read_config(path)
    file = spectral_file_of(path) if config is None else parameters_file(path)
    if file is None or not file.is_file():
        raise FileNotFoundError(f"{path} holds {SPECTRAL_CONFIG} and no {WHOLE}: copy the whole folder")
    saved = read_file(file)
    _, record, identity = saved
    if HOOKED in record:
        return _load_whole(source, file, saved, options)
    if config is None:
        raise ValueError(
            f"{file} holds spectral parameters and no model: load the model that they were learned on, then "
            f"tls.spectral_rope.load_spectral(model, {str(file)!r})"
        )
    if config.get("sha256") != identity["sha256"]:
        raise IncompatibleCheckpoint(
            f"{path / SPECTRAL_CONFIG} and {file} come from two different saves, so the base is unknown: save the "
            "model again"
        )
    name = _base_of(path, config)
    if options["tokenizer"] is None:
        options = {**options, "tokenizer": find_tokenizer(source, path, None)}
    try:
        base = load_model(name, revision=config.get("revision"), **options)
    except (TlspectralError, OSError, ValueError) as error:
        error.args = (f"{path} holds spectral parameters of {name}, which cannot be loaded: {error}",)
        raise
    spectral = load_spectral(base, file)
    spectral.rotated.tlspectral_source = {**base.tlspectral_source, **source.record, "base": base.tlspectral_source}
    return spectral


def _load_whole(source: Source, file: Path, saved: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
    """Return a whole `SpectralHookedTransformer` from its file, in evaluation mode.

    `source`: where the model came from, noted in it. `saved`: tensors, options and identity of the file, from
    `read_file`. `options`: the arguments of `load_model` except the model (backend, device, dtype, tokenizer). Raises
    ValueError for backend="bridge", ImportError on TransformerLens 4, and IncompatibleCheckpoint if the model does not
    compute the saved numbers.
    """
    # It imports TransformerLens.
    from tlspectral.spectral_rope.spectral_hooked_transformer import (
        SpectralHookedTransformer,
        require_hooked_transformer,
    )

    require_hooked_transformer(f"{file.parent} holds a SpectralHookedTransformer. ")
    (tensors, record, identity), dtype, tokenizer = saved, options["dtype"], options["tokenizer"]
    if options["backend"] == "bridge":
        raise ValueError(
            f'{file.parent} holds a SpectralHookedTransformer, which has no bridge: leave backend="bridge" out'
        )
    tokenizer = find_tokenizer(source, file.parent, None) if tokenizer is None else tokenizer
    unmade = f"{file} describes no model that this version of TransformerLens can build"
    with copied_tokenizer(tokenizer) as own_tokenizer, refusing(unmade):
        model = SpectralHookedTransformer.from_save(record, tensors, own_tokenizer)
    model.to(options["device"], print_details=False)
    model.eval()
    require_identity(identity, model, file)  # before another type rounds what it computes
    if dtype is not None:
        for name, module in model.named_children():
            # Spectral parameters stay in float32 or more, as `to_spectral` makes them.
            module.to(torch.promote_types(dtype, torch.float32) if name == "spectral" else dtype)
        model.cfg.dtype = dtype
    model.tlspectral_source = source.record
    return model


def _base_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the hub name or folder of the ordinary model that `config`, the content of a saved folder's
    `spectral_config.json`, names.

    Raises IncompatibleCheckpoint if it names none, or a folder of spectral parameters; FileNotFoundError for a missing
    folder.
    """
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str):
        raise IncompatibleCheckpoint(f"{folder / SPECTRAL_CONFIG} names no base: save the model again")
    if "relative_to" not in config:
        return name
    name = os.path.normpath(os.path.join(os.path.realpath(folder), name))
    if not os.path.isdir(name):
        raise FileNotFoundError(
            f"{folder} holds spectral parameters of the model in {name}, which is not there: move the base there, "
            "or load it and give it to load_spectral with this folder"
        )
    if (Path(name) / SPECTRAL_CONFIG).is_file():
        raise IncompatibleCheckpoint(
            f"{folder / SPECTRAL_CONFIG} names {name} as the base, which holds spectral parameters and no base: write "
            "there the folder of the model on which the parameters were learned"
        )
    return name
