"""Load the encoders BERT and RoBERTa, with or without their head for masked tokens.

The bridges of TransformerLens need a head. An encoder without one, such as a sentence encoder, gets a head that changes
nothing, so its bridge returns the residual stream as logits.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tlspectral.errors import UnsupportedArchitecture

_HEADS = {"bert": "cls", "roberta": "lm_head"}  # the head's module, by model type; the type names the encoder's module


def is_encoder_config(config: Any) -> bool:
    """Return True if a config of transformers describes a BERT or RoBERTa encoder (not a decoder variant)."""
    return config.model_type in _HEADS and not config.is_decoder


def encoder_class(config: Any, stored: Iterable[str]) -> tuple[Any, dict[str, Any]]:
    """Return (class of transformers for an encoder, its keyword options).

    config: the encoder's config. stored: names of the tensors in the files; the class has a head if the files have one.
    The pooling layer, which acts after the last layer, is left out.
    """
    import transformers

    head = f"{_HEADS[config.model_type]}."
    if any(name.startswith(head) for name in stored):
        return transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)], {}
    return transformers.MODEL_MAPPING[type(config)], {"add_pooling_layer": False}


def with_head(model: Any) -> Any:
    """Return a model that can be run for logits: an encoder without a head is put into a new model whose head is the
    identity.

    The encoder itself is used, not a copy, and is not changed. Other models are returned unchanged. model: of
    transformers.
    """
    import transformers

    config = model.config
    if not is_encoder_config(config) or type(model) is not transformers.MODEL_MAPPING[type(config)]:
        return model
    build: Any = transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    with torch.device("meta"):
        whole = build(config)
    setattr(whole, config.model_type, model)
    setattr(whole, _HEADS[config.model_type], nn.Identity())
    return whole.train(model.training)


def require_known_form(model: Any, kind: str) -> None:
    """Raise UnsupportedArchitecture if an encoder has another head than the head for masked tokens.

    model: of transformers. kind: the model's class name, for the message.
    """
    import transformers

    config: Any = type(model.config)
    known: Any = (transformers.MODEL_MAPPING[config], transformers.MODEL_FOR_MASKED_LM_MAPPING[config])
    if not isinstance(model, known):
        raise UnsupportedArchitecture(f"this {kind} has another head; load the encoder by AutoModel, without a head")


def has_no_head(model: Any) -> bool:
    """Return True if a model of transformers is an encoder to which `with_head` gave an identity as head."""
    return is_encoder_config(model.config) and isinstance(getattr(model, _HEADS[model.config.model_type]), nn.Identity)
