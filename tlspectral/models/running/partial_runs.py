"""Forward passes under hooks that skip known or unneeded work: earlier layers, a shared prompt, unused logits.

The model's own forward pass is used, so masks, rotary tables, final norm, softcap and logit scale are the model's own.
A skipped layer returns its input. Copies of the sequences join the batch at the first layer that they need, with the
stored residual stream of that layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.hooking.deferred_checks import checked_at_end
from tlspectral.models.hooking.exclusive import evaluating, model_name
from tlspectral.models.hooking.interrupts import undoing, uninterrupted
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.blocks import Block
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import in_batches
from tlspectral.models.running.growing_batch import BlockArguments, GrowingBatch, growing_batch
from tlspectral.models.running.long_prompts import in_strips

Positions = slice | Int[Tensor, "sequences predicted"]
"""Positions whose logits are wanted: a slice for all prompts, or each prompt's own positions."""

LAST = slice(-1, None)
"""The last position only."""


def require_gradients(view: AttentionView, what: str) -> None:
    """Raise ValueError if PyTorch records no gradients (torch.inference_mode), or if the model in `view` was loaded
    without them.

    what: name of the call that needs gradients, the beginning of the message.
    """
    made = any(parameter.is_inference() for parameter in view.model.parameters())
    if made or torch.is_inference_mode_enabled():
        raise ValueError(
            f"{what} needs gradients, and "
            + (
                f"{model_name(view.model)} was loaded under torch.inference_mode, whose tensors have no gradients: "
                "load the model outside of it (torch.no_grad is allowed)"
                if made
                else "torch.inference_mode records none: call this outside of it (torch.no_grad is allowed)"
            )
        )


@dataclass(frozen=True)
class IntactRun:
    """A run without ablation, with stored residual streams from which the model can be run again from later layers on.

    Attributes:
        view: view of the model.
        tokens: token ids of the sequences.
        predicted: positions whose logits are wanted.
        entering: from layer to the residual stream that enters it; layer 0 is not stored.
        companions: from layer to the number of values it returns besides the residual stream; -1 if it returns no
            tuple.
        arguments: from layer to the shapes of its arguments besides the residual stream.
        unembedded: the unembedding's input at the predicted positions; None if the model does not use its unembedding
            module.
        continued: the latest `ContinuedRun` (or None if it was not possible), by the position at which it begins.
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
        """Tokens of each sequence that a replay (another run from a later layer on, under hooks) computes: all."""
        return self.tokens.shape[1]

    @property
    def n_keys(self) -> int:
        """Number of keys of the last query in a replay: all tokens of the sequence."""
        return self.n_tokens

    @property
    def bytes_kept(self) -> int:
        """Bytes of keys and values that a replay copies for each of its rows: 0."""
        return 0

    def replay(
        self, layers: Sequence[int], sequences: slice, hooks: Iterable[tuple[slice, list[Hook]]] = ()
    ) -> Float[Tensor, "rows predicted d_vocab"]:
        """Run copies of some sequences in one pass, each copy from its own layer on, and return their logits.

        layers: for each copy the layer at which it begins, in ascending order. A layer computes the copies that begin
        at it or earlier.
        sequences: slice of the stored sequences.
        hooks: pairs of a slice of copies and the hooks that act only on them. Hooks already on the model act on all
        copies.

        The rows of the result are one whole copy after another. The caller decides whether gradients are recorded.
        """
        batch = growing_batch(self.view, self._begun(layers), len(self.tokens[sequences]), self.arguments)
        tokens = self.tokens[sequences].repeat(len(layers), 1)
        predicted = self.predicted
        predicted = predicted if isinstance(predicted, slice) else predicted[sequences].repeat(len(layers), 1)
        with self.view.hooks_on(batch.of_copies(hooks)), self.joining(batch, sequences):
            return logits_at(self.view, tokens, predicted)

    def begun(self, layer: int, sequences: slice) -> AbstractContextManager[None]:
        """Return a context manager: passes over some sequences in its `with` block begin at a layer, from its stored
        stream.

        layer: the first layer that runs; 0 is used if the model cannot begin later. sequences: a slice of the stored
        sequences.
        """
        n = len(self.tokens[sequences])
        return self.joining(growing_batch(self.view, self._begun([layer]), n, self.arguments), sequences)

    def _begun(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the layers at which copies begin: the given ones, or 0 for each if the model cannot begin later."""
        return [0] * len(layers) if begins_whole(self.view) else layers

    @uninterrupted
    def joining(self, batch: GrowingBatch, sequences: slice, first: int = 0) -> Iterator[None]:
        """Let passes over a batch skip layers that no row needs, until the `with` block ends.

        Rows join the batch at their own layers.

        batch: which copies join at which layer. sequences: slice of the stored sequences, whose streams are used.
        first: position at which the passes begin; stored streams are cut there.
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
    """Return True if later layers of the model in `view` need more of earlier layers than a residual stream.

    They need keys (Gemma 3n and 4), keys picked by an indexer (GLM 5), or several streams (Gemma 3n).
    """
    config: Any = getattr(getattr(view.model, "original_model", None), "config", None)
    config = getattr(config, "text_config", config)
    modes = (mode for name in ("kv_sharing_modes", "indexer_types") for mode in getattr(config, name, None) or ())
    return hasattr(config, "altup_num_inputs") or not {"reuse", "shared"}.isdisjoint(modes)


def share_behind(view: AttentionView, layer: int) -> float:
    """Return the share of the model's layers that a replay from `layer` on runs."""
    return 1.0 if begins_whole(view) else (view.n_layers - layer) / view.n_layers


