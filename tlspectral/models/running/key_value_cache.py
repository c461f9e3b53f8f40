"""Key/value caches: prompts that share one, whether a cached step is right, and generation that uses none.

Whether a bridge fills the cache that it is given depends on the versions of TransformerLens and transformers and on the
family: from transformers 5.24 on no bridge of TransformerLens 3.9 or 4.3 that computes attention itself does, and in
3.9 those of MPT and of Falcon with ALiBi never do. The tokens in front are then lost without an error.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.hooking.hooks_on_model import Hook, evaluating, without_hooks
from tlspectral.models.hooking.interrupts import uninterrupted
from tlspectral.models.hooking.pass_checks import checked_at_end
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.padding import probe_tokens
from tlspectral.models.running.partial_runs import LAST, last_logits, methods_replaced, unembedding_only

_PROBED_TOKENS = 24
# Relative to the largest |log-probability|. Measured in float32: 1.8e-7 at most over 49 tiny architectures, 1.0e-6 on
# 30 layers (SmolLM2-135M); 0 in bfloat16. Without the tokens in front: 0.013 (tiny BLOOM) to 0.32 on tiny models, 0.59
# on SmolLM2-135M.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-4, 0.03
_GENERATING: dict[str, dict[str, Any]] = {
    "generate": {"use_past_kv_cache": False},
    "generate_stream": {"use_past_kv_cache": False},
    "hf_generate": {"use_past_kv_cache": False, "use_cache": False},
}
"""Methods of a model that generate, and what lets each run without a cache."""

_differences: WeakKeyDictionary[Any, float | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Prefill:
    """Prompts of one length that a model has read, with its key/value cache, which is of the model's own class."""

    view: AttentionView
    tokens: Int[Tensor, "prompts pos"]
    cache: Any

    def last_logits(
        self, suffixes: Int[Tensor, "suffixes pos"], hooks: Iterable[Hook] = ()
    ) -> Float[Tensor, "rows d_vocab"]:
        """Return logits of the last token of every prompt followed by every suffix, without gradients.

        Their row is `prompt * len(suffixes) + suffix`. Hooks see the positions of the suffix alone, except that
        patterns and scores have a column for each key that the layer keeps.
        """
        rows = suffixes.repeat(len(self.tokens), 1).to(self.view.device)
        with _cached_pass(self.view, hooks):
            logits = self.view._reader.continued_logits(self.view.model, self.cache, rows, len(suffixes))
        return logits[:, -1]


def prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    """Run a model on prompts of one length, without gradients, and keep its keys and values.

    Hooks that are on the model stay in force. None where a cached step of this model is not that of the uncached pass,
    or has no cache, see `cached_step_difference`.
    """
    difference = cached_step_difference(view)
    return None if difference is None or beyond_rounding(view.model, difference) else _prefill(view, tokens, hooks)


def _prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    with _cached_pass(view, hooks):
        cache = view._reader.prefill_cache(view.model, tokens.to(view.device))
    return None if cache is None else Prefill(view, tokens, cache)


def cached_step_difference(view: AttentionView) -> float | None:
    """Return how far the log-probabilities behind cached tokens are from those of the uncached pass.

    It is relative to the largest |log-probability|, of one short prompt, without the user's hooks, and measured once
    per model. None where there is no cache to be wrong: the model keeps no keys and values (native bridges) or takes
    none (it raises), or is an encoder, whose keys and values change with what follows.
    """
    if view.model not in _differences:
        _differences[view.model] = _measured(view) if view.causal else None
    return _differences[view.model]


def _measured(view: AttentionView) -> float | None:
    tokens = probe_tokens(view.d_vocab, min(_PROBED_TOKENS, view.n_ctx))
    with without_hooks(view.model, view.hook_points):
        expected = last_logits(view, tokens)
        try:
            read = _prefill(view, tokens[:, :-1])
            found = None if read is None else read.last_logits(tokens[:, -1:])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that takes no cache loses none
            return None
    return None if found is None else relative_difference(found, expected)


def generation_difference(view: AttentionView) -> float | None:
    """Return how far the log-probabilities of the second token that a model generates are from an uncached pass.

    As `cached_step_difference`, of the cache that `generate` uses, which in a bridge may hold states beside keys and
    values, and in a HookedTransformer with learned positions counts the cached tokens twice (TransformerLens 3.9). None
    where the model does not generate, and where TransformerLens keeps recurrent states (Bamba, Nemotron H): a step from
    a state is computed in another way than a pass, off by 0.007 of the largest in a tiny Bamba of transformers itself.
    """
    generate = getattr(view.model, "generate", None)
    recurrent = getattr(view.model.cfg, "is_stateful", False)
    if generate is None or recurrent or not view.causal or view.n_ctx < 3:
        return None
    owner, passes = generate.__self__, list[Tensor]()
    forward = owner.forward

    def kept(*given: Any, **named: Any) -> Tensor:
        passes.append(forward(*given, **named))
        return passes[-1]

    tokens = probe_tokens(view.d_vocab, min(_PROBED_TOKENS, view.n_ctx - 2)).to(view.device)
    with (
        without_hooks(view.model, view.hook_points),
        evaluating(view.model),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with methods_replaced(owner, {"forward": kept}):
                text = generate(tokens, max_new_tokens=2, do_sample=False, stop_at_eos=False, verbose=False)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # one that cannot generate loses no cache
            return None
        return relative_difference(passes[-1][:, -1], last_logits(view, text[:, :-1])) if passes else None


def relative_difference(found: Float[Tensor, "*batch d_vocab"], expected: Float[Tensor, "*batch d_vocab"]) -> float:
    """Return the largest difference of log-probabilities, relative to the largest |log-probability| expected."""
    actual, wanted = (logits.cpu().double().log_softmax(-1) for logits in (found, expected))
    return float((actual - wanted).abs().max() / wanted.abs().max())


def beyond_rounding(model: Any, difference: float | None) -> bool:
    """Return whether a difference of log-probabilities of a model is more than rounding in its type, or NaN."""
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    return difference is not None and not difference <= (_TOLERANCE_OF_HALF if half else _TOLERANCE)


class WithoutCache:
    """A model's own method of generation, called without its cache. In a copy of the model it is the copy's method."""

    def __init__(self, generate: Callable[..., Any], options: dict[str, Any]) -> None:
        self.generate, self.options = generate, options
        update_wrapper(self, generate)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """As the method, whatever the call says of a cache."""
        parameters = signature(self.generate)
        call = dict(parameters.bind(*given, **named).arguments)
        for name, parameter in parameters.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(name, {})
        return self.generate(**{**call, **self.options})

    def __reduce__(self) -> Any:
        return WithoutCache, (self.generate, self.options)


def generating_without_cache(model: Any) -> dict[str, WithoutCache]:
    """Return the methods by which a model generates, by name, each called without a key/value cache."""
    return {
        name: WithoutCache(getattr(model, name), options)
        for name, options in _GENERATING.items()
        if hasattr(model, name)
    }


@uninterrupted
def _cached_pass(view: AttentionView, hooks: Iterable[Hook]) -> Iterator[None]:
    with checked_at_end(), torch.no_grad(), evaluating(view.model), view.hooks_on(hooks), unembedding_only(view, LAST):
        yield
