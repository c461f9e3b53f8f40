"""Checks that the model which TransformerLens makes of a checkpoint computes what the checkpoint does."""

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.attention import stated_context
from tlspectral.models.loading.damage import first_sentence

_CHECKED_TOKENS = 24
# Relative to the largest |log-probability|. Rounding in float32 was measured as 3e-7 on tiny models and 1.4e-6 on 30
# layers (SmolLM2-135M); a rope scaling left out gave 1e-3 to 0.2.
_TOLERANCE = 1e-4


@torch.no_grad()
def log_probabilities(model: Any) -> Float64[Tensor, "1 pos d_vocab"] | None:
    """Return the log-probabilities of 24 seeded random tokens, on the CPU, of a Hugging Face or TransformerLens model.

    Fewer tokens where the context is shorter. None in half precision, where rounding hides the differences. Raises
    UnsupportedArchitecture for a model that does not run in float64.
    """
    anchor = next(model.parameters())
    if anchor.dtype not in (torch.float32, torch.float64):
        return None
    if hasattr(model, "config"):
        # Of a model that also reads images, the part that reads text.
        vocabulary, context = model.config.get_text_config().vocab_size, stated_context(model.config)
    else:
        vocabulary, context = model.cfg.d_vocab, model.cfg.n_ctx
    length = min(_CHECKED_TOKENS, context or _CHECKED_TOKENS)
    tokens = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    try:
        output = model(tokens.to(anchor.device))
    except RuntimeError as error:
        if anchor.dtype is not torch.float64:
            raise
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not run in float64 ({first_sentence(error)}): load it with dtype='float32'"
        ) from error
    return getattr(output, "logits", output).cpu().double().log_softmax(-1)


def require_numbers(model: Any, found: Float64[Tensor, "1 pos d_vocab"] | None, name: str) -> None:
    """Refuse NaN or infinite weights; they are looked for where log-probabilities are NaN or were not computed.

    Raises BadWeights, which names the first weight, also if only the log-probabilities are NaN.
    """
    if found is not None and not bool(found.isnan().any()):
        return
    for tensor, value in model.named_parameters():
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise BadWeights(
                f"{tensor} of {name}: {bad} of {value.numel()} values are NaN or infinite; load the checkpoint again"
            )
    if found is not None:
        raise BadWeights(
            f"the log-probabilities of {name} are NaN although all of its weights are numbers, in transformers' own "
            "model; compare config.json with the published one"
        )


def require_agreement(model: Any, expected: Float64[Tensor, "1 pos d_vocab"] | None, what: str, advice: str) -> None:
    """Refuse a model whose log-probabilities are not those that are expected; None checks nothing.

    Raises UnsupportedArchitecture if they differ by more than rounding, or the model cannot be run.
    """
    if expected is None:
        return
    try:
        actual, worst = log_probabilities(model), float("inf")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedArchitecture(f"{what} cannot be run ({reason}); {advice}") from error
    if actual is not None and actual.shape == expected.shape:
        worst = float((actual - expected).abs().max())
    if not worst <= _TOLERANCE * float(expected.abs().max()):
        raise UnsupportedArchitecture(
            f"{what} does not compute what the checkpoint does (log-probabilities differ by {worst:.1e}); {advice}"
        )
