"""Forward passes under hooks that skip what is known or not needed: earlier blocks, a shared prompt, other logits.

The model's own forward pass is used, so that masks, rotary tables, final norm, softcap and logit scale are its own. A
skipped block hands on what it is given. Copies of the sequences join the batch at the first block that they need, with
the residual stream that is stored of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating, model_name
from tlspectral.models.hooking.interrupts import undoing, uninterrupted
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.blocks import Block
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import in_batches
from tlspectral.models.running.growing_batch import BlockArguments, GrowingBatch, growing_batch

Positions = slice | Int[Tensor, "sequences predicted"]
"""Positions whose logits are wanted: the same in every prompt, or each prompt's own."""

LAST = slice(-1, None)
"""The last position alone."""


def require_gradients(view: AttentionView, what: str) -> None:
    """Refuse passes with gradients where PyTorch records none; `what` needs them. Raises ValueError."""
    made = any(parameter.is_inference() for parameter in view.model.parameters())
    if made or torch.is_inference_mode_enabled():
        raise ValueError(
            f"{what} needs gradients, and "
            + (
                f"{model_name(view.model)} was loaded under torch.inference_mode, whose tensors have none: load it "
                "outside of it (torch.no_grad does no harm)"
                if made
                else "none are recorded under torch.inference_mode: call it outside, or under torch.no_grad"
            )
        )