def intact_run(
    view: AttentionView,
    tokens: Int[Tensor, "sequences pos"],
    predicted: Positions,
    layers: Iterable[int],
    *,
    batch: int,
    reduce: Callable[[slice, Tensor], None],
) -> IntactRun:
    """Run the model in `view` once, without gradients; return an `IntactRun` with the streams that enter some layers
    (`.entering`).

    tokens: the sequences. predicted: positions whose logits are wanted. layers: whose input is stored. batch: sequences
    per pass. reduce: called for each batch with the slice of its sequences and the logits [batch, predicted, d_vocab].
    Hooks on the model act.
    """
    entering: dict[int, Tensor] = {}
    companions: dict[int, int] = {}
    arguments: dict[int, BlockArguments] = {}
    current = slice(0, 0)

    def keeper(layer: int) -> Callable[[Any, Any, Any], None]:
        """Return a forward hook that stores the output of a layer as the input of the next."""

        def keep(block: Any, inputs: Any, output: Any) -> None:
            """Store the output of a layer as the input of the next, and how many further values the layer returns."""
            companions[layer] = len(output) - 1 if isinstance(output, tuple) else -1
            if layer + 1 not in wanted:
                return
            residual = output[0] if isinstance(output, tuple) else output
            if layer + 1 not in entering:
                entering[layer + 1] = residual.new_empty(len(tokens), *residual.shape[1:])
            entering[layer + 1][current] = residual

        return keep

    def run(sequences: slice) -> None:
        """Run some sequences and hand their logits to `reduce`."""
        nonlocal current
        current = sequences
        at_once = predicted if isinstance(predicted, slice) else predicted[current]

        def read(values: Tensor) -> Tensor:
            """Return the values at the predicted positions, and store them in `unembedded`."""
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
    """Run the model in `view` on `tokens` and return its logits at the positions `predicted`; other positions are not
    unembedded.

    predicted: a slice of positions, or a tensor of positions [batch, predicted]. Hooks on the unembedding see only
    these positions. The caller decides whether gradients are recorded.
    """
    return _logits(view, tokens, predicted, partial(at, predicted=predicted))


