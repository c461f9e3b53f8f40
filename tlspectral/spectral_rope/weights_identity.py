"""Which model spectral parameters belong to: a digest of the weights under them, and what the whole model computes.

The digest knows every bit of the weights, in one form of the model. Across forms, log-probabilities of a short prompt
tell models apart: a HookedTransformer has folded weights, a bridge parts of packed projections, another precision other
bits.
"""

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import without_hooks
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.bridge import stated_context
from tlspectral.models.reading.checkpoint_weights import checkpoint_weights
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.running.batches import probe_tokens

IDENTITY = "base"
"""Name of the tensor that holds an identity in files and state dicts, as the bytes of JSON."""

_TOKENS = 24
# Shares of the largest |log-probability|, in float32 and in half precision: rounding was measured as 6e-8 between a
# tiny model of transformers and its bridge, and as 2e-3 between float32 and bfloat16. Weights of another seed were off
# by 0.16.
_TOLERANCE = {True: 1e-3, False: 0.03}


def identity_of(model: Any) -> dict[str, Any]:
    """Return the identity of a spectral model, as JSON: `form`, `dtype` and `sha256` of its weights without spectral
    parameters, and `log_probabilities` of the last of `tokens` with them."""
    weights = plain_weights(model)
    return {"form": _form(model), "sha256": weights_digest(weights), **probe_of(model, weights)}


def probe_of(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a model with these plain weights computes, as JSON: `log_probabilities` of the last of `tokens`, and
    the `dtype` of the weights."""
    context = stated_context(model.config) if _of_transformers(model) else attention_view(model).n_ctx
    tokens = probe_tokens(_vocabulary(model), min(_TOKENS, context or _TOKENS))
    return {
        "dtype": str(_precision(weights)).removeprefix("torch."),
        "tokens": tokens[0].tolist(),
        "log_probabilities": _log_probabilities(model, tokens).tolist(),
    }


def require_same_weights(stored: Mapping[str, Any], model: Any, where: Any) -> None:
    """Refuse a model, spectral or not, by IncompatibleCheckpoint if its weights do not match an identity.

    Nothing is said of a model in another form, or of less precision than the weights had.
    """
    weights, precision = plain_weights(model), getattr(torch, stored["dtype"])
    if stored["form"] != _form(model) or torch.promote_types(_precision(weights), precision) != _precision(weights):
        return
    found = weights_digest(weights)
    if found != stored["sha256"]:
        raise IncompatibleCheckpoint(
            f"{where} holds spectral parameters that were learned on other weights (SHA-256 {stored['sha256'][:12]}, "
            f"{found[:12]} in this model): give the base that they were learned on, loaded in the same way"
        )


def require_same_function(stored: Mapping[str, Any], spectral: Any, where: Any) -> None:
    """Refuse a spectral model by IncompatibleCheckpoint if its log-probabilities do not match an identity's."""
    if max(stored["tokens"]) >= _vocabulary(spectral):
        raise IncompatibleCheckpoint(
            f"{where} holds spectral parameters of a model that knows more tokens than the {_vocabulary(spectral)} of "
            "this one: give the base that they were learned on"
        )
    worst = function_difference(stored, spectral)
    if worst is not None:
        raise IncompatibleCheckpoint(
            f"{where} holds spectral parameters of another model: log-probabilities of a prompt of "
            f"{len(stored['tokens'])} tokens are off by {worst:.1e}; give the base that they were learned on"
        )


def function_difference(stored: Mapping[str, Any], spectral: Any) -> float | None:
    """Return by how much log-probabilities differ from those of a probe, None where rounding can be the reason."""
    tokens, expected = torch.tensor([stored["tokens"]]), torch.tensor(stored["log_probabilities"]).double()
    found = _log_probabilities(spectral, tokens)
    precise = all(
        dtype.itemsize >= 4 for dtype in (getattr(torch, stored["dtype"]), _precision(plain_weights(spectral)))
    )
    worst = float((found - expected).abs().max())
    allowed = _TOLERANCE[precise] * max(1.0, float(expected.abs().max()))
    both_diverged = not bool(found.isfinite().any() or expected.isfinite().any())
    return None if worst <= allowed or both_diverged else worst


def as_tensor(identity: Mapping[str, Any]) -> Tensor:
    """Return an identity as a tensor, since a state dict holds nothing else."""
    return torch.tensor(list(json.dumps(identity).encode()), dtype=torch.uint8)


def from_tensor(stored: Tensor) -> dict[str, Any]:
    """Return the identity that `as_tensor` was given."""
    return json.loads(bytes(stored.tolist()))


def plain_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model, spectral or not, without spectral parameters.

    Weights of transformers and raw bridges have their names in the checkpoint, others their names in TransformerLens.
    """
    own = getattr(model, "rotated", model)  # of a SpectralModel
    if _form(model) == "checkpoint":
        weights = checkpoint_weights(getattr(own, "original_model", own))
    else:
        weights = dict(own.named_parameters())
    return {name: value.detach() for name, value in weights.items() if "spectral" not in name.split(".")}


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights and their names, equal for equal numbers in any precision.

    A bias of zeros counts as none, since TransformerLens adds one to unembeddings.
    """
    return digest_of(part for name in sorted(weights) for part in _hashed(name, _in_float32(weights[name])))


def logits_of(model: Any, tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """Return the logits of a model of transformers in evaluation mode."""
    with evaluating(model):
        return model(input_ids=tokens.to(model.device), use_cache=False).logits


def _hashed(name: str, value: Tensor) -> tuple[Tensor, ...]:
    if name.endswith("bias") and not bool(value.any()):
        return ()
    return torch.tensor([*name.encode(), *value.shape]), value


def _in_float32(value: Tensor) -> Tensor:
    if not value.is_floating_point() or value.dtype == torch.float32:
        return value
    narrow = value.to(torch.float32)
    return narrow if value.dtype != torch.float64 or torch.equal(narrow.double(), value) else value


def _precision(weights: Mapping[str, Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {value.dtype for value in weights.values() if value.is_floating_point()})


def _vocabulary(model: Any) -> int:
    return model.config.get_text_config().vocab_size if _of_transformers(model) else attention_view(model).d_vocab


def _of_transformers(model: Any) -> bool:
    return not hasattr(model, "run_with_hooks")


def _form(model: Any) -> str:
    if _of_transformers(model) or (hasattr(model, "original_model") and not model.compatibility_mode):
        return "checkpoint"
    return "bridge in compatibility mode" if hasattr(model, "original_model") else "HookedTransformer"


@torch.no_grad()
def _log_probabilities(model: Any, tokens: Int64[Tensor, "1 pos"]) -> Float64[Tensor, "following"]:
    if _of_transformers(model):
        logits = logits_of(model, tokens)
    else:
        view = attention_view(model)
        with without_hooks(model, view.hook_points):
            logits = view.logits(tokens)
    of_all = logits[0, :-1].cpu().double().log_softmax(-1)
    return of_all.gather(-1, tokens[0, 1:, None])[:, 0]
