"""Weights that a checkpoint's files hold and its config.json does not ask for: refused, or recorded.

transformers drops them without an error, and does not report all of them. A query/key norm, a bias or a layer that is
dropped makes another model of the checkpoint. Masks, rotary frequencies, extra prediction layers and parts for images
or sound change nothing that is measured.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import BadWeights
from tlspectral.models.loading.weight_files import stored_names, stored_tensor, weight_files

OTHER_TOWERS = re.compile(r"(^|[._])(vision|visual|image|audio|speech)")
"""Matches a word in the name of a tensor that belongs to images or sound."""

_NUMBERED = re.compile(r"((?:.*?\.)??)(\d+)\.(.+)")  # prefix of a list of modules, index in it, name within
_POSITIONS = re.compile(r"(.*\.)?(rotary_emb\..*|[a-z_]*inv_freq)")
_MASK = re.compile(r"(.*\.)?(attn|attention)\.(bias|masked_bias|causal_mask)")
_FINAL_NORM = re.compile(r"(norm|ln_f|norm_f|ln_final|final_layer_norm|final_layernorm|final_norm)\.(weight|bias)")
_PREDICTION_LAYER = re.compile(r"(.*\.)?(eh_proj|shared_head)\..*")
_QUANTISED = re.compile(r".*\.(qweight|qzeros|SCB|absmax|quant_map|quant_state\..*|weight_scale(_inv)?|weight_packed)")
_SHOWN = 20


def unplaced(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the tensors of a checkpoint that fit no parameter of a model, each with the name transformers looks for.

    Names are changed as in a load: older names, packed experts, prefixes that are missing or too many.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    whole: Any = model
    rules = get_model_conversion_mapping(whole)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, parameters = whole.base_model_prefix, whole.state_dict()
    targets = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name not in parameters:
            targets[name] = target
    return targets


def unused_weights(model: Any, folder: Path, reported: Iterable[str], who: str) -> dict[str, Any]:
    """Return what a model loaded from a folder left out: nothing, or `unused_weights` as `listed` gives it.

    `reported` are tensors that transformers itself reports as unused. Raises as `check_unused` and `require_tied`.
    """
    require_tied(model, who)
    stored = stored_names(weight_files(folder))
    unused = unplaced(model, stored)
    known = set(unused.values())
    unused |= {name: name for name in reported if name not in known}

    def read(name: str) -> Tensor:
        return stored_tensor(stored[name], name) if name in stored else torch.zeros(2)

    check_unused(model, unused, read, who, model.config.get_text_config())
    return {"unused_weights": listed(unused)} if unused else {}


def refuse_quantised(unused: Iterable[str], who: str) -> None:
    """Refuse unused weights with the names of quantised ones, if config.json does not say so. Raises BadWeights."""
    quantised = sorted(filter(_QUANTISED.fullmatch, unused))
    if quantised:
        raise BadWeights(
            f"{who} stores quantised weights ({quantised[0]} and {len(quantised) - 1} others), and config.json does "
            "not say so; load the model that they were made from"
        )


def check_unused(
    model: nn.Module,
    unused: Mapping[str, str],
    read: Callable[[str], Tensor],
    who: str,
    config: Any,
) -> None:
    """Refuse unused weights that belong to a part of the model that was built, and quantised ones. Raises BadWeights.

    Refused are floating-point tensors in a decoder block of the model or its final norm, and further blocks. `unused`
    is as of `unplaced`, `read` gives a tensor by its name in the files, `config` is that of the whole text model.
    """
    refuse_quantised(unused, who)
    base = f"{model.base_model_prefix}."
    depth = _depth_of_lists(model, base)
    modules = {path.removeprefix(base): module for path, module in model.named_modules()}
    targets = {stored: target.removeprefix(base) for stored, target in unused.items()}
    extra = _prediction_blocks(targets.values(), depth, getattr(config, "num_nextn_predict_layers", 0) or 0)
    for stored, target in sorted(targets.items()):
        numbered = _NUMBERED.fullmatch(target)
        block = None if numbered is None else (numbered[1], int(numbered[2]))
        if OTHER_TOWERS.search(target) or _POSITIONS.fullmatch(target) or block in extra:
            continue
        in_list = block is not None and block[0] in depth
        if not in_list and not (block is None and _in_built_module(target, modules, depth)):
            continue
        value = read(stored)
        if not value.is_floating_point() or (_MASK.fullmatch(target) and _is_mask(value)):
            continue
        if block is not None and block[1] >= depth[block[0]]:
            raise BadWeights(
                f"layer {block[1]} is in the files of {who} ({stored}), and config.json says that there are "
                f"{getattr(config, 'num_hidden_layers', 0)} layers; correct num_hidden_layers there"
            )
        raise BadWeights(
            f"{who}: its files hold {stored}, which fits no parameter of the model of config.json. Without it another "
            "model would be measured. Correct config.json (model_type, biases, norms), or remove the tensor from the "
            "files if it is no part of the model"
        )


def list_of_blocks(model: nn.Module) -> str:
    """Return the prefix of the names of a model's blocks, up to their number."""
    return next(match[1] for match in map(_NUMBERED.fullmatch, model.state_dict()) if match is not None)


