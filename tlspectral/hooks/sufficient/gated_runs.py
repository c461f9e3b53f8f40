"""`GatedRuns`: runs in which every head has a gate between its own write and its write on the paired prompt.

A gate of 1 keeps what the head writes in this run. A gate of 0 replaces it by what the head writes on the pair.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.probe import require_honoured, require_writes
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, in_batches, rows_of_pass, rows_of_scores
from tlspectral.models.running.continued_runs import ContinuedRun, continued_run, rows_at_once
from tlspectral.models.running.partial_runs import IntactRun, intact_run, require_gradients
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import HeadWrites, head_writes, require_stream, z_of
from tlspectral.tasks.task_sequences import MetricValues, Replays, TaskSequences, replayed_values

Replace = Literal["counterfactual", "mean", "zero"]
"""What a closed gate lets through: the head's write on the pair, its mean over the prompts, or nothing."""

_BACKWARD = 4  # a backward pass keeps activations of all layers, so it gets so many times fewer rows

Sets = Bool[np.ndarray, "sets heads"]
"""Sets of heads, True for kept heads, in the order of `GatedRuns.heads`."""


@dataclass(frozen=True)
class Base:
    """A run in which all gates are equal. Gated runs begin at the first layer whose gates differ from it.

    Attributes:
        kept: True if all heads are kept, False if no head is.
        run: the run with the streams that enter each layer; None if it took several batches.
        values: the metric of each sequence in this run.
    """

    kept: bool
    run: IntactRun | ContinuedRun | None
    values: Float64[np.ndarray, "sequences"]