def _logits(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], predicted: Positions, chosen: Callable[[Tensor], Tensor]
) -> Float[Tensor, "batch predicted d_vocab"]:
    """Run the model in `view` on `tokens` and return its logits at the positions `predicted`.

    chosen: function that selects these positions from the unembedding's input [batch, pos, d_model]. The caller decides
    whether gradients are recorded.
    """
    with checked_at_end(), evaluating(view.model), in_strips(view), unembedding_only(view, chosen) as selected:
        logits = view.model(tokens.to(view.device), return_type="logits")
    # A model that unembeds without its unembedding module returns all positions.
    return logits if selected else at(logits, predicted)


@uninterrupted
def unembedding_only(view: AttentionView, chosen: Callable[[Tensor], Tensor]) -> Iterator[list[bool]]:
    """Let passes of the model in `view` unembed only what `chosen` selects from the last stream [batch, pos, d_model],
    until the `with` block ends.

    This works if the model uses its unembedding module. Yields a list that is not empty once a pass has done so.
    """
    selected: list[bool] = []

    def select(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the unembedding's input by the selected positions. PyTorch calls this as a forward pre-hook."""
        selected.append(True)
        return (chosen(inputs[0]), *inputs[1:])

    unembedding = getattr(view.model, "unembed", None)  # None for an encoder alone
    with module_hooks([] if unembedding is None else [(unembedding.register_forward_pre_hook, select)]):
        yield selected


def at(values: Float[Tensor, "batch pos width"], predicted: Positions) -> Float[Tensor, "batch predicted width"]:
    """Return the values at the predicted positions: for a slice `predicted` this part of the axis `pos` (a view), for a
    tensor each row's own positions.
    """
    if isinstance(predicted, slice):
        return values[:, predicted]
    return values.take_along_dim(predicted[..., None].to(values.device), dim=1)


def _handed_on(companions: int, *arguments: Any, **named: Any) -> Any:
    """Return a layer's input in the form of its output; it replaces the forward of a skipped layer.

    companions: number of values the layer returns besides the stream, replaced by None; -1 if it returns no tuple.
    arguments, named: the arguments of the call; the first is the stream.
    """
    stream = arguments[0] if arguments else next(iter(named.values()))
    return stream if companions < 0 else (stream, *[None] * companions)


def noting_arguments(
    blocks: Sequence[Block], noted: dict[int, BlockArguments], layers: Iterable[int]
) -> AbstractContextManager[None]:
    """Return a context manager: in the first pass in its `with` block, the shapes of some layers' arguments are stored
    in the dict `noted`.

    blocks: all layers of the model. noted: from layer to the shapes. layers: numbers of the layers.
    """

    def note(layer: int, block: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer not in noted:
            noted[layer] = BlockArguments.of_block(arguments, named)

    registering = {layer: partial(blocks[layer].module.register_forward_pre_hook, with_kwargs=True) for layer in layers}
    return module_hooks([(register, partial(note, layer)) for layer, register in registering.items()])


@uninterrupted
def module_hooks(placing: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Place PyTorch hooks on modules until the `with` block ends; then they are removed.

    placing: pairs of a register method, such as `module.register_forward_hook`, and the hook.
    """
    handles: list[Any] = []
    with undoing(_remove, handles):
        for register, hook in placing:
            handles.append(register(hook))
        yield


def _remove(handles: list[Any]) -> None:
    """Remove PyTorch hooks from their modules. handles: the results of the register methods."""
    for handle in handles:
        handle.remove()


def last_logits(
    view: AttentionView, tokens: Int[Tensor, "batch pos"], hooks: Iterable[Hook] = ()
) -> Float[Tensor, "batch d_vocab"]:
    """Run the model in `view` on `tokens` under hooks and return the logits of the last token of each row, without
    gradients and without a cache.

    hooks: pairs of hook point name and function.
    """
    with torch.no_grad(), view.hooks_on(hooks):
        return logits_at(view, tokens, LAST)[:, -1]
