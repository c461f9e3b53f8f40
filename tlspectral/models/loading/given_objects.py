"""Take a model object apart for `load_model`: unwrap nnsight, merge peft, copy objects of transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.errors import BadWeights, UnsupportedArchitecture, kind_of, public_call, shown
from tlspectral.models.loading.adapters import merged_exactly, require_lora
from tlspectral.models.loading.checks import log_probabilities, require_agreement
from tlspectral.models.loading.copies import copy_of_object
from tlspectral.models.loading.encoders import is_encoder_config, require_known_form, with_head
from tlspectral.models.loading.pretrained import check_config
from tlspectral.models.loading.weight_files import snapshot_commit
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.packed import LoraLayer, is_packed, is_packed_tensor, packed_layers
from tlspectral.models.running.passes import require_single_runs

ACCEPTED = (
    "a model of transformers, a PeftModel of peft, a LanguageModel of nnsight, a model of nnterp, a TransformerBridge "
    "or a HookedTransformer"
)
"""The model objects that `load_model` takes, for messages."""


def unwrapped(given: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return (model, tokenizer): the model that an object of nnsight or nnterp wraps, and the wrapper's tokenizer.

    given: the user's object; one that wraps nothing is returned as it is. tokenizer: the user's; None takes the
    wrapper's, if it has one of transformers. Raises BadWeights if nnsight has not loaded the weights yet.
    """
    from transformers import PreTrainedTokenizerBase

    while not isinstance(given, nn.Module) and isinstance(inner := getattr(given, "_module", None), nn.Module):
        if any(parameter.is_meta for parameter in inner.parameters()):
            raise BadWeights(
                f"this {type(given).__name__} of nnsight has not loaded its weights yet; make it with dispatch=True, "
                "or call its dispatch()"
            )
        own = getattr(given, "tokenizer", None)
        tokenizer = own if tokenizer is None and isinstance(own, PreTrainedTokenizerBase) else tokenizer
        given = inner
    return given, tokenizer


def is_of_transformer_lens(given: Any) -> bool:
    """Return True for a TransformerBridge or HookedTransformer, also a spectral one."""
    return hasattr(given, "run_with_hooks")


def as_it_is(model: Any, **options: Any) -> Any:
    """Return a model of TransformerLens itself, unchanged, after the checks of `load_model`.

    options: `backend`, `device`, `dtype`, `tokenizer` as the user gave them, None for the default. Raises ValueError if
    any argument would change the model, UnsupportedArchitecture or TypeError if the model cannot be read.
    """
    view = attention_view(model)
    anchor, device = next(model.parameters()), options["device"]
    fits = {
        "backend": options["backend"] == view.backend,
        "device": device in (anchor.device, torch.device(anchor.device.type)),
        "dtype": options["dtype"] is anchor.dtype,
        "tokenizer": options["tokenizer"] is getattr(model, "tokenizer", None),
    }
    changed = [f"{name}=" for name, value in options.items() if value is not None and not fits[name]]
    if changed:
        raise ValueError(
            f"this {type(model).__name__} is loaded already and comes back as it is, so {' and '.join(changed)} "
            "cannot be followed: leave this out, or give the model's name or the model of transformers"
        )
    require_single_runs(view)
    return model


def copied_object(
    given: Any, dtype: torch.dtype | None, *, device: torch.device | None, backend: str
) -> tuple[Any, dict[str, Any]]:
    """Return (copy, origin) of a model of transformers or peft: a model of transformers with weights of `dtype`.

    The copy has eager attention; a LoRA adapter is merged into it. origin: a dict with `model`, `revision` (None), if
    known `commit`, and for a PeftModel `adapter` (its name) and `base` (origin of the model under it). dtype: None
    keeps the object's own. device, backend: as the user gave them; quantised weights are not converted. Raises
    TypeError, ValueError, UnsupportedArchitecture or BadWeights for an object that cannot be read.
    """
    adapter = _adapter_of(given)
    base = given if adapter is None else given.get_base_model()
    name = _checked_name(base, merges=adapter is not None)
    stated = getattr(base.config, "_commit_hash", None)
    commit = {"commit": stated} if stated else snapshot_commit(Path(base.config._name_or_path))
    record: dict[str, Any] = {"model": name, "revision": None, **commit}
    check_config(base.config, name, loaded=True)
    check_weights(given, name)
    refuse_plain_form(base, backend, device, dtype)
    if adapter is None or packed_layers(base):
        copied = copy_of_object(given, name, dtype=dtype).eval()
        if adapter is not None:
            copied = _with_factors(copied, f"{adapter} of this {type(given).__name__}")
        _complete_unembedding(copied)
    else:
        dtype = dtype or base.get_input_embeddings().weight.dtype
        copied = _merged_copy(given, f"{adapter} of this {type(given).__name__}", name)
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(dtype)
    copied.config._attn_implementation = "eager"
    if next(copied.parameters()).dtype is torch.float64:
        copied.config._experts_implementation = "eager"  # kernels of grouped experts have no float64
    if adapter is not None:
        record = {"model": f"{name} with the adapter {adapter}", "revision": None, "adapter": adapter, "base": record}
    if dtype is not None:
        copied.config.dtype = dtype
    return with_head(copied), record


