"""`check_hook`: which heads a hook changes, and whether it removes exactly what one head writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.models.attention.tolerances import Quantity, noise_of
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.user_hooks import acting_in, listed, without_user_hooks
from tlspectral.models.loading.copies import given_for
from tlspectral.models.reading import measured
from tlspectral.models.reading.blocks import output_map
from tlspectral.models.reading.view import AttentionView, one_head
from tlspectral.models.running.partial_runs import logits_at, module_hooks
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.stream.writes import HeadWrites, head_writes, mixed, require_stream, z_of
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
_SHAPES = ((2, 33), (1, 6), (3, 11))
"""Rows and tokens of the three runs: a hook may act in one row alone, or up to a position, or by the shape."""
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

    The model runs with the hook. It then runs without the hook, where each layer is given the residual stream that it
    received in the run with the hook, so that a change in one layer is not counted again in later layers. z is read
    where W_O reads it, after any PyTorch hook on the input of `o_proj`. A third run replaces only the z of the head by
    its z under the hook. Its logits must equal those of the run with the hook; otherwise something else was changed.

    All this is done three times, because a hook may act only on some rows, positions, lengths or runs.

    Args:
        model: a TransformerBridge or HookedTransformer.
        hook: a TransformerLens `fwd_hooks` list, which is put on the model for the check; or None for what of yours
            acts in the model now: its hooks, hooks of PyTorch on its modules or on all, and replaced forwards.
        head: `"L5H1"`, (5, 1) or a table row.
        prompts: one or more prompts, as for `Task`, run three times. Default: 2, 1 and 3 rows of arbitrary tokens, 33,
            6 and 11 long.

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
    with measured(model, report_hooks=hook is not None) as view:
        require_stream(view)
        pair = one_head(view, head)
        probes = _probes(view) if prompts is None else [packed_prompts(view, prompts).tokens] * 3
        origin = view.origin()
        hooks, checked = None if hook is None else [*hook], []
        with torch.no_grad():
            for tokens in probes:
                heads, found, whole = _compared(view, tokens, hooks, pair)
                checked.append(HookCheck(whole and len(found) == 1, found, HOOK_CHECK.frame(heads, origin)))
                if not checked[-1].exact:
                    break
        last, run = checked[-1], len(checked)
        if not last.exact and run > 1:
            before, shape = (list(tokens.shape) for tokens in probes[run - 2 : run])
            last.found[0] = f"in run {run}, of prompts of shape {shape}, {last.found[0]}"
            last.found.append(f"it is exact in the run before, of prompts of shape {before}")
        if hooks is None and not last.exact:
            last.found.extend(_elsewhere(view.model))
        return last


def _probes(view: AttentionView) -> list[Tensor]:
    """Return prompts of tokens from the middle half of the vocabulary, each of its own where there are enough."""
    some = torch.randperm(max(1, view.d_vocab // 2), generator=torch.Generator().manual_seed(0)) + view.d_vocab // 4
    shapes = [(rows, min(length, view.n_ctx)) for rows, length in _SHAPES]
    sizes = [rows * length for rows, length in shapes]
    drawn = some[torch.arange(sum(sizes)) % len(some)].split(sizes)
    return [tokens.view(shape) for tokens, shape in zip(drawn, shapes, strict=True)]


def _elsewhere(model: Any) -> Iterator[str]:
    """Yield in words which hooks are on the model of transformers that was copied, and where they would act."""
    given = given_for(model)
    names = list(dict.fromkeys(acting.name for acting in acting_in(given))) if given is not None else []
    if given is None or not names:
        return
    place, inside = "a hook point of this model", names[0]
    if hasattr(model, "original_model"):
        while inside and inside not in dict(given.named_modules()):  # without the method that is replaced there
            inside = inside.rpartition(".")[0]
        place = f"model.original_model.get_submodule({inside!r})"
    yield (
        f"hooks are on the {type(given).__name__} that load_model copied, at {listed(names)}: they act there and not "
        f"in this model; put them on {place}"
    )


def _compared(
    view: AttentionView, tokens: Tensor, hooks: list[Hook] | None, pair: tuple[int, int]
) -> tuple[pd.DataFrame, list[str], bool]:
    """Return the heads that hooks change on some prompts, what they change in words, and whether all of `pair` goes."""
    layer, index = pair
    under = _run(view, tokens, hooks or ())
    for one in view.layers:
        _read_behind(view, one, under)
    stays: list[str] = []
    with nullcontext(stays) if hooks is not None else without_user_hooks(view.model) as stays:
        plain = _run(view, tokens, (), under)
        alone = _run(view, tokens, [_head_alone(view, layer, index, under)])
    heads = pd.concat([_changed_heads(view, one, under, plain) for one in view.layers], ignore_index=True)
    found = [said for one in range(view.n_layers) for said in _beside_heads(view, one, under, plain)]
    stored = _stored(view)
    if _differ(under["logits"], plain["logits"], stored, "same run"):
        found.append("it changes what follows the last layer")
    name, own = head_name(layer, index), (heads["layer"] == layer) & (heads["head"] == index)
    others = [head_name(*other) for other in heads.loc[~own, ["layer", "head"]].itertuples(index=False)]
    if others:
        found.insert(0, f"it changes {listed(others)}")
    if not found and _differ(under["logits"], alone["logits"], stored, "same run"):
        first = next(point for point in alone if _differ(under[point], alone[point], stored, "same run"))
        found.append(f"it changes something else, the first time in front of {first}")
    if stays:
        found.append(f"{listed(stays)} cannot be taken off for the check: what it changes is not seen")
    left = heads.pop("left")
    whole = bool((left[own] < _tolerance(view)).all()) and bool(own.any())
    if own.any():
        removed, changed = heads.loc[own, ["removed", "changed"]].iloc[0]
        share = f"{removed:.2f}"
        said = "all" if whole else "nearly all" if share == "1.00" else share
        turned = "" if whole or abs(changed - abs(removed)) < 0.01 else f", and changes it by {changed:.2f} of its size"
        found.insert(0, f"it removes {said} of what {name} writes{turned}" + ", and nothing else" * (not found))
    else:
        found.insert(0, f"it changes nothing that {name} writes")
    return heads, found, whole


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

    def keep_read(name: str, module: Any, given: tuple[Any, ...], output: Any) -> None:
        if given:
            seen[name] = given[0].detach().clone().reshape(seen[name].shape if name in seen else given[0].shape)

    reading = [
        (module.register_forward_hook, partial(keep_read, view.hook_names(layer)["z"]))
        for layer in view.layers
        if (module := output_map(view.blocks[layer].module)) is not None
    ]
    with view.hooks_on([*hook, *keeping]), module_hooks(reading):
        seen["logits"] = logits_at(view, tokens, slice(None))
    return seen


def _read_behind(view: AttentionView, layer: int, under: dict[str, Tensor]) -> None:
    """Set z of a head to 0 in a run in which the attention's output lacks what this head writes, and nothing else.

    A hook behind W_O takes it away there (`hook_result`, a replaced forward of `o_proj`).
    """
    writes, name = head_writes(view, layer, in_float64), view.hook_names(layer)["z"]
    z = z_of(in_float64(under[name]), writes.w_o)
    if _is_output(view, layer, writes, z, under):
        return
    for head in range(z.shape[2]):
        others = z.index_fill(2, torch.tensor(head, device=z.device), 0.0)
        if _is_output(view, layer, writes, others, under):
            under[name] = others.reshape(under[name].shape).to(under[name])


def _is_output(view: AttentionView, layer: int, writes: HeadWrites, z: Tensor, run: dict[str, Tensor]) -> bool:
    """Return whether the attention of a layer put out in a run what heads of this z and the biases write."""
    scale, name = writes.token_scale(z), view.hook_names(layer)["attention_out"]
    attention = in_float64(run[name]) * view.attention_factor(layer)
    return not _differ(writes.sum_of(z, scale) + writes.of_biases(scale), attention, _stored(view))


def _head_alone(view: AttentionView, layer: int, head: int, under: dict[str, Tensor]) -> Hook:
    """Return a hook that replaces the z of one head alone with its z of another run."""
    name, n_heads = view.hook_names(layer)["z"], view.n_heads(layer)

    def edit(z: Tensor, hook: Any) -> Tensor:
        edited, held = (each.reshape(*z.shape[:2], n_heads, -1) for each in (z.clone(), under[name]))
        edited[:, :, head] = held[:, :, head].to(edited)
        return edited.reshape(z.shape)

    return name, edit


def _changed_heads(view: AttentionView, layer: int, under: dict[str, Tensor], plain: dict[str, Tensor]) -> pd.DataFrame:
    """Return the heads of a layer whose write the hook changes, at the scale of a norm behind of the run without it.

    `left`: largest norm of what a head writes at a token under the hook, over that without it.
    """
    writes, name = head_writes(view, layer, in_float64), view.hook_names(layer)["z"]
    before, after = (z_of(in_float64(run[name]), writes.w_o) for run in (plain, under))
    scale = writes.token_scale(before)
    before, after = (writes.written(z, scale) for z in (before, after))
    taken = before - after
    largest, left, most = (each.norm(dim=-1).amax((1, 2)) for each in (before, after, taken))
    unit = largest.where(largest > 0, 1.0)  # by the largest token, so that a change of one token is seen
    size = before.square().sum((1, 2, 3)).where(largest > 0, 1.0)
    values = {
        "removed": (taken * before).sum((1, 2, 3)) / size,
        "changed": (taken.square().sum((1, 2, 3)) / size).sqrt(),
        "left": left / unit,
    }
    heads = (most / unit > _tolerance(view)).nonzero().flatten()
    rows = {name: value[heads].numpy() for name, value in values.items()}
    return pd.DataFrame({"layer": layer, "head": heads.numpy(), **rows})


def _beside_heads(view: AttentionView, layer: int, under: dict[str, Tensor], plain: dict[str, Tensor]) -> Iterator[str]:
    """Yield in words what a hook changes in a layer beside what its heads write, and in front of the first layer."""
    names, stored = view.hook_names(layer), _stored(view)
    if layer == 0 and _differ(under[names["residual"]], plain[names["residual"]], stored, "same run"):
        yield "it changes what the first layer reads: the embedding, or what is added to it"
    if layer in view.layers:
        writes = head_writes(view, layer, in_float64)
        if not _is_output(view, layer, writes, z_of(in_float64(under[names["z"]]), writes.w_o), under):
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
