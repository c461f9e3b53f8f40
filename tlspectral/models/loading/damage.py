"""Guards around other packages that read files of models.

Damaged files, and sizes that files cannot hold, raise an error that names the file. Progress bars and log messages of
the packages are switched off.
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
    """Turn errors of other packages, raised inside the `with` block, into BadWeights.

    what: beginning of the message, which names the file. Errors of this package, missing files and lack of memory stay
    as they are. Warnings are silenced, because they would end the load if the user has turned them into errors.
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
    """Return a context that turns errors into BadWeights "... describes no model that can be run with its weights".

    record: origin of the model (`Source.record`), whose `file` or `model` the message names.
    """
    file = record["model"] if "file" in record else f"config.json of {record['model']}"
    return refusing(f"{file} describes no model that can be run with its weights; compare it with the published file")


def first_sentence(error: BaseException) -> str:
    """Return the first sentence or line of an error's text, at most 300 characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".:")[:300] + "."


def from_files(load: Callable[..., Any], source: Source, folder: Path, **options: Any) -> Any:
    """Call `load`, a method `from_pretrained` of transformers, on a folder without the network; return its result.

    source: the model, whose name is in messages. options: passed to `load`. Raises FileNotFoundError,
    UnsupportedArchitecture or BadWeights in place of the errors of transformers.
    """
    name = source.record["model"]
    with misfit(source.record), quiet():
        try:
            return load(str(folder), local_files_only=True, trust_remote_code=False, **options)
        except OSError as error:
            raise FileNotFoundError(
                f"{name} cannot be loaded from {folder}: {first_sentence(error)} Fetch its files again."
            ) from error
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedArchitecture(
                f"transformers does not load {name}: {first_sentence(error)} Compare its config.json with the "
                "published one."
            ) from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise BadWeights(
                f"The weights of {name} do not have the shapes that its config.json asks for: fetch both again."
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path` as a dict. Raises BadWeights if the file does not hold one."""
    with refusing(f"{path} is no JSON; fetch it again"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise BadWeights(f"{path} holds a {type(value).__name__} where an object should be; fetch it again")
    return value


def check_settings(folder: Path) -> None:
    """Raise BadWeights if config.json or generation_config.json in `folder` is not JSON, or asks for too many layers or
    heads.
    """
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            check_counts(read_json(path), str(path))


def check_counts(settings: Mapping[str, Any], file: str) -> None:
    """Raise BadWeights if settings of `file` ask for more than 100,000 layers, heads or experts.

    transformers would build a list of that length.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(value, file)
        elif isinstance(value, int | float) and _COUNT.match(name) and not value <= _MOST_PARTS:
            raise BadWeights(f"{file} asks for {name} = {value:g}, which no model has; fetch it again")


def empty_model(config: Any, *, tensors: int, file: str, auto: Any = None, **options: Any) -> nn.Module:
    """Return the model of a config on the meta device: with names and shapes, but without memory for weights.

    Args:
        config: a config of transformers.
        tensors: number of tensors in the model's files. Raises BadWeights if the config has more layers.
        file: the config's name in messages.
        auto: class of the model or auto class of transformers; default: a causal language model.
        options: passed to the class.
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
    """Raise BadWeights if a model asks for more weights than its files can hold, or for too large tables.

    model: on the meta device, so nothing is allocated. elements: largest number of weights in the files; twice as many
    pass, because a tied unembedding counts twice. file: name of the config in the message.
    """
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    # An unembedding that is tied to the embedding counts twice here.
    if n_weights > 2 * elements + 2**20:
        raise BadWeights(
            f"{file} asks for {n_weights:,} weights, and the files hold at most {elements:,}; fetch it again"
        )
    require_tables(model, 4 * elements, file)


def require_tables(model: nn.Module, weights: int, file: str, *, embeddings: int = 0) -> None:
    """Raise BadWeights if the buffers of a model, such as masks, exceed both 1 GiB and the bytes of its weights.

    model: on the meta device. weights: bytes of its weights. file: the config's name in the message. embeddings: bytes
    of embeddings that will be drawn at random; they count like buffers.
    """
    tables = embeddings + sum(value.nbytes for value in model.buffers())
    if tables > max(_TABLES, weights):
        raise BadWeights(f"{file} asks for tables of {tables:,} bytes (by the length of its context); fetch it again")


def download_bars() -> AbstractContextManager[None]:
    """Return a context manager for downloads: in its `with` block huggingface_hub shows progress bars, unless the user
    has switched bars off.
    """
    return _without_hub_bars() if hidden() else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log messages and progress bars until the `with` block ends, then restore its settings."""
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
    """Hide the progress bars of huggingface_hub until the `with` block ends, then restore its setting."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    with warnings.catch_warnings():
        # The hub warns if an environment variable decides about its bars; the variable stays in force.
        warnings.filterwarnings("ignore", message=".*HF_HUB_DISABLE_PROGRESS_BARS")
        disable_progress_bars()
        try:
            yield
        finally:
            restore()
