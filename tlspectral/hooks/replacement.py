"""What a head writes in place of its own z: its mean over sequences, or its z on another sequence."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.prompts import packed_rows, refuse_padding
from tlspectral.models.attention.replay import last_logits
from tlspectral.rotary import widened

Replace = Literal["zero", "mean", "resample"]

_TOKENS = 2**11  # of one run of the reference


@dataclass(frozen=True)
class Replacement:
    """What replaces the z of heads of one layer.

    Attributes:
        how: the mean over sequences, or the z of another sequence.
        seed: of the draw of that sequence.
        heads: heads that `z` holds, in order.
        z: of the reference; its mean over sequences for `"mean"`, with one position where sequences are of unequal
            length. None: the sequences of the run itself.
        donors: the reference's sequence for each sequence of the run; None draws them as the model runs.
    """

    how: Literal["mean", "resample"]
    seed: int
    heads: list[int] = field(default_factory=list)
    z: Float[Tensor, "sequences pos heads d_head"] | None = None
    donors: Int[Tensor, "rows"] | None = None

    def of(self, z: Float[Tensor, "batch pos chosen d_head"], heads: list[int]) -> Tensor:
        """Return what replaces the z of these heads, as a constant for gradients.

        Raises ValueError for a run of one sequence that is its own reference, or of another length than the sequences
        that it is resampled from.
        """
        if self.z is None:
            if len(z) < 2:
                raise ValueError(
                    f"replace={self.how!r} takes from other sequences of the run, and this run has one: run several at "
                    "once, or give reference="
                )
            reference = z.detach()
        else:
            reference = self.z[:, :, [self.heads.index(head) for head in heads]]
        if self.how == "mean":
            mean = widened(reference).mean(0, keepdim=True)
            if mean.shape[1] != z.shape[1]:
                mean = mean.mean(1, keepdim=True)
            return mean.to(z).expand_as(z)
        if reference.shape[1] != z.shape[1]:
            raise ValueError(
                f"replace='resample' takes the output of each position from another sequence: this run has "
                f"{z.shape[1]} positions and the reference {reference.shape[1]}; give sequences of one length, or "
                "replace='mean'"
            )
        donors = self.donors
        if donors is None:
            donors = drawn_donors(len(z), None if self.z is None else len(reference), self.seed)
        return reference[donors.to(reference.device)].to(z)

    def of_rows(self, rows: slice) -> "Replacement":
        """Return the same for a run of some of the sequences that the donors are for."""
        return self if self.donors is None else dataclasses.replace(self, donors=self.donors[rows])


def drawn_donors(n: int, n_reference: int | None, seed: int) -> Int[Tensor, "rows"]:
    """Draw a sequence of the reference for each of n sequences; None: another one of these n."""
    stream = torch.Generator().manual_seed(seed)
    if n_reference is None:
        return (torch.arange(n) + torch.randint(1, n, (n,), generator=stream)) % n
    return torch.randint(n_reference, (n,), generator=stream)


def replacements(
    view: AttentionView, by_layer: dict[int, list[int]], replace: Replace, reference: Tensor | None, seed: int
) -> dict[int, Replacement]:
    """Return what replaces the z of the chosen heads, by layer; nothing for zeros.

    Raises ValueError for a reference that is no tensor of token ids of this model, or looks padded.
    """
    if replace == "zero":
        return {}
    if reference is None:
        return {layer: Replacement(replace, seed) for layer in by_layer}
    refuse_padding(view, reference, "give sequences of one length as reference")
    try:
        sequences = packed_rows(view, reference)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reference: {error}") from error
    return from_reference(view, by_layer, replace, sequences, seed)


def from_reference(
    view: AttentionView,
    by_layer: dict[int, list[int]],
    how: Literal["mean", "resample"],
    sequences: PackedTokens,
    seed: int,
    donors: Int[Tensor, "rows"] | None = None,
) -> dict[int, Replacement]:
    """Run the reference once, without gradients and under the hooks on the model, and return what replaces z.

    Sequences of unequal length have one mean, over the real tokens of all.
    """
    tokens, even = sequences.tokens, not sequences.padded
    sums: dict[int, Tensor] = {}
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in by_layer}
    batch = slice(0, 0)

    def keeper(layer: int, heads: list[int]) -> Callable[[Tensor, Any], None]:
        def keep(z: Tensor, hook: Any) -> None:
            chosen = z[:, :, heads]
            if how == "resample":
                outputs[layer].append(chosen)
                return
            real = sequences.real[batch]
            total = (widened(chosen) * real[..., None, None].to(chosen.device)).sum(0 if even else (0, 1))
            sums[layer] = sums[layer] + total if layer in sums else total

        return keep

    hooks = []
    for layer, heads in by_layer.items():
        require_honoured(view, layer, "z")
        hooks.append((view.hook_names(layer)["z"], keeper(layer, heads)))
    rows = max(1, _TOKENS // tokens.shape[1])
    for start in range(0, len(tokens) if hooks else 0, rows):
        batch = slice(start, start + rows)
        last_logits(view, tokens[batch], hooks)
    count = len(tokens) if even else int(sequences.lengths.sum())

    def gathered(layer: int) -> Tensor:
        if how == "resample":
            return torch.cat(outputs[layer])
        return (sums[layer] / count)[None] if even else (sums[layer] / count)[None, None]

    return {layer: Replacement(how, seed, heads, gathered(layer), donors) for layer, heads in by_layer.items()}
