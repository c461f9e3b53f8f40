"""Build a model from a single layer of a checkpoint."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.loading.damage import empty_model, one_load_at_a_time, quiet, require_tables

VOCABULARY = 256

_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))  # in Jamba
_LISTS_OF_LAYERS = ("attn_layer_indices", "moe_layers")  # layers with attention (Bamba), with experts (Llama 4)
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def one_layer_config(config: Any, index: int) -> Any:
    """Return a changed copy of a config of transformers: a model with layer `index` alone and a vocabulary of at most
    256 tokens.

    Per-layer lists (window, rotary or not, local or global) keep only this layer's entry. The number of first layers
    without experts becomes 0 or 1. Settings that say which layers have attention or experts now describe this layer.
    """
    n_layers = int(config.num_hidden_layers)
    single = copy.deepcopy(config)
    if hasattr(single, "attention_types"):  # GPT-Neo derives its per-layer list from this setting
        single.attention_types = [[[single.attention_layers[index]], 1]]
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == n_layers:
            setattr(single, name, [value[index]])
    if hasattr(single, "block_types"):  # RecurrentGemma repeats them over its layers
        single.block_types = [config.layers_block_type[index]]
    for name in _LISTS_OF_LAYERS:
        if hasattr(single, name):
            setattr(single, name, [0] if index in getattr(config, name) else [])
    for period, offset in _PERIODS:
        if hasattr(single, period):
            every = index % getattr(config, period) == getattr(config, offset)
            setattr(single, period, 1 if every else 2)
            setattr(single, offset, 0 if every else 1)
    for name in _FIRST_DENSE:
        if isinstance(getattr(single, name, None), int):
            setattr(single, name, int(index < getattr(single, name)))
    if getattr(single, "indexer_types", None):  # in GLM 5 a layer that shares an indexer does not run alone
        single.indexer_types = ["full"]
    sizes = config.to_dict().get("per_layer_config")  # sizes of heads by layer (Gemma 4)
    single.num_hidden_layers = 1
    if sizes:
        single.per_layer_config = {0: sizes[str(index)]} if str(index) in sizes else None
    if hasattr(single, "num_kv_shared_layers"):
        single.num_kv_shared_layers = 0  # layers with keys of another layer are not read
    single.vocab_size = min(int(single.vocab_size), VOCABULARY)
    single.tie_word_embeddings = False
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # an embedding refuses a padding row that it lacks
        if isinstance(getattr(single, name, None), int) and getattr(single, name) >= single.vocab_size:
            setattr(single, name, None)
    return single


def model_of(config: Any, weights: dict[str, Tensor]) -> Any:
    """Return the float32 model of transformers of a config with these weights, on the CPU in evaluation mode.

    weights: tensors by parameter name. Missing embeddings are random, missing vectors as in a new norm. All other
    matrices are zeros that take no memory, because scores do not depend on them.
    """
    empty: Any = empty_model(config, tensors=1, file="config.json")
    tables = {f"{path}.weight" for path, module in empty.named_modules() if isinstance(module, nn.Embedding)}
    rows = sum(parameter.nbytes for name, parameter in empty.named_parameters() if name in tables)
    require_tables(empty, 0, f"config.json ({config.model_type})", embeddings=rows)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, parameter in empty.named_parameters():
        if name in weights:
            state[name] = weights[name]
        elif name in tables:
            state[name] = torch.randn(parameter.shape, generator=generator)
        else:
            fresh = float(parameter.ndim == 1 and name.endswith("weight"))
            state[name] = torch.full((), fresh).expand(parameter.shape)
    for name, buffer in empty.state_dict().items():  # biases of experts, and the scale of the stream after a layer
        if any(part in name for part in (".mlp.", ".feed_forward.", ".layer_scalar")) and name not in state:
            state[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    with one_load_at_a_time, quiet():
        model, report = type(empty).from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=state,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    lost = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if lost:
        raise UnsupportedArchitecture(
            f"a {config.model_type} model of one layer cannot be filled with weights ({lost[0]}); pass a loaded model"
        )
    model.config.architectures = [type(model).__name__]
    return model.eval()
