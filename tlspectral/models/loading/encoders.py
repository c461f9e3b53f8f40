"""BERT and RoBERTa, with their head for masked tokens or alone.

TransformerLens has bridges of them with that head. An encoder without it, such as one that embeds sentences, gets a
head that changes nothing, so that the bridge returns the residual stream as its logits.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tlspectral.errors import UnsupportedArchitecture

_HEADS = {"bert": "cls", "roberta": "lm_head"}  # the module of the head, by model type; its base has the type's name


def is_encoder_config(config: Any) -> bool:
    """Return whether a config describes an encoder that is read."""
    return config.model_type in _HEADS and not config.is_decoder


def encoder_class(config: Any, stored: Iterable[str]) -> tuple[Any, dict[str, Any]]:
    """Return transformers' class for the weights of an encoder, with a head where the files hold one, and its options.

    A pooling layer acts on the first token behind the last layer; it is left out.
    """
    import transformers

    head = f"{_HEADS[config.model_type]}."
    if any(name.startswith(head) for name in stored):
        return transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)], {}
    return transformers.MODEL_MAPPING[type(config)], {"add_pooling_layer": False}


def with_head(model: Any) -> Any:
    """Return an encoder that has no head with one that hands on the residual stream; other models as they are."""
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
    """Refuse an encoder that is neither alone nor with its head for masked tokens. Raises UnsupportedArchitecture."""
    import transformers

    config: Any = type(model.config)
    known: Any = (transformers.MODEL_MAPPING[config], transformers.MODEL_FOR_MASKED_LM_MAPPING[config])
    if not isinstance(model, known):
        raise UnsupportedArchitecture(f"this {kind} has another head; load the encoder by AutoModel, without a head")


def has_no_head(model: Any) -> bool:
    """Return whether a model is an encoder of `with_head`, alone."""
    return is_encoder_config(model.config) and isinstance(getattr(model, _HEADS[model.config.model_type]), nn.Identity)
