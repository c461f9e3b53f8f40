"""All that a head writes, and what stands in its place: nothing, a mean, its z on another sequence or on the pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.parts.part import Part
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, in_batches, rows_of_pass
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.passes import capture_until
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.stream.writes import z_of

Replace = Literal["zero", "mean", "resample", "counterfactual"]
"""What is put in the place of a head's output."""

_IN_PLACE = {
    "zero": "zeros",
    "mean": "the mean over the reference",
    "resample": "that on another sequence",
    "counterfactual": "that on the pair of the prompt",
}


@dataclass(frozen=True, eq=False, repr=False)
class Output(Part):
    """Everything that a head writes.

    Attributes:
        replace: what z becomes: `"zero"`; its `"mean"` over sequences, at each position where the run has the
            reference's length, else over all positions too; `"resample"`, its z on another sequence of that length, the
            same one in every head; or `"counterfactual"`, its z on the pair of each prompt, which a task with
            `counterfactual=` has, and which is the reference of an `ablate` context: a prompt for each row of the run.
            None: `"counterfactual"` for a task of pairs, in sweeps and `ablate(task=)`, else `"zero"`.
        reference: prompts that means and other sequences come from, in any form that a `Task` takes; they are run once,
            under the hooks on the model by then. None: the sequences of each run itself (in a sweep the task's),
            every position counted, never a sequence for itself. Batches then differ, so give a reference where a loss
            is computed.
        seed: of the draw of other sequences, which is the same in each run.

    Zero depends on how the weights were processed: the bias b_O of the layer stays, and TransformerLens'
    `fold_value_biases` moves what a head's value bias writes into b_O. The other replacements do not
    (docs/from_transformerlens.md; `attrs["processing"]` of a table).

    Raises:
        ValueError: another `replace`, a reference for zeros, or one that is no prompts. Where the part meets prompts:
            no pairs of them.

    >>> import tlspectral as tls
    >>> tls.parts.Output(replace="mean")
    Output(replace='mean', reference=None, seed=0)
    """

    name = "output"
    acts_on = "z"
    replace: Replace | None = None
    reference: Any = None
    seed: int = 0
    bound: _OfHeads | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replace not in (None, *_IN_PLACE):
            raise ValueError(
                f"replace must be None, 'zero', 'mean', 'resample' or 'counterfactual', not {self.replace!r}"
            )
        if self.reference is not None and self.replace in (None, "zero"):
            raise ValueError(
                "reference goes with replace='mean', 'resample' or 'counterfactual': zeros are taken from no sequence"
            )
        if self.reference is not None and not isinstance(self.reference, _Reference):
            object.__setattr__(self, "reference", _given(self.reference))

    @property
    def settings(self) -> Mapping[str, Any]:
        """What replaces the output, and of a settled part the hash of the reference."""
        if self.replace in (None, "zero"):
            return {}
        known = {"replace": self.replace} | ({"replace_seed": self.seed} if self.replace == "resample" else {})
        if isinstance(self.reference, _Reference):
            known["reference_sha256"] = self.reference.sequences.hashed()
        return known

    @property
    def noted(self) -> Mapping[str, Any]:
        """What stands in place of the output."""
        return {"replace": self.replace}

    def _done(self) -> tuple[str, Mapping[str, Any]]:
        return f"replaced by {_IN_PLACE[self.replace or 'zero']}", {}

    @property
    def screened(self) -> bool:
        """Whether what stands in its place is of the prompt alone, or of its pair."""
        return self.replace not in ("mean", "resample")

    def idle(self, tokens: Int[Tensor, "sequences pos"]) -> Bool[Tensor, "sequences"]:
        """Return which prompts are their own pairs."""
        if self.replace != "counterfactual":
            return super().idle(tokens)
        return (self.reference.sequences.tokens == tokens).all(1)

    def _settled(self, view: AttentionView, prompts: PackedTokens) -> Output:
        """Return the part with what replaces it decided, its reference packed and sequences drawn.

        The reference is the prompts themselves if none was given. Raises ValueError for one sequence that would be its
        own reference, and to resample unequal lengths.
        """
        if self.replace is None:
            of_pairs = getattr(prompts, "counterfactual", None) is not None
            return replace(self, replace="counterfactual" if of_pairs else "zero")._settled(view, prompts)
        if self.replace == "zero":
            return self
        if self.replace == "counterfactual":
            return replace(self, reference=_pairs_of(view, prompts, self.reference))
        given = prompts if self.reference is None else _packed(view, self.reference)
        n = len(prompts.tokens)
        if self.reference is None and n < 2:
            raise ValueError(
                f"the task has one sequence, and replace={self.replace!r} takes from the others: give more prompts, or "
                "reference="
            )
        if self.replace == "mean":
            return replace(self, reference=_Reference(given, None))
        found = torch.cat([given.lengths, prompts.lengths])
        shortest, longest = int(found.min()), int(found.max())
        if shortest != longest:
            raise ValueError(
                "replace='resample' takes the output of each position from another sequence, and these have "
                f"{shortest} to {longest} tokens: give prompts of one length, or replace='mean'"
            )
        donors = drawn_donors(n, None if self.reference is None else len(given.tokens), self.seed)
        return replace(self, reference=_Reference(given, donors))

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, Output]:
        """Run the reference once, and bind the part to layers. Raises ValueError for a reference that is no prompts."""
        if self.replace == "counterfactual" and self.reference is None:
            raise ValueError(
                "replace='counterfactual' takes what a head writes on the pair of a prompt, and there are none: give a "
                "Task with counterfactual=, or reference= with a prompt for each row of the run"
            )
        if self.replace in (None, "zero") or self.reference is None:
            return dict.fromkeys(by_layer, self)
        reference = self.reference
        if not isinstance(reference, _Reference):
            packed = _packed(view, reference)
            donors = torch.arange(len(packed.tokens)) if self.replace == "counterfactual" else None
            reference = _Reference(packed, donors)
        return _from_reference(view, by_layer, self, reference)

    def of(self, z: Float[Tensor, "batch pos chosen d_head"], heads: list[int], run: int = 0) -> Tensor:
        """Return what replaces the z of these heads, a constant for gradients.

        Raises ValueError for a run of one sequence that is its own reference, or of another length than the sequences
        that it is resampled from.
        """
        if self.replace in (None, "zero"):
            return torch.zeros_like(z)
        bound, donors = self.bound, None if self.bound is None else self.bound.donors
        if bound is None:
            if len(z) < 2:
                raise ValueError(
                    f"replace={self.replace!r} takes from other sequences of the run, and this run has one: run "
                    "several at once, or give reference="
                )
            reference = z.detach()
        else:
            reference = bound.z[:, :, [bound.heads.index(head) for head in heads]]
        if self.replace == "mean":
            mean = widened(reference).mean(0, keepdim=True)
            if mean.shape[1] != z.shape[1]:
                mean = mean.mean(1, keepdim=True)
            return mean.to(z).expand_as(z)
        if self.replace == "counterfactual" and donors is not None and len(donors) != len(z):
            raise ValueError(
                f"replace='counterfactual' has {len(donors)} pairs, and this run has {len(z)} prompts: run the "
                "prompts of the pairs, all at once"
            )
        if reference.shape[1] != z.shape[1]:
            raise ValueError(
                f"replace={self.replace!r} takes the output of each position from another sequence: this run has "
                f"{z.shape[1]} positions and the reference {reference.shape[1]}; give sequences of one length, or "
                "replace='mean'"
            )
        if donors is None:
            donors = drawn_donors(len(z), None if bound is None else len(reference), self.seed)
        return reference[donors.to(reference.device)].to(z)

    def of_rows(self, rows: slice) -> Output:
        """Return the same for a run of some of the sequences that donors and positions are for."""
        placed, bound = super().of_rows(rows), self.bound
        if bound is None or bound.donors is None:
            return placed
        return replace(placed, bound=replace(bound, donors=bound.donors[rows]))


