"""`check_hook`: which heads a hook changes, and whether it removes exactly the output of one head."""

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
from tlspectral.errors.settings import checked_settings, pairs_in
from tlspectral.models.attention.tolerances import Quantity, noise_of
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.user_hooks import acting_in, listed, without_user_hooks
from tlspectral.models.loading.copies import given_for
from tlspectral.models.reading import measured
from tlspectral.models.reading.blocks import output_map
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import logits_at, module_hooks
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.stream.writes import HeadWrites, head_writes, mixed, require_stream, z_of
from tlspectral.selection.heads_as_written import Head
from tlspectral.selection.node_names import head_name
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
"""Rows and tokens of the three runs. They differ because a hook may act only on some rows, positions or shapes."""
_POINTS = ("residual", "z", "attention_out", "mlp_out", "residual_after")


@dataclass(frozen=True)
class HookCheck:
    """Result of `tls.hooks.check_hook(model, hook, "L0H1")`: whether a hook removes exactly the output of one head.

    Attributes:
        exact: True if the hook removes the whole output of the head and changes nothing else.
        found: list of sentences that say what the hook changes.
        heads: a row per head whose output the hook changes: `layer, head, name`, `removed` (share of the head's write
            that is taken away: 1 all, 0 none) and `changed` (norm of the change over norm of the write). Changes that
            only follow from a change in an earlier layer are not counted.

    Not established: that this is the right ablation for a question; `exact` says only that the hook does it.
    """

    exact: bool
    found: list[str]
    heads: pd.DataFrame = field(repr=False)

    def __repr__(self) -> str:
        return f"HookCheck(exact={self.exact}: {'; '.join(self.found)})"

    def _repr_html_(self) -> str:
        rows = [("exact", str(self.exact)), *((str(place), text) for place, text in enumerate(self.found, 1))]
        return html_rows("Hook", rows) + (self.heads.to_html() or "")


