"""`Dictionary`: features of the residual stream, by a decoder, a bias and an encoder (a sparse autoencoder)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlspectral.hooks.attribution.dictionary_origin import DictionaryOrigin
from tlspectral.hooks.attribution.stream_terms import StreamTerms
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection import whole_number
from tlspectral.user_functions import not_finite, require_call, returned_tensor

ERROR, DICTIONARY_BIAS = "error", "dictionary bias"

Encode = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Features of the residual stream that enters a layer: stream = activations @ decoder + bias + error.

    >>> import tlspectral as tls, torch
    >>> words = torch.eye(64)[:8]
    >>> tls.Dictionary(words, torch.zeros(64), lambda stream: (stream @ words.T).relu())
    Dictionary(8 features of 64, any hook)

    Attributes:
        decoder: what each feature writes at activation 1, [features, d_model].
        bias: what is written at every token, [d_model].
        encode: function of streams [..., d_model] in float32 that returns activations [..., features].
        hook: hook point of the stream that the features were made for; None: not compared.
        origin: what the file of `load` says of its model; None: not compared.

    Raises:
        TypeError: decoder or bias are no real tensors, encode is no function.
        ValueError: shapes that do not fit.

    What it does not establish: that a feature means what its label says, or that the model uses it. What features do
    not explain is the error, a term like the others, and often the largest.
    """

    decoder: Float[Tensor, "features d_model"]
    bias: Float[Tensor, "d_model"]
    encode: Encode
    _: KW_ONLY
    hook: str | None = None
    origin: DictionaryOrigin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value, n_axes in (("decoder", self.decoder, 2), ("bias", self.bias, 1)):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise TypeError(f"{name} is a tensor of real numbers; found {type(value).__name__}")
            if value.ndim != n_axes:
                raise ValueError(f"{name} has {n_axes} axes; found shape {tuple(value.shape)}")
        if self.decoder.shape[1] != len(self.bias):
            raise ValueError(
                f"decoder has width {self.decoder.shape[1]} and bias {len(self.bias)}: both are d_model wide"
            )
        if not callable(self.encode):
            raise TypeError(f"encode is a function of streams; found {type(self.encode).__name__}")
        require_call(self.encode, ("streams",), "encode")

    def __repr__(self) -> str:
        features, width = self.decoder.shape
        return f"Dictionary({features} features of {width}, {self.hook or 'any hook'})"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Dictionary":
        """Read a sparse autoencoder from a folder in the layout of SAELens, by safetensors alone.

        `cfg.json` and `sae_weights.safetensors`, with ReLU (`"standard"`), JumpReLU or top-k activations. What cfg.json
        says of the model (`model_name`, `hook_name`, `center_writing_weights`) is compared with the model that the
        dictionary is used on: see `docs/attribution.md`.

        Args:
            folder: with the two files.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a setting that is not read, by its name; tensors that are missing, left over or of other shapes.
        """
        at = Path(folder).expanduser()
        for name in ("cfg.json", "sae_weights.safetensors"):
            if not (at / name).is_file():
                raise FileNotFoundError(
                    f"{at} has no {name}: a folder of SAELens has cfg.json and sae_weights.safetensors"
                )
        try:
            settings = json.loads((at / "cfg.json").read_text(encoding="utf-8"))
            tensors = load_file(at / "sae_weights.safetensors")
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ValueError(f"{at} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{at / 'cfg.json'} is no object of settings; found {type(settings).__name__}")
        return _autoencoder(at / "cfg.json", settings, tensors)

    def fitted(self, view: AttentionView, layers: Iterable[int]) -> Dictionary:
        """Return the dictionary for streams that enter layers of a model.

        A dictionary of centred streams (`center_writing_weights`) is given streams without their mean. Warns where its
        file names another model. Raises ValueError for another width or hook point; `activations` of what is returned
        raises it for a dictionary of raw streams in a model whose streams are centred.
        """
        layers = list(layers)
        for layer in layers:
            self._require_own(view, layer)
        if self.origin is None:
            return self
        self.origin.compare(view)
        return replace(self, encode=self.origin.encoder(view, layers[0], self.encode))

    def described(self) -> dict[str, Any]:
        """Return the attrs of tables: the dictionary's form, and what its file says of its model."""
        origin = {} if self.origin is None else {"dictionary_origin": self.origin.said}
        return {"dictionary": repr(self), **origin}

    def _require_own(self, view: AttentionView, layer: int) -> None:
        if self.decoder.shape[1] != view.d_model:
            raise ValueError(
                f"the dictionary's features are {self.decoder.shape[1]} wide, and the model's stream is {view.d_model}"
            )
        names = [view.hook_names(layer)["residual"], f"blocks.{layer}.hook_resid_pre"]
        if layer > 0:
            names += [view.hook_names(layer - 1)["residual_after"], f"blocks.{layer - 1}.hook_resid_post"]
        if self.hook is not None and self.hook not in names:
            raise ValueError(
                f"the dictionary is of {self.hook}, and a head of layer {layer} reads "
                f"{' = '.join(dict.fromkeys(names))}: give a head of the layer behind it, or another dictionary"
            )

    def activations(self, streams: Float64[Tensor, "tokens d_model"]) -> Float64[Tensor, "tokens features"]:
        """Return the activations of streams. Raises ValueError unless `encode` returns finite numbers of this shape."""
        wide = torch.promote_types(self.decoder.dtype, torch.float32)
        with torch.no_grad():  # a copy, since a caller's function may write into what it is given
            found = self.encode(streams.to(wide, copy=True).to(self.decoder.device))
        said = "encode returns activations [tokens, features]"
        activations = returned_tensor(found, (len(streams), len(self.decoder)), said)
        wrong = not_finite(activations)
        if wrong is not None:
            token, feature = wrong.nonzero()[0].tolist()
            value = float(activations[token, feature])
            raise ValueError(f"{said}, which are finite; found {value} for feature {feature} of token {token}")
        return activations.detach().cpu().to(torch.float64, copy=True)

    def terms(self, stream: Float64[Tensor, "d_model"], activations: Float64[Tensor, "features"]) -> StreamTerms:
        """Return what each active feature writes to a stream, the bias, and the error."""
        active, features = self.written(activations)
        bias = self.bias.detach().cpu().double()[None]
        error = stream[None] - features.sum(0, keepdim=True) - bias
        names = [*(f"feature {number}" for number in active), DICTIONARY_BIAS, ERROR]
        return StreamTerms(names, torch.cat([features, bias, error]))

    def written(self, activations: Float64[Tensor, "features"]) -> tuple[list[int], Float64[Tensor, "active d_model"]]:
        """Return the features that are active and what each of them writes."""
        active = activations.nonzero()[:, 0]
        rows = self.decoder[active.to(self.decoder.device)].detach().cpu().double()
        return active.tolist(), activations[active, None] * rows