def listed(unused: Iterable[str]) -> dict[str, Any]:
    """Return the record of unused weights for a table: their number, and their names with N for the layer."""
    names = list(unused)
    patterns = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names})
    return {"count": len(names), "names": patterns[:_SHOWN]}


def require_tied(model: Any, who: str) -> None:
    """Refuse files that hold another unembedding than the embedding, if config.json ties the two. Raises BadWeights."""
    if not getattr(model.config, "tie_word_embeddings", False) or not getattr(model, "_tied_weights_keys", None):
        return
    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    if outside is None or outside.weight is inside.weight or torch.equal(outside.weight, inside.weight):
        return
    raise BadWeights(
        f"{who}: config.json ties the unembedding to the embedding (tie_word_embeddings), and the files hold another "
        "unembedding; set tie_word_embeddings to false in config.json"
    )


def _depth_of_lists(model: nn.Module, base: str) -> dict[str, int]:
    """Return the number of blocks that the model built, by the prefix of their list."""
    depth: dict[str, int] = {}
    for name in model.state_dict():
        match = _NUMBERED.fullmatch(name.removeprefix(base))
        if match is not None and not OTHER_TOWERS.search(match[1]):
            depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)
    return depth


def _prediction_blocks(targets: Iterable[str], depth: Mapping[str, int], stated: int) -> set[tuple[str, int]]:
    """Return the blocks past the model's last that predict further tokens.

    These are all such blocks if there are at most `stated`, else those with parameters that only these blocks have.
    """
    recognised, beyond = set(), set()
    for target in targets:
        match = _NUMBERED.fullmatch(target)
        if match is not None and int(match[2]) >= depth.get(match[1], int(match[2]) + 1):
            beyond.add((match[1], int(match[2])))
            if _PREDICTION_LAYER.fullmatch(match[3]):
                recognised.add((match[1], int(match[2])))
    return beyond if len(beyond) <= stated else recognised


def _in_built_module(target: str, modules: Mapping[str, nn.Module], depth: Mapping[str, int]) -> bool:
    """Return whether a tensor outside all lists belongs to a leaf module of the model, or to its final norm."""
    module = modules.get(target.rpartition(".")[0])
    if module is not None and "." in target and next(module.children(), None) is None:
        return True
    parents = {list_name.rstrip(".").rpartition(".")[0] for list_name in depth}
    return any(_FINAL_NORM.fullmatch(target.removeprefix(f"{parent}." if parent else "")) for parent in parents)


def _is_mask(value: Tensor) -> bool:
    """Return whether a tensor is a mask: a matrix of zeros and ones, or one number, for minus infinity."""
    if value.numel() == 1:
        return True
    return value.ndim >= 2 and bool(((value == 0) | (value == 1)).all())
