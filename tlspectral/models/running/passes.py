"""Passes of a whole model: its logits, a run under hooks that stops early, and activations at named hook points.

Every pass runs in evaluation mode, in one thread at a time, under the hooks that are already on the model.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook, without_hooks
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading.blocks import refuse_repeated
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.long_prompts import in_strips

_single_runs: WeakSet[Any] = WeakSet()
"""Models for which it is known that one pass runs each layer once."""


class _ForwardStopped(Exception):
    """Raised by a hook to end a forward pass once everything to be measured has been computed."""


def whole_logits(view: AttentionView, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """Run the model in `view` on `tokens` and return the logits of all positions, with gradients unless the caller
    disabled them.

    Hooks on the model act. Raises ValueError if a prompt is longer than the positions that the model has.
    """
    _require_positions(view, tokens)
    with checked_at_end(), evaluating(view.model), in_strips(view):
        return view.model(tokens.to(view.device), return_type="logits")


def run_until(view: AttentionView, tokens: Int[Tensor, "batch pos"], hooks: Iterable[Hook], *, last: str) -> None:
    """Run the model in `view` on `tokens` under `hooks`, without gradients, and stop once the hook point `last` has
    fired.

    Nothing is returned: the hooks, pairs of hook point name and function, keep the results. Hooks already on the
    model act first. Raises ValueError for a prompt longer than the model's positions, UnsupportedArchitecture if the
    model runs a layer several times or `last` never fires.
    """
    _require_positions(view, tokens)
    require_single_runs(view)
    fired = []

    def stop(activation: Tensor, strip: Strip, hook: Any) -> None:
        fired.append(last)
        if strip.is_last:
            raise _ForwardStopped

    placed = view.hooks_on([*hooks, (last, OfStrips(stop))])
    stopping = suppress(_ForwardStopped)
    with checked_at_end(), torch.no_grad(), evaluating(view.model), placed, in_strips(view), stopping:
        view.model(tokens.to(view.device), return_type=None)
    if not fired:
        raise UnsupportedArchitecture(
            f"{last} never fired, so the model does not show this activation: load the model with "
            'attn_implementation="eager"'
        )


def read_patterns(
    view: AttentionView,
    tokens: Int[Tensor, "batch pos"],
    layers: Sequence[int],
    read: Callable[[int, Float[Tensor, "batch heads queries keys"], Strip], Any],
) -> None:
    """Run the model in `view` on `tokens`, and call `read` with the attention pattern of each of the `layers`, which
    ascend.

    `read` gets the layer, the pattern of all heads in a strip and the `Strip`, and returns nothing that is used. Hooks
    on the model act. Raises as `run_until` does, and UnsupportedArchitecture if a layer does not show its pattern.
    """
    shown: set[int] = set()

    def reading(layer: int, pattern: Tensor, strip: Strip, hook: Any) -> None:
        shown.add(layer)
        read(layer, pattern, strip)

    hooks = [(view.hook_names(layer)["pattern"], OfStrips(partial(reading, layer))) for layer in layers]
    run_until(view, tokens, hooks, last=hooks[-1][0])
    require_patterns(layers, shown)  # `run_until` waits only for the last one


def require_patterns(layers: Iterable[int], shown: Container[int]) -> None:
    """Raise UnsupportedArchitecture unless all `layers` are in `shown`, the layers whose pattern a pass has shown."""
    for layer in layers:
        if layer not in shown:
            raise UnsupportedArchitecture(
                f"layer {layer}: the attention never returned its pattern; "
                'load the model with attn_implementation="eager"'
            )


def capture_until(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], names: Iterable[str], *, last: str
) -> dict[str, Tensor]:
    """Run the model in `view` on `tokens` and return the activations at the hook points `names`: a dict from name to
    tensor, without gradients.

    The run stops once the hook point `last` has fired. A point that did not fire or does not exist is missing from the
    dict. Raises ValueError for a prompt longer than the model's positions, UnsupportedArchitecture if the model runs a
    layer several times or `last` never fires.
    """
    captured: dict[str, Tensor] = {}

    def keep(name: str, activation: Tensor, hook: Any) -> None:
        captured[name] = activation.detach()

    run_until(view, tokens, [(name, partial(keep, name)) for name in names if name in view.hook_points], last=last)
    return captured


def require_single_runs(view: AttentionView) -> None:
    """Raise UnsupportedArchitecture if one pass of the model in `view` runs a layer several times, or if two layers
    share one attention.

    A pass of two tokens shows it, without the user's hooks at hook points. Models that passed the check are remembered.
    """
    if view.model in _single_runs:
        return
    fired: set[str] = set()

    def once(name: str, activation: Tensor, hook: Any) -> None:
        if name in fired:
            raise refuse_repeated(view.source["model"], f"{name} fires several times")
        fired.add(name)

    names = [names.get(what) for names in map(view.hook_names, range(view.n_layers)) for what in ("residual", "z")]
    hooks = [(name, partial(once, name)) for name in names if name in view.hook_points]
    tokens = torch.zeros(1, min(2, view.n_ctx), dtype=torch.long)
    with without_hooks(view.model, view.hook_points), torch.no_grad(), view.hooks_on(hooks):
        whole_logits(view, tokens)
    _single_runs.add(view.model)


def note_single_runs(model: Any) -> None:
    """Remember that a model runs each layer once in a pass, so that `require_single_runs` skips its check."""
    _single_runs.add(model)


def _require_positions(view: AttentionView, tokens: Tensor) -> None:
    # Rotary positions can be computed past the context, but tables of positions and ALiBi end there.
    """Raise ValueError if a prompt in `tokens` is longer than the positions of the model in `view`, unless the
    positions are rotary.
    """
    if view.model.cfg.positional_embedding_type != "rotary" and tokens.shape[-1] > view.n_ctx:
        raise ValueError(
            f"the prompt has {tokens.shape[-1]} tokens, and the model has positions for {view.n_ctx}: give shorter "
            "prompts"
        )
