"""Identity of the model that spectral parameters belong to: a digest of its weights, and log-probabilities.

The digest covers every bit of the weights, but only in one form of the model. A HookedTransformer has folded weights, a
bridge parts of packed projections, another precision other bits. Across forms, log-probabilities of a short prompt tell
models apart.
"""

import json
import math
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
from tlspectral.models.reading.packed import stored_weights
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.passes import whole_logits

IDENTITY = "base"
"""Name of the tensor that holds an identity in files and state dicts, as bytes of JSON."""

_TOKENS = 24
# Tolerances as shares of the largest |log-probability|, in float32 (True) and in half precision (False). Measured
# rounding: 6e-8 between a tiny model of transformers and its bridge, 2e-3 between float32 and bfloat16. Weights of
# another seed differ by 0.16.
_TOLERANCE = {True: 1e-3, False: 0.03}


def identity_of(model: Any) -> dict[str, Any]:
    """Return a dict, for JSON, that identifies the weights of a spectral model.

    The model runs once. Keys: `form` ("checkpoint", "HookedTransformer" or "bridge in compatibility mode"), `dtype` and
    `sha256` of its weights without spectral parameters; `tokens`, a short prompt; and `log_probabilities` of each next
    token of the prompt, with spectral parameters.
    """
    weights = plain_weights(model)
    context = stated_context(model.config) if of_transformers(model) else attention_view(model).n_ctx
    tokens = probe_tokens(_vocabulary(model), min(_TOKENS, context or _TOKENS))
    return {
        "form": _form(model),
        "sha256": weights_digest(weights),
        "dtype": str(_precision(weights)).removeprefix("torch."),
        "tokens": tokens[0].tolist(),
        "log_probabilities": _log_probabilities(model, tokens).tolist(),
    }


def require_identity(stored: Mapping[str, Any], model: Any, where: Any) -> None:
    """Raise IncompatibleCheckpoint unless a spectral model matches a stored identity, a dict of `identity_of`.

    Weights are compared if form and precision allow it, log-probabilities always. `where`: file, for messages.
    """
    weights, precision = plain_weights(model), getattr(torch, stored["dtype"])
    same_form = stored["form"] == _form(model)
    if same_form and torch.promote_types(_precision(weights), precision) == _precision(weights):
        digest = weights_digest(weights)
        if digest != stored["sha256"]:
            raise IncompatibleCheckpoint(
                f"{where} holds spectral parameters that were learned on other weights (SHA-256 "
                f"{stored['sha256'][:12]}, {digest[:12]} in this model): give the base that they were learned on, "
                "loaded in the same way"
            )
    precise = all(dtype.itemsize >= 4 for dtype in (precision, _precision(weights)))
    worst = _difference(stored, model)
    expected = max([1.0, *map(abs, stored["log_probabilities"])])
    if not worst <= _TOLERANCE[precise] * expected:
        raise IncompatibleCheckpoint(
            f"{where} belongs to another model: log-probabilities of a prompt of {len(stored['tokens'])} tokens are "
            f"off by {worst:.1e}: give the base that the parameters were learned on. A model with a function that was "
            "replaced by hand, or of another version of its library, counts as another model"
        )


def _difference(stored: Mapping[str, Any], model: Any) -> float:
    """Return the largest absolute difference between the model's and the stored log-probabilities, on the tokens in the
    identity `stored`.

    It is 0 if neither model has finite values, and infinite if the model's vocabulary is too small for the prompt.
    """
    if max(stored["tokens"]) >= _vocabulary(model):
        return math.inf
    computed = _log_probabilities(model, torch.tensor([stored["tokens"]]))
    expected = torch.tensor(stored["log_probabilities"]).double()
    both_diverged = not bool(computed.isfinite().any() or expected.isfinite().any())
    return 0.0 if both_diverged else float((computed - expected).abs().max())


def as_tensor(identity: Mapping[str, Any]) -> Tensor:
    """Return an identity (a dict) as a tensor of the bytes of its JSON, because a state dict can hold only tensors."""
    return torch.tensor(list(json.dumps(identity).encode()), dtype=torch.uint8)


def from_tensor(stored: Tensor) -> dict[str, Any]:
    """Return the identity (a dict) that `as_tensor` turned into a tensor."""
    return json.loads(bytes(stored.tolist()))


def plain_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model without spectral parameters as a dict by name; detached, but not copied.

    Models of transformers and raw bridges use the names of the checkpoint, other models their names in TransformerLens.
    A quantised weight counts as the tensors that it is stored as.
    """
    own = getattr(model, "rotated", model)  # of a SpectralModel
    if _form(model) == "checkpoint":
        weights = checkpoint_weights(getattr(own, "original_model", own))
    else:
        weights = dict(own.named_parameters())
    plain = stored_weights({name: value for name, value in weights.items() if "spectral" not in name.split(".")})
    return {name: value.detach() for name, value in plain.items()}


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of weights and their names; equal numbers give equal digests in any precision.

    A bias of zeros counts as no bias, because TransformerLens adds such a bias to unembeddings.
    """
    return digest_of(part for name in sorted(weights) for part in _hashed(name, _in_float32(weights[name])))


def of_transformers(model: Any) -> bool:
    """Return True if a model, spectral or not, is a Hugging Face model and not of TransformerLens."""
    return not hasattr(model, "run_with_hooks")


def logits_of(model: Any, tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """Return the logits of a Hugging Face model on `tokens`, run in evaluation mode without cache; its mode is restored
    afterwards.
    """
    with evaluating(model):
        return model(input_ids=tokens.to(model.device), use_cache=False).logits


def _hashed(name: str, value: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors to hash for one weight (`name`, `value`): name with shape as bytes, and the values; () for a
    bias of zeros.
    """
    if name.endswith("bias") and not bool(value.any()):
        return ()
    return torch.tensor([*name.encode(), *value.shape]), value


def _in_float32(value: Tensor) -> Tensor:
    """Return a weight converted to float32; a float64 weight that float32 cannot hold exactly is returned as it is."""
    if not value.is_floating_point() or value.dtype == torch.float32:
        return value
    narrow = value.to(torch.float32)
    return narrow if value.dtype != torch.float64 or torch.equal(narrow.double(), value) else value


def _precision(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Return the torch dtype that all the weights promote to, such as float32 for weights in bfloat16 and float32."""
    return reduce(torch.promote_types, {value.dtype for value in weights.values() if value.is_floating_point()})


def _vocabulary(model: Any) -> int:
    """Return the number of tokens in the model's vocabulary."""
    return model.config.get_text_config().vocab_size if of_transformers(model) else attention_view(model).d_vocab


def _form(model: Any) -> str:
    """Return the form of the model's weights: "checkpoint", "bridge in compatibility mode" or "HookedTransformer"."""
    if of_transformers(model) or (hasattr(model, "original_model") and not model.compatibility_mode):
        return "checkpoint"
    return "bridge in compatibility mode" if hasattr(model, "original_model") else "HookedTransformer"


@torch.no_grad()
def _log_probabilities(model: Any, tokens: Int64[Tensor, "1 pos"]) -> Float64[Tensor, "following"]:
    """Return the log-probability (nats, float64) of each token after the first, given the tokens before it. The model
    runs without user hooks.
    """
    if of_transformers(model):
        logits = logits_of(model, tokens)
    else:
        view = attention_view(model)
        with without_hooks(model, view.hook_points):
            logits = whole_logits(view, tokens)
    of_all = logits[0, :-1].cpu().double().log_softmax(-1)
    return of_all.gather(-1, tokens[0, 1:, None])[:, 0]
