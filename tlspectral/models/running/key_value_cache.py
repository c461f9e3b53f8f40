"""Key/value caches: prompts that share one, whether a cached step is right, and generation that uses none.

Whether a bridge fills the cache that it is given depends on the versions of TransformerLens and transformers and on the
family: from transformers 5.24 on no bridge of TransformerLens 3.9 or 4.3 that computes attention itself does, and in
3.9 the bridges of MPT and of Falcon with ALiBi never do. The tokens in front are then lost without an error.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.interrupts import uninterrupted
from tlspectral.models.hooking.placing import Hook, without_hooks
from tlspectral.models.hooking.user_hooks import acts_inside
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.partial_runs import (
    LAST,
    at,
    last_logits,
    methods_replaced,
    module_hooks,
    unembedding_only,
)

_PROBED_TOKENS = 24
# For `HeldLayers.difference`. Measured in float32: 9e-7 at most over 49 tiny architectures, 3e-6 in 32 layers with
# query and key weights times 16. Where one row of tokens is summed in another order than several: 0.016 at most in
# bfloat16 (0.035 in those layers, where logits are off by 0.14 of the largest) and 0.004 in float16. Without the tokens
# in front: 0.13 (tiny BLOOM) to 1.7.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 0.07
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
        tokens = suffixes.repeat(len(self.tokens), 1)
        with _cached_pass(self.view, hooks):
            logits = self.logits(tokens, torch.arange(len(self.tokens)).repeat_interleave(len(suffixes)))
        return logits[:, -1]

    def logits(
        self, tokens: Int[Tensor, "rows pos"], prompts: Int[Tensor, "rows"], alive: Sequence[int] | None = None
    ) -> Float[Tensor, "rows unembedded d_vocab"]:
        """Return logits of tokens that each follow the prompt whose index is given, under the contexts of the caller.

        `alive` says by layer how many of the rows, the first ones, a caller lets its block run; None for all.
        """
        read, device = self.view.reader, self.view.device
        alive = [len(tokens)] * self.view.n_layers if alive is None else alive
        return read.continued_logits(self.view.model, self.cache, tokens.to(device), prompts.to(device), alive)

    @property
    def bytes_of_prompt(self) -> int:
        """Size of the keys and values of one prompt."""
        return self.view.reader.cache_bytes(self.cache) // len(self.tokens)


def prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    """Run a model on prompts of one length, without gradients, and keep its keys and values.

    Hooks that are on the model stay in force. None where a cached step of this model differs from the uncached pass,
    or has no cache, see `cached_step_difference`.
    """
    difference = cached_step_difference(view)
    return None if difference is None or beyond_rounding(view.model, difference) else _prefill(view, tokens, hooks)


def joined(reads: list[Prefill | None]) -> Prefill | None:
    """Return batches of prompts of one length as one; None where one has no cache, or they cannot be joined."""
    found = [read for read in reads if read is not None]
    if not found or len(found) < len(reads):
        return None
    view = found[0].view
    cache = view.reader.joined_caches([read.cache for read in found])
    return None if cache is None else Prefill(view, torch.cat([read.tokens for read in found]), cache)


def _prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    with _cached_pass(view, hooks):
        cache = view.reader.prefill_cache(view.model, tokens.to(view.device))
    return None if cache is None else Prefill(view, tokens, cache)


def cached_step_difference(view: AttentionView) -> float | None:
    """Return how far what the layers write behind cached tokens is from what they write in the uncached pass.

    It is the difference in `HeldLayers`, of one short prompt, without the user's hooks at hook points. It is measured
    once per model, and each time where something else of the user's acts in it. None where there is no cache to be
    wrong: the model keeps no keys and values (native bridges) or takes none (it raises), or is an encoder, whose keys
    and values change with what follows.
    """
    if acts_inside(view.model, view.hook_points):
        return _measured(view) if view.causal else None
    if view.model not in _differences:
        _differences[view.model] = _measured(view) if view.causal else None
    return _differences[view.model]


def _measured(view: AttentionView) -> float | None:
    tokens = probe_tokens(view.d_vocab, min(_PROBED_TOKENS, view.n_ctx))
    held = HeldLayers([block.module for block in view.blocks])
    with without_hooks(view.model, view.hook_points):
        with held.noted():
            last_logits(view, tokens)
        try:
            with held.compared():
                held.end = tokens.shape[1] - 1
                read = _prefill(view, tokens[:, :-1])
                if read is None:
                    return None
                held.end += 1
                read.last_logits(tokens[:, -1:])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that takes no cache loses none
            return None
    return held.difference


def generation_difference(view: AttentionView) -> float | None:
    """Return how far what the layers write at the second token that a model generates is from an uncached pass.

    As `cached_step_difference`, of the cache that `generate` uses, which in a bridge may hold states beside keys and
    values, and in a HookedTransformer with learned positions counts the cached tokens twice (TransformerLens 3.9). None
    where the model does not generate, and where TransformerLens keeps recurrent states (Bamba, Nemotron H): a step from
    a state is computed in another way than a pass, off by 0.007 of the largest log-probability in a tiny Bamba of
    transformers itself.
    """
    generate = getattr(view.model, "generate", None)
    recurrent = getattr(view.model.cfg, "is_stateful", False)
    if generate is None or recurrent or not view.causal or view.n_ctx < 3:
        return None
    owner = generate.__self__
    forward = owner.forward
    tokens = probe_tokens(view.d_vocab, min(_PROBED_TOKENS, view.n_ctx - 2) + 1).to(view.device)
    held = HeldLayers([block.module for block in view.blocks])
    held.end = tokens.shape[1] - 2

    def choosing(*given: Any, **named: Any) -> Tensor:
        """Run the model on some more tokens, and let it choose the last one of `tokens` whatever it computes."""
        held.end += 1
        logits = forward(*given, **named)
        chosen = torch.zeros_like(logits)
        chosen[..., tokens[0, -1]] = 1.0
        return chosen

    plain = without_hooks(view.model, view.hook_points)
    with plain, evaluating(view.model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with held.noted():
            last_logits(view, tokens)
        try:
            with held.compared(), methods_replaced(owner, {"forward": choosing}):
                generate(tokens[:, :-1], max_new_tokens=2, do_sample=False, stop_at_eos=False, verbose=False)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # one that cannot generate loses no cache
            return None
    return held.difference


class HeldLayers:
    """How far each layer's output in passes over parts of a prompt is from that in one pass over all of it.

    Every layer of the later passes is given what it was given in the first, so that the rounding of one layer is seen
    and not what the layers behind make of it: in 16 bits, or where scores are large, that is as large as an effect.

    Attributes:
        end: how many tokens of the prompt have been read at the end of the pass that comes.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.end = layers, 0
        self._outputs: list[Tensor] = []
        self._place = 0
        self._found: dict[int, list[float]] = {}  # by the end of a pass

    @property
    def difference(self) -> float | None:
        """The root mean square of differences over the layers of a pass, the largest of all passes; None without any.

        Each is relative to the size of what the layer writes there, and NaN where an output has another shape.
        """
        of_passes = [np.sqrt(np.mean(np.square(one))) for one in self._found.values()]
        return float(np.max(of_passes)) if of_passes else None  # NaN if one is

    def noted(self) -> AbstractContextManager[None]:
        """Note what the layers hand on in a pass over the whole prompt."""
        return module_hooks([(layer.register_forward_hook, self._note) for layer in self.layers])

    def compared(self) -> AbstractContextManager[None]:
        """Compare what the layers hand on in passes over parts, and let them hand on what was noted."""
        return module_hooks([(layer.register_forward_hook, self._compare) for layer in self.layers])

    def _note(self, layer: Any, inputs: Any, output: Any) -> None:
        self._outputs.append(_stream_of(output).detach())

    def _compare(self, layer: Any, inputs: Any, output: Any) -> Any:
        found, place = _stream_of(output), self._place % len(self._outputs)
        self._place += 1
        read = slice(self.end - found.shape[-2], self.end)
        expected = self._outputs[place][..., read, :]
        of_pass = self._found.setdefault(self.end, [])
        if expected.shape != found.shape:
            of_pass.append(float("nan"))
            return output
        written = expected if place == 0 else expected - self._outputs[place - 1][..., read, :]
        off, size, whole = (_root_mean_square(one) for one in (found - expected, written, expected))
        # A layer that writes little is rounded with the stream that it writes to.
        of_pass.append(off / (size + torch.finfo(found.dtype).eps / _tolerance(found.dtype) * whole))
        return expected if isinstance(output, Tensor) else type(output)((expected, *output[1:]))


def _stream_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE_OF_HALF if dtype in (torch.float16, torch.bfloat16) else _TOLERANCE


def beyond_rounding(model: Any, difference: float | None) -> bool:
    """Return whether a difference of `HeldLayers` is more than rounding in a model's type, or NaN."""
    return difference is not None and not difference <= _tolerance(next(model.parameters()).dtype)


class WithoutCache:
    """A model's own method of generation, called without its cache. In a copy of the model it is the copy's method."""

    def __init__(self, generate: Callable[..., Any], options: dict[str, Any]) -> None:
        self.generate, self.options = generate, options
        update_wrapper(self, generate)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Generate as the method does, whatever the call says of a cache."""
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
    with (
        checked_at_end(),
        torch.no_grad(),
        evaluating(view.model),
        view.hooks_on(hooks),
        unembedding_only(view, partial(at, predicted=LAST)),
    ):
        yield
