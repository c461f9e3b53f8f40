"""Long prompts: passes in which attention is computed strip by strip, so that memory grows with the prompt's length.

Eager attention keeps several matrices of all queries and keys. From `LONG` tokens on, passes of the library compute
scores and pattern for some hundred queries at a time instead (`running.striped`), with the model's own code. Shorter
prompts run as before, to the bit. The length alone decides, so that a number does not depend on the machine.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.interrupts import uninterrupted
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import Hook, without_hooks
from tlspectral.models.hooking.strips import OfStrips, Strip, strips, takes_strips
from tlspectral.models.hooking.user_hooks import acting_on, of_this_library, without_user_hooks
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.striped import ByStrips, NotByStrips, Striped

LONG = 2048
"""From this many tokens on, attention is computed strip by strip."""

STRIP = 256
"""Queries of a strip."""

_asked: ContextVar[tuple[int, int]] = ContextVar("_asked", default=(STRIP, LONG))
_running: ContextVar[bool] = ContextVar("_running", default=False)


@contextmanager
def strips_of(size: int, least: int = 2) -> Iterator[None]:
    """Use strips of `size` queries for prompts of `least` tokens or more inside the `with` block, for this thread."""
    token = _asked.set((size, least))
    try:
        yield
    finally:
        _asked.reset(token)


def is_long(n_tokens: int) -> bool:
    """Return True if a prompt of `n_tokens` tokens is long."""
    return n_tokens >= _asked.get()[1]


def prompt_strips(n_tokens: int) -> list[Strip]:
    """Return the strips of a prompt of `n_tokens` tokens: one, unless it is long."""
    return [*strips(n_tokens, _asked.get()[0])] if is_long(n_tokens) else [Strip(0, n_tokens, n_tokens)]


def strips_for(view: AttentionView, n_tokens: int) -> list[Strip]:
    """Return the strips in which hooks that take strips get the scores and pattern of a prompt of `n_tokens` tokens.

    A prompt that is not long has one strip. So has a long one where a hook on scores or pattern takes whole matrices,
    because the model's own attention then runs. Raises UnsupportedArchitecture for a long prompt of a model whose
    attention cannot be computed strip by strip.
    """
    if not is_long(n_tokens) or whole_hooks(view):
        return [Strip(0, n_tokens, n_tokens)]
    reason = why_whole(view)
    if reason is not None:
        raise UnsupportedArchitecture(
            f"{view.source['model']}: prompts of {_asked.get()[1]:,} tokens or more are refused here, because {reason}"
            ", and memory would grow with the square of the prompt: give shorter prompts"
        )
    return prompt_strips(n_tokens)


def refuse_long(n_tokens: int, what: str, advice: str) -> None:
    """Raise ValueError if a prompt of `n_tokens` tokens is long. what: what would need matrices of all its queries and
    keys, the beginning of the message. advice: its end, before "or give shorter prompts".
    """
    if is_long(n_tokens):
        raise ValueError(
            f"{what} attention of all queries and keys at once, and a prompt has {n_tokens:,} tokens, of which at most "
            f"{_asked.get()[1] - 1:,} are allowed here: {advice}give shorter prompts"
        )


def strips_noted(strips: list[Strip]) -> dict[str, int]:
    """Return the entry `strip` of a table's attrs: {"strip": queries of a strip}; {} if the prompt is one strip."""
    return {"strip": strips[0].stop} if len(strips) > 1 else {}


def runs_by_strips(view: AttentionView, n_tokens: int) -> bool:
    """Return True if passes over prompts of `n_tokens` tokens compute attention strip by strip.

    The prompts are long then, no hook takes whole matrices, and the model's attention can be computed so.
    """
    return is_long(n_tokens) and not whole_hooks(view) and not why_whole(view)


def run_noted(view: AttentionView, n_tokens: int) -> dict[str, int]:
    """Return {"strip": queries of a strip}, for a table's attrs, if passes over prompts of `n_tokens` tokens compute
    attention strip by strip; otherwise {}.
    """
    return strips_noted(prompt_strips(n_tokens)) if runs_by_strips(view, n_tokens) else {}


@uninterrupted
def in_strips(view: AttentionView) -> Iterator[None]:
    """Let passes over long prompts compute attention strip by strip inside the `with` block.

    Where a hook on scores or pattern takes whole matrices, or the model's attention cannot be computed by strips, the
    model's own attention runs.
    """
    with methods_replaced(view.model, {"forward": partial(_forward, view, view.model.forward)}):
        yield


