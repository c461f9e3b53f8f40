"""What other packages do as they read files: damaged files are refused by name, with sizes that they cannot hold.

Their progress bars and messages are switched off inside a context.
"""

import copy
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlspectral.errors import BadWeights, TlspectralError, UnsupportedArchitecture
from tlspectral.models.loaders import Source
from tlspectral.tables.progress import hidden

one_load_at_a_time = threading.Lock()
"""A lock: transformers disables weight tying in the whole process while it loads, and two threads can leave it off."""

_MOST_PARTS = 100_000
_TABLES = 2**30  # bytes of masks and other tables that a model may compute, whatever its size
_COUNT = re.compile(r"(?!.*(?:dim|size|window|norm|drop)).*(?:layer|block_count|expert|head|hidden_groups)")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any error that another package raises inside the context into BadWeights.

    Errors of this package, a file that is missing and memory that is too small stay as they are. Warnings are silenced:
    where a user has made them errors, they would end the load. `what` begins the message, with the file's name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (TlspectralError, FileNotFoundError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):
            raise
        raise BadWeights(f"{what} ({type(error).__name__}: {first_sentence(error)})") from error


def misfit(record: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which an error says that a config and weights make no model, by a source's record."""
    file = record["model"] if "file" in record else f"config.json of {record['model']}"
    return refusing(f"{file} describes no model that can be run with its weights; compare it with the published file")


def first_sentence(error: BaseException) -> str:
    """Return the first sentence or line of an error's text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".:")[:300] + "."


def from_files(load: Callable[..., Any], source: Source, folder: Path, **options: Any) -> Any:
    """Call a `from_pretrained` of transformers without the network, and turn its errors into errors of this package."""
    name = source.record["model"]
    with misfit(source.record), quiet():
        try:
            return load(str(folder), local_files_only=True, trust_remote_code=False, **options)
        except OSError as error:
            raise FileNotFoundError(f"{name} cannot be loaded from {folder}: {first_sentence(error)}") from error
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedArchitecture(
                f"transformers does not load {name}: {first_sentence(error)} See its config.json."
            ) from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise BadWeights(f"The weights of {name} do not have the shapes that its config.json asks for.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises BadWeights if it is no JSON, or holds something else."""
    with refusing(f"{path} is no JSON; fetch it again"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise BadWeights(f"{path} holds a {type(value).__name__} where an object should be; fetch it again")
    return value


def check_settings(folder: Path) -> None:
    """Refuse a config.json or generation_config.json that is no JSON, or asks for too many parts. Raises BadWeights."""
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            check_counts(read_json(path), str(path))


def check_counts(settings: Mapping[str, Any], file: str) -> None:
    """Refuse a number of layers, heads or experts past 100,000, which would be built as lists. Raises BadWeights."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(value, file)
        elif isinstance(value, int | float) and _COUNT.match(name) and not value <= _MOST_PARTS:
            raise BadWeights(f"{file} asks for {name} = {value:g}, which no model has; fetch it again")


def empty_model(config: Any, *, tensors: int, file: str, auto: Any = None, **options: Any) -> nn.Module:
    """Return the model of a config on the meta device: it has names and shapes and takes no memory.

    `auto` is its class, or one of transformers' auto classes; None makes a causal language model.

    Raises BadWeights for more layers than there are tensors in its files; messages name the `file` of the config.
    """
    from transformers import AutoModelForCausalLM

    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= tensors:
        raise BadWeights(f"{file} asks for {layers!r} layers, and there are {tensors} tensors in all; fetch it again")
    with one_load_at_a_time, torch.device("meta"), quiet():
        auto = auto or AutoModelForCausalLM
        build = getattr(auto, "from_config", None) or auto._from_config
        return build(copy.deepcopy(config), **options)


def require_room(model: nn.Module, elements: int, file: str) -> None:
    """Refuse a model on the meta device that asks for more weights than its files hold, `elements` at most.

    Raises BadWeights, before anything is allocated.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    # An unembedding that is tied to the embedding counts twice here.
    if asked > 2 * elements + 2**20:
        raise BadWeights(f"{file} asks for {asked:,} weights, and the files hold at most {elements:,}; fetch it again")
    require_tables(model, 4 * elements, file)


def require_tables(model: nn.Module, weights: int, file: str, *, embeddings: int = 0) -> None:
    """Refuse a model on the meta device whose buffers, such as masks of the context, outgrow its weights and 1 GiB.

    `weights` is bytes of its weights, `embeddings` bytes of embeddings that are made up, which count as buffers.
    """
    tables = embeddings + sum(value.nbytes for value in model.buffers())
    if tables > max(_TABLES, weights):
        raise BadWeights(f"{file} asks for tables of {tables:,} bytes (by the length of its context); fetch it again")


def download_bars() -> AbstractContextManager[None]:
    """Return a context in which huggingface_hub shows its bars, unless bars are switched off."""
    return _without_hub_bars() if hidden() else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log messages and progress bars inside the context, and restore its settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with _without_hub_bars():  # transformers switches the hub's bars together with its own
        logging.set_verbosity_error()
        try:
            logging.disable_progress_bar()
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextmanager
def _without_hub_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    with warnings.catch_warnings():
        # The hub warns if an environment variable has decided about its bars, which then stays in force.
        warnings.filterwarnings("ignore", message=".*HF_HUB_DISABLE_PROGRESS_BARS")
        disable_progress_bars()
        try:
            yield
        finally:
            restore()
