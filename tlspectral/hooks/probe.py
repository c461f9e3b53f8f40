"""Proofs, made by short runs and kept for a model: that an edit of attention reaches the output, and others.

Some bridges compute attention elsewhere and discard the edit.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored, TlspectralError, UnsupportedArchitecture
from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook, without_hooks
from tlspectral.models.hooking.user_hooks import acting_on, acts_inside
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.partial_runs import LAST, logits_at
from tlspectral.models.running.passes import capture_until, require_single_runs, whole_logits
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes

Checks = Callable[[int], Iterable[Hook]]
"""Hooks of a layer that raise where its activations in a run without an edit are not as expected."""


@dataclass
class _Proofs:
    """Layers of a model whose edits on one route were proved, and whether the run of all layers was made."""

    layers: set[int] = field(default_factory=set)
    together: bool = False


_proofs: WeakKeyDictionary[Any, dict[str, _Proofs]] = WeakKeyDictionary()
_summed: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
_of_state: WeakKeyDictionary[Any, tuple[Hashable, set[Hashable]]] = WeakKeyDictionary()

_BEYOND_ROUNDING = 100.0
"""How many times the largest difference between rows without an edit the logits of an edited row have to move.

Measured: 0 between rows without an edit on a CPU, where an edit moves logits of SmolLM2-135M by 3.8 and more.
"""


def require_honoured(view: AttentionView, layer: int, route: str, *, checks: Checks | None = None) -> None:
    """Prove by a short run, once per model, layer and route, that an edit moves the logits, else EditNotHonored.

    The route is a hook point of scores, pattern, z or what heads read, by its name in `AttentionView.hook_names`.
    The probe runs without the user's hooks, so that they do not record it. The `checks` of a layer are on the model in
    a run without the edit, and may raise.

    The first layer of a route is proved alone. When a second one is asked for, all layers are proved in one run, each
    by a row of the batch that is edited in this layer. A layer that this leaves in doubt is proved alone when it is
    asked for, so that only its own ablations are refused.

    Where something of the user's acts inside the modules, such as a replaced forward, the proof is made with it, each
    time: it may discard the edit.
    """
    acting = acts_inside(view.model, view.hook_points)
    proofs = _Proofs() if acting else _proofs.setdefault(view.model, defaultdict(_Proofs))[route]
    if layer in proofs.layers:
        return
    require_single_runs(view)
    with without_hooks(view.model, view.hook_points), evaluating(view.model), torch.no_grad():
        if proofs.layers and not proofs.together:
            proofs.together = True
            proofs.layers |= _honoured_together(view, route, checks)
        if layer not in proofs.layers:
            _require_alone(view, layer, route, checks)
    proofs.layers.add(layer)


def _require_alone(view: AttentionView, layer: int, route: str, checks: Checks | None) -> None:
    tokens = probe_tokens(view.d_vocab, min(4, view.n_ctx))
    name = view.hook_names(layer)[route]
    with view.hooks_on(() if checks is None else checks(layer)):
        intact = whole_logits(view, tokens)
    for sign in (1.0, -1.0):
        with view.hooks_on([(name, partial(_edited, view, layer, route, slice(None), sign))]):
            if not torch.equal(intact, whole_logits(view, tokens)):
                return
    raise EditNotHonored(f"an edit of {name} does not change the logits of this model, so an ablation there cannot")


def _honoured_together(view: AttentionView, route: str, checks: Checks | None) -> set[int]:
    """Return layers that pass their checks and whose edit moves the logits of its row clearly beyond rounding.

    Behind the row of each layer stands one without an edit. What these rows differ by is rounding.
    """
    tokens = probe_tokens(view.d_vocab, min(4, view.n_ctx))
    layers = [layer for layer in view.layers if route in view.hook_names(layer)]
    failed: set[int] = set()
    if checks is not None:
        checking = [(name, partial(_noted, failed, one, check)) for one in layers for name, check in checks(one)]
        with view.hooks_on(checking):
            whole_logits(view, tokens)
    edits = [
        (view.hook_names(layer)[route], partial(_edited, view, layer, route, slice(2 * row, 2 * row + 1), 1.0))
        for row, layer in enumerate(layers)
    ]
    with view.hooks_on(edits):
        logits = logits_at(view, tokens.repeat(2 * len(layers), 1), LAST)
    edited, intact = logits.flatten(1).unflatten(0, (-1, 2)).unbind(1)
    moved = (edited - intact).abs().amax(1) > _BEYOND_ROUNDING * (intact - intact[0]).abs().amax()
    return {layer for layer, one in zip(layers, moved.tolist(), strict=True) if one} - failed


def _noted(failed: set[int], layer: int, check: Callable[..., Any], activation: Tensor, hook: Any) -> None:
    """Run a check, and note its layer where it raises."""
    try:
        with checked_at_end():
            check(activation, hook=hook)
    except TlspectralError:
        failed.add(layer)


def _edited(
    view: AttentionView, layer: int, route: str, rows: slice, sign: float, activation: Tensor, hook: Any
) -> Tensor:
    """Return an activation with an edit of some rows, larger than what it edits.

    A small edit can be lost: a softmax with one large score hides it, and so does rounding of large numbers. One edit
    may move what is largest already, that with the other sign does not.
    """
    edited = activation.clone()
    chosen = edited[rows]
    counted = chosen.masked_fill(~view.reader.unmasked(view.model, layer, chosen), 0.0) if route == "scores" else chosen
    size = sign * counted.abs().amax().clamp_min(1.0)
    if route == "z":
        chosen += size
    elif route in ("scores", "pattern"):
        chosen[..., 0] += 3.0 * size  # of one key, as the softmax sees no shift of all
    else:
        # The last query, the first key: an edit of the first query, or of all keys alike, need not change a pattern.
        # A ramp, since the norm of queries and keys may take off a constant.
        at = 0 if route == "key" else -1
        width = activation.shape[-1]
        chosen[:, at] += 4.0 * size * torch.arange(1, width + 1, device=activation.device).to(activation) / width
    return edited


def require_writes(view: AttentionView, layers: Iterable[int]) -> None:
    """Prove by one short run, once per model and layer, that the residual stream is a sum of what is written to it.

    The run is without the user's hooks at hook points; with what else of the user's acts, it is made each time. Raises
    UnsupportedArchitecture where it is not, or where the layer cannot be read.
    """
    acting = acts_inside(view.model, view.hook_points)
    known = set[int]() if acting else _summed.setdefault(view.model, set())
    missing = [layer for layer in layers if layer not in known]
    if not missing:
        return
    names = [name for layer in missing for point, name in view.hook_names(layer).items() if point in WRITE_POINTS]
    following = [layer + 1 for layer in missing if layer + 1 < view.n_layers]
    names += [view.hook_names(layer)["residual"] for layer in following]
    last = view.hook_names(max(following, default=missing[-1]))["residual" if following else "residual_after"]
    with without_hooks(view.model, view.hook_points):
        captured = capture_until(view, probe_tokens(view.d_vocab, min(4, view.n_ctx)), dict.fromkeys(names), last=last)
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


def proved_in_state(view: AttentionView, what: Hashable, prove: Callable[[], None]) -> None:
    """Make a proof that depends on weights and hooks, once for each state of the model (`AttentionView.state`).

    `prove` runs under the hooks that are on the model, and raises where it fails, which is not remembered. Where
    anything of the user's acts in the passes, at hook points too, it is made each time.
    """
    if next(acting_on(view.model), None) is not None:
        prove()
        return
    now = view.state()
    then, proved = _of_state.get(view.model, (None, set[Hashable]()))
    if then != now:
        proved = set[Hashable]()
        _of_state[view.model] = now, proved
    if what not in proved:
        prove()
        proved.add(what)
