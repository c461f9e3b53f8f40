"""`ablate`: remove a part of some heads while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored, shown
from tlspectral.hooks.capture import HeadCapture
from tlspectral.hooks.edges.reached import Reached, reached, refuse_order, warn_of_other_heads
from tlspectral.hooks.edges.receiving import EdgeReceiver, EdgeRun, EdgeSender
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Part, PartName, part_of
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.probe import require_writes
from tlspectral.models.hooking.exclusive import exclusive, open_contexts
from tlspectral.models.hooking.gated_queries import OfQueries, seen_at
from tlspectral.models.hooking.interrupts import interruptible, uninterrupted_context
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import Hook, hooks_on
from tlspectral.models.hooking.strips import OfStrips
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.key_value_cache import generating_without_cache
from tlspectral.models.running.long_prompts import in_strips
from tlspectral.models.stream.writes import layer_reads, require_stream
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import head_name
from tlspectral.selection.receivers_as_written import Receivers
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import task_sequences


def ablate(
    model: Any,
    heads: Heads,
    part: Part | PartName,
    *,
    into: Receivers | None = None,
    task: Any = None,
) -> AbstractContextManager[Any]:
    """Remove a part of some heads inside a `with` block.

    Use it to see what a model does without the part: its text, its loss, or the attention of later heads.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> round(tls.tasks.induction_loss(model, n_sequences=20).value, 1)
    0.1
    >>> with tls.ablate(model, "L0H3", "rope_phase", into={"k": "L1"}):
    ...     round(tls.tasks.induction_loss(model, n_sequences=20).value, 1)
    1.7

    After the block the model is as before, also after an exception. Everything inside the block sees the ablation:
    calls, `generate` (it runs without key/value cache there), gradients and your own hooks.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a table row, a list of these, or a DataFrame
            with the columns `layer` and `head`. An empty list changes nothing.
        part: "symmetric" (M_S), "antisymmetric" (M_A), "rope_phase" (Im(M_t)), "output", or a value of `tls.parts`.
        into: receivers, that is queries, keys or values of later layers than `heads`: "L18H6.q", "L18KV2.k" (keys that
            heads share), a list of these, or `{"k": heads}`. Only their input loses the part. Default: the whole model.
        task: prompts, needed for a part with a negative or named `at`, and for an `Output` that takes its values from
            the task. Run all prompts of the task in one batch.

    Returns:
        A context manager. `with ... as` gives the same model; there is no table.

    Raises:
        BadHead: a head or receiver does not exist.
        ValueError: the part is unknown, lacks a setting, or does not fit the model, the task or the run; or a receiver
            reads before a head writes.
        UnsupportedArchitecture: the part needs rotary positions and the layer has none; or, with `into`, the residual
            stream is not the sum of what heads and MLPs write.
        EditNotHonored: the model ignores the edit, a key/value cache is in use, or other hooks or `with` blocks
            conflict.

    Not established: that training needed the part. Parts differ in size: compare with
    `ablation_sweep(control="random")`. With `into`, other paths stay, so an edge without effect does not show that the
    head is useless to the receiver. More: docs/parts.md, docs/wiring.md
    """
    return _context(model, _checked(model, heads, part, into, task))


@uninterrupted_context(
    "`tls.ablate` made a context that was never entered, so nothing is removed: write `with tls.ablate(...):`"
)
def _context(model: Any, request: _Request) -> Iterator[Any]:
    with exclusive(request.view.model, asked=request):
        with interruptible():
            request.require_apart([other for other in open_contexts(model) if other is not request])
            hooks = request.hooks()
        # Hooks on the pattern act before hooks that were placed earlier, which then see the edited pattern. Hooks on
        # the embedding see the tokens of the run before other hooks change the embedding.
        ahead = {name for name, _ in hooks if name.endswith(("hook_pattern", "hook_embed"))}
        # A part of a score needs the unrotated queries and keys of all positions, and a cache holds rotated keys.
        generating = generating_without_cache(model)
        placed = hooks_on(model, request.view.hook_points, hooks, ahead=ahead)
        with placed, methods_replaced(model, generating), in_strips(request.view):
            yield model


def ablation_hooks(
    model: Any,
    heads: Heads,
    part: Part | PartName,
    *,
    into: Receivers | None = None,
    task: Any = None,
) -> list[tuple[str, Callable[..., Any]]]:
    """Return the hooks of `ablate` as a TransformerLens `fwd_hooks` list.

    Use it where TransformerLens takes hooks, such as `run_with_hooks`. In other cases `ablate` is simpler.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> tokens = torch.arange(8)[None]
    >>> hooks = tls.ablation_hooks(model, "L0H3", "output")
    >>> hooks
    blocks.0.attn.hook_z: L0H3, output replaced by zeros
    >>> bool((model.run_with_hooks(tokens, fwd_hooks=hooks) != model(tokens)).any())
    True

    Args:
        model: a TransformerBridge or HookedTransformer. Run the hooks on this model.
        heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a table row, a list of these, or a DataFrame
            with the columns `layer` and `head`.
        part: "symmetric" (M_S), "antisymmetric" (M_A), "rope_phase" (Im(M_t)), "output", or a value of `tls.parts`.
        into: receivers such as "L18H6.q", "L18KV2.k" or `{"k": heads}`: only their input loses the part. Default: the
            whole model loses it.
        task: prompts, for a part that takes positions or replacement values from them. Default: None.

    Returns:
        A list of pairs (name of a hook point, hook), in the order in which the hooks act. Printed, it has a line per
        hook: the hook point, the heads, and what the hook reads or replaces.

    Raises:
        BadHead: a head or receiver does not exist.
        ValueError: the part is unknown, lacks a setting or does not fit the model or the task; or a receiver reads
            before a head writes.
        UnsupportedArchitecture: the layer does not have this part, or the residual stream is not the sum of its writes.
        EditNotHonored: the model ignores the edit. A run raises it if a key/value cache is in use or another hook edits
            what the ablation needs.

    Not established: that the part matters; see `ablate`. Use one list in one run at a time and in one thread, because
    the hooks keep queries and keys of a run. `ablate` refuses a second thread; this list does not.
    """
    request = _checked(model, heads, part, into, task)
    return _Hooks(request, request.hooks())


def _checked(model: Any, heads: Heads, part: Part | PartName, into: Receivers | None, task: Any) -> _Request:
    """Check the arguments of `ablate` without a run of the model, and return them as a `_Request`.

    `model` is the model, `part` the part to remove or its name. `into` are the receivers whose input loses the part;
    None: the whole model loses it. `task` is a `Task`, a task's name or None; its prompts turn a named or negative
    position of the part into numbers. Raises ValueError for such a position without a task, for an unknown part, or for
    a receiver that reads before a head writes; BadHead for heads or receivers that do not exist; TypeError for an
    unusable part of the user; UnsupportedArchitecture if a model cannot have `into`.
    """
    removed, view = part_of(part), attention_view(model)
    if task is not None:
        removed = removed.fixed(view, task_sequences(view, task_of(task)))
    if isinstance(removed.at, str):
        raise ValueError(f"at={shown(removed.at)} names a position of a task: give task= too")
    if removed.at is not None and int(torch.as_tensor(removed.at).min()) < 0:
        raise ValueError(
            f"at={shown(removed.at)} counts from the end of each prompt, and a run does not show where prompts end: "
            "give task= too, or count from the first token"
        )
    by_layer = heads_by_layer(view, heads)
    if into is None:
        return _Request(view, by_layer, removed, None)
    require_stream(view)
    ends = reached(view, into)
    refuse_order(by_layer, ends)
    return _Request(view, by_layer, removed, ends)


class _Hooks(list[Hook]):
    """A list of pairs (hook point, hook) that `ablation_hooks` returns; it is passed to a model as `fwd_hooks`.

    `hooks` are the pairs. `request` is the checked call of `ablation_hooks`, whose heads and part are shown when the
    list is printed. Printed, it has a line per hook: hook point, heads, and what the hook reads or replaces.
    """

    def __init__(self, request: _Request, hooks: Iterable[Hook]):
        super().__init__(hooks)
        self._request = request

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {self._request.description_of(hook)}" for name, hook in self) or "[]"


@dataclass(frozen=True, repr=False)
class _Request:
    """The checked arguments of one `ablate` call: which part is removed from which heads.

    Attributes:
        view: the model.
        by_layer: dict from layer to the heads that lose the part.
        part: the part of a head that is removed.
        ends: the receivers (queries, keys or values of heads) whose input loses the part; None: the whole model loses
            it.
    """

    view: AttentionView
    by_layer: dict[int, list[int]]
    part: Part
    ends: list[Reached] | None

    def __str__(self) -> str:
        return f"an `ablate` context on {self._heads()} ({self.part.name})"

    def __repr__(self) -> str:
        read = "" if self.ends is None else f", in what {', '.join(end.receiver.name for end in self.ends)} read"
        return f"<ablate: {self._heads()}, {self.part.in_words()}{read}>"

    def _heads(self) -> str:
        heads = [head_name(layer, head) for layer, some in self.by_layer.items() for head in some]
        named = ", ".join(heads[:_NAMED]) or "no head"
        return named + (f" and {len(heads) - _NAMED} others" if len(heads) > _NAMED else "")

    def description_of(self, hook: Callable[..., Any]) -> str:
        """Return text on one hook of this request: its heads, and what it reads or removes, such as "L0H3, read".

        `hook` is the hook function. A hook that only forgets stored activations gives "drops activations that an
        earlier run left".
        """
        while isinstance(hook, partial | OfQueries | OfStrips):
            hook = hook.func if isinstance(hook, partial) else hook.hook
        owner = getattr(hook, "__self__", None)
        owner = getattr(owner, "ablation", owner)  # an EdgeSender holds its ablation
        if not isinstance(owner, HeadCapture):
            return "drops activations that an earlier run left"
        # A hook that returns None changes no activation.
        if hook.__annotations__["return"] in (None, "None"):
            return f"{owner.head_names}, read"
        removed = self.part.in_words("" if isinstance(owner, LayerAblation) else f" of {self._heads()}")
        return f"{owner.head_names}, {removed}"

    def require_apart(self, others: Iterable[_Request]) -> None:
        """Raise EditNotHonored if another open `ablate` block removes a part of one of these heads.

        `others` are the requests of the open blocks. Two blocks on one head are allowed if `_add_up` says that removing
        their parts one after the other equals removing both at once.
        """
        for other in others:
            for layer, heads in self.by_layer.items():
                both = {*heads} & {*other.by_layer.get(layer, ())}
                whole = self.ends is None and other.ends is None
                if both and whole and not _add_up(self.view, layer, self.part, other.part):
                    raise EditNotHonored(
                        f"{head_name(layer, min(both))}: {other} is open. Removing {self.part.name} from the same head "
                        "in a second context may not add up with it: close the first context"
                    )

    def hooks(self) -> list[Hook]:
        """Return the `fwd_hooks` list that removes the part from these heads, or only from the receivers' input.

        First, short runs of the model prove that such an edit changes the logits. Raises EditNotHonored if it does not.
        With receivers, raises UnsupportedArchitecture if the residual stream is not the sum of the writes, and warns if
        the edit of a receiver changes heads that the user did not name.
        """
        view, ends = self.view, self.ends
        ablations = [
            LayerAblation(view, view.layer(index), self.by_layer[index], bound)
            for index, bound in bound_parts(self.part, view, self.by_layer).items()
        ]
        if ends is None:
            return [(name, seen_at(name, hook)) for ablation in ablations for name, hook in ablation.hooks()]
        if not ablations or not ends:
            return []
        last = max(end.receiver.layer for end in ends)
        require_writes(view, range(min(ablation.layer.layer for ablation in ablations), last))
        run = EdgeRun({ablation.layer.layer: ablation.heads for ablation in ablations})
        warn_of_other_heads(ends)
        # Every run from token ids passes the embedding first.
        hooks: list[Hook] = [("hook_embed" if "hook_embed" in view.hook_points else "embed.hook_out", run.forget)]
        for ablation in ablations:
            hooks += EdgeSender(ablation, run).hooks()
        for (layer, what), some in groupby(ends, key=lambda end: (end.receiver.layer, end.receiver.input)):
            heads_read = [end.receiver.head for end in some]
            for reads in layer_reads(view.raw(layer), what, widened):
                hooks += EdgeReceiver(view, view.layer(layer), heads_read, what, reads.point, run).hooks()
        return [*((name, seen_at(name, hook)) for name, hook in hooks), (view.hook_names(last)["z"], run.forget)]


_SUMMANDS = {"symmetric", "antisymmetric", "rope_phase"}
"""Parts that add up to the score, so removing two of them one after the other equals removing both at once."""
_NAMED = 6  # heads in a message


def _add_up(view: AttentionView, layer: int, part: Part, second_part: Part) -> bool:
    """Return True if removing two parts of one head one after the other equals removing both at once.

    `part` and `second_part` are the parts, `view` and `layer` the model and layer of the head. True for different parts
    out of M_S, M_A and Im(M_t), for parts at different positions, and for different rotary frequencies. False for any
    other two parts.
    """
    kinds = {part.acts_on, second_part.acts_on}
    if kinds == {"z"}:
        return _apart(part.at, second_part.at)
    if "z" in kinds or "scores" not in view.hook_names(layer):
        return False
    if _apart(part.at, second_part.at):
        return True
    # A softcap is applied to the sum, so changes of capped scores do not add up.
    if kinds != {"scores"} or view.raw(layer).softcap is not None:
        return False
    if part.name != second_part.name and {part.name, second_part.name} <= _SUMMANDS:
        return True
    first, second = (getattr(removed, "frequencies", None) for removed in (part, second_part))
    if first is None or second is None or not all(type(pair) is int for pair in (*first, *second)):
        return False
    return not {*first} & {*second}


def _apart(first: Any, second: Any) -> bool:
    """Return True if two `at` values of parts have no token position in common in any prompt.

    `first` and `second` are each one position for all prompts, one per prompt, or None for all positions (then False).
    """
    if first is None or second is None:
        return False
    first, second = (torch.as_tensor(at).reshape(-1) for at in (first, second))
    return (len(first) == len(second) or 1 in (len(first), len(second))) and not bool((first == second).any())
