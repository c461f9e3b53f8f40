"""Checks that an edit of attention reaches the output, and that the edited scores are those of the operators.

Some bridges compute attention elsewhere and discard the edit.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored, UnsupportedArchitecture
from tlspectral.models.hooking.hooks_on_model import Hook, without_hooks
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.padding import probe_tokens
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes

_honoured: WeakKeyDictionary[Any, set[tuple[int, str]]] = WeakKeyDictionary()
_summed: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def require_honoured(view: AttentionView, layer: int, route: str, *, during: Iterable[Hook] = ()) -> None:
    """Prove by one short run, once per model, layer and route, that an edit moves the logits, else EditNotHonored.

    The route is a hook point of scores, pattern, z or what heads read, by its name in `AttentionView.hook_names`.
    The probe runs without the user's hooks, so that they do not record it. The hooks `during` are on the model in the
    run without the edit, and may raise.
    """
    known = _honoured.setdefault(view.model, set())
    if (layer, route) in known:
        return
    tokens = probe_tokens(view.d_vocab)
    name = view.hook_names(layer)[route]

    def edit(activation: Tensor, hook: Any) -> Tensor:
        if route == "z":
            return activation + 1.0
        edited = activation.clone()
        if route in ("scores", "pattern"):
            edited[..., 0] += 1.0  # a shift of one key, which the softmax sees
            return edited
        # The last query, the first key: an edit of the first query, or of all keys alike, need not change a pattern.
        # A ramp, since the norm of queries and keys may take off a constant.
        at = 0 if route == "key" else -1
        edited[:, at] += torch.arange(1, activation.shape[-1] + 1, device=activation.device).to(activation)
        return edited

    with without_hooks(view.model), torch.no_grad():
        with view.hooks_on(during):
            intact = view.logits(tokens)
        with view.hooks_on([(name, edit)]):
            edited = view.logits(tokens)
    if torch.equal(intact, edited):
        raise EditNotHonored(f"an edit of {name} does not change the logits of this model, so an ablation there cannot")
    known.add((layer, route))


def require_writes(view: AttentionView, layers: Iterable[int]) -> None:
    """Prove by one short run, once per model and layer, that the residual stream is a sum of what is written to it.

    The run is without the user's hooks. Raises UnsupportedArchitecture, or as `AttentionView.raw`.
    """
    known = _summed.setdefault(view.model, set())
    missing = [layer for layer in layers if layer not in known]
    if not missing:
        return
    names = [name for layer in missing for point, name in view.hook_names(layer).items() if point in WRITE_POINTS]
    following = [layer + 1 for layer in missing if layer + 1 < view.n_layers]
    names += [view.hook_names(layer)["residual"] for layer in following]
    last = view.hook_names(max(following, default=missing[-1]))["residual" if following else "residual_after"]
    with without_hooks(view.model):
        captured = view.capture(probe_tokens(view.d_vocab), dict.fromkeys(names), last=last)
        for layer in missing:
            checked_writes(view, layer, captured, widened)
            after = captured[view.hook_names(layer)["residual_after"]]
            handed_on = captured.get(view.hook_names(layer + 1)["residual"], after) if layer + 1 in following else after
            if not torch.equal(after, handed_on.to(after.device)):
                raise UnsupportedArchitecture(
                    f"layer {layer + 1}: its residual stream is not that behind layer {layer}, so the share of one "
                    "head is not defined"
                )
            known.add(layer)
