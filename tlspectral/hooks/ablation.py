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
from tlspectral.errors import EditNotHonored
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
from tlspectral.models.hooking.placing import Hook, hooks_on
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.key_value_cache import generating_without_cache
from tlspectral.models.running.partial_runs import methods_replaced
from tlspectral.models.stream.writes import layer_reads, require_stream
from tlspectral.selection import Heads, Receivers, head_name
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
    """Remove a part of the given heads inside a context; the model is as before when the context ends.

    Example: in a model with an induction circuit, the previous-token head acts by the keys of the induction heads.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> round(tls.tasks.induction_loss(model, n_sequences=20).value, 1)
    0.1
    >>> with tls.ablate(model, "L0H3", "rope_phase", into={"k": "L1"}):
    ...     round(tls.tasks.induction_loss(model, n_sequences=20).value, 1)
    1.7

    `tlspectral.hooks.parts` has the parts: `"symmetric"` (M_S), `"antisymmetric"` (M_A), `"rope_phase"` (Im(M_t)) and
    `"output"` by name, and as values with settings `RopePhase`, `Symmetric`, `Antisymmetric`, `Band`, `Output`,
    `LongRange`, `Content`, `Position` and `Interaction`. The name says what is removed.

    With C the part of a score that is even in the offset of its tokens, `"symmetric"` is (C + C^T)/2 and
    `"antisymmetric"` (C - C^T)/2. Under rotary positions these are the parts of the operator as it acts at each
    distance, and with Im(M_t) they sum to the score; `"symmetric_static"` and `"antisymmetric_static"` are the parts of
    the matrix M at distance 0, which do not (`parts.Symmetric`).

    `generate`, `generate_stream` and `hf_generate` run without their key/value cache inside the context, whatever
    `use_past_kv_cache` says: the cache holds keys of earlier positions alone, and a part needs the queries too. The
    text is the same.

    Biases, ALiBi, windows and masks stay as they are, unless a part's `include_bias` adds the bias terms. Works with
    `run_with_cache`, `run_with_hooks`, gradients and hooks of your own: enter it after hooks that edit queries and
    keys, which it then sees. Two contexts on different heads act like one on both. A second context on the same head is
    refused, on every backend, unless the two provably add up: M_S, M_A and Im(M_t) of one head, or rotary pairs of
    which none is in both, where the layer exposes its scores and has no softcap; or other positions (`at`). Ctrl-C
    leaves nothing on the model. Heads, part, receivers and task are checked at the call, the model as the context
    begins; a context that is never entered warns. A copy of the model that is made inside the context cannot be run:
    copy it outside.

    **Edges.** With `into`, the heads run as they are, and the part is taken away only in what the receivers read. What
    removing the part changes of the residual stream is measured at the heads, the norm behind an attention held at its
    scale in the run, and taken out of the receivers' input, their own norms taken again. Only the direct path is cut:
    what layers in between made of the part stays. The gate of a gated attention (AFMoE, Qwen3-Next) reads what the
    queries read, and belongs to their receiver. Keys and values that a group shares are one receiver (`L18KV2.k`), so
    are the keys and values of all heads of latent attention (`L3KV0.k`); where it is given by one of its heads
    (`L18H6.k`), a warning names the others that it reaches. Source: path patching (Goldowsky-Dill et al. 2023, section
    2), here with a part of a head. "Fingerprint, Not Blueprint" leaves the mediated phase ablation to future work.

    Args:
        model: a TransformerBridge or HookedTransformer; the context's `as` target.
        heads: "L5H1", (5, 1), a table row, "L5" for all heads of a layer, a list of these over any layers, or a
            DataFrame with `layer` and `head`; an empty list changes nothing.
        part: what is removed: a value of `tlspectral.hooks.parts`, or one without settings by name or symbol.
        into: receivers, `"L18H6.q"`, `"L18KV2.k"`, a list of them or `{"k": heads}`, each in a later layer than all of
            `heads`. None: no edge; the part is removed from the model.
        task: the prompts that the context runs, all at once: of a part with `at`, whose positions count from the end of
            each prompt or have a name; or of an `Output`, which takes from them, or from their pairs if it has no
            `replace` and they have pairs. Prompts stand from the first token of the run on, as in `evaluate`.

    Raises:
        BadHead: a head or a receiver that does not exist.
        UnsupportedArchitecture: a `RopePhase` or `Band` on a layer without rotary positions; or an edge over layers
            whose residual stream is no sum of what heads and MLPs write.
        ValueError: an unknown part, one with settings that is given by name, frequencies that do not exist, a reference
            that the model cannot read or that looks padded, blocks of unequal length, a task that is not of the prompt
            of a part in blocks, or a receiver that reads before a head writes.
        EditNotHonored: the model discards the edit, or its scores are not what the operators give; the model is given a
            key/value cache, or a later hook edits queries or keys (raised as the model runs); the hooks were taken off
            inside the context, by `reset_hooks` (raised at its end, unless another exception is raised); or a second
            thread opens a context on the model or runs it while a context is open.
        EditNotHonored, as the context begins: another open context removes a part of one of these heads, and the two
            need not add up.
        EditNotHonored, for an edge, as the model runs: a later hook edits z or the output of attention at a head; a
            receiver does not read the residual stream as the operators do; the pass skips a head (as a sweep does); or
            two open contexts have one receiver.
        ValueError, as the model runs: a prompt beyond the length up to which the model's score scale holds (Ministral
            3; `attrs["rotary_valid_up_to"]` of the head table); one sequence that is its own reference; sequences
            to resample that are of another length; tokens that differ from the prompt of a part in blocks; or no
            query behind the blocks, or one that does not see all of them.

    What it does not establish: that training needed the part. And an effect alone says little: the parts differ in
    size. An edge without effect does not say that the head does not matter to the receiver: paths over other heads and
    MLPs are not cut.
    """
    return _context(model, _checked(model, heads, part, into, task))


