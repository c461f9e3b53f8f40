"""`Output`: everything that a head writes, replaced by zeros, a mean, or its output on another prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.hooks.parts.part import Part
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, in_batches, rows_of_pass
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.passes import capture_until
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.stream.writes import z_of

Replace = Literal["zero", "mean", "resample", "counterfactual"]
"""What replaces a head's output: zeros, its mean over sequences, its output on another sequence or on the pair."""

_IN_PLACE = {
    "zero": "zeros",
    "mean": "the mean over the reference",
    "resample": "the output on another sequence",
    "counterfactual": "the output on the counterfactual prompt",
}


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class Output(Part):
    """Remove everything that a head writes: z W_O becomes z' W_O, where z is the head's output before W_O.

    Use it in `tls.ablate` or `tls.ablation_sweep`, as a whole-head ablation.

    >>> import tlspectral as tls
    >>> with tls.ablate(tls.load_model("tiny-rope"), "L0H3", tls.parts.Output("zero")):
    ...     pass
    >>> tls.parts.Output(replace="mean")
    Output(replace='mean', reference=None, seed=0)

    Attributes:
        replace: the replacement z'.

            - "zero": 0.
            - "mean": the mean of z over reference sequences, at the same position. If run and reference differ in
              length, it is also over all positions.
            - "resample": z on another sequence of the same length, the same sequence for all heads.
            - "counterfactual": z on the counterfactual of the same row. A task with `counterfactual=` supplies these
              prompts; in `ablate` without a task give them as `reference`, one prompt per row.
            - None (default): "counterfactual" if the task has counterfactual prompts, otherwise "zero".
        reference: prompts (text, token ids, or a list) for "mean", "resample" and "counterfactual". They are run once,
            under the hooks that are on the model at that time. Default: None, the other sequences of the same run (in a
            sweep: of the task). Means then depend on the batch, so give a reference if you compute a loss.
        seed: of the random choice of sequences for "resample". Default: 0.
        at: position whose output is replaced. Default: None, all positions.
        bound: replacement of each head, set by `on`; leave it out.

    Raises:
        ValueError: `replace` is unknown, a reference is given for "zero" or is not prompts, or the task has no
            counterfactual prompts for "counterfactual".

    Not established: with "zero" the layer's bias b_O stays, and TransformerLens' `fold_value_biases` moves a head's
    value bias into b_O. The effect of "zero" depends on this folding; the effects of the other replacements do not.
    More: docs/from_transformerlens.md
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
                f"replace= must be None, 'zero', 'mean', 'resample' or 'counterfactual'; found {shown(self.replace)}"
            )
        if self.reference is not None and self.replace in (None, "zero"):
            raise ValueError(
                f"reference= has no use with replace={shown(self.replace)}: leave it out, or give replace='mean', "
                "'resample' or 'counterfactual'"
            )
        if self.reference is not None and not isinstance(self.reference, _Reference):
            try:
                object.__setattr__(self, "reference", given_prompts(self.reference))
            except (TypeError, ValueError) as error:
                raise ValueError(f"reference: {error}") from error

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict of this part for attrs of tables: `replace`, `replace_seed` for "resample", and `reference_sha256`.

        `reference_sha256` is the hash of the reference sequences, once prompts are known. The dict is empty for zeros.
        """
        if self.replace in (None, "zero"):
            return {}
        settings = {"replace": self.replace} | ({"replace_seed": self.seed} if self.replace == "resample" else {})
        if isinstance(self.reference, _Reference):
            settings["reference_sha256"] = self.reference.sequences.hashed()
        return settings

    @property
    def noted(self) -> Mapping[str, Any]:
        """Dict with `replace` for the attrs of a sweep."""
        return {"replace": self.replace}

    def _done(self) -> tuple[str, Mapping[str, Any]]:
        """Return text that says what replaces the output, such as "replaced by zeros", and an empty dict."""
        return f"replaced by {_IN_PLACE[self.replace or 'zero']}", {}

    @property
    def screened(self) -> bool:
        """True if `ablation_sweep(screen="gradient")` can estimate the effect: not for "mean" and "resample".

        Their replacement depends on other prompts of the run.
        """
        return self.replace not in ("mean", "resample")

    def idle(self, tokens: Int[Tensor, "sequences pos"]) -> Bool[Tensor, "sequences"]:
        """Return a mask, True for prompts that equal their counterfactual, so that nothing changes.

        `tokens` are the token ids of the prompts. All False if the replacement is not the counterfactual.
        """
        if self.replace != "counterfactual":
            return super().idle(tokens)
        return (self.reference.sequences.tokens == tokens).all(1)

    def _settled(self, view: AttentionView, prompts: PackedTokens) -> Output:
        """Return a copy with `replace` decided, the reference tokenized, and a reference row for each of the prompts.

        `view` is the model. `prompts` are the tokenized prompts of a task; without a reference they serve as reference.
        Raises ValueError for a single prompt without a reference, and for "resample" with prompts of unequal length.
        """
        if self.replace is None:
            has_pairs = getattr(prompts, "counterfactual", None) is not None
            return replace(self, replace="counterfactual" if has_pairs else "zero")._settled(view, prompts)
        if self.replace == "zero":
            return self
        if self.replace == "counterfactual":
            return replace(self, reference=_pairs_of(view, prompts, self.reference))
        reference = prompts if self.reference is None else _packed(view, self.reference)
        n = len(prompts.tokens)
        if self.reference is None and n < 2:
            raise ValueError(
                f"replace={self.replace!r} needs other sequences, and the task has one: give more prompts, or "
                "Output(..., reference=)"
            )
        if self.replace == "mean":
            return replace(self, reference=_Reference(reference, None))
        lengths = torch.cat([reference.lengths, prompts.lengths])
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest != longest:
            raise ValueError(
                f"replace='resample' needs sequences of one length, and these have {shortest} to {longest} tokens: "
                "give prompts of one length, or replace='mean'"
            )
        donors = drawn_donors(n, None if self.reference is None else len(reference.tokens), self.seed)
        return replace(self, reference=_Reference(reference, donors))

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, Output]:
        """Run the reference once; return a dict from layer to a copy of the part with the replacement z of its heads.

        `view` is the model, `by_layer` a dict from layer to heads. Without a reference nothing is run, and the dict has
        this part itself. Raises ValueError for a reference that is not prompts, and for "counterfactual" without
        counterfactual prompts.
        """
        if self.replace == "counterfactual" and self.reference is None:
            raise ValueError(
                "replace='counterfactual' needs counterfactual prompts: give task=Task(..., counterfactual=), or "
                "Output(..., reference=) with a prompt for each row of the run"
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
        """Return the replacement for z of these heads, with the shape of z; gradients do not flow through it.

        z is the output of the heads before W_O in this run; it is not changed. `heads` are the indices of the heads on
        its third axis. `run` is not used. Raises ValueError if the replacement needs other sequences and the run has
        one, or if the lengths or numbers of rows of run and reference do not fit.
        """
        if self.replace in (None, "zero"):
            return torch.zeros_like(z)
        bound, donors = self.bound, None if self.bound is None else self.bound.donors
        if bound is None:
            if len(z) < 2:
                raise ValueError(
                    f"replace={self.replace!r} needs other sequences, and this run has one: run several at once, or "
                    "give Output(..., reference=)"
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
                f"replace='counterfactual' has {len(donors)} pairs, and this run has {len(z)} prompts: run all "
                "prompts of the task in one batch"
            )
        if reference.shape[1] != z.shape[1]:
            raise ValueError(
                f"replace={self.replace!r} needs a reference of the same length: this run has {z.shape[1]} positions "
                f"and the reference {reference.shape[1]}; give sequences of one length, or replace='mean'"
            )
        if donors is None:
            donors = drawn_donors(len(z), None if bound is None else len(reference), self.seed)
        return reference[donors.to(reference.device)].to(z)

    def of_rows(self, rows: slice) -> Output:
        """Return the part, or a copy, for a batch with some of the task's sequences.

        `rows` are the numbers of these sequences, as a slice. Replacements and positions then belong to these
        sequences.
        """
        placed, bound = super().of_rows(rows), self.bound
        if bound is None or bound.donors is None:
            return placed
        return replace(placed, bound=replace(bound, donors=bound.donors[rows]))


@dataclass(frozen=True)
class _Reference:
    """Sequences whose z (a head's output before W_O) replaces the output of heads.

    Attributes:
        sequences: the tokenized sequences.
        donors: for each row of the run, the row of `sequences` that replaces it; None for a mean over all.
    """

    sequences: PackedTokens
    donors: Int[Tensor, "rows"] | None


@dataclass(frozen=True, eq=False)
class _OfHeads:
    """The z (output before W_O) of a reference, for the heads of one layer.

    Attributes:
        heads: the heads, in the order of the third axis of `z`.
        z: z on each reference sequence; for "mean" its mean over sequences, with one position if their lengths differ.
        donors: the reference row for each row of the run; None draws rows when the model runs.
    """

    heads: list[int]
    z: Float[Tensor, "sequences pos heads d_head"]
    donors: Int[Tensor, "rows"] | None


def _packed(view: AttentionView, reference: Any) -> PackedTokens:
    """Return the reference prompts as token ids for the model `view`. Raises ValueError if they are not prompts."""
    try:
        return packed_prompts(view, reference)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reference: {error}") from error


def _pairs_of(view: AttentionView, prompts: PackedTokens, reference: Any) -> _Reference:
    """Return the counterfactual of each prompt: from `reference` if given, otherwise from the task.

    The `_Reference` has the counterfactual prompts, row i for prompt i. `prompts` are the tokenized prompts of the
    task, `view` is the model. Raises ValueError if there are no counterfactuals, or if their lengths differ from the
    prompts.
    """
    pairs = getattr(prompts, "counterfactual", None) if reference is None else _packed(view, reference)
    if pairs is None:
        raise ValueError(
            "replace='counterfactual' needs counterfactual prompts, and this task has none: give Task(..., "
            "counterfactual=)"
        )
    if pairs.lengths.tolist() != prompts.lengths.tolist():
        raise ValueError(
            "reference= needs one prompt of equal length for each prompt of the run; found lengths "
            f"{pairs.lengths.tolist()[:6]} for prompts of lengths {prompts.lengths.tolist()[:6]}"
        )
    return _Reference(pairs, torch.arange(len(pairs.tokens)))


def drawn_donors(n: int, n_reference: int | None, seed: int) -> Int[Tensor, "rows"]:
    """Return a random reference row for each of n sequences, as row numbers drawn with `seed`.

    `n_reference` is the number of reference rows. None: each sequence gets another one of the same n sequences.
    """
    stream = torch.Generator().manual_seed(seed)
    if n_reference is None:
        return (torch.arange(n) + torch.randint(1, n, (n,), generator=stream)) % n
    return torch.randint(n_reference, (n,), generator=stream)


def _from_reference(
    view: AttentionView, by_layer: dict[int, list[int]], part: Output, reference: _Reference
) -> dict[int, Output]:
    """Run the reference once and return a dict from layer to a copy of `part` with the z of its heads (or their mean).

    `view` is the model, `by_layer` a dict from layer to heads, `reference` the sequences to run. The run has no
    gradients and keeps the hooks on the model. Sequences of unequal length have one mean, over all their tokens without
    padding.
    """
    sequences, how = reference.sequences, part.replace
    even = not sequences.padded
    names = {layer: view.hook_names(layer)["z"] for layer in by_layer}
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in by_layer}

    def captured_of(batch: slice) -> tuple[slice, dict[str, Tensor]]:
        """Return the batch and its activations z, by hook name."""
        return batch, capture_until(view, sequences.tokens[batch], names.values(), last=names[max(names)])

    rows = rows_of_pass(view, sequences.tokens.shape[1])
    for batch, captured in in_batches(len(sequences.tokens) if by_layer else 0, rows, captured_of):
        for layer, heads in by_layer.items():
            z = z_of(captured[names[layer]], view.raw(layer).w_o)[:, :, heads]
            if how == "mean":
                real = sequences.real[batch, :, None, None].to(z.device)
                z = (widened(z) * real).sum(0 if even else (0, 1), keepdim=True)
            outputs[layer].append(z)
    replacing = {layer: torch.cat(batches) for layer, batches in outputs.items()}
    if how == "mean":
        count = len(sequences.tokens) if even else int(sequences.lengths.sum())
        replacing = {layer: z.sum(0, keepdim=True) / count for layer, z in replacing.items()}
    return {
        layer: replace(part, reference=reference, bound=_OfHeads(heads, replacing[layer], reference.donors))
        for layer, heads in by_layer.items()
    }