@dataclass(frozen=True)
class GatedRuns:
    """The prompts of a task on one model, and their runs with a gate on every head; `gated_runs` makes it.

    Attributes:
        view: the model.
        sequences: the prompts with their metric.
        replace: what a closed gate lets through.
        first: first position at which a prompt and its pair differ; earlier positions never change.
        then: from layer to what a closed gate lets through, [sequences, pos, heads, d_head]: z (the output before W_O),
            times the scale of a norm behind the attention.
        writes: from layer to the maps from z to the stream.
    """

    view: AttentionView
    sequences: TaskSequences
    replace: Replace
    first: int
    then: dict[int, Float[Tensor, "sequences pos heads d_head"]]
    writes: dict[int, HeadWrites]

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """List of all heads as (layer, head), in the order of the gates."""
        return [(layer, head) for layer, z in self.then.items() for head in range(z.shape[2])]

    @cached_property
    def of_layer(self) -> dict[int, slice]:
        """Dict from layer to the slice of its heads in `heads`."""
        layers = [layer for layer, _ in self.heads]
        return {layer: slice(layers.index(layer), layers.index(layer) + layers.count(layer)) for layer in self.then}

    @cached_property
    def every(self) -> Base:
        """The run with all heads: the plain run of the prompts."""
        return Base(True, self._begun(self._plain[0]), self._plain[1])

    @cached_property
    def none(self) -> Base:
        """The run in which no head is kept."""
        closed = torch.zeros(1, len(self.heads), device=self.view.device)
        n, width = self.sequences.tokens.shape
        if min(self.sequences.rows_at_once(self.view), rows_of_pass(self.view, width)) >= n:
            run, values = self._whole_run(self.hooks(closed, slice(0, n)))
            return Base(False, self._begun(run), values)
        # A hook of a whole run does not know its batch. Replays know theirs, and begin at the first layer.
        everywhere = Replays(0, 1, lambda replays, batch: self.hooks(closed, batch))
        return Base(False, None, replayed_values(self.run, self.sequences, [everywhere])[0].numpy())

    @cached_property
    def run(self) -> IntactRun | ContinuedRun:
        """The plain run, continued from the position `first` where the model allows it."""
        return self._begun(self._plain[0])

    @cached_property
    def _plain(self) -> tuple[IntactRun, Float64[np.ndarray, "sequences"]]:
        """The plain run of all sequences, with its values."""
        return self._whole_run([])

    def _whole_run(self, hooks: list[Hook]) -> tuple[IntactRun, Float64[np.ndarray, "sequences"]]:
        """Run all sequences under hooks; return the run with the streams that enter each layer, and its values."""
        values, sequences = MetricValues(self.sequences, 1), self.sequences
        rows = sequences.rows_at_once(self.view)
        with self.view.hooks_on(hooks):
            run = intact_run(
                self.view, sequences.tokens, sequences.predicted, self.view.layers, batch=rows, reduce=values.add
            )
        return run, values.result()[0].numpy()

    def _begun(self, run: IntactRun) -> IntactRun | ContinuedRun:
        """Return a run whose replays compute only positions from `first` on, or the run itself if that is impossible.

        Keys and values of earlier positions are the plain run's, because no gate changes them.
        """
        continued = continued_run(self._plain[0], self.first)
        return run if continued is None else replace(continued, intact=run)

    def hooks(self, gates: Float[Tensor, "copies heads"], batch: slice) -> list[Hook]:
        """Return the `fwd_hooks` list that puts gates on all heads.

        The rows of a run are `batch` (a slice of the sequences) for the first row of `gates`, then for the second, and
        so on; a run may have only the first of these copies. Gradients flow into `gates`.
        """
        hooks: list[Hook] = []
        for layer, heads in self.of_layer.items():
            names, own, writes = self.view.hook_names(layer), gates[:, heads], self.writes[layer]
            if writes.norm.kind == "none":
                hooks.append((names["z"], partial(self._gate_z, layer, own, batch)))
                continue
            seen: list[Tensor] = []
            hooks.append((names["z"], partial(self._see_z, seen)))
            hooks.append((names["attention_out"], partial(self._gate_writes, layer, own, batch, seen)))
        return hooks

    def _gate_z(
        self, layer: int, gates: Float[Tensor, "copies heads"], batch: slice, z: Tensor, hook: Any = None
    ) -> Tensor:
        """Return z of a layer with gates: gate times z plus (1 - gate) times the replacement behind a closed gate.

        `hook` is not used.
        """
        by_head = z_of(z, self.writes[layer].w_o)
        then = self._then(layer, batch, by_head)
        by_copy = by_head.unflatten(0, (-1, len(then)))
        gate = gates[: len(by_copy), None, None, :, None].to(by_copy)
        return (gate * by_copy + (1.0 - gate) * then).flatten(0, 1).reshape(z.shape)

    def _see_z(self, seen: list[Tensor], z: Tensor, hook: Any = None) -> None:
        """Keep z of this run in the list `seen`, for the hook behind the attention. `hook` is not used."""
        seen[:] = [z]

    def _gate_writes(
        self,
        layer: int,
        gates: Float[Tensor, "copies heads"],
        batch: slice,
        seen: list[Tensor],
        written: Float[Tensor, "rows pos d_model"],
        hook: Any = None,
    ) -> Tensor:
        """Return the write of a layer's attention with gates on the heads, where a norm stands behind the attention.

        The norm's scale is the scale of this run for open gates and of the paired run for closed gates. `seen` has z of
        this run. `hook` is not used.
        """
        writes = self.writes[layer]
        scaled = writes.scaled(z_of(seen.pop(), writes.w_o))
        then = self._then(layer, batch, scaled)
        by_copy = scaled.unflatten(0, (-1, len(then)))
        gate = gates[: len(by_copy), None, None, :, None].to(by_copy)
        changed = ((1.0 - gate) * (then - by_copy)).flatten(0, 1)
        added = torch.einsum("bphd,hdm->bpm", changed, writes.effective().to(changed))
        return written + (added / self.view.attention_factor(layer)).to(written)

    def _then(self, layer: int, batch: slice, like: Float[Tensor, "rows pos heads d_head"]) -> Tensor:
        """Return what closed gates of a layer let through on the sequences `batch`, for the last positions of a run.

        The result has the positions, type and device of `like`.
        """
        return self.then[layer][batch, -like.shape[1] :].to(like)

    def values(self, sets: Sets) -> Float64[np.ndarray, "sets sequences"]:
        """Return the metric of each sequence when only the heads of a set are kept, for each set.

        A run begins at the first layer in which its set differs from all heads, or from no head, whichever is later.
        """
        found = np.empty((len(sets), len(self.sequences.tokens)))
        layer_of = np.array([layer for layer, _ in self.heads])
        begins: list[tuple[bool, int]] = []
        for kept in sets:
            late, early = (layer_of[np.flatnonzero(kept != whole)] for whole in (False, True))
            after_none = int(late.min()) if len(late) else self.view.n_layers
            after_all = int(early.min()) if len(early) else self.view.n_layers
            begins.append((after_all >= after_none, max(after_none, after_all)))
        for of_all, base in ((True, self.every), (False, self.none)):
            own = [place for place, (begun_from_all, _) in enumerate(begins) if begun_from_all == of_all]
            own.sort(key=lambda place: begins[place][1])
            replays, order = [], []
            for layer, places in groupby(own, key=lambda place: begins[place][1]):
                chosen = [*places]
                if layer == self.view.n_layers:  # all heads, or no head
                    found[chosen] = base.values
                    continue
                hooks_of = partial(self._hooks_of, torch.as_tensor(sets[chosen], dtype=torch.float32))
                replays.append(Replays(layer if base.run is not None else 0, len(chosen), hooks_of))
                order += chosen
            if order:
                found[order] = replayed_values(base.run or self.run, self.sequences, replays).numpy()
        return found

    def _hooks_of(self, gates: Float[Tensor, "copies heads"], replays: slice, batch: slice) -> list[Hook]:
        """Return the hooks of some replays (a slice of the rows of `gates`) on the sequences `batch`."""
        return self.hooks(gates[replays].to(self.view.device), batch)

    def slopes(
        self, gates: Float[Tensor, "copies heads"]
    ) -> tuple[Float64[Tensor, "copies sequences"], Float64[Tensor, "copies heads"]]:
        """Return the metric of each sequence under each row of gates, and the gradient of its mean in these gates.

        As many rows of gates as memory allows run in one pass. No gradient reaches the model's parameters.
        """
        n = len(self.sequences.tokens)
        rows = rows_at_once(self.run) // _BACKWARD
        rows = max(1, min(rows, rows_of_scores(self.view, self.run.n_tokens, self.run.n_keys, backward=True)))
        whole = slice(0, n)

        def of_copies(some: slice) -> tuple[Tensor, Tensor]:
            """Return values and gradients of some rows of gates."""
            leaf = gates[some].detach().clone().requires_grad_()
            if rows >= n:
                logits = self._gated_logits(leaf, whole).unflatten(0, (len(leaf), -1))
                values = torch.stack([self.sequences.measured(copy) for copy in logits])
                self._require_slope(values)
                return values.detach().cpu(), torch.autograd.grad(values.mean(1).sum(), leaf)[0].cpu().double()
            return self._slopes_in_batches(leaf, rows)

        with evaluating(self.view.model), torch.enable_grad():
            found = [*in_batches(len(gates), max(1, rows // n), of_copies)]
        return torch.cat([values for values, _ in found]), torch.cat([gradients for _, gradients in found])

    def _slopes_in_batches(self, leaf: Float[Tensor, "one heads"], rows: int) -> tuple[Tensor, Tensor]:
        """Return values and gradient for one row of gates, with at most `rows` sequences in a pass.

        The metric gets the logits of all sequences at once, so a first run without gradients collects them.
        """
        n = len(self.sequences.tokens)
        with torch.no_grad():
            logits = torch.cat([*in_batches(n, rows, lambda batch: self._gated_logits(leaf, batch))])
        values = self.sequences.measured(logits)
        of_logits = self.sequences.gradients(logits) / n

        def gradient(batch: slice) -> Tensor:
            """Return the gradient in the gates from the sequences of a batch."""
            return torch.autograd.grad(self._gated_logits(leaf, batch), leaf, of_logits[batch])[0]

        total = torch.stack([*in_batches(n, rows, gradient)]).sum(0)
        return values.detach().cpu()[None], total.cpu().double()

    def _gated_logits(self, gates: Float[Tensor, "copies heads"], batch: slice) -> Tensor:
        """Return the logits of the sequences `batch` under each row of gates, one whole copy after another."""
        copies = len(gates)
        return self.run.replay([0] * copies, batch, [(slice(0, copies), self.hooks(gates, batch))])

    def _require_slope(self, values: Tensor) -> None:
        """Raise ValueError if the metric's values do not depend on the logits in a way that has a gradient."""
        if not values.requires_grad:
            raise ValueError(
                f"gates are trained by gradients, and the metric of {self.sequences.name} has none (an argmax, a "
                "comparison or .item() cuts it off): write the metric without these"
            )


def gated_runs(view: AttentionView, sequences: TaskSequences) -> GatedRuns:
    """Prepare runs with gates on all heads: prove that edits act, and run the paired prompts once.

    Closed gates let through the write on the paired prompt. Without pairs they let through the mean write over the
    prompts at the same position, or nothing if the prompts differ in length.

    Raises EditNotHonored or UnsupportedArchitecture if gates do not act in this model, ValueError if PyTorch records no
    gradients.
    """
    require_stream(view)
    require_gradients(view, "sufficient_heads")
    writes = {layer: head_writes(view, layer, widened) for layer in view.layers}
    behind = [layer for layer, of_layer in writes.items() if of_layer.norm.kind != "none"]
    for layer in writes:
        require_honoured(view, layer, "attention_out" if layer in behind else "z")
    require_writes(view, behind)
    other = sequences.counterfactual
    if other is not None:
        differs = (sequences.tokens != other.tokens).any(0)
        first = int(differs.float().argmax()) if differs.any() else 0
        return GatedRuns(view, sequences, "counterfactual", first, _written(view, other, writes), writes)
    found = _written(view, sequences, writes)
    if sequences.padded or len(sequences.tokens) < 2:
        return GatedRuns(view, sequences, "zero", 0, {layer: torch.zeros_like(z) for layer, z in found.items()}, writes)
    means = {layer: widened(z).mean(0, keepdim=True).expand_as(z) for layer, z in found.items()}
    return GatedRuns(view, sequences, "mean", 0, means, writes)


@torch.no_grad()
def _written(view: AttentionView, prompts: PackedTokens, writes: dict[int, HeadWrites]) -> dict[int, Tensor]:
    """Run prompts once and return by layer z of the heads, [sequences, pos, heads, d_head].

    z is the output before W_O, times the scale of a norm behind the attention. `writes` are the layers' maps from z to
    the stream.
    """
    names = {layer: view.hook_names(layer)["z"] for layer in writes}

    def of_batch(batch: slice) -> dict[int, Tensor]:
        """Return the same for the sequences of a batch."""
        seen = capture_until(view, prompts.tokens[batch], names.values(), last=names[max(names)])
        z = {layer: z_of(seen[name], writes[layer].w_o) for layer, name in names.items()}
        behind = {layer for layer in z if writes[layer].norm.kind != "none"}
        return {layer: writes[layer].scaled(own) if layer in behind else own for layer, own in z.items()}

    batches = [*in_batches(len(prompts.tokens), rows_of_pass(view, prompts.tokens.shape[1]), of_batch)]
    return {layer: torch.cat([batch[layer] for batch in batches]) for layer in names}
