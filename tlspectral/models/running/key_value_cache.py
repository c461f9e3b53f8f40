"""Key/value caches: sharing a prompt's cache, checking a cached step, and generating without a cache.

Whether a bridge fills the cache that it is given depends on the versions of TransformerLens and transformers and on the
family. From transformers 5.24 on, bridges of TransformerLens 3.9 to 4.3 need the hooks of `cache_name` for it. In 3.9
the bridges of MPT and of Falcon with ALiBi never fill it. Earlier tokens are then lost without an error.
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
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import Hook, without_hooks
from tlspectral.models.hooking.user_hooks import acts_inside
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.cache_name import cache_name_hooks
from tlspectral.models.running.long_prompts import in_strips
from tlspectral.models.running.partial_runs import (
    LAST,
    at,
    last_logits,
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
"""Methods of a model that generate, and the options that make each run without a cache."""

_differences: WeakKeyDictionary[Any, float | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Prefill:
    """Prompts of one length and the key/value cache of a model that has read them.

    view: view of the model. tokens: the prompts' ids. cache: an object of the model's own cache class.
    """

    view: AttentionView
    tokens: Int[Tensor, "prompts pos"]
    cache: Any

    def last_logits(
        self, suffixes: Int[Tensor, "suffixes pos"], hooks: Iterable[Hook] = ()
    ) -> Float[Tensor, "rows d_vocab"]:
        """Run the cached prompts, each followed by every suffix, and return the logits of the last token, without
        gradients.

        suffixes: token ids of suffixes of one length. The row of the result is `prompt * len(suffixes) + suffix`.
        hooks: pairs of hook point name and function. They see only positions of the suffix, but patterns and scores
        have a column for every key that the layer keeps.
        """
        tokens = suffixes.repeat(len(self.tokens), 1)
        with _cached_pass(self.view, hooks):
            logits = self.logits(tokens, torch.arange(len(self.tokens)).repeat_interleave(len(suffixes)))
        return logits[:, -1]

    def logits(
        self, tokens: Int[Tensor, "rows pos"], prompts: Int[Tensor, "rows"], alive: Sequence[int] | None = None
    ) -> Float[Tensor, "rows unembedded d_vocab"]:
        """Run `tokens`, whose rows continue the cached prompts, and return the logits of the unembedded positions.

        prompts: for each row, the index of its prompt. alive: for each layer, how many rows it computes, counted from
        the first; default: all. The caller opens the contexts of the pass: hooks, evaluation mode, and which positions
        are unembedded.
        """
        read, device = self.view.reader, self.view.device
        alive = [len(tokens)] * self.view.n_layers if alive is None else alive
        with module_hooks(cache_name_hooks(self.view)):
            return read.continued_logits(self.view.model, self.cache, tokens.to(device), prompts.to(device), alive)

    @property
    def bytes_of_prompt(self) -> int:
        """Size in bytes of one prompt's keys and values."""
        return self.view.reader.cache_bytes(self.cache) // len(self.tokens)


def prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    """Run the model in `view` on `tokens`, prompts of one length, without gradients, and return its cache as a
    `Prefill` (`.view`, `.tokens`, `.cache`).

    hooks: pairs of hook point name and function; hooks on the model act too. None if the model keeps no cache, or if a
    cached step differs from an uncached pass by more than rounding.
    """
    difference = cached_step_difference(view)
    return None if difference is None or beyond_rounding(view.model, difference) else _prefill(view, tokens, hooks)


def joined(reads: list[Prefill | None]) -> Prefill | None:
    """Return several `Prefill` of prompts of one length as a new one; None if one is None or the caches cannot be
    joined.

    reads: the `Prefill`, whose prompts follow each other in the result.
    """
    prefills = [read for read in reads if read is not None]
    if not prefills or len(prefills) < len(reads):
        return None
    view = prefills[0].view
    cache = view.reader.joined_caches([read.cache for read in prefills])
    return None if cache is None else Prefill(view, torch.cat([read.tokens for read in prefills]), cache)


