"""Checks that an edit of attention reaches the output, and that the edited scores are those of the operators.

Some bridges compute attention elsewhere and discard the edit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models.attention import AttentionLayer, AttentionView
from tlspectral.models.attention.threads import Hook, exclusive

_PROBE_LENGTH = 4
_honoured: WeakKeyDictionary[Any, set[tuple[int, str]]] = WeakKeyDictionary()


def require_honoured(
    view: AttentionView, layer: int, route: Literal["scores", "z"], *, during: Iterable[Hook] = ()
) -> None:
    """Prove by one short run, once per model, layer and route, that an edit moves the logits, else EditNotHonored.

    The probe runs without the user's hooks, so that they do not record it. The hooks `during` are on the model in the
    run without the edit, and may raise.
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
        with view.model.hooks(fwd_hooks=list(during)):
            intact = view.logits(tokens)
        with view.model.hooks(fwd_hooks=[(name, edit)]):
            edited = view.logits(tokens)
    if torch.equal(intact, edited):
        raise EditNotHonored(f"an edit of {name} does not change the logits of this model, so an ablation there cannot")
    known.add((layer, route))


def require_own_scores(
    layer: AttentionLayer,
    heads: list[int],
    scores: Float[Tensor, "batch heads pos pos"],
    rebuilt: Float[Tensor, "batch heads pos pos"],
) -> None:
    """Refuse scores that differ from those rebuilt from the run's queries and keys, masked pairs left out.

    `scores` are the model's own, scaled and capped, of some of the layer's heads; `rebuilt` are the same without ALiBi.
    Raises EditNotHonored.
    """
    visible = scores > torch.finfo(scores.dtype).min / 2
    off = scores.to(rebuilt) - rebuilt
    if layer.alibi is not None:
        off = off - layer.alibi.bias(torch.arange(scores.shape[-1]))[heads][:, None].to(off)
        # Implementations differ by a constant in each query's row, which the softmax does not see.
        off = off - off.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    worst, largest = (x.masked_fill(~visible, 0.0).abs().amax((0, 2, 3)) for x in (off, scores.to(rebuilt)))
    # By head, so that a small one is seen. Measured 3e-7 in float32, 0.009 in bfloat16; another pairing, other angles
    # or an edit of queries or keys moves scores by tenths.
    excess = worst - (1e-4 if scores.dtype.itemsize >= 4 else 0.1) * (largest + 1)
    if not bool((excess <= 0).all()):
        head = int(excess.argmax())
        raise EditNotHonored(
            f"layer {layer.layer}, head {heads[head]}: the model's scores are not those of this run's queries and keys "
            f"(they differ by {float(worst[head]):.2e}, largest score {float(largest[head]):.1f}), so the part to be "
            "removed is no part of them; enter the ablation after hooks that edit queries or keys, and see whether "
            "verify_scores passes on this model"
        )


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