def _complete_unembedding(copied: Any) -> None:
    """Give a quantised unembedding without bias a bias of zeros, in place; another unembedding stays as it is.

    TransformerLens would make the bias by shape and type of the packed weight.
    """
    unembedding = copied.get_output_embeddings()
    if unembedding is not None and is_packed(unembedding) and unembedding.bias is None:
        like = copied.get_input_embeddings().weight
        zeros = torch.zeros(unembedding.out_features, dtype=like.dtype, device=like.device)
        unembedding.bias = nn.Parameter(zeros, requires_grad=False)


def _with_factors(copied: Any, adapter: str) -> Any:
    """Return a model of transformers with quantised weights and, beside them, the factors of its LoRA adapters.

    copied: the PeftModel, which is taken apart; merging would quantise the weights again. adapter: the adapter, in
    messages. Raises UnsupportedArchitecture for a layer that adds more than B A.
    """
    expected = log_probabilities(copied)
    model = copied.get_base_model()
    for path, layer in [*model.named_modules()]:
        if not type(layer).__module__.startswith("peft.tuners.lora") or not hasattr(layer, "base_layer"):
            continue
        base, active = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A]
        more = bool(getattr(layer, "lora_variant", None)) or bool(layer.merged_adapters)
        biased = any(layer.lora_B[name].bias is not None for name in active)
        if more or biased or not isinstance(getattr(base, "in_features", None), int):
            raise UnsupportedArchitecture(
                f"{path} of {adapter}, over quantised weights, is not a plain LoRA layer of its own (DoRA, a bias, an "
                "embedding, or merged already): train it over unquantised weights, or merge it there"
            )
        factors = [
            (layer.lora_A[name].weight, layer.lora_B[name].weight.detach() * layer.scaling[name])
            for name in active
            if not layer.disable_adapters
        ]
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, LoraLayer(base, factors) if factors else base)
    model.eval()
    advice = "turn its adapters on by enable_adapter_layers(), or merge the adapter into unquantised weights"
    require_agreement(model, expected, f"the copy with the factors of {adapter}", advice)
    return model


def _adapter_of(given: Any) -> str | None:
    """Return the names of the active adapters of a PeftModel as text, such as "default"; None for another object.

    Raises UnsupportedArchitecture if one of them is not a LoRA adapter of a causal language model.
    """
    configs = getattr(given, "peft_config", None)
    if not isinstance(configs, dict) or not callable(getattr(given, "get_base_model", None)):
        return None
    active = list(given.active_adapters)
    for adapter in active:
        config = configs[adapter]
        kind, task = getattr(config, "peft_type", None), getattr(config, "task_type", None)
        require_lora(getattr(kind, "value", kind), getattr(task, "value", task), f"the adapter {adapter}")
    return " and ".join(active)


def _merged_copy(given: Any, adapter: str, name: str) -> Any:
    """Return a model of transformers in float32: a copy of a PeftModel, with its active adapters merged.

    adapter: the adapter in messages. name: name of the base. The PeftModel stays as it is: `safe_merge` writes new
    tensors, so weights that the copy shares with it are not changed.
    """
    with warnings.catch_warnings():
        # Outputs are compared, so both are safe.
        warnings.filterwarnings("ignore", message="Model (with|has) `tie_word_embeddings")
        warnings.filterwarnings("ignore", message="(All|Already following) adapters (are already|were) merged")
        copied = copy_of_object(given, name, dtype=torch.float32).eval()
        advice = "turn its adapters on by enable_adapter_layers(), or pass what its merge_and_unload() returns"
        return merged_exactly(copied, adapter, advice)