def _forward(view: AttentionView, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run the model's `forward`, strip by strip if its input, token ids, is a long prompt; return its result."""
    tokens = given[0] if given else named.get("input")
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or _running.get():
        return forward(*given, **named)
    if not runs_by_strips(view, tokens.shape[-1]):
        return forward(*given, **named)
    return _by_strips(view, partial(forward, *given, **named))


def _by_strips(view: AttentionView, run: Callable[[], Any]) -> Any:
    """Call `run`, a pass of the model, with attention strip by strip, and return its result."""
    mode = ByStrips(*_asked.get())
    token = _running.set(True)
    try:
        with ExitStack() as placed:
            for _, block in view.blocks:
                attention = getattr(block, "attn", None)
                if attention is not None:
                    attending = partial(_attending, mode, attention.forward)
                    placed.enter_context(methods_replaced(attention, {"forward": attending}))
            points = _points(view)
            for name, point in view.hook_points.items():
                if name in points:
                    placed.enter_context(methods_replaced(point, {"_call_impl": partial(_passed, point._call_impl)}))
                elif point._forward_hooks:
                    called = partial(_by_itself, mode, point._call_impl)
                    placed.enter_context(methods_replaced(point, {"_call_impl": called}))
            placed.enter_context(mode)
            return run()
    finally:
        _running.reset(token)


def _attending(mode: ByStrips, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run the `forward` of an attention module; products of queries and keys inside are `Striped` tensors."""
    mode.attending = True
    try:
        return forward(*given, **named)
    finally:
        mode.attending = False


def _by_itself(mode: ByStrips, call: Callable[..., Any], activation: Any) -> Any:
    """Call a hook point of other activations. What its hooks compute is not computed strip by strip."""
    outer, mode.computing = mode.computing, True
    try:
        return call(activation)
    finally:
        mode.computing = outer


def _passed(call: Callable[..., Any], activation: Any) -> Any:
    """Call a hook point on an activation. Its hooks get a `Striped` strip by strip, when it is computed."""
    if not isinstance(activation, Striped):
        return call(activation)
    if not activation.spent:
        return activation.through(call)
    # The wrapped module has used its attention already: it is computed once more for the hooks.
    activation.uses += 1
    seen = activation.through(call)
    for strip in activation.made_by.each(activation.shape[-2]):
        seen.of(strip)
    return activation


def _points(view: AttentionView) -> dict[str, Any]:
    """Return the hook points of the model that pass matrices of queries and keys, by name."""
    names = (view.hook_names(layer).get(what) for layer in range(view.n_layers) for what in ("scores", "pattern"))
    return {name: view.hook_points[name] for name in names if name is not None and name in view.hook_points}


def whole_hooks(view: AttentionView) -> list[str]:
    """Return the names of hook points of scores and pattern at which some hook takes whole matrices, and the names of
    the user's changes inside the model (replaced methods and others), which may act on whole matrices too.

    Hooks of the library on modules act on streams alone.
    """
    at_points = {id(point._forward_hooks) for point in view.hook_points.values()}
    inside = [acting for acting in acting_on(view.model) if id(acting.holder) not in at_points]
    return [
        acting.name for acting in inside if acting.holder is None or not of_this_library(acting.holder[acting.key])
    ] + [
        name
        for name, point in _points(view).items()
        if not all(takes_strips(handle.user_hook) for handle in point.fwd_hooks)
        or len(point._forward_hooks) > len(point.fwd_hooks)
        or point._forward_pre_hooks
        or point._backward_hooks
    ]


# --- may a model run by strips? ---

_proved: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # "" or a reason

_PROBED, _PROBED_STRIP = (23, 29, 31, 37, 41), 5


def why_whole(view: AttentionView) -> str | None:
    """Return why attention of the model in `view` cannot be computed strip by strip, as text; None if it can.

    Shown once per model: a short prompt runs both ways, and all patterns and logits have to agree to 1e-5.
    """
    if view.model not in _proved:
        token = _running.set(True)
        try:
            # Hooks of the library on modules cut, keep or skip what the caller's prompts need; they are taken off too.
            with without_hooks(view.model, view.hook_points), without_user_hooks(view.model), torch.no_grad():
                _proved[view.model] = _difference_of_ways(view)
        finally:
            _running.reset(token)
    return _proved[view.model] or None


def _difference_of_ways(view: AttentionView) -> str:
    """Return why a short prompt does not run strip by strip as it runs otherwise, as text; empty if it does."""
    if not view.causal:
        return "the model is an encoder"
    if view.backend == "hooked" and view.model.cfg.positional_embedding_type == "alibi":
        return "HookedTransformer builds the bias of ALiBi for all queries and keys"
    sizes = {size for parameter in view.model.parameters() for size in parameter.shape}
    length = next((n for n in _PROBED if n not in sizes and n <= view.n_ctx), min(_PROBED[0], view.n_ctx))
    tokens = probe_tokens(view.d_vocab, length).to(view.device)
    whole, by_strip = {}, {}

    def keep(kept: dict[int, list[Tensor]], layer: int, pattern: Tensor, strip: Strip, hook: Any) -> None:
        kept.setdefault(layer, []).append(functional.pad(pattern, (0, strip.n_queries - pattern.shape[-1])))

    def hooks(kept: dict[int, list[Tensor]]) -> list[Hook]:
        return [(view.hook_names(layer)["pattern"], OfStrips(partial(keep, kept, layer))) for layer in view.layers]

    with evaluating(view.model), view.hooks_on(hooks(whole)):
        logits = view.model(tokens, return_type="logits")
    try:
        with evaluating(view.model), view.hooks_on(hooks(by_strip)), strips_of(_PROBED_STRIP):
            made = _Squares(length)
            with made:
                found = _by_strips(view, partial(view.model, tokens, return_type="logits"))
    except NotByStrips as error:
        return f"its attention needs all queries at once ({error})"
    if made.largest:
        return f"{made.largest} makes a matrix of all queries and keys"
    pairs = [(logits / logits.abs().max(), found / logits.abs().max())]
    for layer in view.layers:
        if len(by_strip.get(layer, ())) < 2:
            return f"layer {layer} shows no attention pattern"
        pairs.append((whole[layer][0], torch.cat(by_strip[layer], dim=-2)))
    worst = max(float((one - other).float().abs().max()) for one, other in pairs)
    limit = max(_CLOSE, 8 * torch.finfo(logits.dtype).eps)
    return "" if worst <= limit else f"its attention by strips differs from its own by {worst:.1e}"


_CLOSE = 1e-5


class _Squares(TorchDispatchMode):
    """Notes operations that make a tensor with two axes of `length`. `largest` is the name of the last one."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.largest = length, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and [*result.shape].count(self.length) > 1:
            held = [value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)]
            if result.untyped_storage().data_ptr() not in held:  # views of a mask that the model keeps are no new one
                self.largest = str(func)
        return result
