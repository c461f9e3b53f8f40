"""`Dictionary`: features of the residual stream, such as a sparse autoencoder: decoder, bias and encoder."""

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

from tlspectral.errors import not_a, shown
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.hooks.attribution.dictionary_origin import DictionaryOrigin
from tlspectral.hooks.attribution.stream_terms import StreamTerms
from tlspectral.models.reading.view import AttentionView
from tlspectral.user_functions import call_users, function_name, not_finite, require_call, returned_tensor

ERROR, DICTIONARY_BIAS = "error", "dictionary bias"

Encode = Callable[[Tensor], Tensor]


@checked_settings
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Features of the residual stream that enters a layer: stream = activations @ decoder + bias + error.

    Use it as `dictionary=` of `qk_attribution` or `ov_attribution`, to divide a score or a write into features. The
    error is the part of the stream that the features do not explain.

    >>> import tlspectral as tls, torch
    >>> words = torch.eye(64)[:8]
    >>> tls.Dictionary(words, torch.zeros(64), lambda stream: (stream @ words.T).relu())
    Dictionary(8 features of 64, any hook)

        tls.qk_attribution(model, "a b a", "L1H0", query=-1, key=1, dictionary=dictionary)

    Attributes:
        decoder: the vector that each feature adds to the stream at activation 1, [features, d_model].
        bias: the vector that is added at every token, [d_model].
        encode: a function from streams [..., d_model] in float32 to activations [..., features].
        hook: name of the hook point of the stream that the features were trained on, such as "blocks.5.hook_resid_pre".
            Default: None, not checked.
        origin: the model that the features were trained on, as `Dictionary.load` reads it from the files. Default:
            None, not checked.

    Raises:
        TypeError: decoder or bias is not a tensor of real numbers, or encode is not a function.
        ValueError: the shapes do not fit.

    Not established: that a feature means what its label says, or that the model uses it. The error is a term like any
    other, and often the largest. More: docs/attribution.md
    """

    decoder: Float[Tensor, "features d_model"]
    bias: Float[Tensor, "d_model"]
    encode: Encode
    _: KW_ONLY
    hook: str | None = None
    origin: DictionaryOrigin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shapes = (("decoder", self.decoder, "[features, d_model]", 2), ("bias", self.bias, "[d_model]", 1))
        for name, value, axes, n_axes in shapes:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise TypeError(
                    f"{name}= must be a floating-point tensor; found {type(value).__name__}: give "
                    f"torch.as_tensor({name}).float()"
                )
            if value.ndim != n_axes:
                raise ValueError(
                    f"{name}= must have {n_axes} axes ({axes}); found shape {tuple(value.shape)}: give [{axes}]"
                )
        if self.decoder.shape[1] != len(self.bias):
            raise ValueError(
                f"decoder has width {self.decoder.shape[1]} and bias {len(self.bias)}: give both with width d_model"
            )
        if not callable(self.encode):
            raise TypeError(
                f"encode must be a function from streams to activations; found {type(self.encode).__name__}: for "
                "example encode=sae.encode"
            )
        require_call(self.encode, ("streams",), "encode")

    def __repr__(self) -> str:
        features, width = self.decoder.shape
        return f"Dictionary({features} features of {width}, {self.hook or 'any hook'})"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Dictionary":
        """Read a sparse autoencoder from a folder in the layout of SAELens, and return a `Dictionary`.

            dictionary = tls.Dictionary.load("saes/blocks.5.hook_resid_pre")

        Its activations may be ReLU ("standard"), JumpReLU or top-k. The model that cfg.json names is compared with the
        model that the dictionary is later used on.

        Args:
            folder: a folder with `cfg.json` and `sae_weights.safetensors`.

        Returns:
            A `Dictionary` with `.decoder` [features, d_model], `.bias`, `.encode`, `.hook` and `.origin`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a setting is not supported, or a tensor is missing, unknown or of another shape.

        More: docs/attribution.md
        """
        at = Path(folder).expanduser()
        for name in ("cfg.json", "sae_weights.safetensors"):
            if not (at / name).is_file():
                raise FileNotFoundError(
                    f"{at} has no {name}: give a folder of SAELens with cfg.json and sae_weights.safetensors"
                )
        try:
            settings = json.loads((at / "cfg.json").read_text(encoding="utf-8"))
            tensors = load_file(at / "sae_weights.safetensors")
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ValueError(
                f"{at} cannot be read as a SAELens folder: {error}. Fetch cfg.json and sae_weights.safetensors again"
            ) from error
        if not isinstance(settings, dict):
            raise ValueError(
                f"{at / 'cfg.json'} must be a JSON object of settings; found {type(settings).__name__}: fetch it again"
            )
        return _autoencoder(at / "cfg.json", settings, tensors)

    def fitted(self, view: AttentionView, layers: Iterable[int]) -> Dictionary:
        """Return the dictionary, or a copy with another encoder, for the streams that enter these layers of a model.

        `qk_attribution` and `ov_attribution` call it. If the dictionary was trained on centred streams
        (`center_writing_weights`), the copy centres streams of a raw model before the encoder. A dictionary made
        without a file is returned as it is. Warns if the file names another model or training step. Raises ValueError
        for another width or hook point. In a model with centred streams, a dictionary for raw streams raises ValueError
        when `activations` is called.
        """
        layers = list(layers)
        for layer in layers:
            self._require_own(view, layer)
        if self.origin is None:
            return self
        self.origin.compare(view)
        return replace(self, encode=self.origin.encoder(view, layers[0], self.encode))

    def described(self) -> dict[str, Any]:
        """Return a dict of attrs for tables: `dictionary` (its form as text) and `dictionary_origin`.

        `dictionary_origin` is a dict of settings of its cfg.json, such as `model_name` and `hook_name`. It is missing
        for a dictionary without a file.
        """
        origin = {} if self.origin is None else {"dictionary_origin": self.origin.recorded}
        return {"dictionary": repr(self), **origin}

    def _require_own(self, view: AttentionView, layer: int) -> None:
        """Raise ValueError unless the dictionary fits a layer of the model.

        It needs the model's d_model, and a hook point that is the input of this layer.
        """
        if self.decoder.shape[1] != view.d_model:
            raise ValueError(
                f"the dictionary's features are {self.decoder.shape[1]} wide, and the model's stream is "
                f"{view.d_model}: give a dictionary for this model"
            )
        names = [view.hook_names(layer)["residual"], f"blocks.{layer}.hook_resid_pre"]
        if layer > 0:
            names += [view.hook_names(layer - 1)["residual_after"], f"blocks.{layer - 1}.hook_resid_post"]
        if self.hook is not None and self.hook not in names:
            raise ValueError(
                f"the dictionary is of {self.hook}, and a head of layer {layer} reads "
                f"{' = '.join(dict.fromkeys(names))}: give a head of the layer after {self.hook}, or another dictionary"
            )

    def activations(self, streams: Float64[Tensor, "tokens d_model"]) -> Float64[Tensor, "tokens features"]:
        """Return the activations of all features at each stream, as `encode` computes them, in float64 on the CPU.

        Raises ValueError unless `encode` returns finite numbers of shape [tokens, features].
        """
        wide = torch.promote_types(self.decoder.dtype, torch.float32)
        with torch.no_grad():  # a copy, since a caller's function may write into its argument
            given = {"streams": streams.to(wide, copy=True).to(self.decoder.device)}
            what, shape = f"encode ({function_name(self.encode)})", (len(streams), len(self.decoder))
            returned = call_users(self.encode, given, what, f"activations [tokens, features] of shape {shape}")
        expected = f"{function_name(self.encode)}: encode must return activations [tokens, features]"
        activations = returned_tensor(returned, shape, expected)
        wrong = not_finite(activations)
        if wrong is not None:
            token, feature = wrong.nonzero()[0].tolist()
            value = float(activations[token, feature])
            raise ValueError(
                f"{expected}, all finite; found {value} for feature {feature} of token {token}: look for a division by "
                "0 or half precision in encode"
            )
        return activations.detach().cpu().to(torch.float64, copy=True)

    def terms(self, stream: Float64[Tensor, "d_model"], activations: Float64[Tensor, "features"]) -> StreamTerms:
        """Return a stream as a sum of named vectors: each active feature's write, the dictionary's bias and the error.

        `activations` are the activations of all features at this stream. The result is a `StreamTerms` with the names
        ("feature 12", ...) and the vectors [terms, d_model] in float64 on the CPU. The error is the stream minus all
        other terms.
        """
        active, features = self.written(activations)
        bias = self.bias.detach().cpu().double()[None]
        error = stream[None] - features.sum(0, keepdim=True) - bias
        names = [*(f"feature {number}" for number in active), DICTIONARY_BIAS, ERROR]
        return StreamTerms(names, torch.cat([features, bias, error]))

    def written(self, activations: Float64[Tensor, "features"]) -> tuple[list[int], Float64[Tensor, "active d_model"]]:
        """Return the indices of the features with non-zero activation, and the vector that each adds to the stream.

        `activations` are the activations of all features at one stream. A vector is the activation times the feature's
        row of the decoder, in float64 on the CPU.
        """
        active = activations.nonzero()[:, 0]
        rows = self.decoder[active.to(self.decoder.device)].detach().cpu().double()
        return active.tolist(), activations[active, None] * rows


def require_division(by: str, known: tuple[str, ...], dictionary: Any) -> None:
    """Raise ValueError unless the argument `by` is in `known`, and is "source" if a dictionary is given.

    `known` are the values that the calling function allows. Raises TypeError if `dictionary` is neither a `Dictionary`
    nor None.
    """
    if by not in known:
        raise ValueError(f"by= must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}; found {shown(by)}")
    if dictionary is not None and not isinstance(dictionary, Dictionary):
        wrong = not_a(dictionary, "a dictionary of features")
        raise TypeError(
            f"{wrong}: dictionary= must be a tls.Dictionary; found {type(dictionary).__name__}: give "
            "tls.Dictionary.load(folder) or tls.Dictionary(decoder, bias, encode)"
        )
    if dictionary is not None and by != "source":
        raise ValueError(f"dictionary= does not go with by={shown(by)}: give by='source'")


_BY_HAND = "make the dictionary yourself, tls.Dictionary(decoder, bias, encode)"  # end of messages of `load`
_ACTIVATIONS = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk"}
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "activation_fn_str": "activation_fn",
    "hook_point_head_index": "hook_head_index",
}

# The values that are supported: with any other value the encoder or decoder would compute something else.
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

# Settings that change no number, such as those that say where an autoencoder comes from (`DictionaryOrigin`).
_NO_EFFECT = {
    "architecture", "activation_fn", "activation_fn_kwargs", "apply_b_dec_to_input", "d_in", "d_sae", "k", "metadata",
    "hook_name", "hook_layer", "model_name", "model_class_name", "model_from_pretrained_kwargs", "dtype", "device",
    "prepend_bos", "context_size", "dataset_path", "dataset_trust_remote_code", "sae_lens_version",
    "sae_lens_training_version", "neuronpedia_id", "seqpos_slice", "use_sparse_activations", "hf_hook_name",
    "exclude_special_tokens", "sequence_separator_token", "disable_concat_sequences", "n_batches_in_buffer",
    "store_batch_size_prompts", "is_dataset_tokenized", "streaming", "autocast", "autocast_lm", "compile_llm",
    "llm_compilation_mode", "compile_sae", "sae_compilation_mode", "training_tokens", "seed", "act_store_device",
    "l1_coefficient", "l0_coefficient", "lr", "lr_scheduler_name", "release", "sae_id",
    # Training settings that SAELens up to version 3 wrote beside the weights.
    "use_cached_activations", "cached_activations_path", "total_training_tokens", "store_batch_size",
    "train_batch_size", "tokens_per_buffer", "b_dec_init_method", "expansion_factor", "from_pretrained_path",
    "lr_warm_up_steps", "use_ghost_grads", "feature_sampling_window", "feature_sampling_method", "resample_batches",
    "feature_reinit_scale", "dead_feature_window", "dead_feature_estimation_method", "dead_feature_threshold",
    "log_to_wandb", "wandb_project", "wandb_entity", "wandb_log_frequency", "n_checkpoints", "checkpoint_path",
    "run_name",
}  # fmt: skip


def _autoencoder(where: Path, given: dict[str, Any], tensors: dict[str, Tensor]) -> Dictionary:
    """Return the dictionary from the settings in cfg.json (at the path `where`) and the tensors of SAELens.

    `given` are the settings as written in the file, `tensors` the weights by name. Raises ValueError for a setting or
    tensor that is not supported.
    """
    settings = {_OLD_NAMES.get(name, name): value for name, value in given.items()}
    metadata: dict[str, Any] = settings.get("metadata") or {}
    where_from = {_OLD_NAMES.get(name, name): value for name, value in metadata.items()}
    settings |= {name: value for name, value in where_from.items() if name in _ALLOWED}
    origin = DictionaryOrigin.read(where, given | metadata, where_from | settings)
    for name, value in settings.items():
        if name not in _NO_EFFECT and name not in _ALLOWED:
            raise ValueError(
                f"{where}: the setting {name}={shown(value)} is unknown, so the features may differ: {_BY_HAND}"
            )
        if name in _ALLOWED and value not in _ALLOWED[name]:
            allowed = _ALLOWED[name][0]
            raise ValueError(f"{where}: {name}={shown(value)} is not supported, only {allowed!r}: {_BY_HAND}")
    kind = settings.get("architecture", "standard")
    function = settings.get("activation_fn", _ACTIVATIONS.get(kind, "relu"))
    if kind == "standard" and function == "topk":  # before SAELens 6, top-k was written as a "standard" architecture
        kind = "topk"
    if kind not in _ACTIVATIONS:
        raise ValueError(
            f"{where}: architecture={shown(kind)} is not supported, only {', '.join(_ACTIVATIONS)}: {_BY_HAND}"
        )
    if function not in ("relu", _ACTIVATIONS[kind]):
        raise ValueError(
            f"{where}: activation_fn={shown(function)} is not supported with architecture={shown(kind)}: {_BY_HAND}"
        )
    given_k = settings.get("k", (settings.get("activation_fn_kwargs") or {}).get("k"))
    k = (whole_number(given_k) or 0) if kind == "topk" else 1
    if k < 1:
        raise ValueError(
            f"{where}: k={shown(given_k)} must be the number of active features (top-k), 1 or more: write there the k "
            "of the training"
        )
    needed = {"W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if kind == "jumprelu" else [])}
    if set(tensors) != needed:
        missing, more = sorted(needed - set(tensors)), sorted(set(tensors) - needed)
        raise ValueError(
            f"{where.parent}: tensors {shown(missing)} are missing, and {shown(more)} are unknown for {shown(kind)}: "
            f"correct architecture= in cfg.json, or {_BY_HAND}"
        )
    w_dec, w_enc = tensors["W_dec"].float(), tensors["W_enc"].float()
    d_sae, d_in = w_dec.shape if w_dec.ndim == 2 else (-1, -1)
    shapes = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "b_dec": (d_in,), "threshold": (d_sae,)}
    for name, shape in shapes.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{where.parent}: {name} has shape {tuple(tensors[name].shape)}, which does not fit W_dec "
                f"{tuple(w_dec.shape)}: {shape} is expected; fetch sae_weights.safetensors again"
            )
    for name, size in (("d_in", d_in), ("d_sae", d_sae)):
        if settings.get(name, size) != size:
            raise ValueError(
                f"{where}: {name}={shown(settings[name])} does not fit W_dec of shape {tuple(w_dec.shape)}: fetch "
                "cfg.json and sae_weights.safetensors of one autoencoder"
            )
    if k > d_sae:
        raise ValueError(
            f"{where}: k={k} is more than the {d_sae} features of the autoencoder: write there the k of the training"
        )
    b_enc, b_dec = tensors["b_enc"].float(), tensors["b_dec"].float()
    threshold = tensors["threshold"].float() if kind == "jumprelu" else None
    subtracted = b_dec if settings.get("apply_b_dec_to_input", True) else torch.zeros_like(b_dec)

    def encode(stream: Tensor) -> Tensor:
        """Return the activations of streams [..., d_in] as the autoencoder computes them, [..., d_sae]."""
        preactivations = (stream.float() - subtracted) @ w_enc + b_enc
        if kind == "topk":
            largest = preactivations.topk(k, dim=-1)
            return torch.zeros_like(preactivations).scatter(-1, largest.indices, largest.values.relu())
        active = preactivations.relu()
        return active if threshold is None else active * (preactivations > threshold)

    hook = settings.get("hook_name", where_from.get("hook_name"))
    return Dictionary(w_dec, b_dec, encode, hook=hook, origin=origin)
