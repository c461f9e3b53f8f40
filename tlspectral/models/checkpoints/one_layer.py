"""A model that consists of one layer of a checkpoint, and the tensors in its files that fit no parameter."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.checkpoints.files import CheckpointFiles
from tlspectral.models.loading.bars import quiet
from tlspectral.models.loading.checks import check_unused, list_of_blocks, unplaced
from tlspectral.models.loading.damage import require_tables
from tlspectral.models.loading.pretrained import one_load_at_a_time

VOCABULARY = 256

_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def one_layer_config(config: Any, index: int) -> Any:
    """Return the config of a model that is layer `index` alone, with a small vocabulary.

    Lists with one entry per layer (window, rotary or not, local or global) are cut to that layer's entry. The number of
    first layers without experts becomes 0 or 1.
    """
    n_layers = int(config.num_hidden_layers)
    single = copy.deepcopy(config)
    if hasattr(single, "attention_types"):  # GPT-Neo derives its per-layer list from this one
        single.attention_types = [[[single.attention_layers[index]], 1]]
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == n_layers:
            setattr(single, name, [value[index]])
    for name in _FIRST_DENSE:
        if isinstance(getattr(single, name, None), int):
            setattr(single, name, int(index < getattr(single, name)))
    single.num_hidden_layers = 1
    single.vocab_size = min(int(single.vocab_size), VOCABULARY)
    single.tie_word_embeddings = False
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # an embedding refuses a padding row it does not have
        if isinstance(getattr(single, name, None), int) and getattr(single, name) >= single.vocab_size:
            setattr(single, name, None)
    return single


def model_class(config: Any) -> Any:
    """Return the class of causal language models of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def empty_model(config: Any) -> nn.Module:
    """Return the model without weights, on the meta device: it has names and shapes and takes no memory."""
    with one_load_at_a_time, torch.device("meta"), quiet():
        return model_class(config)(config)


def model_of(config: Any, weights: dict[str, Tensor]) -> Any:
    """Return the model in float32, with these weights. Other embeddings are random, other vectors those of a new norm.

    All other matrices are zeros that take no memory, since scores do not depend on them.
    """
    empty = empty_model(config)
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
    for name, buffer in empty.state_dict().items():  # biases of experts
        if ".mlp." in name and name not in state:
            state[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    with one_load_at_a_time, quiet():
        model, report = model_class(config).from_pretrained(
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


def unused_tensors(files: CheckpointFiles, config: Any, stack: str) -> list[str]:
    """Return the tensors of a checkpoint's files that the model of its config has no parameter for.

    They are found with a model of one layer of each kind. Of a tensor that no layer has a parameter for, one layer's is
    read. `stack` is the prefix of the names of its layers' tensors, up to the layer's number. Raises as `check_unused`.
    """
    unused: set[str] = set()
    kinds: dict[str, set[int]] = {}
    for index in range(int(config.num_hidden_layers)):
        kinds.setdefault(one_layer_config(config, index).to_json_string(use_diff=False), set()).add(index)
    for layers in kinds.values():
        model = empty_model(one_layer_config(config, min(layers)))
        in_first_layer = _naming(stack, list_of_blocks(model), layers, int(config.num_hidden_layers))
        named = {tensor: name for tensor in files.file_of if (name := in_first_layer(tensor)) is not None}
        missing = unplaced(model, set(named.values()))
        one_of = {name: tensor for tensor, name in reversed(named.items())}

        def read(tensor: str) -> Tensor:
            return files.read([tensor])[tensor]

        check_unused(model, {one_of[name]: target for name, target in missing.items()}, read, files.name, config)
        unused |= {tensor for tensor, name in named.items() if name in missing}
    return [tensor for tensor in files.file_of if tensor in unused]


def _naming(stack: str, own_prefix: str, layers: set[int], n_layers: int) -> Callable[[str], str | None]:
    """Return a function that gives a tensor's name in the model of one layer, whose list is called `own_prefix`.

    A text model that is part of another has longer names in the files. Layers past the last keep their number. Other
    layers than `layers` have no name, and what is no layer has one where layer 0 is among them.
    """
    outer, own_outer = (_without_last(name) for name in (stack, own_prefix))

    def name_of(tensor: str) -> str | None:
        if tensor.startswith(stack):
            index, _, rest = tensor.removeprefix(stack).partition(".")
            if int(index) in layers:
                return f"{own_prefix}0.{rest}"
            return f"{own_prefix}{index}.{rest}" if int(index) >= n_layers and 0 in layers else None
        if 0 not in layers:
            return None
        if outer and tensor.startswith(outer):
            return own_outer + tensor.removeprefix(outer)
        return tensor.removeprefix(outer.removesuffix(own_outer)) if outer.endswith(own_outer) else tensor

    return name_of


def _without_last(name: str) -> str:
    """Return a dotted name without its last part: `"model."` of `"model.layers."`, nothing of `"h."`."""
    before, dot, _ = name.rstrip(".").rpartition(".")
    return before + dot