def _prefill(view: AttentionView, tokens: Int[Tensor, "prompts pos"], hooks: Iterable[Hook] = ()) -> Prefill | None:
    """Run the model in `view` on the prompts `tokens` and return its cache as a `Prefill`, None without a cache. The
    cache is not checked.

    hooks: pairs of hook point name and function.
    """
    with _cached_pass(view, hooks), module_hooks(cache_name_hooks(view)), in_strips(view):
        cache = view.reader.prefill_cache(view.model, tokens.to(view.device))
    return None if cache is None else Prefill(view, tokens, cache)


def cached_step_difference(view: AttentionView) -> float | None:
    """Return how far a step of the model in `view` with the key/value cache is from a pass without it, relative to what
    layers write.

    It is the `difference` of `HeldLayers` on one short prompt, without the user's hooks at hook points. It is measured
    once per model (each time if something else of the user's acts inside the model). None if no cache can be wrong: the
    model keeps no keys and values (native bridges), raises when given a cache, or is an encoder, whose keys and values
    depend on later tokens.
    """
    if acts_inside(view.model, view.hook_points):
        return _measured(view) if view.causal else None
    if view.model not in _differences:
        _differences[view.model] = _measured(view) if view.causal else None
    return _differences[view.model]


def _measured(view: AttentionView) -> float | None:
    """Run the model in `view` on a short prompt; return how far a cached step is from an uncached pass; None if the
    model has no cache.

    The number is the `difference` of `HeldLayers`, relative to what layers write.
    """
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
        except Exception:  # a model that accepts no cache cannot lose one
            return None
    return held.difference


def generation_difference(view: AttentionView) -> float | None:
    """Return how far the second token that the model in `view` generates with its cache is from an uncached pass.

    The number is the `difference` of `HeldLayers`, relative to what layers write, for the cache that `generate` uses.
    In a bridge it may hold states besides keys and values. In a HookedTransformer with learned positions it counts the
    cached tokens twice (TransformerLens 3.9).

    None if the model does not generate, or if TransformerLens keeps recurrent states (Bamba, Nemotron H). A step from a
    state is computed differently from a pass; in a tiny Bamba of transformers itself it is off by 0.007 of the largest
    log-probability.
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

    def choosing(*arguments: Any, **named: Any) -> Tensor:
        """Run the model on further tokens, and return logits that select the last one of `tokens`."""
        held.end += 1
        logits = forward(*arguments, **named)
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
        except Exception:  # a model that cannot generate cannot lose a cache
            return None
    return held.difference


class HeldLayers:
    """Compares each layer's output in passes over parts of a prompt with one pass over the whole prompt.

    Use `noted()` around the pass over the whole prompt, then `compared()` around passes over its parts; then read
    `difference`. In the later passes every layer gets the same input as in the first. So only the rounding of single
    layers is measured, not its growth through later layers, which in 16 bits or with large scores is as large as an
    effect.

    Attributes:
        layers: the layers' modules.
        end: number of tokens of the prompt that have been read once the next pass ends.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.end = layers, 0
        self._outputs: list[Tensor] = []
        self._place = 0
        self._found: dict[int, list[float]] = {}  # by the end of a pass

    @property
    def difference(self) -> float | None:
        """Largest difference of layer outputs, over passes, relative to the layers' writes; None without passes.

        For a pass it is the root mean square over layers. It is NaN if an output has another shape.
        """
        of_passes = [np.sqrt(np.mean(np.square(differences))) for differences in self._found.values()]
        return float(np.max(of_passes)) if of_passes else None  # NaN if one is

    def noted(self) -> AbstractContextManager[None]:
        """Return a context manager: during the pass over the whole prompt in its `with` block, the outputs of the
        layers are stored.
        """
        return module_hooks([(layer.register_forward_hook, self._note) for layer in self.layers])

    def compared(self) -> AbstractContextManager[None]:
        """Return a context manager. Passes in its `with` block compare the layers' outputs with the stored outputs, and
        pass the stored outputs on.

        `difference` is then the largest difference over the passes.
        """
        return module_hooks([(layer.register_forward_hook, self._compare) for layer in self.layers])

    def _note(self, layer: Any, inputs: Any, output: Any) -> None:
        """Store the `output` of the module `layer`; `inputs` are not used. PyTorch calls this as a forward hook."""
        self._outputs.append(_stream_of(output).detach())

    def _compare(self, layer: Any, inputs: Any, output: Any) -> Any:
        """Record how far the `output` of the module `layer` is from the stored one, and return the stored one in its
        place.

        `inputs` are not used. PyTorch calls this as a forward hook.
        """
        output_stream, place = _stream_of(output), self._place % len(self._outputs)
        self._place += 1
        read = slice(self.end - output_stream.shape[-2], self.end)
        expected = self._outputs[place][..., read, :]
        of_pass = self._found.setdefault(self.end, [])
        if expected.shape != output_stream.shape:
            of_pass.append(float("nan"))
            return output
        write = expected if place == 0 else expected - self._outputs[place - 1][..., read, :]
        compared = (output_stream - expected, write, expected)
        off, size, whole = (float(values.float().square().mean().sqrt()) for values in compared)
        # A layer that writes little is rounded at the size of the stream to which it writes.
        of_pass.append(off / (size + torch.finfo(output_stream.dtype).eps / _tolerance(output_stream.dtype) * whole))
        return expected if isinstance(output, Tensor) else type(output)((expected, *output[1:]))


