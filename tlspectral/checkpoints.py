"""A checkpoint folder read layer by layer, so that weights of a model too large to load can still be analysed.

Each layer is put into a one-layer model of the checkpoint's own architecture, with the checkpoint's embeddings and
final norm. So a streamed layer is read by the same code as a loaded one, and its scores are checked the same way.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.attention import AttentionView, attention_view
from tlspectral.errors import BadWeights, TlspectralError, UnsupportedArchitecture
from tlspectral.loading import build_bridge
from tlspectral.loading.pretrained import check_config, quiet
from tlspectral.loading.source import Source, find_source

_LAYER_KEY = re.compile(r"^((?:.*\.)?(?:layers|h|blocks)\.)(\d+)(\..*)$")


def streamable_checkpoint(name: str | PathLike[str]) -> Source | None:
    """The folder of safetensors that `name` is a path to; None where the model has to be loaded instead.

    Raises as `load_model` does for a name that means nothing.
    """
    source = find_source(name)
    if source.kind != "folder" or not any(Path(source.location).glob("*.safetensors")):
        return None
    return source


class CheckpointLayers:
    """The layers of a checkpoint folder, one in memory at a time.

    A layer's place decides nothing but its kind (window, rotary or not, local or global), which is carried over from
    the config's per-layer lists. Queries, keys and norms are exact; a scale that depends on the layer's index
    (`scale_attn_by_inverse_layer_idx`) is not, and no column of the head table depends on it.
    """

    def __init__(self, source: Source):
        from transformers import AutoConfig

        self._origin = source
        self._folder = Path(source.location)
        self._config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
        check_config(self._config, source)
        self.n_layers = int(self._config.num_hidden_layers)

    @property
    def source(self) -> dict[str, Any]:
        """Where the weights came from, as `AttentionView.source`."""
        return {**self._origin.record, "backend": "bridge, layer by layer"}

    def layer_view(self, index: int) -> AttentionView:
        """A view of a one-layer model that holds the weights of layer `index`, in float32.

        Raises:
            BadWeights: the files lack some of the layer's weights.
            UnsupportedArchitecture: the architecture has no bridge.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        config = self._config_of(index)
        with quiet():
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=self._weights_of(index),
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        lost = sorted(map(str, report["missing_keys"])) + sorted(str(entry) for entry in report["mismatched_keys"])
        if lost:
            raise BadWeights(
                f"layer {index}: {self._folder} lacks {len(lost)} of its weights or has them in another shape, "
                f"such as {lost[0]}"
            )
        model.config.architectures = [type(model).__name__]
        return attention_view(build_bridge(model.eval(), None, str(self._origin.record["model"])))

    @cached_property
    def ends(self) -> AttentionView:
        """A view that serves for the embeddings and the final norm."""
        return self.layer_view(0)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file that holds each tensor."""
        from safetensors import safe_open

        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return {name: self._folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        found = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            with _readable(file), safe_open(file, framework="pt") as tensors:
                found |= dict.fromkeys(tensors.keys(), file)
        return found

    def _weights_of(self, index: int) -> dict[str, Tensor]:
        """The tensors outside the layers, and those of one layer under the names of layer 0."""
        from safetensors import safe_open

        wanted: dict[Path, dict[str, str]] = {}
        for name, file in self._files.items():
            match = _LAYER_KEY.match(name)
            if match is None:
                wanted.setdefault(file, {})[name] = name
            elif int(match[2]) == index:
                wanted.setdefault(file, {})[name] = f"{match[1]}0{match[3]}"
        weights = {}
        for file, names in wanted.items():
            with _readable(file), safe_open(file, framework="pt") as tensors:
                weights |= {new: tensors.get_tensor(old) for old, new in names.items()}
        if not any(_LAYER_KEY.match(name) for name in weights):
            raise UnsupportedArchitecture(f"layer {index}: {self._folder} names no tensors of this layer")
        return weights

    def _config_of(self, index: int) -> Any:
        config = copy.deepcopy(self._config)
        if hasattr(config, "attention_types"):  # GPT-Neo derives its per-layer list from this one
            config.attention_types = [[[config.attention_layers[index]], 1]]
        for name, value in self._config.to_dict().items():
            if isinstance(value, list) and len(value) == self.n_layers:
                setattr(config, name, [value[index]])
        config.num_hidden_layers = 1
        return config


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{file} cannot be read as safetensors ({error}); fetch it again") from error


@contextmanager
def layer_named(index: int) -> Iterator[None]:
    """Let errors about the only layer of a one-layer model speak of the checkpoint's layer `index`."""
    try:
        yield
    except TlspectralError as error:
        raise type(error)(str(error).replace("layer 0", f"layer {index}", 1)) from error
