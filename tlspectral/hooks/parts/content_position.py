"""The content, the position and their interaction in a head's scores of keys in blocks of a prompt.

A block of width w holds a content k and stands at a place j; its tokens have offsets o = 0 .. w - 1. For one query and
one offset, the score of content k at place j is a two-way table L[k, j]: the key of content k as it is in this run,
rotated to its token of place j. With means over contents and over places,

    mu = mean_kj L     content_k = mean_j L[k, j] - mu     position_j = mean_k L[k, j] - mu
    interaction_kj = L[k, j] - mu - content_k - position_j

so that L = mu + content + position + interaction, and squares over the table add up. A score is a product c_k . p_j of
a key and a rotation, so that

    content_k = (c_k - c) . p     position_j = c . (p_j - p)     interaction_kj = (c_k - c) . (p_j - p)

with c the mean key and p the mean rotation over the blocks: no table is formed. Source: "Decoupling Positional and
Symbolic Attention Behavior" (PS) conjectures in section 6 that any head decomposes into heads that are purely
positional or purely symbolic; the interaction is what such a sum of two lacks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import warn_caller
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.removal import Removal
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.tasks.block_places import BlockPlaces, block_places


@dataclass(frozen=True, eq=False, repr=False)
class BlockPart(Part, ABC):
    """A part of the scores between queries behind the blocks of a prompt (or their places) and keys in them."""

    needs_tokens = True
    prompt: Any

    @property
    def settings(self) -> Mapping[str, Any]:
        """Where the blocks stand, of a settled part."""
        places = self.prompt
        known = isinstance(places, BlockPlaces)
        return {"block_starts": list(places.starts), "block_width": places.width} if known else {}

    def _settled(self, view: AttentionView, prompts: PackedTokens) -> "BlockPart":
        """Return the part with the places of its blocks in place of the prompt.

        Raises ValueError for blocks of unequal length, and for prompts of a run that are not the part's.
        """
        places = block_places(view.model, self.prompt)
        places.require_own(prompts.tokens, torch.tensor(places.ids), f"{self.name}: prompt")
        return replace(self, prompt=places)

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, "BlockPart"]:
        """Bind the part to layers. Raises ValueError for blocks of unequal length."""
        return dict.fromkeys(by_layer, replace(self, prompt=block_places(view.model, self.prompt)))

    def require_own(self, view: AttentionView, passed: Tensor) -> None:
        """Refuse a run of other prompts than the part's, by what passes `AttentionView.tokens_point`. ValueError."""
        own = view.passed_by(torch.tensor(self.prompt.ids, device=passed.device))
        self.prompt.require_own(passed, own, f"{self.name}: row")

    def change(
        self, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"]
    ) -> tuple[Float[Tensor, "batch heads pos pos"], Bool[Tensor, "*batch pos pos"]]:
        """Return what is added to the scaled scores, before a softcap, and the pairs of `BlockPlaces.read`.

        Raises ValueError for a run of other prompts. Biases are in it. Non-rotary columns do not depend on the place,
        so they are content; ALiBi is position.
        """
        read = self.prompt.read(allowed)
        return self._of(scores).neg_().masked_fill_(~read, 0.0), read

    @property
    def screened(self) -> bool:
        """No part in blocks is."""
        return False

    def draws_of(self, wanted: int) -> int:
        """Return how many cycles through the blocks there are, of so many. Warns of fewer."""
        most = self.prompt.cycles
        if most < wanted:
            warn_caller(
                f"the control of {self.name!r} moves what is removed by a cycle through the blocks of a prompt, and "
                f"{len(self.prompt.starts)} blocks have {most}: control_p is not below 1 / {1 + most}"
            )
        return min(wanted, most)

    def control(
        self, removal: Removal, which: list[int], seeds: list[list[int]]
    ) -> Float[Tensor, "batch drawn pos pos"]:
        """Return the same numbers in other blocks, by a random cycle through all of them."""
        return self.prompt.shuffled(removal.difference[:, which], seeds)

    def _of(self, scores: HeadScores) -> Float[Tensor, "batch heads pos pos"]:
        """Return the part of the scaled scores between queries behind the blocks and keys in them."""
        key, rotation = scores.key.whole, scores.key.rotation
        mean_keys, keys = self.prompt.split(key)
        at_mean, at_places = scores, scores  # the scores with keys rotated to no place, and by how places differ
        if rotation is not None:
            tables = zip(self.prompt.split(rotation.cos), self.prompt.split(rotation.sin), strict=True)
            at_mean, at_places = (
                replace(scores, key=replace(scores.key, rotation=replace(rotation, cos=cos, sin=sin)))
                for cos, sin in tables
            )
        return self._term(at_mean, at_places, mean_keys, keys)

    @abstractmethod
    def _term(
        self,
        at_mean: HeadScores,
        at_places: HeadScores,
        mean_keys: Float[Tensor, "batch heads pos d_head"],
        keys: Float[Tensor, "batch heads pos d_head"],
    ) -> Float[Tensor, "batch heads pos pos"]:
        """Return the products of queries with the mean keys of blocks or what keys differ by, at places of either."""


@dataclass(frozen=True, eq=False, repr=False)
class Content(BlockPart):
    """What of a head's scores depends on which content a block of a prompt has.

    The module has the formulas. Only scores of queries behind the blocks and keys in them change.

    Attributes:
        prompt: a `BlockPrompt` with blocks of equal length, or a list of them with blocks at the same places. Every
            sequence of a run has to begin with the tokens of one of them, up to the end of its last block; what follows
            is free. A sink in the first block is a block like the others; put it into the prefix to leave it out.

    Raises:
        ValueError: when a model is given, no `BlockPrompt`, blocks of unequal length or at other places; as it meets a
            task or the model runs, other tokens than the prompt's (a start token in front, such as `model(text)`
            puts there), no query behind the blocks, or one that does not see all of them; or a run that begins behind
            the embedding (from embeddings, or `start_at_layer`), which shows no tokens.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(12)]
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> with tls.ablate(model, "L1H0", tls.parts.Content(prompt)):
    ...     model(prompt.tokenized(model).tokens()).shape
    torch.Size([1, 26, 32])
    """

    name = "content"

    def _term(self, at_mean: HeadScores, at_places: HeadScores, mean_keys: Tensor, keys: Tensor) -> Tensor:
        return at_mean.between(at_mean.query.whole, keys)


@dataclass(frozen=True, eq=False, repr=False)
class Position(BlockPart):
    """What of a head's scores depends on where a block of a prompt stands; else as `Content`."""

    name = "position"

    def _term(self, at_mean: HeadScores, at_places: HeadScores, mean_keys: Tensor, keys: Tensor) -> Tensor:
        scores = at_places
        part = scores.turning_between(scores.query.whole, mean_keys)
        if scores.layer.alibi is not None:
            bias = in_float64(scores.layer.alibi.bias(torch.arange(mean_keys.shape[-2]))[scores.heads])
            part = part + self.prompt.split(bias[..., None])[1].mT.to(part)
        return part


@dataclass(frozen=True, eq=False, repr=False)
class Interaction(BlockPart):
    """What of a head's scores depends on the content of a block and on its place together; else as `Content`."""

    name = "interaction"

    def _term(self, at_mean: HeadScores, at_places: HeadScores, mean_keys: Tensor, keys: Tensor) -> Tensor:
        return at_places.turning_between(at_places.query.whole, keys)
