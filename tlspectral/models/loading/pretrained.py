"""Load a Hugging Face language model and its tokenizer from the hub, a folder or a GGUF file."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tlspectral.errors import BadWeights, UnsupportedArchitecture, warn_caller
from tlspectral.models.loaders import Source
from tlspectral.models.loading.checks import listed, require_filled, require_tied, unused_weights
from tlspectral.models.loading.damage import (
    check_settings,
    empty_model,
    first_sentence,
    from_files,
    misfit,
    one_load_at_a_time,
    quiet,
    require_room,
)
from tlspectral.models.loading.encoders import encoder_class, is_encoder_config, with_head
from tlspectral.models.loading.gguf import converted_folder
from tlspectral.models.loading.hub import SETTINGS, VOCABULARIES, fetch_tokenizer, fetch_weights, pinned
from tlspectral.models.loading.weight_files import WHOLE, refuse_adapter, stored_tensor, stored_tensors
from tlspectral.models.reading.blocks import require_no_repeats


def load_pretrained(source: Source, dtype: torch.dtype, tokenizer: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Return (model, tokenizer or None, origin) of a source that is a hub model, a folder or a GGUF file.

    The model is of transformers, with weights of `dtype`, on the CPU, in evaluation mode, with eager attention. The
    origin is a dict, the later `tlspectral_source`. Missing files of a hub model are downloaded into the cache.
    tokenizer: replaces the one in the files. Raises FileNotFoundError, ValueError, UnsupportedArchitecture or
    BadWeights.
    """
    import transformers

    folder, name = Path(source.location), source.record["model"]
    if source.kind == "gguf":
        folder, digest = converted_folder(source)
        source = replace(source, kind="folder", record={**source.record, "sha256": digest})
    if source.kind == "hub":
        source, folder = pinned(source)
    check_settings(folder)
    refuse_adapter(folder, name)
    config = check_config(from_files(transformers.AutoConfig.from_pretrained, source, folder), name)
    if source.kind == "hub":
        fetch_weights(source, config)
    stored = stored_tensors(folder, config)
    if not stored:
        raise FileNotFoundError(f"{name} cannot be loaded: {folder} holds no weights: put {WHOLE} there")
    auto, given = transformers.AutoModelForCausalLM, {}
    if is_encoder_config(config):
        auto, given = encoder_class(config, stored)
    with misfit(source.record):
        empty = empty_model(config, tensors=len(stored), file=f"config.json of {name}", auto=auto, **given)
        room = sum(file.stat().st_size for file in {*stored.values()})  # a weight takes at least one byte
        require_room(empty, room, f"config.json of {name}")
        unused = unused_weights(empty, stored, lambda tensor: stored_tensor(stored[tensor], tensor), name)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True, **given}
    if dtype is torch.float64:
        options["experts_implementation"] = "eager"  # kernels of grouped experts have no float64
    with one_load_at_a_time:
        model, report = from_files(auto.from_pretrained, source, folder, config=config, **options)
    require_filled(report, model, name, unused)
    require_tied(model, name)
    model = with_head(model)
    if not model.config.architectures:
        model.config.architectures = [type(model).__name__]
    if source.kind == "hub":  # transformers writes the folder there
        model.name_or_path = model.config._name_or_path = source.location
    if tokenizer is None:
        tokenizer = find_tokenizer(source, folder, model.config)
    return model.eval(), tokenizer, source.record | ({"unused_weights": listed(unused)} if unused else {})


def check_config(config: Any, name: str, *, loaded: bool = False) -> Any:
    """Return the config of transformers to build a model from, after checks; for Gemma 3n the config of its text part.

    It is `config` itself, not changed, or a copy without an empty `quantization_config`. Causal language models, BERT
    and RoBERTa in plain floating point pass. name: the model's name in messages. loaded: True for the config of a model
    object, whose layers may be quantised; quantised files are not loaded. Raises UnsupportedArchitecture for
    another encoder, an encoder-decoder model, or a model that runs a layer several times in a pass; BadWeights for
    quantised weights.
    """
    import transformers

    # Encoders of BERT's family can be turned into decoders by a flag, so they are in the causal mapping.
    encodes = getattr(config, "is_decoder", None) is False and type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    what = "an encoder-decoder model" if getattr(config, "is_encoder_decoder", False) else "not a causal language model"
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and "encoder" not in what and not encodes
    if not causal and not is_encoder_config(config):
        raise UnsupportedArchitecture(
            f"{name} is {what} (model type {config.model_type}); causal language models are read, and of encoders BERT "
            "and RoBERTa."
        )
    require_no_repeats(config, name)
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        if quantised is not None:  # empty: transformers would look for a method in it
            config = copy.copy(config)
            del config.quantization_config
        return config.text_config if config.model_type == "gemma3n" else config
    if loaded:
        return config
    settings = quantised if isinstance(quantised, dict) else vars(quantised)
    method = settings.get("quant_method")
    method = getattr(method, "value", method) or "bitsandbytes"  # old configs of bitsandbytes do not name it
    raise BadWeights(
        f"{name} stores quantised weights ({method}), and files of these are not read; give the model object that "
        "AutoModelForCausalLM.from_pretrained of transformers returns, or load the model that they were made from"
    )


def find_tokenizer(source: Source, folder: Path, config: Any) -> Any:
    """Return the tokenizer of transformers in a folder; None if it has none, or, with a warning, if it cannot be read.

    source: the model; `folder`: its folder, for a hub model in the cache, because TransformerLens loads a tokenizer
    again by name and would use the network for a hub id. config: the model's config, needed for a hub model only.
    """
    import transformers

    name, problem, tokenizer = source.record["model"], None, None
    options: dict[str, Any] = {}
    folders = [folder]
    if source.kind == "hub":
        options["config"] = config  # transformers chooses some tokenizers by the hub id in it
        try:
            fetch_tokenizer(source)
        except ValueError as error:
            problem = str(error)
    elif source.record["revision"]:
        folders.append(folder.parent)  # the tokenizer of a training checkpoint can lie in the folder of the run
    place = next((at for at in folders if any((at / file).is_file() for file in (SETTINGS, *VOCABULARIES))), None)
    if place is not None:
        try:
            with quiet():
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(place), local_files_only=True, trust_remote_code=False, **options
                )
            if len(tokenizer) <= len(tokenizer.all_special_tokens):  # of some folders transformers makes an empty one
                raise ValueError(f"its files in {place} hold no vocabulary; fetch them again, or give token ids")
        except Exception as error:  # a broken tokenizer raises many kinds of errors; the model works without it
            tokenizer, problem = None, problem or f"it cannot be read: {first_sentence(error)}"
    if problem is not None:
        state = "without its tokenizer" if tokenizer is None else "with a tokenizer that may be incomplete"
        warn_caller(f"{name} is loaded {state}: {problem}")
    return tokenizer
