"""What the file of a sparse autoencoder says of the model it was made on, compared with the model that is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import warn_caller
from tlspectral.models.loading.finding import same_model
from tlspectral.models.reading.norms import is_centred
from tlspectral.models.reading.view import AttentionView

# SAELens took TransformerLens' processed model up to the version before, and an unprocessed one since; in
# `model_from_pretrained_kwargs` stands what differs from that.
_UNPROCESSED_FROM = (3, 19, 2)
_KEPT = ("model_name", "hook_name", "model_from_pretrained_kwargs", "prepend_bos", "context_size", "dataset_path")
_STEP = re.compile(r"(?:step|checkpoint-)(\d+)")


@dataclass(frozen=True)
class DictionaryOrigin:
    """The model of a dictionary, as its file describes it.

    Attributes:
        where: the file.
        model: name of the model; None: not said.
        step: its training step, or its number in TransformerLens' list of checkpoints; None: the last step.
        centred: True: the writing weights were centred, so the stream has mean zero. False: they were not. None: not
            said.
        processed_by_default: `centred` is not said, and the file is of a SAELens that centred by default.
        said: settings that tables store.
    """

    where: Path
    model: str | None
    step: int | str | None
    centred: bool | None
    processed_by_default: bool
    said: dict[str, Any]

    @classmethod
    def read(cls, where: Path, given: Mapping[str, Any], settings: Mapping[str, Any]) -> DictionaryOrigin:
        """Return the origin in a cfg.json: its settings as `given`, and with today's names and without nesting.

        Raises ValueError for `model_from_pretrained_kwargs` of another form, and layers that contradict each other.
        """
        options = settings.get("model_from_pretrained_kwargs")
        if not isinstance(options, dict | None):
            raise ValueError(f"{where}: model_from_pretrained_kwargs={options!r} should be an object of settings")
        options = options or {}
        centred = options.get("center_writing_weights")
        if not isinstance(centred, bool | None):
            raise ValueError(f"{where}: center_writing_weights={centred!r} should be true or false")
        block, layer = re.match(r"blocks\.(\d+)\.", str(settings.get("hook_name"))), settings.get("hook_layer")
        if block and layer is not None and layer != int(block[1]):
            raise ValueError(f"{where}: hook_layer={layer!r} contradicts hook_name={settings['hook_name']!r}")
        version = settings.get("sae_lens_training_version", settings.get("sae_lens_version"))
        numbers = tuple(map(int, re.findall(r"\d+", str(version))[:3]))
        if centred is None and numbers >= _UNPROCESSED_FROM:
            centred = False
        model, old = settings.get("model_name"), bool(numbers) or "hook_point" in given
        return cls(
            where=where,
            model=str(model) if model else None,
            step=_said_step(options),
            centred=centred,
            processed_by_default=centred is None and old,
            said={name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )

    def compare(self, view: AttentionView) -> None:
        """Warn where the model's name or training step is not the one in the file."""
        source = view.source
        name, revision = source["model"], source.get("revision")
        if self.model and name not in (None, "external") and not same_model(self.model, str(name)):
            warn_caller(
                f"{self.where} says that the dictionary was made on {self.model}, and this model is {name}: on another "
                "model its features mean nothing"
            )
            return
        given = _step(revision)
        # A number of a checkpoint in TransformerLens' list (a text here) is not compared with a step.
        same = given is not None if isinstance(self.step, str) else self.step == given
        if self.model and not same:
            steps = [
                "the last training step" if step is None else f"training step {step}" for step in (self.step, given)
            ]
            warn_caller(
                f"{self.where} says that the dictionary was made on {self.model} at {steps[0]}, and this model is at "
                f"{steps[1]}"
            )

    def encoder(
        self, view: AttentionView, layer: int, encode: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return the encoder to use on the streams that enter a layer of this model.

        TransformerLens centres writing weights only in models with LayerNorm. A centred stream is the raw stream
        minus its mean over d_model, so the encoder subtracts that mean if the dictionary was trained on centred streams
        and this model is raw. The encoder raises ValueError in two cases: the dictionary was trained on raw streams and
        this model is centred, so the mean is lost; or the model has a norm behind its embedding (BLOOM), where the
        centred stream is not the raw stream minus its mean.
        """
        raw = view.raw(layer)
        if raw.norm.kind != "LN":
            return encode
        name, eps = view.source["model"], torch.finfo(raw.w_o.dtype).eps
        writes_centred = is_centred(raw.w_o, eps)
        embedding_norm, to_warn = view.has_embedding_norm, self.processed_by_default

        def encode_checked(streams: Tensor) -> Tensor:
            nonlocal to_warn
            centred_here = writes_centred or is_centred(streams, eps)
            if self.centred is False and centred_here:
                raise ValueError(
                    f"{self.where}: the dictionary was made on streams as they are (center_writing_weights is false), "
                    f"and the streams of this model, {name}, are centred: their mean over d_model is lost. Load the "
                    "model without processing (load_model; HookedTransformer.from_pretrained_no_processing)"
                )
            if self.centred and not centred_here:
                if embedding_norm:
                    raise ValueError(
                        f"{self.where}: the dictionary was made on a model with center_writing_weights, and {name} has "
                        "a norm behind its embedding, so that its centred streams cannot be made of raw ones: give "
                        "the model as TransformerLens processes it (enable_compatibility_mode, from_pretrained)"
                    )
                streams = streams - streams.mean(-1, keepdim=True)
            if to_warn and not centred_here:
                to_warn = False
                warn_caller(
                    f"{self.where} does not say whether the dictionary was made on centred streams, and SAELens before "
                    f"{'.'.join(map(str, _UNPROCESSED_FROM))} centred them by default; the streams of this model are "
                    'not centred, and are taken as they are. Write "model_from_pretrained_kwargs": '
                    '{"center_writing_weights": true} (or false) into the file'
                )
            return encode(streams)

        return encode_checked


def _said_step(options: Mapping[str, Any]) -> int | str | None:
    """Return the training step in arguments of `from_pretrained`."""
    if options.get("checkpoint_index") is not None:
        return f"number {options['checkpoint_index']}"
    value = options.get("checkpoint_value")
    return _step(options.get("revision")) if value is None else int(value)


def _step(revision: Any) -> int | None:
    """Return the training step that a revision names; None for another revision, and for none."""
    match = _STEP.fullmatch(str(revision))
    return int(match[1]) if match else None