@uninterrupted_context(
    "`tls.ablate` made a context that was never entered, so nothing is removed: write `with tls.ablate(...):`"
)
def _context(model: Any, asked: _Asked) -> Iterator[Any]:
    with exclusive(asked.view.model, asked=asked):
        with interruptible():
            asked.require_apart([other for other in open_contexts(model) if other is not asked])
            hooks = asked.hooks()
        # An edited pattern is handed on to all that reads it, hooks that were there before among them. Embeddings
        # are read as the tokens of the run give them, before other hooks change them.
        ahead = {name for name, _ in hooks if name.endswith(("hook_pattern", "hook_embed"))}
        # A part of a score needs the unrotated queries and keys of all positions, and a cache holds rotated keys.
        generating = generating_without_cache(model)
        with hooks_on(model, asked.view.hook_points, hooks, ahead=ahead), methods_replaced(model, generating):
            yield model


def ablation_hooks(
    model: Any,
    heads: Heads,
    part: Part | PartName,
    *,
    into: Receivers | None = None,
    task: Any = None,
) -> list[tuple[str, Callable[..., Any]]]:
    """Return the hooks of `ablate` as a TransformerLens `fwd_hooks` list, with the same arguments and errors.

    Printed, the list is a line a hook: its hook point, the heads, and what is read or replaced there. They keep a run's
    queries and keys between the hook points of one layer, so use a list in one run at a time. As TransformerLens adds
    and removes hooks for all threads at once, use it in one thread at a time too; `ablate` refuses a second one.

    Args:
        model, heads, part, into, task: as in `ablate`.

    Returns:
        Pairs of a hook point's name and a hook, in the order in which they act.

    Example:
        >>> import tlspectral as tls, torch
        >>> model = tls.load_model("tiny-rope")
        >>> tokens = torch.arange(8)[None]
        >>> hooks = tls.ablation_hooks(model, "L0H3", "output")
        >>> hooks
        blocks.0.attn.hook_z: L0H3, output replaced by zeros
        >>> bool((model.run_with_hooks(tokens, fwd_hooks=hooks) != model(tokens)).any())
        True
    """
    asked = _checked(model, heads, part, into, task)
    return _Hooks(asked, asked.hooks())