def _stream_of(output: Any) -> Tensor:
    """Return the residual stream from a layer's output, which is a tensor or a tuple with the stream first."""
    return output if isinstance(output, Tensor) else output[0]


def _tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference of layer outputs (`HeldLayers`) that rounding in the type `dtype`
    explains.
    """
    return _TOLERANCE_OF_HALF if dtype in (torch.float16, torch.bfloat16) else _TOLERANCE


def beyond_rounding(model: Any, difference: float | None) -> bool:
    """Return True if a relative difference of layer outputs (from `HeldLayers`) is NaN or too large for rounding.

    model: its parameters' type determines the bound. difference: None counts as no difference.
    """
    return difference is not None and not difference <= _tolerance(next(model.parameters()).dtype)


class WithoutCache:
    """A model's method that generates text, called without its key/value cache.

    generate: the method, such as `model.generate`. options: arguments that turn the cache off. Pickled with a model it
    is the copy's method.
    """

    def __init__(self, generate: Callable[..., Any], options: dict[str, Any]) -> None:
        self.generate, self.options = generate, options
        update_wrapper(self, generate)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Generate and return as the wrapped method does, without a cache whatever the arguments say.

        given, named: the method's arguments.
        """
        parameters = signature(self.generate)
        call = dict(parameters.bind(*given, **named).arguments)
        for name, parameter in parameters.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(name, {})
        return self.generate(**{**call, **self.options})

    def __reduce__(self) -> Any:
        return WithoutCache, (self.generate, self.options)


def generating_without_cache(model: Any) -> dict[str, WithoutCache]:
    """Return a dict from name to function: the methods of `model` that generate text, each wrapped so that it runs
    without a key/value cache.

    The model is not changed.
    """
    return {
        name: WithoutCache(getattr(model, name), options)
        for name, options in _GENERATING.items()
        if hasattr(model, name)
    }


@uninterrupted
def _cached_pass(view: AttentionView, hooks: Iterable[Hook]) -> Iterator[None]:
    """Prepare passes of the model in `view` on a cache until the `with` block ends; then the model is as before.

    In the block gradients are off, the model is in evaluation mode with `hooks` (pairs of hook point name and
    function), and only the last position is unembedded.
    """
    with (
        checked_at_end(),
        torch.no_grad(),
        evaluating(view.model),
        view.hooks_on(hooks),
        unembedding_only(view, partial(at, predicted=LAST)),
    ):
        yield