@dataclass(frozen=True)
class _Reference:
    """Packed sequences that replace the output of heads, and which of them does so for each of a run's."""

    sequences: PackedTokens
    donors: Int[Tensor, "rows"] | None


@dataclass(frozen=True, eq=False)
class _OfHeads:
    """What an output bound to heads of a layer takes from its reference.

    `z` is the z of the reference, of `heads` in order; for `"mean"` its mean over sequences, with one position where
    these are of unequal length. `donors` are the reference's sequence for each
    sequence of the run; None draws them as the model runs.
    """

    heads: list[int]
    z: Float[Tensor, "sequences pos heads d_head"]
    donors: Int[Tensor, "rows"] | None


def _given(reference: Any) -> Any:
    """Return a reference as the part keeps it, which shares nothing with what was given. Raises ValueError."""
    try:
        return given_prompts(reference)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reference: {error}") from error


def _packed(view: AttentionView, reference: Any) -> PackedTokens:
    try:
        return packed_prompts(view, reference)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reference: {error}") from error


def _pairs_of(view: AttentionView, prompts: PackedTokens, reference: Any) -> _Reference:
    """Return the pair of each prompt: as it is given, else as the task has it. Raises ValueError without any."""
    pairs = getattr(prompts, "counterfactual", None) if reference is None else _packed(view, reference)
    if pairs is None:
        raise ValueError(
            "replace='counterfactual' needs pairs, and this task has none: give Task(..., counterfactual=)"
        )
    if pairs.lengths.tolist() != prompts.lengths.tolist():
        raise ValueError(
            "reference: a pair of each prompt with as many tokens; found lengths "
            f"{pairs.lengths.tolist()[:6]} for prompts of {prompts.lengths.tolist()[:6]}"
        )
    return _Reference(pairs, torch.arange(len(pairs.tokens)))


