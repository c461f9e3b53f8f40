"""A Hugging Face causal language model and its tokenizer, from disk where they are there."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.loading.source import Source
from tlspectral.loading.unused_weights import unused_weights
from tlspectral.loading.weight_files import weight_files

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


one_load_at_a_time = threading.Lock()
"""transformers switches weight tying off in the whole process while it loads: of two threads one may leave it off."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' log messages and progress bars, and leave its settings as they were."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_bars_off = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        with warnings.catch_warnings():
            # The hub warns where an environment variable holds its own bars off, which is what is wanted here.
            warnings.simplefilter("ignore", UserWarning)
            if bars:
                logging.enable_progress_bar()
            if hub_bars_off:
                disable_progress_bars()


def load_pretrained(source: Source, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    """The model (eager attention, evaluation mode, on the CPU), its tokenizer or None, and what was left out.

    The last is empty, or holds `unused_weights`: number and names of tensors that the model has no place for.

    A hub id is looked for in the local cache first, so that the network is touched only for what is not there.

    Raises:
        FileNotFoundError: A folder without weights.
        ValueError: A hub id that is neither cached nor given by the hub.
        UnsupportedArchitecture: Not a causal language model, or one that needs code from its repository.
        BadWeights: Quantised, unreadable or incomplete weights, or some that config.json does not ask for.
    """
    import transformers

    config = _fetch(transformers.AutoConfig.from_pretrained, source)
    check_config(config, source)
    if source.kind == "folder":
        weight_files(Path(source.location))  # before any file is opened that does not lie in the folder
    with one_load_at_a_time:
        model, report = _fetch(
            transformers.AutoModelForCausalLM.from_pretrained,
            source,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    lost = sorted(map(str, report["missing_keys"])) + sorted(str(entry) for entry in report["mismatched_keys"])
    if lost:
        raise BadWeights(
            f"{source.record['model']} lacks {len(lost)} of the weights that its config.json asks for, such as"
            f" {lost[0]}; they would be left random."
        )
    if not model.config.architectures:
        model.config.architectures = [type(model).__name__]
    left_out = unused_weights(model, weights_folder(source), report["unexpected_keys"], source.record["model"])
    return model.eval(), _load_tokenizer(source), left_out


def _fetch(load: Callable[..., Any], source: Source, **options: Any) -> Any:
    """Call a `from_pretrained` on the disk alone, then for a hub id on the network."""
    from safetensors import SafetensorError

    where, name = source.location, source.record["model"]
    options = {**options, "revision": source.revision, "trust_remote_code": False}
    try:
        with quiet():
            return load(where, local_files_only=True, **options)
    except OSError as error:
        if source.kind != "hub":
            raise FileNotFoundError(f"{where} cannot be loaded: {_first_sentence(error)}") from error
    except SafetensorError as error:
        raise BadWeights(f"The weights of {name} cannot be read: {_first_sentence(error)}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise BadWeights(f"The weights of {name} do not have the shapes that its config.json asks for.") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedArchitecture(f"transformers does not load {name}: {_first_sentence(error)}") from error
    try:
        return load(where, **options)
    except OSError as error:
        which = f" at revision {source.revision!r}" if source.revision else ""
        raise ValueError(
            f"{name!r}{which} is not a folder, a .gguf file or a cached hub model, and the hub did not give it:"
            f" {_first_sentence(error)}"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedArchitecture(f"transformers does not load {name}: {_first_sentence(error)}") from error


def check_config(config: Any, source: Source) -> None:
    """Refuse, from its configuration alone, what is not a causal language model in plain floating point.

    Raises:
        UnsupportedArchitecture: An encoder or an encoder-decoder model.
        BadWeights: Quantised weights.
    """
    import transformers

    name, kind = source.record["model"], config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(
            f"{name} is an encoder-decoder model (model type {kind}); only causal language models are read."
        )
    # Encoders of BERT's family can be made decoders by a flag, and are in the causal mapping for that.
    is_encoder = (
        getattr(config, "is_decoder", None) is False and type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    )
    if is_encoder or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedArchitecture(
            f"{name} is not a causal language model (model type {kind}); only causal language models are read."
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise BadWeights(
            f"{name} stores quantised weights ({method}), which cannot be folded; save a de-quantised copy and load it."
        )


def _load_tokenizer(source: Source) -> Any:
    import transformers

    places = [Path(source.location)] if source.kind != "hub" else [snapshot_folder(source)]
    if source.kind == "folder" and source.record["revision"]:
        places.append(places[0].parent)  # a training checkpoint inside a run keeps its tokenizer beside it
    try:
        if source.kind == "hub":
            # This brings the files into the cache; they are then read from there, because TransformerLens loads the
            # tokenizer again by the name that it carries, and would go to the network for a hub id.
            _fetch(transformers.AutoTokenizer.from_pretrained, source)
        for place in places:
            if any((place / file).is_file() for file in _TOKENIZER_FILES):
                with quiet():
                    tokenizer = transformers.AutoTokenizer.from_pretrained(
                        str(place), local_files_only=True, trust_remote_code=False
                    )
                # transformers makes an empty tokenizer for some folders that hold only part of one.
                return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None
    except Exception as error:  # a tokenizer is a convenience, and a broken one fails in many ways
        warnings.warn(
            f"{source.record['model']} is loaded without its tokenizer, which fails: {_first_sentence(error)}",
            stacklevel=4,
        )
    return None


def snapshot_folder(source: Source) -> Path:
    """The folder of the hub's cache in which a revision's files lie; it is named by the commit."""
    from transformers.utils.hub import cached_file

    config = cached_file(source.location, "config.json", revision=source.revision, local_files_only=True)
    return Path(str(config)).parent


def weights_folder(source: Source) -> Path:
    """The folder in which the weights lie that were loaded."""
    return snapshot_folder(source) if source.kind == "hub" else Path(source.location)


def _first_sentence(error: BaseException) -> str:
    """The first sentence or line of an error's text, as one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".:") + "."
