"""Short runs that prove something about a model, such as: an edit of attention changes the logits.

Some bridges compute attention elsewhere and ignore the edit. A proof is made once per model and remembered.
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
"""Function from a layer to hooks that raise an error if activations of an unedited run are not as expected."""


@dataclass
class _Proofs:
    """The layers of one model whose edits at one kind of hook point were shown to act.

    Attributes:
        layers: layers whose edits were shown to change the logits.
        together: True once all layers were tried in one run.
    """

    layers: set[int] = field(default_factory=set)
    together: bool = False


_proofs: WeakKeyDictionary[Any, dict[str, _Proofs]] = WeakKeyDictionary()
_summed: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
_of_state: WeakKeyDictionary[Any, tuple[Hashable, set[Hashable]]] = WeakKeyDictionary()

_BEYOND_ROUNDING = 100.0
"""Logits of an edited row must move by more than this many times the largest difference between unedited rows.

Measured on a CPU with SmolLM2-135M: unedited rows differ by 0, and an edit moves logits by 3.8 or more.
"""


def require_honoured(view: AttentionView, layer: int, route: str, *, checks: Checks | None = None) -> None:
    """Raise EditNotHonored unless a short run shows that an edit of a layer changes the logits.

    Made once per model, layer and `route`, the edited hook point by its short name in `AttentionView.hook_names`, such
    as "scores", "pattern", "z" or "query". `checks`: function from a layer to hooks that are placed in an unedited run
    and may raise. The user's hooks are off meanwhile, so they do not record the short runs.
    """
    # A replaced forward of the user may discard the edit: prove with it, and each time.
    acting = acts_inside(view.model, view.hook_points)
    proofs = _Proofs() if acting else _proofs.setdefault(view.model, defaultdict(_Proofs))[route]
    if layer in proofs.layers:
        return
    require_single_runs(view)
    with without_hooks(view.model, view.hook_points), evaluating(view.model), torch.no_grad():
        # The first layer is proved alone. At the second, all layers are proved in one run, a row of the batch each.
        # A layer that stays in doubt is proved alone when it is needed, so only its own ablations are refused.
        if proofs.layers and not proofs.together:
            proofs.together = True
            proofs.layers |= _honoured_together(view, route, checks)
        if layer not in proofs.layers:
            _require_alone(view, layer, route, checks)
    proofs.layers.add(layer)


def _require_alone(view: AttentionView, layer: int, route: str, checks: Checks | None) -> None:
    """Raise EditNotHonored unless an edit of this one layer, with either sign, changes the logits of a short run.

    `view` is the model. `route` is the short name of the edited hook point. `checks` is a function from the layer to
    hooks that are placed in the unedited run and may raise; None: no hooks.
    """
    tokens = probe_tokens(view.d_vocab, min(4, view.n_ctx))
    name = view.hook_names(layer)[route]
    with view.hooks_on(() if checks is None else checks(layer)):
        intact = whole_logits(view, tokens)
    for sign in (1.0, -1.0):
        with view.hooks_on([(name, partial(_edited, view, layer, route, slice(None), sign))]):
            if not torch.equal(intact, whole_logits(view, tokens)):
                return
    raise EditNotHonored(
        f"an edit of {name} does not change the logits of this model, so an ablation there has no effect: load the "
        "model with another backend of tls.load_model"
    )


def _honoured_together(view: AttentionView, route: str, checks: Checks | None) -> set[int]:
    """Return the layers that pass their `checks` and whose edit moves the logits by much more than rounding.

    `view` is the model. All layers are tried in one run with two rows per layer: one edited in this layer, one
    unedited. Unedited rows differ only by rounding. `route` is the short name of the edited hook point. `checks` is a
    function from a layer to hooks that may raise; a layer fails if one of them raises.
    """
    tokens = probe_tokens(view.d_vocab, min(4, view.n_ctx))
    layers = [layer for layer in view.layers if route in view.hook_names(layer)]
    failed: set[int] = set()
    if checks is not None:
        checking = [(name, partial(_noted, failed, layer, check)) for layer in layers for name, check in checks(layer)]
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
    return {layer for layer, has_moved in zip(layers, moved.tolist(), strict=True) if has_moved} - failed


def _noted(failed: set[int], layer: int, check: Callable[..., Any], activation: Tensor, hook: Any) -> None:
    """Call the hook function `check` on an activation; if it raises TlspectralError, add the layer to the set `failed`.

    The error does not go further, and the activation is not changed.
    """
    try:
        with checked_at_end():
            check(activation, hook=hook)
    except TlspectralError:
        failed.add(layer)


def _edited(
    view: AttentionView, layer: int, route: str, rows: slice, sign: float, activation: Tensor, hook: Any
) -> Tensor:
    """Return a copy of the activation in which some rows of the batch are changed by more than their own size.

    `view` is the model. `route` is the short name of the hook point, `layer` its layer, `rows` the slice of the batch.
    A small edit can be lost in a softmax with one large score, or in rounding. `sign` is 1 or -1, because one sign may
    enlarge an entry that is the largest already, which changes nothing. `hook` is not used.
    """
    edited = activation.clone()
    chosen = edited[rows]
    counted = chosen.masked_fill(~view.reader.unmasked(view.model, layer, chosen), 0.0) if route == "scores" else chosen
    size = sign * counted.abs().amax().clamp_min(1.0)
    if route == "z":
        chosen += size
    elif route in ("scores", "pattern"):
        chosen[..., 0] += 3.0 * size  # one key only: a softmax ignores a shift of all keys
    else:
        # The last query or the first key: an edit of the first query, or an equal edit of all keys, changes no pattern.
        # The edit is a ramp, because a query/key norm may subtract a constant.
        at = 0 if route == "key" else -1
        width = activation.shape[-1]
        chosen[:, at] += 4.0 * size * torch.arange(1, width + 1, device=activation.device).to(activation) / width
    return edited


def require_writes(view: AttentionView, layers: Iterable[int]) -> None:
    """Raise UnsupportedArchitecture unless the residual stream of each layer is the sum of its writers' outputs.

    Writers are the heads, the MLP and any mixer. Proved by one short run per model and layer, without the user's hooks.
    It is repeated each time if other code of the user acts in the model, such as a replaced forward.
    """
    acting = acts_inside(view.model, view.hook_points)
    known = set[int]() if acting else _summed.setdefault(view.model, set())
    missing = [layer for layer in layers if layer not in known]
    if not missing:
        return
    names = [name for layer in missing for point, name in view.hook_names(layer).items() if point in WRITE_POINTS]
    following = [layer + 1 for layer in missing if layer + 1 < view.n_layers]
    names += [view.hook_names(layer)["residual"] for layer in following]
    final = max(missing)
    end, point = (final + 1, "residual") if final + 1 in following else (final, "residual_after")
    last = view.hook_names(end)[point]
    with without_hooks(view.model, view.hook_points):
        captured = capture_until(view, probe_tokens(view.d_vocab, min(4, view.n_ctx)), dict.fromkeys(names), last=last)
        for layer in missing:
            checked_writes(view, layer, captured, widened)
            after = captured[view.hook_names(layer)["residual_after"]]
            handed_on = captured.get(view.hook_names(layer + 1)["residual"], after) if layer + 1 in following else after
            if not torch.equal(after, handed_on.to(after.device)):
                raise UnsupportedArchitecture(
                    f"layer {layer + 1}: its input is not the residual stream after layer {layer}, so the share of one "
                    "head is not defined: edges and writes are not available for this model. Take another "
                    "model, or ablate whole heads with tls.ablate"
                )
            known.add(layer)


def proved_in_state(view: AttentionView, what: Hashable, prove: Callable[[], None]) -> None:
    """Call `prove` unless a proof named `what` has passed in the model's present state (weights and hooks).

    `what` is any hashable name. `prove` raises if the proof fails; the error goes on to the caller and a failure is not
    remembered. `prove` is called each time if hooks or other code of the user act in the model.
    """
    if next(acting_on(view.model), None) is not None:
        prove()
        return
    state = view.state()
    proved_state, proved = _of_state.get(view.model, (None, set[Hashable]()))
    if proved_state != state:
        proved = set[Hashable]()
        _of_state[view.model] = state, proved
    if what not in proved:
        prove()
        proved.add(what)