def require_division(by: str, known: tuple[str, ...], dictionary: Any) -> None:
    """Refuse an unknown `by`, what is no dictionary, and one beside another `by`. Raises ValueError and TypeError."""
    if by not in known:
        raise ValueError(f"by is {', '.join(map(repr, known[:-1]))} or {known[-1]!r}; found {by!r}")
    if dictionary is not None and not isinstance(dictionary, Dictionary):
        raise TypeError(f"dictionary is a tls.Dictionary; found {type(dictionary).__name__}")
    if dictionary is not None and by != "source":
        raise ValueError(f"a dictionary divides streams into features: give by='source'; found by={by!r}")


_ACTIVATIONS = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk"}
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "activation_fn_str": "activation_fn",
    "hook_point_head_index": "hook_head_index",
}

# What a setting may be: with any other value the encoder or the decoder would be another one.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "normalize_activations": ("none", None, False),
    "reshape_activations": ("none", None),
    "finetuning_scaling_factor": (False, None),
    "hook_head_index": (None,),
    "rescale_acts_by_decoder_norm": (False, None),
    "noise_scale": (0, 0.0, None),
    "scaling_factor": (1, 1.0, None),
    "activation_normalization": ("none", None),
}

# What says where an autoencoder comes from, and changes no number of it: `DictionaryOrigin` compares it with a model.
_SAID = {
    "architecture", "activation_fn", "activation_fn_kwargs", "apply_b_dec_to_input", "d_in", "d_sae", "k", "metadata",
    "hook_name", "hook_layer", "model_name", "model_class_name", "model_from_pretrained_kwargs", "dtype", "device",
    "prepend_bos", "context_size", "dataset_path", "dataset_trust_remote_code", "sae_lens_version",
    "sae_lens_training_version", "neuronpedia_id", "seqpos_slice", "use_sparse_activations", "hf_hook_name",
    "exclude_special_tokens", "sequence_separator_token", "disable_concat_sequences", "n_batches_in_buffer",
    "store_batch_size_prompts", "is_dataset_tokenized", "streaming", "autocast", "autocast_lm", "compile_llm",
    "llm_compilation_mode", "compile_sae", "sae_compilation_mode", "training_tokens", "seed", "act_store_device",
    "l1_coefficient", "l0_coefficient", "lr", "lr_scheduler_name", "release", "sae_id",
    # How SAELens trained, up to version 3: it wrote its whole configuration beside the weights.
    "use_cached_activations", "cached_activations_path", "total_training_tokens", "store_batch_size",
    "train_batch_size", "tokens_per_buffer", "b_dec_init_method", "expansion_factor", "from_pretrained_path",
    "lr_warm_up_steps", "use_ghost_grads", "feature_sampling_window", "feature_sampling_method", "resample_batches",
    "feature_reinit_scale", "dead_feature_window", "dead_feature_estimation_method", "dead_feature_threshold",
    "log_to_wandb", "wandb_project", "wandb_entity", "wandb_log_frequency", "n_checkpoints", "checkpoint_path",
    "run_name",
}  # fmt: skip