@checked_settings
def check_hook(model: Any, hook: Iterable[Hook] | None, head: Head, *, prompts: Any = None) -> HookCheck:
    """Check whether a hook of your own removes exactly the output of one head.

    Use it before you trust an ablation that you wrote yourself.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> def no_head(z, hook):
    ...     z = z.clone()
    ...     z[:, :, 1] = 0
    ...     return z
    >>> tls.hooks.check_hook(model, [("blocks.0.attn.hook_z", no_head)], "L0H1")
    HookCheck(exact=True: it removes all of what L0H1 writes, and nothing else)

    The model runs with the hook and without it, on prompts of three shapes, because a hook may act only on some rows,
    positions, lengths or runs. Every layer gets the same input in both runs, so a change counts in its own layer only.

    Args:
        model: a TransformerBridge or HookedTransformer.
        hook: a TransformerLens `fwd_hooks` list, placed on the model for the check. None: check everything of yours
            that acts in the model now (TransformerLens hooks, PyTorch hooks, replaced forwards).
        head: "L5H1", (5, 1) or a table row: the head that the hook should remove.
        prompts: one or more prompts, as text or token ids, run three times. Default: 2, 1 and 3 rows of arbitrary
            tokens, 33, 6 and 11 tokens long.

    Returns:
        A `HookCheck`: `.exact` (True or False), `.found` (list of sentences) and `.heads` (DataFrame, a row per changed
        head: `layer, head, name, removed, changed`; the last two are shares of the head's write).

    Raises:
        BadHead: the head does not exist.
        UnsupportedArchitecture: a layer cannot be read.

    Not established: that this is the right ablation for a question. Removing a head by zeros, by its mean, or by its
    output on another prompt gives different effects.
    """
    with measured(model, report_hooks=hook is not None) as view:
        require_stream(view)
        pair = one_head(view, head)
        probes = _probes(view) if prompts is None else [packed_prompts(view, prompts).tokens] * 3
        origin = view.origin()
        hooks, checked = None if hook is None else pairs_in("hook", hook, "(hook point, function)"), []
        with torch.no_grad():
            for tokens in probes:
                heads, sentences, removes_all = _compared(view, tokens, hooks, pair)
                exact = removes_all and len(sentences) == 1
                checked.append(HookCheck(exact, sentences, HOOK_CHECK.frame(heads, origin)))
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
    """Return three tensors of random token ids, [2, 33], [1, 6] and [3, 11], for the runs of `check_hook`.

    Ids are from the middle half of the vocabulary, and all different if it has enough. Rows are cut to the model's
    longest prompt.
    """
    some = torch.randperm(max(1, view.d_vocab // 2), generator=torch.Generator().manual_seed(0)) + view.d_vocab // 4
    shapes = [(rows, min(length, view.n_ctx)) for rows, length in _SHAPES]
    sizes = [rows * length for rows, length in shapes]
    drawn = some[torch.arange(sum(sizes)) % len(some)].split(sizes)
    return [tokens.view(shape) for tokens, shape in zip(drawn, shapes, strict=True)]


def _elsewhere(model: Any) -> Iterator[str]:
    """Yield a sentence if the user's hooks are on the transformers model that `load_model` copied.

    Hooks there do not act in the copy, so the check would not see them.
    """
    original = given_for(model)
    names = list(dict.fromkeys(acting.name for acting in acting_in(original))) if original is not None else []
    if original is None or not names:
        return
    place, inside = "a hook point of this model", names[0]
    if hasattr(model, "original_model"):
        while inside and inside not in dict(original.named_modules()):  # drop the name of a replaced method
            inside = inside.rpartition(".")[0]
        place = f"model.original_model.get_submodule({inside!r})"
    yield (
        f"hooks are on the {type(original).__name__} that load_model copied, at {listed(names)}: they do not act in "
        f"this model; put them on {place}"
    )


def _compared(
    view: AttentionView, tokens: Tensor, hooks: list[Hook] | None, pair: tuple[int, int]
) -> tuple[pd.DataFrame, list[str], bool]:
    """Run the model with the hooks and without them; return changed heads, sentences, and whether the head is removed.

    `tokens` are the token ids. `hooks` is a `fwd_hooks` list; None: the user's hooks that are on the model. `pair` is
    (layer, head). The three results: a table of the heads whose write changes (`layer, head, removed, changed`),
    sentences on all changes, and True if the whole write of the head `pair` is removed.
    """
    layer, index = pair
    under = _run(view, tokens, hooks or ())
    for read_layer in view.layers:
        _read_behind(view, read_layer, under)
    stays: list[str] = []
    with nullcontext(stays) if hooks is not None else without_user_hooks(view.model) as stays:
        plain = _run(view, tokens, (), under)
        alone = _run(view, tokens, [_head_alone(view, layer, index, under)])
    heads = pd.concat([_changed_heads(view, changed, under, plain) for changed in view.layers], ignore_index=True)
    sentences = [text for index in range(view.n_layers) for text in _beside_heads(view, index, under, plain)]
    stored = _stored(view)
    if _differ(under["logits"], plain["logits"], stored, "same run"):
        sentences.append("it changes something after the last layer")
    name, own = head_name(layer, index), (heads["layer"] == layer) & (heads["head"] == index)
    others = [head_name(*other) for other in heads.loc[~own, ["layer", "head"]].itertuples(index=False)]
    if others:
        sentences.insert(0, f"it changes {listed(others)}")
    if not sentences and _differ(under["logits"], alone["logits"], stored, "same run"):
        first = next(point for point in alone if _differ(under[point], alone[point], stored, "same run"))
        sentences.append(f"it changes something else, the first time before {first}")
    if stays:
        sentences.append(f"{listed(stays)} cannot be taken off for the check: its changes are not seen")
    left = heads.pop("left")
    removes_all = bool((left[own] < _tolerance(view)).all()) and bool(own.any())
    if own.any():
        removed, changed = heads.loc[own, ["removed", "changed"]].iloc[0]
        share = f"{removed:.2f}"
        amount = "all" if removes_all else "nearly all" if share == "1.00" else share
        unaligned = not removes_all and abs(changed - abs(removed)) >= 0.01
        turned = f", and changes it by {changed:.2f} of its size" if unaligned else ""
        sentences.insert(
            0, f"it removes {amount} of what {name} writes{turned}" + ", and nothing else" * (not sentences)
        )
    else:
        sentences.insert(0, f"it changes nothing that {name} writes")
    return heads, sentences, removes_all


def _tolerance(view: AttentionView) -> float:
    return noise_of("live z", _stored(view))[1]


def _stored(view: AttentionView) -> torch.dtype:
    return next(view.model.parameters()).dtype


def _run(
    view: AttentionView, tokens: Tensor, hook: Iterable[Hook], under: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Run the model with the hooks `hook`; return a dict from hook point to activation, with the logits under "logits".

    `tokens` are the token ids. The hook points are, for every layer: the stream before the layer, z (heads' outputs
    before W_O, as W_O reads it), the outputs of attention and MLP, and the stream after the layer. The tensors are
    copies. `under`: activations of another run. Each layer then reads the residual stream and the attention output of
    that run, so changes do not spread to later layers.
    """
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
    """Set z of a head (its output before W_O) to 0 in `under` if the attention's output lacks exactly its write.

    `view` is the model. `under` has the activations of the run with hooks, by hook point, and is changed in place; the
    other heads of the layer stay. A hook after W_O (`hook_result`, a replaced forward of `o_proj`) removes the write
    and leaves z as it is.
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
    """Return True if the attention's output in a run is the sum of the heads' writes from `z` and of the biases.

    `view` is the model. `layer` is the layer, `z` its heads' output before W_O, `writes` the maps from z to the
    residual stream, `run` the activations by hook point. Equal means up to rounding.
    """
    scale, name = writes.token_scale(z), view.hook_names(layer)["attention_out"]
    attention = in_float64(run[name]) * view.attention_factor(layer)
    return not _differ(writes.sum_of(z, scale) + writes.of_biases(scale), attention, _stored(view))


def _head_alone(view: AttentionView, layer: int, head: int, under: dict[str, Tensor]) -> Hook:
    """Return (hook point, hook): the hook replaces z of one head by its z in the activations `under`.

    `view` is the model. `layer` and `head` name the head. `under` has the activations of another run, by hook point. z
    is the heads' output before W_O; the hook returns an edited copy.
    """
    name, n_heads = view.hook_names(layer)["z"], view.n_heads(layer)

    def edit(z: Tensor, hook: Any) -> Tensor:
        edited, held = (whole.reshape(*z.shape[:2], n_heads, -1) for whole in (z.clone(), under[name]))
        edited[:, :, head] = held[:, :, head].to(edited)
        return edited.reshape(z.shape)

    return name, edit


def _changed_heads(view: AttentionView, layer: int, under: dict[str, Tensor], plain: dict[str, Tensor]) -> pd.DataFrame:
    """Return a row per head of a layer whose write differs between two runs: `layer, head, removed, changed, left`.

    `view` is the model. `under` has the activations of the run with the hook, `plain` without it, by hook point. A norm
    after the attention keeps its scale in `plain`. `removed` and `changed` are shares of the write in `plain`. `left`
    is the largest norm over tokens of the head's write in `under`, divided by the largest in `plain`.
    """
    writes, name = head_writes(view, layer, in_float64), view.hook_names(layer)["z"]
    before, after = (z_of(in_float64(run[name]), writes.w_o) for run in (plain, under))
    scale = writes.token_scale(before)
    before, after = (writes.written(z, scale) for z in (before, after))
    taken = before - after
    largest, left, most = (write.norm(dim=-1).amax((1, 2)) for write in (before, after, taken))
    unit = largest.where(largest > 0, 1.0)  # the largest token, because a hook may change one token only
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
    """Yield sentences on everything but heads that a hook changes in a layer: attention output, MLP, stream.

    For layer 0 also the embedding. `view` is the model. `under` has the activations of the run with the hook, `plain`
    without it, by hook point.
    """
    names, stored = view.hook_names(layer), _stored(view)
    if layer == 0 and _differ(under[names["residual"]], plain[names["residual"]], stored, "same run"):
        yield "it changes what the first layer reads: the embedding, or what is added to it"
    if layer in view.layers:
        writes = head_writes(view, layer, in_float64)
        if not _is_output(view, layer, writes, z_of(in_float64(under[names["z"]]), writes.w_o), under):
            yield (
                f"layer {layer}: it changes the output of the attention, where heads are already mixed by W_O: edit z "
                "instead (hook_z, the input of o_proj)"
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
    """Return True if two activations, `found` and `expected`, differ by more than rounding.

    `stored` is the dtype of the model's weights, `what` the kind of quantity; both set the tolerance, relative to the
    largest entry of `expected`.
    """
    relative = noise_of(what, stored)[1]
    return bool((found - expected.to(found)).abs().max() > relative * expected.abs().max())
