"""`check_hook`: which heads a hook changes, and whether it removes exactly what one head writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.models.attention.tolerances import Quantity, noise_of
from tlspectral.models.hooking.hooks_on_model import Hook, of_a_library, without_hooks
from tlspectral.models.hooking.interrupts import undoing, uninterrupted
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView, one_head, require_stream
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.stream.writes import head_writes, mixed, z_of
from tlspectral.selection import Head, head_name
from tlspectral.tables.html_summary import html_rows
from tlspectral.tables.schema import Schema, columns

HOOK_CHECK = Schema(
    "check_hook.heads",
    columns("""
        layer   | index | Layer of the head.
        head    | index | Head.
        name    | label | Name of the head.
        removed | share | Share of its write that the hook takes away: 1 all of it, 0 none, below 0 where it adds.
        changed | share | Norm of the change over the norm of the write; above |removed| where other directions change.
    """),
    "`tls.hooks.check_hook`, its field `heads`",
)
_POINTS = ("residual", "z", "attention_out", "mlp_out", "residual_after")


@dataclass(frozen=True)
class HookCheck:
    """What a hook changes in one run.

    Attributes:
        exact: the hook takes away all that the head writes, and changes nothing else.
        found: in words, what the hook changes.
        heads: heads whose write is changed, a row each: `layer, head, name, removed, changed`. What follows from a
            change in later layers is not counted.
    """

    exact: bool
    found: list[str]
    heads: pd.DataFrame = field(repr=False)

    def __repr__(self) -> str:
        return f"HookCheck(exact={self.exact}: {'; '.join(self.found)})"

    def _repr_html_(self) -> str:
        rows = [("exact", str(self.exact)), *((str(place), text) for place, text in enumerate(self.found, 1))]
        return html_rows("Hook", rows) + (self.heads.to_html() or "")


def check_hook(model: Any, hook: Iterable[Hook] | None, head: Head, *, prompts: Any = None) -> HookCheck:
    """Say whether a hook removes exactly what one head writes, and what else it changes.

    The model runs once under the hook, and once more without it, every layer on the stream that it read under the
    hook. So a change in one layer is not counted again in the layers behind it. Slices of the output of `o_proj`, a
    frequent mistake, are no heads: they show as a change of the attention that belongs to no head. A third run, in
    which the z of the head alone is what it is under the hook, has to give the same logits: so a change anywhere else
    in the model is seen, also where no hook point of a layer shows it.

    Args:
        model: a TransformerBridge or HookedTransformer.
        hook: a TransformerLens `fwd_hooks` list, which is put on the model for the check; or None for the hooks that
            are on the model now, PyTorch's hooks on its modules included.
        head: `"L5H1"`, (5, 1) or a table row.
        prompts: one or more prompts, as for `Task`; None is a short one of arbitrary tokens.

    Raises:
        BadHead: there is no such head.
        UnsupportedArchitecture: a layer that cannot be read.

    Source: this package.

    What it does not establish: that removing the head in this way is the right ablation for a question. Zeros, means
    and other prompts in its place give other effects.

    Example: zeros in z are the head, zeros in columns of the attention's output are not.

        >>> import tlspectral as tls
        >>> model = tls.load_model("tiny-rope")
        >>> def no_head(z, hook):
        ...     z = z.clone()
        ...     z[:, :, 1] = 0
        ...     return z
        >>> tls.hooks.check_hook(model, [("blocks.0.attn.hook_z", no_head)], "L0H1")
        HookCheck(exact=True: it removes all of what L0H1 writes, and nothing else)
    """
    view = attention_view(model)
    require_stream(view)
    layer, index = one_head(view, head)
    own = probe_tokens(view.d_vocab, min(8, view.n_ctx))
    tokens = own if prompts is None else packed_prompts(view, prompts).tokens
    with torch.no_grad():
        if hook is None:
            under = _run(view, tokens, ())
            with _without_own_hooks(view.model), without_hooks(view.model, view.hook_points):
                plain = _run(view, tokens, (), under)
                alone = _run(view, tokens, [_head_alone(view, layer, index, under)])
        else:
            under = _run(view, tokens, hook)
            plain = _run(view, tokens, (), under)
            alone = _run(view, tokens, [_head_alone(view, layer, index, under)])
        heads = pd.concat([_changed_heads(view, one, under, plain) for one in view.layers], ignore_index=True)
        found = [said for one in range(view.n_layers) for said in _beside_heads(view, one, under, plain)]
    stored = _stored(view)
    if _differ(under["logits"], plain["logits"], stored, "same run"):
        found.append("it changes what follows the last layer")
    name, own = head_name(layer, index), (heads["layer"] == layer) & (heads["head"] == index)
    others = [head_name(*pair) for pair in heads.loc[~own, ["layer", "head"]].itertuples(index=False)]
    if others:
        found.insert(
            0, f"it changes {', '.join(others[:6])}{f' and {len(others) - 6} other heads' * (len(others) > 6)}"
        )
    if not found and _differ(under["logits"], alone["logits"], stored, "same run"):
        first = next(point for point in alone if _differ(under[point], alone[point], stored, "same run"))
        found.append(f"it changes something else, the first time in front of {first}")
    whole = False
    if own.any():
        removed, changed = heads.loc[own, ["removed", "changed"]].iloc[0]
        whole = max(abs(removed - 1), abs(changed - 1)) < _tolerance(view)
        said = "all" if whole else f"{removed:.2f}"
        turned = "" if whole or abs(changed - abs(removed)) < 0.01 else f", and changes it by {changed:.2f} of its size"
        found.insert(0, f"it removes {said} of what {name} writes{turned}" + ", and nothing else" * (not found))
    else:
        found.insert(0, f"it changes nothing that {name} writes")
    return HookCheck(whole and len(found) == 1, found, HOOK_CHECK.frame(heads, view.origin(runs=hook is not None)))


def _tolerance(view: AttentionView) -> float:
    return noise_of("live z", _stored(view))[1]


def _stored(view: AttentionView) -> torch.dtype:
    return next(view.model.parameters()).dtype


def _run(
    view: AttentionView, tokens: Tensor, hook: Iterable[Hook], under: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return what passes the points of every layer. `under` is another run, whose stream each layer then reads."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, substitute: bool, activation: Tensor, hook: Any) -> Tensor | None:
        seen[name] = activation.detach().clone()
        return under[name].to(activation) if under is not None and substitute and name in under else None

    keeping = [
        (name, partial(keep, name, point in ("residual", "attention_out", "residual_after")))
        for layer in range(view.n_layers)
        for point, name in view.hook_names(layer).items()
        if point in _POINTS and name in view.hook_points
    ]
    with view.hooks_on([*hook, *keeping]):
        seen["logits"] = logits_at(view, tokens, slice(None))
    return seen


def _head_alone(view: AttentionView, layer: int, head: int, under: dict[str, Tensor]) -> Hook:
    """Return a hook that replaces the z of one head alone with its z of another run."""
    name, n_heads = view.hook_names(layer)["z"], view.n_heads(layer)

    def edit(z: Tensor, hook: Any) -> Tensor:
        edited, held = (each.reshape(*z.shape[:2], n_heads, -1) for each in (z.clone(), under[name]))
        edited[:, :, head] = held[:, :, head].to(edited)
        return edited.reshape(z.shape)

    return name, edit


def _changed_heads(view: AttentionView, layer: int, under: dict[str, Tensor], plain: dict[str, Tensor]) -> pd.DataFrame:
    """Return the heads of a layer whose write the hook changes, at the scale of a norm behind of the run without it."""
    writes, name = head_writes(view, layer, in_float64), view.hook_names(layer)["z"]
    before, after = (z_of(in_float64(run[name]), writes.w_o) for run in (plain, under))
    scale = writes.token_scale(before)
    before, after = (writes.of(z, scale).flatten(1) for z in (before, after))
    taken = before - after
    size = before.square().sum(1).where((before != 0).any(1), 1.0)
    changed = (taken.square().sum(1) / size).sqrt()
    heads = (changed > _tolerance(view)).nonzero().flatten().numpy()
    removed = (taken * before).sum(1) / size
    return pd.DataFrame(
        {"layer": layer, "head": heads, "removed": removed[heads].numpy(), "changed": changed[heads].numpy()}
    )


def _beside_heads(view: AttentionView, layer: int, under: dict[str, Tensor], plain: dict[str, Tensor]) -> Iterator[str]:
    """Yield in words what a hook changes in a layer beside what its heads write, and in front of the first layer."""
    names, stored = view.hook_names(layer), _stored(view)
    if layer == 0 and _differ(under[names["residual"]], plain[names["residual"]], stored, "same run"):
        yield "it changes what the first layer reads: the embedding, or what is added to it"
    if layer in view.layers:
        writes = head_writes(view, layer, in_float64)
        z = z_of(in_float64(under[names["z"]]), writes.w_o)
        scale = writes.token_scale(z)
        attention = in_float64(under[names["attention_out"]]) * view.attention_factor(layer)
        if _differ(writes.sum_of(z, scale) + writes.of_biases(scale), attention, stored):
            yield (
                f"layer {layer}: it changes the output of the attention in a way that is no head: after W_O the heads "
                "are mixed, edit z (hook_z, the input of o_proj)"
            )
    mlp = names["mlp_out"]
    if mlp in under and mlp in plain and _differ(under[mlp], plain[mlp], stored, "same run"):
        yield f"layer {layer}: it changes the MLP"
    rest, after = mixed(view, layer, under, in_float64), in_float64(under[names["residual_after"]])
    expected = torch.zeros_like(rest)
    if view.writes_more(layer):
        read = {names[point]: under[names[point]] for point in ("residual", "attention_out") if point in names}
        expected = mixed(view, layer, plain | read, in_float64)
    handed_on = under.get(view.hook_names(layer + 1)["residual"]) if layer + 1 < view.n_layers else None
    if _differ(after - rest + expected, after, stored) or (
        handed_on is not None and _differ(in_float64(handed_on), after, stored)
    ):
        yield f"layer {layer}: it changes the residual stream itself"


def _differ(found: Tensor, expected: Tensor, stored: torch.dtype, what: Quantity = "stream") -> bool:
    """Return whether two activations of a model stored in a type differ by more than rounding."""
    relative = noise_of(what, stored)[1]
    return bool((found - expected.to(found)).abs().max() > relative * expected.abs().max())


@uninterrupted
def _without_own_hooks(model: Any) -> Iterator[None]:
    """Take the user's hooks of PyTorch off all modules until the context ends."""
    taken: list[tuple[dict[int, Any], int, Any]] = []
    roots = (getattr(model, "original_model", model), model)
    points = {id(point) for point in model.hook_dict.values()}
    with undoing(_put_on, taken):
        for module in {id(each): each for root in roots for each in root.modules() if id(each) not in points}.values():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in list(hooks.items()):
                    if not of_a_library(hook):
                        taken.append((hooks, key, hooks.pop(key)))
        yield


def _put_on(taken: list[tuple[dict[int, Any], int, Any]]) -> None:
    for hooks, key, hook in taken:
        hooks[key] = hook
