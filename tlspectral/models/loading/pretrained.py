"""A Hugging Face causal language model and its tokenizer, loaded from a folder on disk."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tlspectral.errors import BadWeights, UnsupportedArchitecture, warn_caller
from tlspectral.models.loading.bars import quiet
from tlspectral.models.loading.damage import check_settings, first_sentence, misfit, refusing, require_room
from tlspectral.models.loading.hub import SETTINGS, VOCABULARIES, fetch_tokenizer, fetch_weights, first_file
from tlspectral.models.loading.source import Source
from tlspectral.models.loading.unused_weights import refuse_quantised, unused_weights
from tlspectral.models.loading.weight_files import refuse_adapter, stored_names, weight_files

one_load_at_a_time = threading.Lock()
"""A lock: transformers disables weight tying in the whole process while it loads, and two threads can leave it off."""


def load_pretrained(source: Source, dtype: torch.dtype, tokenizer: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model (eager attention, evaluation mode, on the CPU), its tokenizer or None, and what was left out.

    The last is empty, or holds `unused_weights`. A hub model has to be pinned to a commit. Files that the cache lacks
    are fetched; it is loaded from the cache. Raises as `load_model`.
    """
    import transformers

    folder, name = Path(source.location), source.record["model"]
    if source.kind == "hub":  # its commit's folder in the cache
        config_file = first_file(source, ["config.json"])
        assert config_file is not None
        folder = config_file.parent
    check_settings(folder)
    refuse_adapter(folder, name)
    config = _load(transformers.AutoConfig.from_pretrained, source, folder)
    check_config(config, name)
    if source.kind == "hub":
        fetch_weights(source, config)
    files = weight_files(folder)  # raises if the index names files outside of the folder, before any is opened
    tensors = stored_names(files)
    with one_load_at_a_time, refusing(misfit(source.record)), quiet():
        if files:
            room = sum(file.stat().st_size for file in files)  # an element takes at least a byte
            require_room(config, tensors=len(tensors), elements=room, file=f"config.json of {name}")
        model, report = _load(
            transformers.AutoModelForCausalLM.from_pretrained,
            source,
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    lost = sorted(map(str, report["missing_keys"])) + sorted(str(entry) for entry in report["mismatched_keys"])
    refuse_quantised(report["unexpected_keys"], name)
    if lost:
        raise BadWeights(
            f"{name} lacks {len(lost)} of the weights that its config.json asks for, such as {lost[0]}; they would be "
            "left random."
        )
    if not model.config.architectures:
        model.config.architectures = [type(model).__name__]
    with refusing(misfit(source.record)):
        left_out = unused_weights(model, folder, report["unexpected_keys"], name)
    if source.kind == "hub":  # transformers writes the folder there
        model.name_or_path = model.config._name_or_path = source.location
    if tokenizer is None:
        tokenizer = find_tokenizer(source, folder, model.config)
    return model.eval(), tokenizer, left_out


def _load(load: Callable[..., Any], source: Source, folder: Path, **options: Any) -> Any:
    """Call a `from_pretrained` without the network, and turn its errors into those of this package."""
    name = source.record["model"]
    with refusing(misfit(source.record)), quiet():
        try:
            return load(str(folder), local_files_only=True, trust_remote_code=False, **options)
        except OSError as error:
            raise FileNotFoundError(f"{folder} cannot be loaded: {first_sentence(error)}") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise BadWeights(f"The weights of {name} do not have the shapes that its config.json asks for.") from error
        except (ValueError, KeyError) as error:
            reason = first_sentence(error)
            raise UnsupportedArchitecture(
                f"transformers does not load {name}: {reason} See its config.json."
            ) from error


def check_config(config: Any, name: str) -> None:
    """Refuse a config of anything but a causal language model in plain floating point.

    Raises UnsupportedArchitecture for an encoder or an encoder-decoder model, BadWeights for quantised weights.
    """
    import transformers

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(
            f"{name} is an encoder-decoder model (model type {kind}); only causal language models are read."
        )
    # Encoders of BERT's family become decoders by a flag, which is why the causal mapping has them.
    is_encoder = (
        getattr(config, "is_decoder", None) is False and type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    )
    if is_encoder or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedArchitecture(
            f"{name} is not a causal language model (model type {kind}); only causal language models are read."
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = (
            quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", "")
        )
        method = getattr(method, "value", method) or "bitsandbytes"  # old configs of bitsandbytes do not name it
        advice = "load the model that they were made from"
        if method == "bitsandbytes":
            advice += (
                ", without quantization_config; if there are only these, save a copy of them by"
                " model.dequantize() and model.save_pretrained(folder), and load that"
            )
        raise BadWeights(f"{name} stores quantised weights ({method}), which cannot be folded; {advice}.")


def find_tokenizer(source: Source, folder: Path, config: Any) -> Any:
    """Return the tokenizer of a folder or None, with a warning if it has one that cannot be fetched or read.

    `config` is the model's; it matters for a hub model.
    """
    name, folders, problem = source.record["model"], [folder], None
    options: dict[str, Any] = {}
    if source.kind == "hub":
        options["config"] = config  # transformers chooses some tokenizers by the hub id in it
        try:
            fetch_tokenizer(source)
        except ValueError as error:
            problem = str(error)
    elif source.record["revision"]:
        folders.append(folder.parent)  # the tokenizer of a training checkpoint can lie in the folder of the run
    try:
        tokenizer = _read_tokenizer(folders, options)
    except Exception as error:  # a model can be used without its tokenizer, and a broken one raises many things
        tokenizer = None
        problem = problem or f"it cannot be read: {first_sentence(error)}"
    if problem is not None:
        state = "without its tokenizer" if tokenizer is None else "with a tokenizer that may be incomplete"
        warn_caller(f"{name} is loaded {state}: {problem}")
    return tokenizer


def _read_tokenizer(folders: list[Path], options: dict[str, Any]) -> Any:
    """Return the tokenizer of the first of these folders that has one, or None.

    It is read from a folder for a hub model too: TransformerLens loads the tokenizer again by its name, and would use
    the network for a hub id.
    """
    import transformers

    for folder in folders:
        if any((folder / file).is_file() for file in (SETTINGS, *VOCABULARIES)):
            with quiet():
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False, **options
                )
            if len(tokenizer) <= len(tokenizer.all_special_tokens):  # of some folders transformers makes an empty one
                raise ValueError(f"its files in {folder} hold no vocabulary")
            return tokenizer
    return None
