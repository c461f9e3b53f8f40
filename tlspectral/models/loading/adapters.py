"""Load a LoRA adapter from a folder that peft saved, merged into its base model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tlspectral.errors import BadWeights, UnsupportedArchitecture, require_package
from tlspectral.models.loaders import Source
from tlspectral.models.loading.checks import log_probabilities, require_agreement
from tlspectral.models.loading.damage import read_json
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.pretrained import find_tokenizer, load_pretrained
from tlspectral.models.loading.weight_files import ADAPTER_CONFIG

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def load_merged(adapter: Source, dtype: torch.dtype, tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return (model, tokenizer or None, origin): the model of transformers has the LoRA adapter merged into its base.

    adapter: `Source` of the adapter's folder. The merge runs in float32; then the weights get `dtype`. The tokenizer is
    the given one, otherwise the one in the adapter's folder, otherwise the base's. The origin is a dict with `adapter`
    (the folder) and `base` (the base's origin). Raises UnsupportedArchitecture or BadWeights if it cannot be merged.
    """
    folder, name = Path(adapter.location), adapter.record["model"]
    require_package("peft", f"{name} is a LoRA adapter, and merging it into its base", '"tlspectral[adapters]"')
    base = _base(folder, name)
    if tokenizer is None:
        tokenizer = find_tokenizer(adapter, folder, None)
    pretrained, tokenizer, base_record = load_pretrained(base, torch.float32, tokenizer)
    merged = _merged(pretrained, folder, name)
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(dtype)
    return merged, tokenizer, {**adapter.record, "adapter": str(folder), "base": base_record}


def _base(folder: Path, name: str) -> Source:
    """Return the `Source` of the base model that the config in an adapter's folder names. name: name of the adapter.

    Raises BadWeights if it names none, UnsupportedArchitecture for another kind of adapter or base, FileNotFoundError
    or ValueError if the base is not there.
    """
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    base, kind, task = config.get("base_model_name_or_path"), config.get("peft_type"), config.get("task_type")
    require_lora(kind, task, name)
    if not isinstance(base, str) or not base:
        raise BadWeights(f"{path} does not name the adapter's base; set base_model_name_or_path there")
    try:
        source = find_source(base)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(
            f"the base of the adapter {name}, named in {path}, is not there: {str(error).rstrip('.')}. Correct "
            "base_model_name_or_path in this file"
        ) from error
    if not source.streams:
        raise UnsupportedArchitecture(
            f"the base of the adapter {name}, {base}, is not a folder or hub model; set base_model_name_or_path in "
            f"{path}"
        )
    revision = config.get("revision")
    if source.kind == "hub" and revision is not None:
        source = replace(source, revision=revision, record={**source.record, "revision": revision})
    return source


def require_lora(kind: Any, task: Any, name: str) -> None:
    """Raise UnsupportedArchitecture unless an adapter is LoRA (kind "LORA") for the task None or "CAUSAL_LM".

    kind, task: as the adapter's config states them. name: the adapter's, in the message.
    """
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        raise UnsupportedArchitecture(
            f"{name} is an adapter of kind {kind} for the task {task}; only LoRA of causal language models is merged: "
            "merge it by peft, and load the merged model"
        )


def merged_exactly(model: Any, name: str, advice: str) -> Any:
    """Return the model of transformers under a PeftModel with its active adapters merged; it computes the same.

    model: the PeftModel in float32 and evaluation mode; it is taken apart. name: the adapter's, in messages. advice:
    end of the message. Raises UnsupportedArchitecture if the merge changes the output, BadWeights if peft fails.
    """
    peft: Any = import_module("peft")
    expected = log_probabilities(model)
    with _merging(name):
        merged: Any = model.merge_and_unload(safe_merge=True)
    require_agreement(merged, expected, f"the merge that peft {peft.__version__} makes of {name}", advice)
    return merged.eval()


@contextmanager
def _merging(name: str) -> Iterator[None]:
    """Turn errors of peft inside the `with` block into BadWeights. name: the adapter's, in the message."""
    try:
        yield
    except BadWeights:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OSError, UserWarning) as error:
        reason, peft = " ".join(str(error).split())[:300], import_module("peft")
        raise BadWeights(
            f"peft {peft.__version__} cannot merge the adapter {name} into its base: {reason}. Merge it where it was "
            "trained, by model.merge_and_unload(), and load the result"
        ) from error


def _merged(pretrained: Any, folder: Path, name: str) -> Any:
    """Return a model of transformers with the adapter in `folder` merged into its weights.

    pretrained: the base model; its modules are replaced. name: the adapter's, in messages. Raises BadWeights if adapter
    and base do not fit, UnsupportedArchitecture if the merge changes the output.
    """
    peft: Any = import_module("peft")
    if not any((folder / file).is_file() for file in _WEIGHTS):
        raise BadWeights(f"{name} has an {ADAPTER_CONFIG} and no weights; put {' or '.join(_WEIGHTS)} beside it")
    # New adapters are drawn at random.
    with _merging(name), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # peft warns, and goes on, where it ignores a setting that it does not know.
        warnings.filterwarnings("error", message="Unexpected keyword arguments")
        warnings.filterwarnings("ignore", message="Model (with|has) `tie_word_embeddings")  # outputs are compared
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        model = peft.PeftModel(pretrained, config)
        stored = peft.load_peft_weights(str(folder), device="cpu")
        report = peft.set_peft_model_state_dict(model, stored)
        lost = sorted(set(peft.get_peft_model_state_dict(model, save_embedding_layers=False)) - set(stored))
        if lost or report.unexpected_keys:
            raise BadWeights(
                f"the adapter {name} does not fit its base: it lacks {len(lost)} weights and has "
                f"{len(report.unexpected_keys)} too many, such as {(lost or report.unexpected_keys)[0]}; name "
                f"the base that it was trained on in {ADAPTER_CONFIG}"
            )
        advice = "untie the embeddings of the base, or save the merged model by peft and check it"
        return merged_exactly(model.eval(), name, advice)