def _checked(model: Any, heads: Heads, part: Part | PartName, into: Receivers | None, task: Any) -> _Asked:
    """Return what is asked of `ablate`, with all that can be checked without a run of the model.

    Raises BadHead, ValueError, TypeError, UnsupportedArchitecture.
    """
    removed, view = part_of(part), attention_view(model)
    if task is not None:
        removed = removed.fixed(view, task_sequences(view, task_of(task)))
    if isinstance(removed.at, str):
        raise ValueError(f"at={removed.at!r} is a name of a position of a task: give task=")
    if removed.at is not None and int(torch.as_tensor(removed.at).min()) < 0:
        raise ValueError(
            f"at={removed.at!r} counts from the end of each prompt, which a run does not show: give task=, or count "
            "from the first token"
        )
    by_layer = heads_by_layer(view, heads)
    if into is None:
        return _Asked(view, by_layer, removed, None)
    require_stream(view)
    ends = reached(view, into)
    refuse_order(by_layer, ends)
    return _Asked(view, by_layer, removed, ends)


class _Hooks(list[Hook]):
    """A `fwd_hooks` list that prints a line a hook: its hook point, the heads, and what is read or replaced there."""

    def __init__(self, asked: _Asked, hooks: Iterable[Hook]):
        super().__init__(hooks)
        self._asked = asked

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {self._asked.said_of(hook)}" for name, hook in self) or "[]"


@dataclass(frozen=True, repr=False)
class _Asked:
    """A part to remove from heads, by layer: in the whole model, or in what the receivers `ends` (`Reached`) read."""

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

    def said_of(self, hook: Callable[..., Any]) -> str:
        """Return what one of the hooks does. A hook that returns nothing changes nothing."""
        while isinstance(hook, partial | OfQueries):
            hook = hook.func if isinstance(hook, partial) else hook.hook
        owner = getattr(hook, "__self__", None)
        owner = getattr(owner, "ablation", owner)  # of a sender
        if not isinstance(owner, HeadCapture):
            return "drops what an earlier run has left"
        if hook.__annotations__["return"] in (None, "None"):
            return f"{owner.said}, read"
        removed = self.part.in_words("" if isinstance(owner, LayerAblation) else f" of {self._heads()}")
        return f"{owner.said}, {removed}"

    def require_apart(self, others: Iterable[_Asked]) -> None:
        """Refuse a head of which another open context removes a part that need not add up. Raises EditNotHonored."""
        for other in others:
            for layer, heads in self.by_layer.items():
                both = {*heads} & {*other.by_layer.get(layer, ())}
                whole = self.ends is None and other.ends is None
                if both and whole and not _add_up(self.view, layer, self.part, other.part):
                    raise EditNotHonored(
                        f"{head_name(layer, min(both))}: {other} is open, and {self.part.name} that a second context "
                        "takes from this head need not add up with that: close the first context"
                    )

    def hooks(self) -> list[Hook]:
        """Return the hooks, after runs that prove that they act."""
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
        require_writes(view, range(min(one.layer.layer for one in ablations), last))
        run = EdgeRun({one.layer.layer: one.heads for one in ablations})
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
"""Parts of which different ones have nothing in common: together they are the score."""
_NAMED = 6  # heads in a message


def _add_up(view: AttentionView, layer: int, one: Part, other: Part) -> bool:
    """Return whether parts of one head that are removed one after the other are removed as both are at once."""
    kinds = {one.acts_on, other.acts_on}
    if kinds == {"z"}:
        return _apart(one.at, other.at)
    if "z" in kinds or "scores" not in view.hook_names(layer):
        return False
    if _apart(one.at, other.at):
        return True
    if kinds != {"scores"} or view.raw(layer).softcap is not None:
        return False
    if one.name != other.name and {one.name, other.name} <= _SUMMANDS:
        return True
    first, second = (getattr(part, "frequencies", None) for part in (one, other))
    if first is None or second is None or not all(type(pair) is int for pair in (*first, *second)):
        return False
    return not {*first} & {*second}


def _apart(one: Any, other: Any) -> bool:
    """Return whether two positions, of all prompts or one for each, are nowhere the same; None is everywhere."""
    if one is None or other is None:
        return False
    one, other = (torch.as_tensor(at).reshape(-1) for at in (one, other))
    return (len(one) == len(other) or 1 in (len(one), len(other))) and not bool((one == other).any())
