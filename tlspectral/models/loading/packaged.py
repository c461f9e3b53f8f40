"""Load the tiny checkpoints in this package.

A checkpoint is a safetensors file with TransformerLens' names and shapes, and a JSON file with the config, the command
that made the weights, and their SHA-256.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.loaders import Source

FOLDED = {"fold_ln": True, "center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
"""Options for loading weights into a HookedTransformer, under which the logits stay the checkpoint's."""


def models_folder() -> Path:
    """Return the folder of the tiny checkpoints in the installed package."""
    return Path(str(files("tlspectral") / "data" / "models"))


def load_packaged(source: Source, backend: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a new model of a checkpoint of this package: a bridge, or for the `backend` "hooked" a HookedTransformer
    with folded norms.

    source: the `Source` of the checkpoint, such as "tiny-rope". device, dtype: of the weights. The model's
    `tlspectral_source` is a dict with the name and the SHA-256 of the weights.
    """
    record, weights = read_packaged(source.location)
    made = hooked_from_weights if backend == "hooked" else bridge_from_weights
    model = made({**record["config"], "model_name": source.location}, weights, device, dtype)
    model.tlspectral_source = {**source.record, "revision": record["sha256"][:12], "sha256": record["sha256"]}
    return model


def read_packaged(name: str, folder: Path | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (record, weights) of a checkpoint of this package.

    record: its JSON file as a dict, with `config`, `sha256` and `command`, by which the weights were made.
    weights: dict from TransformerLens' name of a parameter to tensor.

    folder: default: the folder in the package. Raises BadWeights if the weights have another SHA-256 than recorded.
    """
    from safetensors.torch import load

    folder = folder or models_folder()
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    data = (folder / f"{name}.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != record["sha256"]:
        raise BadWeights(
            f"{name}.safetensors is not the file that {name}.json describes (SHA-256 {digest[:12]}..., expected"
            f" {record['sha256'][:12]}...): install the package again, or make both with: {record['command']}"
        )
    return record, load(data)


def bridge_from_weights(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """Return a TransformerBridge of an attention-only model with these weights.

    TransformerLens' native model rotates adjacent columns as pairs. If `rotary_adjacent_pairs` is False, the columns of
    W_Q, W_K and their biases are reordered for that, which changes no score.

    Args:
        config: fields of TransformerLens' config with `model_name`, and optionally `rotary_adjacent_pairs` (default
            True: columns 2t and 2t + 1 are a pair) and `unembed_bias`.
        weights: tensors by TransformerLens' names, in its shapes: W_Q [heads, d_model, d_head] and so on.
        device, dtype: of the model.
    """
    from transformer_lens.model_bridge import TransformerBridge

    with torch.random.fork_rng(devices=[]):  # the modules draw weights when they are made
        bridge = TransformerBridge.boot_native(
            {**_native_shape(config), "d_vocab_out": config["d_vocab"], "init_weights": False},
            device=device,
            dtype=dtype,
            model_name=config["model_name"],
        )
    if not config.get("rotary_adjacent_pairs", True):
        weights = _with_adjacent_pairs(weights)
    native = dict(_native_parameter(name, value) for name, value in weights.items())
    # TransformerLens gives every unembedding a bias; a checkpoint may have none.
    bridge.load_state_dict({"unembed.bias": torch.zeros(config["d_vocab"]), **native})
    return bridge.eval()


def hooked_transformer_class() -> Any:
    """Return the class HookedTransformer. Raises ImportError on TransformerLens 4, which has none."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError as error:
        raise ImportError(
            'HookedTransformer was removed in TransformerLens 4: use backend="bridge", or install "transformer-lens<4".'
        ) from error
    return HookedTransformer


def hooked_from_weights(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """Return a HookedTransformer of an attention-only model with these weights and folded norms, in evaluation mode.

    config: fields of TransformerLens' config with `model_name`, and optionally `rotary_adjacent_pairs` (default True:
    columns 2t and 2t + 1 are a pair) and `unembed_bias`. weights: tensors by TransformerLens' names, in its shapes.
    device, dtype: of the model. Raises ImportError on TransformerLens 4.
    """
    shape = {**_native_shape(config), "act_fn": None, "init_weights": False, "device": str(device), "dtype": dtype}
    if config["positional_embedding_type"] == "rotary":
        # Without these fields HookedTransformer pairs columns half a head apart.
        shape |= {"rotary_dim": config["d_head"], "rotary_adjacent_pairs": config.get("rotary_adjacent_pairs", True)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        hooked = hooked_transformer_class()(shape)
        whole = {"unembed.b_U": torch.zeros(config["d_vocab"]), **weights}  # the norm's bias is folded into it
        hooked.load_and_process_state_dict({name: value.to(dtype) for name, value in whole.items()}, **FOLDED)
    return hooked.eval()


def _native_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict with the fields of a checkpoint's `config` that TransformerLens knows, set to attention only
    with LayerNorm.
    """
    known = {name: value for name, value in config.items() if name not in ("rotary_adjacent_pairs", "unembed_bias")}
    return {**known, "attn_only": True, "normalization_type": "LN"}


def _with_adjacent_pairs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a new dict of weights in which columns t and t + d_head/2 of W_Q, W_K and their biases stand side by side,
    for every t.

    weights: from TransformerLens' name of a parameter to tensor, as in the result; it is not changed, and other
    parameters are the same tensors.
    """
    rotary_parameters = ("attn.W_Q", "attn.W_K", "attn.b_Q", "attn.b_K")
    return {
        name: rearrange(value, "... (half pair) -> ... (pair half)", half=2)
        if name.endswith(rotary_parameters)
        else value
        for name, value in weights.items()
    }


_NATIVE_NAMES = {
    "embed.W_E": "embed.weight",
    "pos_embed.W_pos": "pos_embed.weight",
    "unembed.W_U": "unembed.weight",
    "unembed.b_U": "unembed.bias",
}


def _native_parameter(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Return (name, value) of a parameter for TransformerLens' native model, from `name` and `value` in
    HookedTransformer.

    Native projections are [out, in], with all heads on one axis.
    """
    if name in _NATIVE_NAMES:
        return _NATIVE_NAMES[name], value.T if name == "unembed.W_U" else value
    module, parameter = name.rsplit(".", 1)
    if not module.endswith(".attn"):
        return f"{module}.{'weight' if parameter == 'w' else 'bias'}", value
    kind, role = parameter.split("_")
    if kind == "W":
        value = (
            rearrange(value, "head d_head d_model -> d_model (head d_head)")
            if role == "O"
            else rearrange(value, "head d_model d_head -> (head d_head) d_model")
        )
    return f"{module}.{role.lower()}.{'weight' if kind == 'W' else 'bias'}", value.reshape(-1) if kind == "b" else value