def drawn_donors(n: int, n_reference: int | None, seed: int) -> Int[Tensor, "rows"]:
    """Draw a sequence of the reference for each of n sequences; None: another one of these n."""
    stream = torch.Generator().manual_seed(seed)
    if n_reference is None:
        return (torch.arange(n) + torch.randint(1, n, (n,), generator=stream)) % n
    return torch.randint(n_reference, (n,), generator=stream)


def _from_reference(
    view: AttentionView, by_layer: dict[int, list[int]], part: Output, reference: _Reference
) -> dict[int, Output]:
    """Run the reference once, without gradients and under the hooks on the model, and bind the part to what replaces z.

    Sequences of unequal length have one mean, over the real tokens of all.
    """
    sequences, how = reference.sequences, part.replace
    even = not sequences.padded
    names = {layer: view.hook_names(layer)["z"] for layer in by_layer}
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in by_layer}

    def captured_of(batch: slice) -> tuple[slice, dict[str, Tensor]]:
        return batch, capture_until(view, sequences.tokens[batch], names.values(), last=names[max(names)])

    rows = rows_of_pass(view, sequences.tokens.shape[1])
    for batch, captured in in_batches(len(sequences.tokens) if by_layer else 0, rows, captured_of):
        for layer, heads in by_layer.items():
            z = z_of(captured[names[layer]], view.raw(layer).w_o)[:, :, heads]
            if how == "mean":
                real = sequences.real[batch, :, None, None].to(z.device)
                z = (widened(z) * real).sum(0 if even else (0, 1), keepdim=True)
            outputs[layer].append(z)
    found = {layer: torch.cat(batches) for layer, batches in outputs.items()}
    if how == "mean":
        count = len(sequences.tokens) if even else int(sequences.lengths.sum())
        found = {layer: z.sum(0, keepdim=True) / count for layer, z in found.items()}
    return {
        layer: replace(part, reference=reference, bound=_OfHeads(heads, found[layer], reference.donors))
        for layer, heads in by_layer.items()
    }
