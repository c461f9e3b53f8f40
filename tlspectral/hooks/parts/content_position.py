"""`Content`, `Position` and `Interaction`: three parts of a head's scores for keys in blocks of a prompt.

A block of w tokens has a content k and stands at a place j. Take one query and one of the w tokens of a block. L[k, j]
is the score of this query if the key of content k is rotated to place j. This table splits into

    mu = mean_kj L     content_k = mean_j L[k, j] - mu     position_j = mean_k L[k, j] - mu
    interaction_kj = L[k, j] - mu - content_k - position_j

The four terms add up to L, and their squares over the table add up too. A score is a product c_k . p_j of a key c_k and
a rotation p_j. Let c be the mean key and p the mean rotation over the blocks. Then

    content_k = (c_k - c) . p     position_j = c . (p_j - p)     interaction_kj = (c_k - c) . (p_j - p)

and the parts are computed without forming the table.

Source: "Decoupling Positional and Symbolic Attention Behavior" (PS). Section 6 conjectures that any head decomposes
into purely positional and purely symbolic heads. A sum of one positional and one symbolic head has no interaction.
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
    """Base class of `Content`, `Position` and `Interaction`: parts of the scores for keys in blocks of a prompt.

    It changes scores of queries after the last block for keys inside the blocks, and no other scores.

    Attributes:
        prompt: a `tls.positional.BlockPrompt` or a list of them; once the part has met a model, the positions and
            tokens of the blocks (`BlockPlaces`).
    """

    needs_tokens = True
    prompt: Any

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict for attrs: `block_starts` (first position of each block) and `block_width` in tokens.

        It is empty before the part met a model.
        """
        places = self.prompt
        known = isinstance(places, BlockPlaces)
        return {"block_starts": list(places.starts), "block_width": places.width} if known else {}

    def _settled(self, view: AttentionView, prompts: PackedTokens) -> "BlockPart":
        """Return a copy whose `prompt` is replaced by the positions and tokens of its blocks (`BlockPlaces`).

        `view` is the model, `prompts` are the tokenized prompts of a task. Raises ValueError for blocks of unequal
        length, and if `prompts` do not begin with the prompt of this part.
        """
        places = block_places(view.model, self.prompt)
        places.require_own(prompts.tokens, torch.tensor(places.ids), f"{self.name}: prompt")
        return replace(self, prompt=places)

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, "BlockPart"]:
        """Return a dict from each layer in `by_layer` (layer to heads) to a copy of the part that knows its blocks.

        `view` is the model, which tokenizes the prompt; the copy has the positions and tokens of the blocks. Raises
        ValueError for blocks of unequal length.
        """
        return dict.fromkeys(by_layer, replace(self, prompt=block_places(view.model, self.prompt)))

    def require_own(self, view: AttentionView, passed: Tensor) -> None:
        """Raise ValueError if a run does not begin with the prompts of this part.

        `view` is the model. `passed` is the activation at `AttentionView.tokens_point`, which identifies the tokens of
        the run.
        """
        own = view.passed_by(torch.tensor(self.prompt.ids, device=passed.device))
        self.prompt.require_own(passed, own, f"{self.name}: row")

    def change(
        self, scores: HeadScores, allowed: Bool[Tensor, "*batch query key"]
    ) -> tuple[Float[Tensor, "batch heads q k"], Bool[Tensor, "*batch q k"]]:
        """Return the change of the scaled scores before a softcap, and a mask of the pairs of tokens that change.

        `scores` are the heads' scores in the run, `allowed` is True for pairs of query and key that the model does not
        mask. Biases of queries and keys are included. Columns that do not rotate count as content, because they do not
        depend on the place. ALiBi counts as position. Raises ValueError if no query stands after the blocks and sees
        them all.
        """
        read = self.prompt.read(allowed)
        return self._of(scores).neg_().masked_fill_(~read, 0.0), read

    @property
    def screened(self) -> bool:
        """False: `ablation_sweep(screen="gradient")` cannot estimate the effects of these parts."""
        return False

    def draws_of(self, wanted: int) -> int:
        """Return the number of random controls per head: `wanted`, or fewer if the blocks allow fewer cyclic exchanges.

        A warning says so if there are fewer.
        """
        most = self.prompt.cycles
        if most < wanted:
            warn_caller(
                f"the control of {self.name!r} exchanges the blocks of a prompt in cycles. {len(self.prompt.starts)} "
                f"blocks have only {most} such cycles, not {wanted}, so control_p cannot be below 1 / {1 + most}: give "
                "a prompt with more blocks for smaller p"
            )
        return min(wanted, most)

    def control(
        self, removal: Removal, which: list[int], seeds: list[list[int]]
    ) -> Float[Tensor, "batch drawn query key"]:
        """Return the removed numbers moved to other blocks, by a random cycle through all blocks for each control.

        `removal` is the change that the part makes; it is not changed. `which` are the indices of heads in it, one for
        each control, `seeds` the seeds, each a list of numbers.
        """
        return self.prompt.shuffled(removal.difference[:, which], seeds)

    def _of(self, scores: HeadScores) -> Float[Tensor, "batch heads query key"]:
        """Return this part of the scaled scores, [batch, heads, query, key].

        Only entries of queries after the blocks and keys in them have a meaning.
        """
        key, rotation = scores.key.whole, scores.key.rotation
        mean_keys, keys = self.prompt.split(key)
        # `at_mean` rotates keys by the mean rotation over blocks, `at_places` by the deviation of each place from it.
        at_mean, at_places = scores, scores
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
    ) -> Float[Tensor, "batch heads query key"]:
        """Return this part of the scaled scores, a product of queries and keys.

        Args:
            at_mean: scores whose keys are rotated by the mean rotation over the blocks.
            at_places: scores whose keys are rotated by the deviation of each place from the mean rotation.
            mean_keys: the mean key over the blocks, at every block.
            keys: the deviation of each block's key from the mean key.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Content(BlockPart):
    """Remove the contribution of a block's content to a score: content_k = mean_j L[k, j] - mean L.

    L[k, j] is the score of a query for the key of block content k, rotated to block place j. Use it to test whether a
    head finds a block by its content ("Decoupling Positional and Symbolic Attention Behavior", section 6).

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(12)]
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> with tls.ablate(model, "L1H0", tls.parts.Content(prompt)):
    ...     model(prompt.tokenized(model).tokens()).shape
    torch.Size([1, 26, 32])

    Only scores of queries after the last block, for keys in the blocks, change. It is a value to give to `tls.ablate`
    or `tls.ablation_sweep`, not a measurement. The control of a sweep takes the same numbers from other blocks.

    Attributes:
        prompt: a `BlockPrompt` with blocks of equal length, or a list of them whose blocks stand at the same places.
            Every sequence of a run must begin with the tokens of one of them, up to the end of its last block. A first
            block that is an attention sink counts as a block; write it into the prefix to leave it out.
        at: position of the queries that lose the part; None (default): all queries after the blocks.

    Raises:
        ValueError: prompt is not a `BlockPrompt`, or its blocks have unequal lengths or other places.
        ValueError, in a run: the tokens are not the tokens of the prompt (text may get a start token in front); no
            query stands after the blocks, or it does not see all of them; or the run starts behind the embedding.

    Not established: that the head uses only content or only position; see `Interaction`. More: docs/positional.md
    """

    name = "content"

    def _term(self, at_mean: HeadScores, at_places: HeadScores, mean_keys: Tensor, keys: Tensor) -> Tensor:
        return at_mean.between(at_mean.query.whole, keys)


@dataclass(frozen=True, eq=False, repr=False)
class Position(BlockPart):
    """Remove the contribution of a block's place to a score: position_j = mean_k L[k, j] - mean L.

    L[k, j] is the score of a query for the key of block content k, rotated to block place j. Use it to test whether a
    head finds a block by its place.

    >>> import tlspectral as tls, torch
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(3)]
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> tls.parts.Position(prompt).name
    'position'

    Only scores of queries after the last block, for keys in the blocks, change. Give it to `tls.ablate(model, "L1H0",
    tls.parts.Position(prompt))` or `tls.ablation_sweep`.

    Attributes:
        prompt: a `BlockPrompt` with blocks of equal length, or a list of them whose blocks stand at the same places.
            Every sequence of a run must begin with the tokens of one of them, up to the end of its last block.
        at: position of the queries that lose the part; None (default): all queries after the blocks.

    Raises:
        ValueError: prompt is not a `BlockPrompt`, or its blocks have unequal lengths or other places.
        ValueError, in a run: the tokens are not the tokens of the prompt; no query stands after the blocks, or it does
            not see all of them; or the run starts behind the embedding.

    Not established: that the head uses only position; see `Interaction`. More: docs/positional.md
    """

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
    """Remove the interaction of content and place: L[k, j] - mean_j L[k, j] - mean_k L[k, j] + mean L.

    L[k, j] is the score of a query for the key of block content k, rotated to block place j. Use it to test whether a
    head is more than a sum of a content and a position part.

    >>> import tlspectral as tls, torch
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(3)]
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> tls.parts.Interaction(prompt).name
    'interaction'

    Only scores of queries after the last block, for keys in the blocks, change. Give it to `tls.ablate(model, "L1H0",
    tls.parts.Interaction(prompt))` or `tls.ablation_sweep`.

    Attributes:
        prompt: a `BlockPrompt` with blocks of equal length, or a list of them whose blocks stand at the same places.
            Every sequence of a run must begin with the tokens of one of them, up to the end of its last block.
        at: position of the queries that lose the part; None (default): all queries after the blocks.

    Raises:
        ValueError: prompt is not a `BlockPrompt`, or its blocks have unequal lengths or other places.
        ValueError, in a run: the tokens are not the tokens of the prompt; no query stands after the blocks, or it does
            not see all of them; or the run starts behind the embedding.

    Not established: why the head needs content and place together. More: docs/positional.md
    """

    name = "interaction"

    def _term(self, at_mean: HeadScores, at_places: HeadScores, mean_keys: Tensor, keys: Tensor) -> Tensor:
        return at_places.turning_between(at_places.query.whole, keys)
