"""The tiny checkpoints of this package, read from its files.

Each is a safetensors file, with TransformerLens' names and shapes, and a json file with its config, the command that
made it and its SHA-256.
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
"""What a HookedTransformer does with its weights: the logits stay the checkpoint's."""


def models_folder() -> Path:
    """Return the folder of the checkpoints in the installed package."""
    return Path(str(files("tlspectral") / "data" / "models"))


def load_packaged(source: Source, backend: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a packaged checkpoint as a native bridge, or as a HookedTransformer with folded norms."""
    record, weights = read_packaged(source.location)
    made = hooked_from_weights if backend == "hooked" else bridge_from_weights
    model = made({**record["config"], "model_name": source.location}, weights, device, dtype)
    model.tlspectral_source = {**source.record, "revision": record["sha256"][:12], "sha256": record["sha256"]}
    return model


def read_packaged(name: str, folder: Path | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record and the weights of a checkpoint, by TransformerLens' parameter names.

    Raises BadWeights if the SHA-256 of the file of weights is not the one in the record.
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
    """Return a TransformerBridge around TransformerLens' native model, with an attention-only model's weights.

    The native model rotates adjacent columns as pairs. Where `rotary_adjacent_pairs` is False, the columns of W_Q, W_K
    and their biases are put in that order, which changes no score.

    `config` is a record's, with `model_name`: TransformerLens' fields, and two that may be left out,
    `rotary_adjacent_pairs` (whether columns 2t and 2t + 1 are a pair; True) and `unembed_bias`. Weights have
    TransformerLens' names and shapes, W_Q [heads, d_model, d_head] and so on.
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
    # TransformerLens gives every unembedding a bias; the models need not have one.
    bridge.load_state_dict({"unembed.bias": torch.zeros(config["d_vocab"]), **native})
    return bridge.eval()


def hooked_transformer_class() -> Any:
    """Return the class HookedTransformer. Raises ImportError on TransformerLens 4, with what to do instead."""
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
    """Return a HookedTransformer with an attention-only model's weights, its norms folded and nothing else processed.

    Arguments are as for `bridge_from_weights`. Raises ImportError on TransformerLens 4.
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
    known = {name: value for name, value in config.items() if name not in ("rotary_adjacent_pairs", "unembed_bias")}
    return {**known, "attn_only": True, "normalization_type": "LN"}


def _with_adjacent_pairs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put columns t and t + d_head/2 of queries and keys side by side, for every t."""
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
    """Return a parameter's name and layout in the native model, whose projections are [out, in], heads in one axis."""
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