def _checked_name(given: Any, *, merges: bool = False) -> str:
    """Return the name of a model object of transformers: its hub id or folder, otherwise its class.

    merges: True for the base under a PeftModel, whose adapter is merged afterwards. Raises TypeError for another
    object, UnsupportedArchitecture for an adapter without its PeftModel, or for another kind of model.
    """
    import transformers

    kind = type(given).__name__
    if not isinstance(given, transformers.PreTrainedModel):
        other = kind_of(given)
        advice = "give one of these"
        if other not in ("", "a model"):
            advice = f"it is {other}: check the order of the arguments, {public_call()}"
        raise TypeError(f"load_model takes a name, a folder or {ACCEPTED}, and found {shown(given)}; {advice}")
    if not merges and any(type(module).__module__.startswith("peft.") for module in given.modules()):
        raise UnsupportedArchitecture(
            f"this {kind} holds an adapter of peft that is not merged into its weights; pass its PeftModel, what "
            "merge_and_unload() of that returns, or the folder of the adapter"
        )
    name = str(given.config._name_or_path or kind)
    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if is_encoder_config(given.config):
        require_known_form(given, kind)
    elif type(given.config) in causal and not isinstance(given, causal[type(given.config)]):
        raise UnsupportedArchitecture(f"this {kind} is not a causal language model; load it by AutoModelForCausalLM")
    return name


def check_weights(given: Any, name: str) -> None:
    """Raise if the weights of a model object cannot be read. name: the model's name in messages.

    BadWeights: quantised weights outside linear layers, or weights on the meta device. UnsupportedArchitecture: a model
    on several devices, or with a weight that a hook of `torch.nn.utils` makes (a pruning mask).
    """
    for module_name, module in given.named_modules():
        if hasattr(module, "_hf_hook"):
            raise UnsupportedArchitecture(
                f"{name} is spread over devices ({module_name or 'the model'} is moved by accelerate); load it onto "
                "one device, without device_map"
            )
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                raise UnsupportedArchitecture(
                    f"a {type(hook).__name__} of torch.nn.utils makes a weight of {module_name} in {name} before each "
                    "pass; write it into the weight first, by torch.nn.utils.prune.remove(module, 'weight') or "
                    "remove_weight_norm(module)"
                )
    read = {id(value) for layer in packed_layers(given).values() for value in layer.parameters()}
    for parameter_name, parameter in given.named_parameters():
        if parameter.is_meta:
            raise BadWeights(f"{parameter_name} of {name} is on the meta device, without values; load the weights")
        if is_packed_tensor(parameter) and id(parameter) not in read:
            raise BadWeights(
                f"{parameter_name} of {name} is {_form(parameter)}, a quantised format, which is read only in linear "
                "layers of a library that quantises; leave its module out of the quantisation"
            )


def _form(parameter: Any) -> str:
    """Return how a quantised parameter is stored, as text: its class, or its type if it has none of its own."""
    return str(parameter.dtype) if type(parameter) in (torch.Tensor, nn.Parameter) else type(parameter).__name__


def refuse_plain_form(given: Any, backend: str, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Raise ValueError if quantised weights of a model object would have to be converted: for a HookedTransformer,
    another device or another type.
    """
    layers = packed_layers(given)
    if not layers:
        return
    anchor, (path, layer) = next(given.parameters()), next(iter(layers.items()))
    conversions = {
        "backend='hooked'": backend == "hooked",
        "device=": device not in (None, anchor.device, torch.device(anchor.device.type)),
        "dtype=": dtype not in (None, given.get_input_embeddings().weight.dtype),
    }
    for setting, asked in conversions.items():
        if asked:
            raise ValueError(
                f"this {type(given).__name__} has quantised weights ({path}, a {type(layer).__name__}), which stay as "
                f"they are, so {setting} cannot be followed: leave it out; choose device and type in transformers, "
                "before you quantise"
            )