@dataclass(frozen=True)
class IntactRun:
    """The residual streams of a run without ablation, from which a model is run again from later blocks on.

    Attributes:
        predicted: positions whose logits are wanted.
        entering: by layer, the residual stream that enters it; layer 0 needs none.
        companions: by layer, how many values its block returns besides the residual stream; -1 for no tuple.
        arguments: by layer, what its block was given besides the residual stream.
        unembedded: what the unembedding read at the predicted positions; None where the model does not use its module.
        continued: the latest `ContinuedRun`, by its position.
    """

    view: AttentionView
    tokens: Int[Tensor, "sequences pos"]
    predicted: Positions
    entering: dict[int, Float[Tensor, "sequences pos d_model"]]
    companions: dict[int, int]
    arguments: dict[int, BlockArguments]
    unembedded: Float[Tensor, "sequences predicted width"] | None = None
    continued: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence that a replay computes."""
        return self.tokens.shape[1]

    @property
    def n_keys(self) -> int:
        """Keys of the last query of a replay."""
        return self.n_tokens

    @property
    def bytes_kept(self) -> int:
        """Size of the keys and values that a replay copies for each of its rows."""
        return 0

    def replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]] = ()
    ) -> Float[Tensor, "rows predicted d_vocab"]:
        """Return logits of copies of some sequences, each computed from a layer of its own on, in one pass.

        The batch is one whole copy after the other. The `layers` of copies do not decrease: a block runs the copies of
        its own layer and of those below. `hooks` are of some of the copies, and act on these alone; those that are on
        the model act on all. Whether gradients are recorded is left to the caller.
        """
        batch = growing_batch(self.view, self._begun(layers), len(self.tokens[sequences]), self.arguments)
        tokens = self.tokens[sequences].repeat(len(layers), 1)
        predicted = self.predicted
        predicted = predicted if isinstance(predicted, slice) else predicted[sequences].repeat(len(layers), 1)
        with self.view.hooks_on(batch.of_copies(hooks)), self.joining(batch, sequences):
            return logits_at(self.view, tokens, predicted)

    def begun(self, layer: int, sequences: slice) -> AbstractContextManager[None]:
        """Let passes over some sequences begin at a layer; at 0 where this cannot be."""
        n = len(self.tokens[sequences])
        return self.joining(growing_batch(self.view, self._begun([layer]), n, self.arguments), sequences)

    def _begun(self, layers: Sequence[int]) -> Sequence[int]:
        return [0] * len(layers) if begins_whole(self.view) else layers

    @uninterrupted
    def joining(self, batch: GrowingBatch, sequences: slice, first: int = 0) -> Iterator[None]:
        """Let passes over the rows of a batch, from a position on, skip blocks that none of them needs, and let rows
        join at their layers.
        """
        begun, last = batch.layers[0], batch.layers[-1]
        with ExitStack() as placed:
            for layer, (_, block) in enumerate(self.view.blocks[: last + 1]):
                if layer < begun:
                    forward = partial(_handed_on, self.companions[layer])
                    placed.enter_context(methods_replaced(block, {"forward": forward}))
                elif layer or last:
                    stored = layer > 0 and layer in batch.layers
                    entering = self.entering[layer][sequences, first:] if stored else None
                    register = partial(block.register_forward_pre_hook, prepend=True, with_kwargs=True)
                    placed.enter_context(module_hooks([(register, partial(batch.joined, layer, entering))]))
            yield


def begins_whole(view: AttentionView) -> bool:
    """Return whether later blocks need more of earlier ones than a residual stream.

    That is their keys (Gemma 3n and 4), the keys that their indexer picks (GLM 5), or several streams (Gemma 3n).
    """
    config: Any = getattr(getattr(view.model, "original_model", None), "config", None)
    config = getattr(config, "text_config", config)
    modes = (mode for name in ("kv_sharing_modes", "indexer_types") for mode in getattr(config, name, None) or ())
    return hasattr(config, "altup_num_inputs") or not {"reuse", "shared"}.isdisjoint(modes)


def intact_run(
    view: AttentionView,
    tokens: Int[Tensor, "sequences pos"],
    predicted: Positions,
    layers: Iterable[int],
    *,
    batch: int,
    reduce: Callable[[slice, Tensor], None],
) -> IntactRun:
    """Run the model once, without gradients, and store the residual stream that enters each of the given layers.

    Hooks that are on the model stay in force. `reduce` is called for each `batch` of sequences, with their slice and
    the logits of the positions `predicted`.
    """
    entering: dict[int, Tensor] = {}
    companions: dict[int, int] = {}
    arguments: dict[int, BlockArguments] = {}
    current = slice(0, 0)

    def keeper(layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(block: Any, inputs: Any, output: Any) -> None:
            companions[layer] = len(output) - 1 if isinstance(output, tuple) else -1
            if layer + 1 not in wanted:
                return
            residual = output[0] if isinstance(output, tuple) else output
            if layer + 1 not in entering:
                entering[layer + 1] = residual.new_empty(len(tokens), *residual.shape[1:])
            entering[layer + 1][current] = residual

        return keep

    def run(sequences: slice) -> None:
        nonlocal current
        current = sequences
        at_once = predicted if isinstance(predicted, slice) else predicted[current]

        def read(values: Tensor) -> Tensor:
            chosen = at(values, at_once)
            if not unembedded:
                unembedded.append(chosen.new_empty(len(tokens), *chosen.shape[1:]))
            unembedded[0][current] = chosen
            return chosen

        reduce(current, _logits(view, tokens[current], at_once, read))

    unembedded: list[Tensor] = []
    wanted = set() if begins_whole(view) else set(layers)
    blocks = view.blocks
    running = range(max(wanted, default=0))
    keeping = [(blocks[layer].module.register_forward_hook, keeper(layer)) for layer in running]
    with evaluating(view.model), torch.no_grad(), module_hooks(keeping), noting_arguments(blocks, arguments, running):
        for _ in in_batches(len(tokens), batch, run):
            pass
    scored = unembedded[0] if unembedded else None
    return IntactRun(view, tokens, predicted, entering, companions, arguments, scored)


def logits_at(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], predicted: Positions
) -> Float[Tensor, "batch predicted d_vocab"]:
    """Return logits of a whole forward pass at some positions; the others are never unembedded.

    Hooks on the unembedding itself see the predicted positions alone. Whether gradients are recorded is left to the
    caller.
    """
    return _logits(view, tokens, predicted, partial(at, predicted=predicted))


def _logits(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], predicted: Positions, chosen: Callable[[Tensor], Tensor]
) -> Float[Tensor, "batch predicted d_vocab"]:
    with checked_at_end(), evaluating(view.model), unembedding_only(view, chosen) as selected:
        logits = view.model(tokens.to(view.device), return_type="logits")
    # A model that unembeds without its unembedding module returns all positions.
    return logits if selected else at(logits, predicted)


@uninterrupted
def unembedding_only(view: AttentionView, chosen: Callable[[Tensor], Tensor]) -> Iterator[list[bool]]:
    """Let passes inside the context unembed what is chosen of the last stream, where the model uses its module for it.

    Yields a list that is empty until a pass did so.
    """
    selected: list[bool] = []

    def select(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        selected.append(True)
        return (chosen(inputs[0]), *inputs[1:])

    unembedding = getattr(view.model, "unembed", None)  # None for an encoder alone
    with module_hooks([] if unembedding is None else [(unembedding.register_forward_pre_hook, select)]):
        yield selected


def at(values: Float[Tensor, "batch pos width"], predicted: Positions) -> Float[Tensor, "batch predicted width"]:
    """Return what stands at the predicted positions."""
    if isinstance(predicted, slice):
        return values[:, predicted]
    return values.take_along_dim(predicted[..., None].to(values.device), dim=1)


def _handed_on(companions: int, *given: Any, **named: Any) -> Any:
    """Return what a block is given, in the form of what it returns."""
    stream = given[0] if given else next(iter(named.values()))
    return stream if companions < 0 else (stream, *[None] * companions)


def noting_arguments(
    blocks: Sequence[Block], noted: dict[int, BlockArguments], layers: Iterable[int]
) -> AbstractContextManager[None]:
    """Note what some blocks are given in the first pass inside the context."""

    def note(layer: int, block: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer not in noted:
            noted[layer] = BlockArguments.of_block(given, named)

    registering = {layer: partial(blocks[layer].module.register_forward_pre_hook, with_kwargs=True) for layer in layers}
    return module_hooks([(register, partial(note, layer)) for layer, register in registering.items()])


@uninterrupted
def module_hooks(placing: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Put hooks of PyTorch on modules until the context ends: pairs of a method that registers a hook, and the hook."""
    handles: list[Any] = []
    with undoing(_remove, handles):
        for register, hook in placing:
            handles.append(register(hook))
        yield


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