def _autoencoder(where: Path, given: dict[str, Any], tensors: dict[str, Tensor]) -> Dictionary:
    """Return the dictionary of settings and tensors of SAELens. Raises ValueError for what is not read."""
    settings = {_OLD_NAMES.get(name, name): value for name, value in given.items()}
    metadata: dict[str, Any] = settings.get("metadata") or {}
    where_from = {_OLD_NAMES.get(name, name): value for name, value in metadata.items()}
    settings |= {name: value for name, value in where_from.items() if name in _ALLOWED}
    origin = DictionaryOrigin.read(where, given | metadata, where_from | settings)
    for name, value in settings.items():
        if name not in _SAID and name not in _ALLOWED:
            raise ValueError(f"{where}: {name}={value!r} is a setting that is not known, so the features may differ")
        if name in _ALLOWED and value not in _ALLOWED[name]:
            allowed = _ALLOWED[name][0]
            raise ValueError(f"{where}: {name}={value!r} is not read; it has to be {allowed!r}")
    kind = settings.get("architecture", "standard")
    function = settings.get("activation_fn", _ACTIVATIONS.get(kind, "relu"))
    if kind == "standard" and function == "topk":  # before SAELens 6 a function of a standard one
        kind = "topk"
    if kind not in _ACTIVATIONS:
        raise ValueError(f"{where}: architecture={kind!r} is not read; those are {', '.join(_ACTIVATIONS)}")
    if function not in ("relu", _ACTIVATIONS[kind]):
        raise ValueError(f"{where}: activation_fn={function!r} is not read with architecture={kind!r}")
    given_k = settings.get("k", (settings.get("activation_fn_kwargs") or {}).get("k"))
    k = (whole_number(given_k) or 0) if kind == "topk" else 1
    if k < 1:
        raise ValueError(f"{where}: k={given_k!r}: a top-k autoencoder says how many features are active, 1 or more")
    needed = {"W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if kind == "jumprelu" else [])}
    if set(tensors) != needed:
        missing, more = sorted(needed - set(tensors)), sorted(set(tensors) - needed)
        raise ValueError(f"{where.parent}: tensors {missing} are missing, and {more} are not read")
    w_dec, w_enc = tensors["W_dec"].float(), tensors["W_enc"].float()
    d_sae, d_in = w_dec.shape if w_dec.ndim == 2 else (-1, -1)
    shapes = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "b_dec": (d_in,), "threshold": (d_sae,)}
    for name, shape in shapes.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{where.parent}: {name} has shape {tuple(tensors[name].shape)}, and W_dec {tuple(w_dec.shape)}"
            )
    for name, size in (("d_in", d_in), ("d_sae", d_sae)):
        if settings.get(name, size) != size:
            raise ValueError(f"{where}: {name}={settings[name]!r}, and W_dec has shape {tuple(w_dec.shape)}")
    if k > d_sae:
        raise ValueError(f"{where}: k={k}, and there are {d_sae} features")
    b_enc, b_dec = tensors["b_enc"].float(), tensors["b_dec"].float()
    threshold = tensors["threshold"].float() if kind == "jumprelu" else None
    subtracted = b_dec if settings.get("apply_b_dec_to_input", True) else torch.zeros_like(b_dec)

    def encode(stream: Tensor) -> Tensor:
        before = (stream.float() - subtracted) @ w_enc + b_enc
        if kind == "topk":
            largest = before.topk(k, dim=-1)
            return torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())
        active = before.relu()
        return active if threshold is None else active * (before > threshold)

    hook = settings.get("hook_name", where_from.get("hook_name"))
    return Dictionary(w_dec, b_dec, encode, hook=hook, origin=origin)
