"""`DictionaryOrigin`: the model that a sparse autoencoder was trained on, by its file, compared with a given model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import shown, warn_caller
from tlspectral.models.loading.finding import same_model
from tlspectral.models.reading.norms import is_centred
from tlspectral.models.reading.view import AttentionView

# From this version on SAELens trains on unprocessed models of TransformerLens, before it on processed ones. Exceptions
# are in `model_from_pretrained_kwargs`.
_UNPROCESSED_FROM = (3, 19, 2)
_KEPT = ("model_name", "hook_name", "model_from_pretrained_kwargs", "prepend_bos", "context_size", "dataset_path")
_STEP = re.compile(r"(?:step|checkpoint-)(\d+)")


@dataclass(frozen=True)
class DictionaryOrigin:
    """The model that a dictionary (features of the residual stream, such as a sparse autoencoder) was trained on.

    Read from its cfg.json, in the layout of SAELens.

    Attributes:
        where: path of the file.
        model: name of the model; None if the file does not name it.
        step: its training step, or its number in TransformerLens' list of checkpoints as text; None: the last step.
        centred: True if the writing weights were centred, so that the stream has mean zero over d_model; False if not;
            None if the file does not tell.
        processed_by_default: True if `centred` is None and the file is from a SAELens that centred by default.
        recorded: settings of the file that tables store.
    """

    where: Path
    model: str | None
    step: int | str | None
    centred: bool | None
    processed_by_default: bool
    recorded: dict[str, Any]

    @classmethod
    def read(cls, where: Path, given: Mapping[str, Any], settings: Mapping[str, Any]) -> DictionaryOrigin:
        """Return the origin of a dictionary from its cfg.json, whose path is `where`.

        `given` are the settings as written in the file, `settings` the same with current names and without nesting.
        Raises ValueError for a malformed `model_from_pretrained_kwargs`, or if hook_layer contradicts hook_name.
        """
        options = settings.get("model_from_pretrained_kwargs")
        if not isinstance(options, dict | None):
            raise ValueError(
                f"{where}: model_from_pretrained_kwargs={shown(options)} should be an object of settings: write "
                'for example {"center_writing_weights": false}'
            )
        options = options or {}
        centred = options.get("center_writing_weights")
        if not isinstance(centred, bool | None):
            raise ValueError(
                f"{where}: center_writing_weights={shown(centred)} should be true or false: write one of these there"
            )
        block, layer = re.match(r"blocks\.(\d+)\.", str(settings.get("hook_name"))), settings.get("hook_layer")
        if block and layer is not None and layer != int(block[1]):
            raise ValueError(
                f"{where}: hook_layer={shown(layer)} contradicts hook_name={shown(settings['hook_name'])}: correct the "
                "wrong one"
            )
        version = settings.get("sae_lens_training_version", settings.get("sae_lens_version"))
        numbers = tuple(map(int, re.findall(r"\d+", str(version))[:3]))
        if centred is None and numbers >= _UNPROCESSED_FROM:
            centred = False
        model, old = settings.get("model_name"), bool(numbers) or "hook_point" in given
        return cls(
            where=where,
            model=str(model) if model else None,
            step=_trained_step(options),
            centred=centred,
            processed_by_default=centred is None and old,
            recorded={name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )

    def compare(self, view: AttentionView) -> None:
        """Warn if the model `view` has another name or training step than the dictionary's file says."""
        source = view.source
        name, revision = source["model"], source.get("revision")
        if self.model and name not in (None, "external") and not same_model(self.model, str(name)):
            warn_caller(
                f"{self.where} says that the dictionary was made on {self.model}, and this model is {name}: its "
                f"features mean nothing here; load {self.model}, or a dictionary for this model"
            )
            return
        own_step = _step(revision)
        # A number of a checkpoint in TransformerLens' list (a text here) is not compared with a step.
        same = own_step is not None if isinstance(self.step, str) else self.step == own_step
        if self.model and not same:
            steps = [
                "the last training step" if step is None else f"training step {step}" for step in (self.step, own_step)
            ]
            warn_caller(
                f"{self.where} says that the dictionary was made on {self.model} at {steps[0]}, and this model is at "
                f"{steps[1]}: load the model at that step, or a dictionary for this step"
            )

    def encoder(
        self, view: AttentionView, layer: int, encode: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function like `encode`, from streams to activations, for streams that enter a layer of the model.

        `encode` is the dictionary's own encoder; it is returned itself if the layer's norm is not a LayerNorm. The
        returned function first subtracts the mean over d_model if the dictionary was trained on centred streams and
        this model is raw. It raises ValueError if the dictionary was trained on raw streams and this model is centred,
        or if it was trained on centred streams and this raw model has a norm behind its embedding (BLOOM). It warns
        once for a raw model if the file of an old SAELens does not tell.
        """
        # TransformerLens centres writing weights only in models with LayerNorm. A centred stream is the raw stream
        # minus its mean over d_model, unless a norm stands behind the embedding.
        raw = view.raw(layer)
        if raw.norm.kind != "LN":
            return encode
        name, eps = view.source["model"], torch.finfo(raw.w_o.dtype).eps
        writes_centred = is_centred(raw.w_o, eps)
        embedding_norm, to_warn = view.has_embedding_norm, self.processed_by_default

        def encode_checked(streams: Tensor) -> Tensor:
            """Return the dictionary's activations of streams, which are centred before if its training needs it.

            Raises ValueError if streams cannot be made as in the training.
            """
            nonlocal to_warn
            centred_here = writes_centred or is_centred(streams, eps)
            if self.centred is False and centred_here:
                raise ValueError(
                    f"{self.where}: the dictionary was made on raw streams (center_writing_weights is false), and the "
                    f"streams of {name} are centred, so their mean over d_model is lost. Load the model without "
                    "processing: tls.load_model, or HookedTransformer.from_pretrained_no_processing"
                )
            if self.centred and not centred_here:
                if embedding_norm:
                    raise ValueError(
                        f"{self.where}: the dictionary was made on centred streams (center_writing_weights). {name} "
                        "has a norm behind its embedding, so its raw streams cannot be centred afterwards: give the "
                        "processed model (enable_compatibility_mode, HookedTransformer.from_pretrained)"
                    )
                streams = streams - streams.mean(-1, keepdim=True)
            if to_warn and not centred_here:
                to_warn = False
                warn_caller(
                    f"{self.where} does not say whether the dictionary was made on centred streams. SAELens before "
                    f"{'.'.join(map(str, _UNPROCESSED_FROM))} centred them by default; the streams of this model are "
                    'not centred, and are used as they are. Write "model_from_pretrained_kwargs": '
                    '{"center_writing_weights": true} (or false) into the file'
                )
            return encode(streams)

        return encode_checked


def _trained_step(options: Mapping[str, Any]) -> int | str | None:
    """Return the training step in arguments of `from_pretrained`: a number, or "number N" for a checkpoint index.

    `options` are these arguments: `checkpoint_index`, `checkpoint_value` or `revision`. None if they name no step.
    """
    if options.get("checkpoint_index") is not None:
        return f"number {options['checkpoint_index']}"
    value = options.get("checkpoint_value")
    return _step(options.get("revision")) if value is None else int(value)


def _step(revision: Any) -> int | None:
    """Return the training step in a revision such as "step3000"; None for any other revision."""
    match = _STEP.fullmatch(str(revision))
    return int(match[1]) if match else None
