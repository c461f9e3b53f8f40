"""Checks that an edit at a hook point reaches the output. Some bridges compute attention elsewhere and discard it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models import AttentionView
from tlspectral.models.attention.threads import exclusive

_PROBE_LENGTH = 4
_honoured: WeakKeyDictionary[Any, set[tuple[int, str]]] = WeakKeyDictionary()


def require_honoured(view: AttentionView, layer: int, route: Literal["scores", "z"]) -> None:
    """Prove by one short run, once per model, layer and route, that an edit moves the logits.

    The probe runs without the user's hooks, so that they do not record it.

    Raises:
        EditNotHonored: the logits stay as they were.
    """
    known = _honoured.setdefault(view.model, set())
    if (layer, route) in known:
        return
    # From the middle of the vocabulary: TransformerLens masks leading pad tokens, whose ids are low.
    tokens = (view.d_vocab // 2 + torch.arange(_PROBE_LENGTH))[None] % view.d_vocab
    name = view.hook_names(layer)[route]

    def edit_scores(scores: Tensor, hook: Any) -> Tensor:
        edited = scores.clone()
        edited[..., 0] += 1.0  # a shift of one key, which the softmax sees
        return edited

    def edit_z(z: Tensor, hook: Any) -> Tensor:
        return z + 1.0

    edit: Callable[[Tensor, Any], Tensor] = edit_scores if route == "scores" else edit_z
    with without_hooks(view.model), torch.no_grad():
        intact = view.logits(tokens)
        with view.model.hooks(fwd_hooks=[(name, edit)]):
            edited = view.logits(tokens)
    if torch.equal(intact, edited):
        raise EditNotHonored(f"an edit of {name} does not change the logits of this model, so an ablation there cannot")
    known.add((layer, route))


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """Take all hooks off the model until the context ends, then restore them in their order."""
    with exclusive(model):
        points = {id(point): point for point in model.hook_dict.values()}.values()
        registered = [(point, dict(point._forward_hooks)) for point in points if point._forward_hooks]
        for point, _ in registered:
            point._forward_hooks.clear()
        try:
            yield
        finally:
            for point, hooks in registered:
                point._forward_hooks.update(hooks)
