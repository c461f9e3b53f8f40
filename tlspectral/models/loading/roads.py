"""The roads to a TransformerLens model that is not packaged: a name or path, and a model object of transformers."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loaders import LOADERS, claimed
from tlspectral.models.loading.adapters import load_merged
from tlspectral.models.loading.bars import download_bars, quiet
from tlspectral.models.loading.building import build_model
from tlspectral.models.loading.copies import copy_of_object
from tlspectral.models.loading.damage import misfit
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.loading.pretrained import check_config, load_pretrained
from tlspectral.models.loading.weight_files import snapshot_commit


def load_named(
    name: str | os.PathLike[str],
    revision: str | None,
    checkpoint: int | None,
    *,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    tokenizer: Any,
) -> Any:
    """Return the model that a name or path means, with its provenance; arguments and errors as of `load_model`."""
    with download_bars():
        source = find_source(name, revision, checkpoint)
        if source.kind in LOADERS:
            return LOADERS[source.kind].load(source, backend=backend, device=device, dtype=dtype, tokenizer=tokenizer)
        if backend == "hooked":
            hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
        with _copied_tokenizer(tokenizer) as given:
            load = load_merged if source.kind == "adapter" else load_pretrained
            pretrained, own_tokenizer, record = load(source, dtype, given)
            with misfit(record):
                model = build_model(pretrained, own_tokenizer, record["model"], backend, device, dtype)
    model.tlspectral_source = record
    return model


def load_object(
    given: Any, *, backend: str, device: torch.device | None, dtype: torch.dtype | None, tokenizer: Any
) -> Any:
    """Return a TransformerLens model of a causal language model of transformers, which stays as it is.

    It is made of a copy that shares the parameters' storage. Arguments and errors as of `load_model`; None is the
    object's own device or floating-point type.
    """
    kind = claimed(given)
    if kind is not None:
        return LOADERS[kind].load(given, backend=backend, device=device, dtype=dtype, tokenizer=tokenizer)
    if backend == "hooked":
        hooked_transformer_class()
    name = _checked_name(given)
    stated = getattr(given.config, "_commit_hash", None)
    commit = {"commit": stated} if stated else snapshot_commit(Path(given.config._name_or_path))
    check_config(given.config, name)
    _check_weights(given, name)
    copied = copy_of_object(given, name, dtype=dtype).eval()
    copied.config._attn_implementation = "eager"
    if dtype is not None:
        copied.config.dtype = dtype
    anchor = next(copied.parameters())
    with _copied_tokenizer(tokenizer) as own_tokenizer:
        model = build_model(copied, own_tokenizer, name, backend, device or anchor.device, anchor.dtype)
    model.tlspectral_source = {"model": name, "revision": None, **commit}
    return model


@contextlib.contextmanager
def _copied_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Yield a copy of a caller's tokenizer, from which a model can be built until the context ends; None for None.

    TransformerLens changes the tokenizer that it is given, and loads it again by its name, which would use the network
    for a hub id and lose tokens that were added. The copy has the name of a temporary folder. Raises TypeError for
    what is no tokenizer of transformers.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if tokenizer is None:
        yield None
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer= takes a tokenizer of transformers, and found {type(tokenizer).__name__}")
    with tempfile.TemporaryDirectory(prefix="tlspectral-") as folder:
        with quiet():
            tokenizer.save_pretrained(folder)
            copied = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        yield copied


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