@dataclass(frozen=True, eq=False)
class _Replacement:
    """Methods that one context has set on an object, and what the object itself had under their names."""

    methods: Mapping[str, Callable[..., Any]]
    before: dict[str, Any]


_replacements: WeakKeyDictionary[Any, list[_Replacement]] = WeakKeyDictionary()
_ABSENT = object()


@uninterrupted
def methods_replaced(owner: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of one object inside the context. Several contexts may end in any order."""
    # In __dict__: a bridge passes attributes that are set on it to the module it wraps.
    own = owner.__dict__
    replacement = _Replacement(methods, {name: own.get(name, _ABSENT) for name in methods})
    with undoing(_put_back, owner, replacement):
        _replacements.setdefault(owner, []).append(replacement)
        own.update(methods)
        yield


def _put_back(owner: Any, replacement: _Replacement) -> None:
    own, standing = owner.__dict__, _replacements.get(owner, [])
    if replacement not in standing:
        return
    later = standing[standing.index(replacement) + 1 :]
    for name, method in replacement.methods.items():
        above = next((other for other in later if name in other.methods), None)
        before = replacement.before[name]
        if above is not None:
            above.before[name] = before
        elif own.get(name) is method:
            own.pop(name) if before is _ABSENT else own.update({name: before})
    standing.remove(replacement)


def last_logits(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], hooks: Iterable[Hook] = ()
) -> Float[Tensor, "batch d_vocab"]:
    """Return logits of the last tokens from a plain pass under hooks, without gradients and without a cache."""
    with torch.no_grad(), view.hooks_on(hooks):
        return logits_at(view, tokens, LAST)[:, -1]
