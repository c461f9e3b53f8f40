"""`WeightFiles`: the layers of a checkpoint as views, with one layer in memory at a time."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from typing import Any, Literal

import torch

from tlspectral.errors import BadWeights, TlspectralError, UnsupportedArchitecture
from tlspectral.models.checkpoints.files import CheckpointFiles
from tlspectral.models.checkpoints.one_layer import model_of, one_layer_config
from tlspectral.models.loaders import Source
from tlspectral.models.loading.building import build_bridge
from tlspectral.models.loading.checks import OTHER_TOWERS, in_any_layer, listed, unused_weights
from tlspectral.models.loading.damage import check_settings, download_bars, empty_model, from_files, misfit
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.pretrained import check_config
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.blocks import SkippedLayer, kind_of, read_layers, require_no_repeats, unread
from tlspectral.models.reading.bridge import shared_keys
from tlspectral.models.reading.digests import recorded_weights
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import note_single_runs
from tlspectral.selection.heads_as_written import recorded_groups

Matrices = Literal["query-key", "output", "positions"]
"""Which weights of a layer to read: queries and keys; values and output; or queries, keys and learned positions."""

STREAMED_MODEL_TYPES = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2",
    "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "internlm3",
    "iquestcoder", "jais2", "jamba", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "minimax_m2", "ministral3",
    "mistral", "mixtral", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
    "openai-gpt", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "recurrent_gemma", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm", "youtu",
)  # fmt: skip
"""Values of `model_type` in config.json of the models whose layers can be read from files."""

_LAYER_KEY = re.compile(r"((?:.*\.)?(?:layers|h|blocks)\.)(\d+)\.(.+)")
_NORMS = "input_layernorm|self_attn_layer_norm|ln_1|ln_attn|norm_1|attention_layernorm|(?:operator_|temporal_pre_)?norm"
_PACKED = "qkv_proj|query_key_value|c_attn|Wqkv"
_LATENT = "kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj"
_QUERY_KEY = re.compile(
    rf"(?:.*\.)?(?:q_proj|k_proj|{_PACKED}|q_a_proj|q_a_layernorm|q_b_proj|{_LATENT}|(?:q|k|query|key)_(?:norm|layernorm)(?:\.norms\.\d+)?|{_NORMS})\.(?:weight|bias)"
)
_ATTENTION = re.compile(rf"(?!linear_attn\.)(?:.*\.)?(?:q_proj|k_proj|kv_b_proj|{_PACKED})\.weight")
_OUTPUT = re.compile(
    rf"(?:(?:self_attn|attn|attention|self_attention|mixer|temporal_block)\.(?:.*\.)?(?:v_proj|{_PACKED}|{_LATENT}|o_proj|out_proj|dense|c_proj)|{_NORMS})"
    r"\.(?:weight|bias)"
)
_POSITIONS = re.compile(r"(?:.*\.)?(wpe|embed_positions)\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")


def opened_files(model: Source | str | PathLike[str]) -> "WeightFiles | None":
    """Return the `WeightFiles` of a folder or hub model, given by name, path or `Source`.

    None for a GGUF file, an adapter or a packaged model, which must be loaded whole. Raises UnsupportedArchitecture,
    BadWeights, ValueError or FileNotFoundError for a model that cannot be read.
    """
    with download_bars():
        source = model if isinstance(model, Source) else find_source(model)
        return WeightFiles(source) if source.streams else None


class WeightFiles:
    """The layers of a checkpoint in safetensors files, read with one layer in memory at a time. It cannot be run.

    Use it for a model that is larger than memory:

        files = tls.load_model("EleutherAI/pythia-70m", weights="files")
        table = tls.analyze_heads(files, detectors=False)

    Only `analyze_heads`, `k_composition` and `head_likeness` take it. It holds names of tensors, no weights, so it can
    be sent to a worker process. The kind of a layer (window, rotary or not, local or global) is taken from the config's
    per-layer lists. Queries, keys and norms are exact. A scale that depends on the layer's index
    (`scale_attn_by_inverse_layer_idx`) is not, but no column of the head table depends on it.

    Args:
        source: where the checkpoint is: a `Source` of a folder or hub model.

    Raises:
        UnsupportedArchitecture: a model type that is not in `STREAMED_MODEL_TYPES`; the message lists the tensors.
        BadWeights: quantised weights, pickles, or unreadable files.
        FileNotFoundError, ValueError: no model has that name.
    """

    only_weights = True
    """Mark by which `attention_view` refuses this object and `open_layers` accepts it."""

    def __init__(self, source: Source):
        from transformers import AutoConfig

        self.files = CheckpointFiles(source)
        source, folder = self.files.source, self.files.config_folder
        try:
            check_settings(folder)
            whole = from_files(AutoConfig.from_pretrained, source, folder)
        except (BadWeights, UnsupportedArchitecture) as error:
            raise self._unsupported(f"its config.json is not understood ({str(error).rstrip('.')})") from error
        require_no_repeats(whole, self.files.name)
        try:
            with misfit(source.record):
                whole = check_config(whole, self.files.name)
        except UnsupportedArchitecture as error:
            raise self._unsupported(str(error)) from error
        config = whole.get_text_config()  # of a model that also reads images, the part that reads text
        if config.model_type not in STREAMED_MODEL_TYPES:
            raise self._unsupported(f"its model type is {config.model_type}")
        self.config, self._whole = config, whole
        with misfit(source.record):
            stacks, wholes = _stacks(self.files.file_of), _stacks(self._empty().state_dict())
        if len(stacks) != 1 or not wholes:
            raise self._unsupported(f"{len(stacks)} stacks of attention layers were found where there should be one")
        self.n_layers = config.num_hidden_layers
        self._names = stacks[0]
        self._in_whole = wholes[0]  # parameters of the whole model, by layer and by name within it
        self._group_sizes: dict[int, int] = {}  # heads per key/value group, of each layer that was read

    def __repr__(self) -> str:
        return f"WeightFiles({self.files.name}, {self.n_layers} layers)"

    @property
    def d_model(self) -> int:
        """Width of the residual stream of the checkpoint's model."""
        return int(self.config.hidden_size)

    @cached_property
    def skipped(self) -> list[SkippedLayer]:
        """Layers whose heads cannot be read, as a list of `SkippedLayer`: number, kind and reason."""
        whole, skipped = self._empty(), []
        for index, names in self._in_whole.items():
            shared = shared_keys(self.config, index)
            if shared is not None or not any(_ATTENTION.fullmatch(name) for name in names):
                within, name = next(iter(names.items()))
                kind = kind_of(whole.get_submodule(name.removesuffix(f".{within}")))
                skipped.append(SkippedLayer(index, kind, shared or unread(kind)))
        return skipped

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the layers whose heads can be read, sorted. Raises UnsupportedArchitecture if none can be read."""
        return read_layers(self.n_layers, self.skipped)

    def n_heads(self, index: int) -> int:
        """Return the number of query heads of layer `index`. Raises UnsupportedArchitecture for a skipped layer."""
        for skipped in self.skipped:
            if skipped.layer == index:
                raise UnsupportedArchitecture(f"layer {index}: {skipped.reason}")
        return int(self.config.num_attention_heads)

    def heads_per_group(self, index: int) -> int:
        """Return the number of query heads that share the keys and values of layer `index`, as `AttentionView` does.

        It is read with the layer's weights, because configs name this number in many ways. Raises BadWeights or
        UnsupportedArchitecture if the layer cannot be read.
        """
        if index not in self._group_sizes:
            with self.layer(index):
                pass
        return self._group_sizes[index]

    @property
    def source(self) -> dict[str, Any]:
        """Origin of the weights, a dict: `model`, `revision`, `backend`; if they apply also further keys.

        The further keys are `commit`, `unused_weights` and `skipped_layers`.
        """
        unused = {"unused_weights": listed(self.unused)} if self.unused else {}
        skipped = {"skipped_layers": [layer._asdict() for layer in self.skipped]} if self.skipped else {}
        return {**self.files.record, **unused, **skipped, "backend": "bridge, layer by layer"}

    def origin(self, layers: Iterable[int]) -> dict[str, Any]:
        """Return the origin of the weights for a table's `attrs`: a dict with the entries of `source` (`model`,
        `revision`, ...), hashes of `layers`, and their heads per key/value group.

        The hashes are `weights_sha256` and `weights_by_layer`, with `n_layers`. Skipped layers have no hash.
        """
        digests = {index: self.digest(index) for index in layers if index in self.layers}
        groups = recorded_groups({index: self.heads_per_group(index) for index in digests})
        return {**self.source, **recorded_weights(digests, self.n_layers), **groups}

    @cached_property
    def unused(self) -> list[str]:
        """Names of tensors in the files that fit no parameter of the model and that the model does not need, as a list.

        In a folder all shapes are compared with the model's; files of a hub model may not be downloaded yet. Raises
        BadWeights for a tensor of another shape, or a weight of a layer that config.json does not ask for.
        """
        # Of a tensor that every layer has, only the first is read: others can be in files not downloaded yet.
        first = {in_any_layer(tensor): tensor for tensor in reversed(self.files.file_of)}

        def read(tensor: str) -> torch.Tensor:
            return self.files.read([first[in_any_layer(tensor)]])[first[in_any_layer(tensor)]]

        with misfit(self.files.record):
            files = self.files
            return unused_weights(self._empty(), files.file_of, read, files.name, files.shapes())

    def _empty(self) -> torch.nn.Module:
        """Return the whole model of transformers of this checkpoint on the meta device: with names and shapes, without
        memory for weights.
        """
        file = f"config.json of {self.files.name}"
        return empty_model(self._whole, tensors=len(self.files.file_of), file=file)

    def prepare(self, indices: Iterable[int], matrices: Matrices = "query-key") -> None:
        """Download the files that some layers need, and check in their headers that the layers can be read.

        indices: numbers of the layers. matrices: which weights will be read: "query-key", "output" or "positions".
        Raises BadWeights for damaged files and for tensors that are missing, quantised, of another shape than in
        config.json or unknown to it; UnsupportedArchitecture if the model cannot be built.
        """
        with misfit(self.files.record):
            _ = self.unused  # raises if weights would be left out that belong to the model
            for index in indices:
                shapes = dict(self._needed(index, matrices).values())
                for tensor, (dtype, stored_shape) in self.files.stored(shapes).items():
                    shape = shapes[tensor]
                    if dtype not in _FLOATS:
                        raise BadWeights(
                            f"layer {index}: {tensor} is stored as {dtype}, a quantised format; load de-quantised "
                            "weights instead"
                        )
                    if stored_shape != shape:
                        raise BadWeights(
                            f"layer {index}: {tensor} of {self.files.name} has shape {stored_shape}, and config.json "
                            f"asks for {shape}: fetch both again"
                        )

    @contextmanager
    def layer(self, index: int, matrices: Matrices = "query-key") -> Iterator[AttentionView]:
        """Yield an `AttentionView` of a one-layer model with the weights of layer `index` as its layer 0, in float32.

        matrices: which weights are read: "query-key", "output" (values and W_O) or "positions" (queries, keys and
        learned positions). Embeddings are random, other matrices zero. The weights are freed when the `with` block
        ends. Raises BadWeights or UnsupportedArchitecture if the layer cannot be read.
        """
        with misfit(self.files.record):
            tensors = self._needed(index, matrices)
            stored = self.files.read(tensor for tensor, _ in tensors.values())
            config = one_layer_config(self.config, index)
            model = model_of(config, {name: stored[tensor] for name, (tensor, _) in tensors.items()})
            del stored
            try:
                bridge = build_bridge(model, None, self.files.name)
            except UnsupportedArchitecture as error:
                raise UnsupportedArchitecture(f"layer {index}: {error}") from error
        note_single_runs(bridge)  # the check needs a whole pass with MLP weights, and these families are known
        view = attention_view(bridge)
        try:
            yield view
            self._group_sizes[index] = view.heads_per_group(0)
        finally:
            # The model has reference cycles, which are collected late: without this, layers pile up in memory.
            for root in (model, view.model):
                for parameter in root.parameters():
                    parameter.data = torch.empty(0)

    def digest(self, index: int) -> str:
        """Return the SHA-256 (hex) of the stored tensors from which queries and keys of layer `index` are read."""
        return self.files.digest(tensor for tensor, _ in self._needed(index, "query-key").values())

    def _needed(self, index: int, matrices: Matrices) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a dict from parameter of the one-layer model to (name of its tensor in the files, shape it must have).

        index: the layer. matrices: "query-key", "output" or "positions". Raises BadWeights if tensors of the layer are
        missing.
        """
        names = self._names.get(index)
        if names is None:
            raise BadWeights(
                f"layer {index}: the files of {self.files.name} hold no tensors of this layer; fetch them again"
            )
        needed, lost = {}, []
        with misfit(self.files.record):
            alone = empty_model(one_layer_config(self.config, index), tensors=1, file="config.json")
            for stack in _stacks(alone.state_dict()):
                if stack[0].keys() != self._in_whole[index].keys():
                    other = min(stack[0].keys() ^ self._in_whole[index].keys())
                    raise UnsupportedArchitecture(
                        f"layer {index}: a {self.config.model_type} model of this layer alone and the whole one do not "
                        f"agree on {other}; pass a loaded model"
                    )
        for parameter, value in alone.named_parameters():
            match, outside = _LAYER_KEY.fullmatch(parameter), _POSITIONS.fullmatch(parameter)
            if match is not None and (_OUTPUT if matrices == "output" else _QUERY_KEY).fullmatch(match[3]):
                tensor = names.get(match[3])
            elif outside is not None and matrices == "positions":
                ending = f"{outside[1]}.weight"
                tensor = next((name for name in self.files.file_of if f".{name}".endswith(f".{ending}")), None)
            else:
                continue
            if tensor is None:
                lost.append(parameter if match is None else f"{match[1]}{index}.{match[3]}")
            else:
                needed[parameter] = (tensor, tuple(value.shape))
        if lost:
            raise BadWeights(
                f"layer {index}: {self.files.name} lacks {len(lost)} of its weights, such as {lost[0]}; fetch the "
                "files again"
            )
        return needed

    def _unsupported(self, why: str) -> UnsupportedArchitecture:
        """Return the UnsupportedArchitecture error for a checkpoint that cannot be read layer by layer.

        why: the reason, as text.
        """
        kinds = sorted(set(map(in_any_layer, self.files.file_of)))
        tensors = ", ".join(kinds[:40]) + (f" and {len(kinds) - 40} others" if len(kinds) > 40 else "")
        return UnsupportedArchitecture(
            f"{self.files.name} is not read layer by layer: {why}. Its tensors are {tensors}. Read from files are "
            f"{', '.join(STREAMED_MODEL_TYPES)}; pass a loaded model for others"
        )


def _stacks(names: Iterable[str]) -> list[dict[int, dict[str, str]]]:
    """Return the lists of layers that have attention on text, each as a dict: layer -> name within the layer -> whole
    name.

    names: names of the tensors or parameters of a model.
    """
    by_prefix: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        match = _LAYER_KEY.fullmatch(name)
        if match is not None and not OTHER_TOWERS.search(match[1]):
            by_prefix.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = name
    return [
        layers
        for layers in by_prefix.values()
        if any(_QUERY_KEY.fullmatch(name) for layer in layers.values() for name in layer)
    ]


@contextmanager
def layer_named(index: int) -> Iterator[None]:
    """Replace "layer 0" by "layer {index}" in errors of the `with` block, which is about a one-layer model."""
    try:
        yield
    except TlspectralError as error:
        raise type(error)(str(error).replace("layer 0", f"layer {index}", 1)) from error
