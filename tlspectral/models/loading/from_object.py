"""A Hugging Face model object as a TransformerLens model, made of a copy that shares the parameters' storage."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading.building import build_model, copied_tokenizer
from tlspectral.models.loading.copies import copy_of_object
from tlspectral.models.loading.hooked import hooked_transformer_class
from tlspectral.models.loading.pretrained import check_config
from tlspectral.models.loading.weight_files import snapshot_commit


def load_from_object(
    given: Any, backend: str, device: torch.device | None, dtype: torch.dtype | None, tokenizer: Any = None
) -> Any:
    """Return a TransformerLens model of a Hugging Face causal language model, which stays as it is.

    Arguments and errors as of `load_model`; None is the object's own device or floating-point type.
    """
    if backend == "hooked":
        hooked_transformer_class()
    name = _checked_name(given)
    stated = getattr(given.config, "_commit_hash", None)
    commit = {"commit": stated} if stated else snapshot_commit(Path(given.config._name_or_path))
    record = {"model": name, "revision": None, **commit}
    check_config(given.config, name)
    _check_weights(given, name)
    copied = copy_of_object(given, name, dtype=dtype).eval()
    copied.config._attn_implementation = "eager"
    if dtype is not None:
        copied.config.dtype = dtype
    anchor = next(copied.parameters())
    with copied_tokenizer(tokenizer) as own_tokenizer:
        model = build_model(copied, own_tokenizer, name, backend, device or anchor.device, anchor.dtype)
    model.tlspectral_source = record
    return model


def _checked_name(given: Any) -> str:
    """Return the name of a causal language model of transformers.

    Raises TypeError for no such model, UnsupportedArchitecture for one with an adapter or of another kind.
    """
    import transformers

    kind = type(given).__name__
    if isinstance(given, nn.Module) and any(type(module).__module__.startswith("peft.") for module in given.modules()):
        raise UnsupportedArchitecture(
            f"this {kind} holds an adapter of peft that is not merged into its weights; pass what merge_and_unload() "
            "of the PeftModel returns, or the folder of the adapter"
        )
    if not isinstance(given, transformers.PreTrainedModel):
        advice = "it is a TransformerLens model already" if hasattr(given, "run_with_hooks") else "give one of these"
        raise TypeError(f"load_model takes a name, a folder or a model of transformers, and found {kind}; {advice}")
    name = str(given.config._name_or_path or kind)
    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(given.config) in causal and not isinstance(given, causal[type(given.config)]):
        raise UnsupportedArchitecture(f"this {kind} is no causal language model; load it by AutoModelForCausalLM")
    return name


def _check_weights(given: Any, name: str) -> None:
    for module_name, module in given.named_modules():
        if hasattr(module, "_hf_hook"):
            raise UnsupportedArchitecture(
                f"{name} is spread over devices ({module_name or 'the model'} is moved by accelerate); load it onto "
                "one device, without device_map"
            )
    for parameter_name, parameter in given.named_parameters():
        if parameter.is_meta:
            raise BadWeights(f"{parameter_name} of {name} is on the meta device, without values; load the weights")
        if not parameter.is_floating_point():
            raise BadWeights(
                f"{parameter_name} of {name} is {parameter.dtype}, a quantised format, which cannot be folded; load "
                "the model without quantization_config"
            )
