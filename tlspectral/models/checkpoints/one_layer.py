"""A one-layer model around the weights of one layer; everything that is not given is as good as empty."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.checkpoints.files import CheckpointFiles
from tlspectral.models.loading.pretrained import one_load_at_a_time, quiet
from tlspectral.models.loading.unused_weights import check_unused, list_of_blocks, unplaced

VOCABULARY = 256


def one_layer_config(config: Any, index: int) -> Any:
    """The config of a model that is layer `index` alone, with a small vocabulary.

    Of lists with one entry per layer (window, rotary or not, local or global) the layer's own is kept.
    """
    n_layers = int(config.num_hidden_layers)
    own = copy.deepcopy(config)
    if hasattr(own, "attention_types"):  # GPT-Neo derives its per-layer list from this one
        own.attention_types = [[[own.attention_layers[index]], 1]]
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == n_layers:
            setattr(own, name, [value[index]])
    own.num_hidden_layers = 1
    own.vocab_size = min(int(own.vocab_size), VOCABULARY)
    own.tie_word_embeddings = False
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # an embedding refuses a padding row it does not have
        if isinstance(getattr(own, name, None), int) and getattr(own, name) >= own.vocab_size:
            setattr(own, name, None)
    return own


def model_class(config: Any) -> Any:
    """The class of causal language models of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def empty_model(config: Any) -> nn.Module:
    """The model without weights (meta device): it tells names and shapes and costs nothing."""
    with one_load_at_a_time, torch.device("meta"), quiet():
        return model_class(config)(config)


def model_of(config: Any, weights: dict[str, Tensor]) -> Any:
    """The model in float32, with these weights. Embeddings are random, other vectors those of a fresh norm.

    All other matrices are zeros that take no memory: scores depend on none of them.
    """
    empty = empty_model(config)
    tables = {f"{path}.weight" for path, module in empty.named_modules() if isinstance(module, nn.Embedding)}
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
    """Their names, found with a model of one layer; refused are those that `check_unused` refuses.

    Of a tensor that has no place in any layer, one layer's is looked at.

    Args:
        files: of the checkpoint.
        config: of the text model.
        stack: what the names of the tensors of its layers begin with, up to the layer's number.

    Raises:
        BadWeights: as `check_unused`.
    """
    model = empty_model(one_layer_config(config, 0))
    in_first_layer = _naming(stack, list_of_blocks(model), int(config.num_hidden_layers))
    named = {tensor: in_first_layer(tensor) for tensor in files.file_of}
    missing = unplaced(model, set(named.values()))
    one_of = {name: tensor for tensor, name in reversed(named.items())}

    def read(tensor: str) -> Tensor:
        return files.read([tensor])[tensor]

    check_unused(
        model, {one_of[name]: target for name, target in missing.items()}, read, files.name, layers=_layers(config)
    )
    return [tensor for tensor, name in named.items() if name in missing]


def _layers(config: Any) -> tuple[int, int]:
    return int(config.num_hidden_layers), int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def _naming(stack: str, own: str, n_layers: int) -> Callable[[str], str]:
    """How a tensor would be called in the model of one layer, which calls its list of layers `own`.

    A text model that is part of another has longer names in the files. Layers behind the last keep their number.
    """
    around, own_around = (_without_last(name) for name in (stack, own))

    def name_of(tensor: str) -> str:
        if tensor.startswith(stack):
            index, _, rest = tensor.removeprefix(stack).partition(".")
            return f"{own}{0 if int(index) < n_layers else index}.{rest}"
        if around and tensor.startswith(around):
            return own_around + tensor.removeprefix(around)
        return tensor.removeprefix(around.removesuffix(own_around)) if around.endswith(own_around) else tensor

    return name_of


def _without_last(name: str) -> str:
    """`"model."` of `"model.layers."`, nothing of `"h."`."""
    before, dot, _ = name.rstrip(".").rpartition(".")
    return before + dot
