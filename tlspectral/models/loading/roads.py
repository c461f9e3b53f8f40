"""`load_other`: load every model that is not in this package, from a name, a path or an object of transformers."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.errors import BadWeights, UnsupportedArchitecture, kind_of, public_call, shown
from tlspectral.models.loaders import LOADERS, claimed
from tlspectral.models.loading.adapters import load_merged
from tlspectral.models.loading.building import build_model
from tlspectral.models.loading.copies import copy_of_object, note_given
from tlspectral.models.loading.damage import download_bars, misfit, quiet
from tlspectral.models.loading.encoders import is_encoder_config, require_known_form, with_head
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.pretrained import check_config, load_pretrained
from tlspectral.models.loading.weight_files import snapshot_commit
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import require_single_runs


def load_other(
    given: Any,
    revision: str | None,
    checkpoint: int | None,
    *,
    backend: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
    tokenizer: Any,
) -> Any:
    """Return the TransformerLens model of a name, a path or an object; `tlspectral_source` is a dict with its origin.

    Args:
        given: name, path, or a model object of transformers.
        revision, checkpoint: choose the weights of a name: branch, tag or commit; training step. None for an object.
        backend: "hooked", otherwise a bridge.
        device, dtype: of the model. None keeps an object's own; for a name `device` is needed and `dtype` None is
            float32.
        tokenizer: the user's tokenizer of transformers, or None.

    Raises as `load_model`.
    """
    with download_bars(), copied_tokenizer(tokenizer) as own_tokenizer:
        source = find_source(given, revision, checkpoint) if isinstance(given, str | os.PathLike) else None
        kind = claimed(given) if source is None else source.kind
        if kind in LOADERS:
            options = {"backend": backend, "device": device, "dtype": dtype, "tokenizer": tokenizer}
            return LOADERS[kind].load(given if source is None else source, **options)
        if source is None:
            pretrained, record = _copied_object(given, dtype)
        else:
            load = load_merged if kind == "adapter" else load_pretrained
            pretrained, own_tokenizer, record = load(source, dtype or torch.float32, own_tokenizer)
        anchor = next(pretrained.parameters())
        with contextlib.nullcontext() if source is None else misfit(record):
            place = device or anchor.device, dtype or anchor.dtype
            model = build_model(pretrained, own_tokenizer, record["model"], backend, *place)
    model.tlspectral_source = record
    require_single_runs(attention_view(model))
    if source is None:
        note_given(model, given)
    return model


def _copied_object(given: Any, dtype: torch.dtype | None) -> tuple[Any, dict[str, Any]]:
    """Return (copy, origin) of a model object of transformers: the copy has eager attention and weights of `dtype`.

    given: the object, which stays unchanged; without another `dtype` the copy shares its weights' memory. origin: a
    dict with `model`, `revision` (None) and, if known, `commit`. dtype: None keeps the object's own. Raises TypeError,
    UnsupportedArchitecture or BadWeights for an object that cannot be read.
    """
    name = _checked_name(given)
    stated = getattr(given.config, "_commit_hash", None)
    commit = {"commit": stated} if stated else snapshot_commit(Path(given.config._name_or_path))
    check_config(given.config, name)
    _check_weights(given, name)
    copied = copy_of_object(given, name, dtype=dtype).eval()
    copied.config._attn_implementation = "eager"
    if next(copied.parameters()).dtype is torch.float64:
        copied.config._experts_implementation = "eager"  # kernels of grouped experts have no float64
    if dtype is not None:
        copied.config.dtype = dtype
    return with_head(copied), {"model": name, "revision": None, **commit}


@contextlib.contextmanager
def copied_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Yield a copy of the user's tokenizer, which can be given to TransformerLens inside the context; None for None.

    TransformerLens changes the tokenizer it gets, and loads it again by name, which would use the network for a hub id
    and lose added tokens. The name of the copy is a temporary folder.
    """
    if tokenizer is None:
        yield None
        return
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer={shown(tokenizer)} is not a tokenizer of transformers: give "
            "transformers.AutoTokenizer.from_pretrained(...), or leave tokenizer= out"
        )
    with tempfile.TemporaryDirectory(prefix="tlspectral-") as folder:
        with quiet():
            tokenizer.save_pretrained(folder)
            copied = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        yield copied


def _checked_name(given: Any) -> str:
    """Return the name of `given`, a model object of transformers: its hub id or folder, otherwise its class.

    Raises TypeError for another object, UnsupportedArchitecture for an unmerged adapter or another kind of model.
    """
    import transformers

    kind = type(given).__name__
    if isinstance(given, nn.Module) and any(type(module).__module__.startswith("peft.") for module in given.modules()):
        raise UnsupportedArchitecture(
            f"this {kind} holds an adapter of peft that is not merged into its weights; pass what merge_and_unload() "
            "of the PeftModel returns, or the folder of the adapter"
        )
    if not isinstance(given, transformers.PreTrainedModel):
        advice = "give one of these"
        if hasattr(given, "run_with_hooks"):
            advice = "it is a TransformerLens model already: use it as it is"
        elif (other := kind_of(given)) not in ("", "a model"):
            advice = f"it is {other}: check the order of the arguments, {public_call()}"
        raise TypeError(
            f"load_model takes a name, a folder or a model of transformers, and found {shown(given)}; {advice}"
        )
    name = str(given.config._name_or_path or kind)
    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if is_encoder_config(given.config):
        require_known_form(given, kind)
    elif type(given.config) in causal and not isinstance(given, causal[type(given.config)]):
        raise UnsupportedArchitecture(f"this {kind} is not a causal language model; load it by AutoModelForCausalLM")
    return name


def _check_weights(given: Any, name: str) -> None:
    """Raise an error if the weights of `given`, a model object of transformers, cannot be read. name: the model's name
    in messages.

    BadWeights: quantised weights, or weights on the meta device. UnsupportedArchitecture: a model on several devices.
    """
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
