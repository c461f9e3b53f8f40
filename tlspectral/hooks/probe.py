"""Checks that an edit of attention reaches the output, and that the edited scores are those of the operators.

Some bridges compute attention elsewhere and discard the edit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tlspectral.errors import EditNotHonored, UnsupportedArchitecture
from tlspectral.models.attention import AttentionLayer, AttentionView, unmasked
from tlspectral.models.attention.threads import Hook, exclusive
from tlspectral.models.attention.writes import LayerReads, head_writes, require_sum_of_writes
from tlspectral.rotary import widened

Route = Literal["scores", "z", "query", "key", "value"]

_honoured: WeakKeyDictionary[Any, set[tuple[int, str]]] = WeakKeyDictionary()
_summed: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def require_honoured(view: AttentionView, layer: int, route: Route, *, during: Iterable[Hook] = ()) -> None:
    """Prove by one short run, once per model, layer and route, that an edit moves the logits, else EditNotHonored.

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
        if route == "scores":
            edited[..., 0] += 1.0  # a shift of one key, which the softmax sees
            return edited
        # The last query, the first key: an edit of the first query, or of all keys alike, need not change a pattern.
        # A ramp, since the norm of queries and keys may take off a constant.
        at = 0 if route == "key" else -1
        edited[:, at] += torch.arange(1, activation.shape[-1] + 1, device=activation.device).to(activation)
        return edited

    with without_hooks(view.model), torch.no_grad():
        with view.model.hooks(fwd_hooks=list(during)):
            intact = view.logits(tokens)
        with view.model.hooks(fwd_hooks=[(name, edit)]):
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
    points = ("residual", "residual_after", "attention_out", "mlp_out", "z")
    names = [view.hook_names(layer)[point] for layer in missing for point in points]
    following = [layer + 1 for layer in missing if layer + 1 < view.n_layers]
    names += [view.hook_names(layer)["residual"] for layer in following]
    last = view.hook_names(max(following, default=missing[-1]))["residual" if following else "residual_after"]
    writes = {layer: head_writes(view, layer, widened) for layer in missing}
    with without_hooks(view.model):
        captured = view.capture(probe_tokens(view.d_vocab), dict.fromkeys(names), last=last)
    for layer in missing:
        require_sum_of_writes(view, layer, captured, writes[layer])
        after = captured[view.hook_names(layer)["residual_after"]]
        handed_on = captured.get(view.hook_names(layer + 1)["residual"], after) if layer + 1 in following else after
        if not torch.equal(after, handed_on.to(after.device)):
            raise UnsupportedArchitecture(
                f"layer {layer + 1}: its residual stream is not that behind layer {layer}, so the share of one head is "
                "not defined"
            )
        known.add(layer)


@torch.no_grad()
def require_own_reads(
    layer: int,
    heads: list[int],
    point: str,
    reads: LayerReads,
    x: Float[Tensor, "batch pos d_model"],
    captured: Float[Tensor, "batch pos heads d_head"],
    bias: Float[Tensor, "heads d_head"] | None,
) -> None:
    """Refuse queries, keys or values that are not the projection of the residual stream, by the first sequence.

    `captured` are those of the run, of the heads of `reads`. Without `bias` what is left has to be the same at every
    token. Raises EditNotHonored.
    """
    found = widened(captured[:1])
    left = found - reads.of(widened(x[:1]))
    off = (left - (left.mean(1, keepdim=True) if bias is None else bias.to(left))).abs().amax((0, 1, 3))
    largest = found.abs().amax((0, 1, 3))
    # By head. Measured over the zoo: 5e-7 in float32, 0.006 in bfloat16; an edit of the attention's input moves them by
    # tenths.
    excess = off - (1e-4 if captured.dtype.itemsize >= 4 else 0.1) * (largest + 1e-3)
    if not bool((excess <= 0).all()):
        at = int(excess.argmax())
        raise EditNotHonored(
            f"layer {layer}, head {heads[at]}: the {point} of this run is not what the operators read from the "
            f"residual stream (off by {float(off[at]):.1e}, largest {float(largest[at]):.1e}), so a change of the "
            "stream cannot be carried to it; look for hooks that edit the input of attention or its norm, and enter "
            "the block after hooks that edit the residual stream, queries, keys or values"
        )


def probe_tokens(d_vocab: int, length: int = 4) -> Int64[Tensor, "1 pos"]:
    """Return a short prompt from the middle of the vocabulary: TransformerLens masks leading pad tokens, of low ids."""
    return (d_vocab // 2 + torch.arange(length))[None] % d_vocab


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
    visible = unmasked(scores)
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
