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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.hooks.parts.part import Part
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading import AttentionView
from tlspectral.models.running.padding import PackedTokens


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of one or more prompts stand: the first position of each, and the tokens in any of them.

    `ids` are the tokens of each prompt up to the end of its last block.
    """

    starts: tuple[int, ...]
    width: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def stop(self) -> int:
        """First position behind the last block."""
        return self.starts[-1] + self.width

    def tokens(self) -> Int[Tensor, "blocks width"]:
        """Positions of the tokens of every block."""
        return torch.tensor(self.starts)[:, None] + torch.arange(self.width)

    def require_own(self, passed: Tensor, own: Tensor, where: str) -> None:
        """Refuse rows that do not begin with the tokens of one of the prompts, up to the end of the last block.

        `passed` are the token ids of the rows, [rows, pos], or what stands for each, [rows, pos, width]; `own` the same
        of the prompts. Raises ValueError for the first wrong row. Rows that end in front are left to `read`.
        """
        if passed.shape[1] < self.stop:
            return
        same = torch.stack([passed[:, : self.stop] == one.to(passed.device) for one in own], dim=1)
        same = same if same.ndim == 3 else same.all(-1)  # rows prompts pos
        wrong = (~same.all(-1).any(1)).nonzero().flatten().tolist()
        if not wrong:
            return
        row = wrong[0]
        agreeing = same[row].long().cumprod(-1).sum(-1)
        nearest, at = int(agreeing.argmax()), int(agreeing.max())
        found = f"token {int(passed[row, at])}" if passed.ndim == 2 else "another token"
        later = [
            shift
            for shift in range(1, passed.shape[1] - self.stop + 1)
            if torch.equal(passed[row, shift : shift + self.stop], own[nearest].to(passed))
        ]
        moved = f" (the prompt begins {later[0]} {'token' if later[0] == 1 else 'tokens'} later)" if later else ""
        raise ValueError(
            f"{where} {row} has {found} at position {at}, where the prompt of the part has {self.ids[nearest][at]}"
            f"{moved}: the blocks of a part are those of its prompt, counted from the first token. Run its own tokens, "
            "prompt.tokenized(model).tokens(), and pad at the end; model(text), to_tokens and a task of text may put a "
            "start token in front: leave that out (prepend_bos=False), or write it into the prefix"
        )

    def split(self, x: Float[Tensor, "*batch pos columns"]) -> tuple[Tensor, Tensor]:
        """Return x with the tokens of blocks replaced by their mean over blocks, and by what is left of it.

        Tokens outside the blocks keep their rows in both.
        """
        at = self.tokens().to(x.device)
        of_blocks = x[..., at, :]  # *batch blocks width columns
        left = centred(of_blocks, dim=-3)
        averaged, deviating = x.clone(), x.clone()
        averaged[..., at, :] = (of_blocks.narrow(-3, 0, 1) - left.narrow(-3, 0, 1)).expand_as(of_blocks)
        deviating[..., at, :] = left
        return averaged, deviating

    def read(self, allowed: Bool[Tensor, "*batch pos pos"]) -> Bool[Tensor, "*batch pos pos"]:
        """Limit pairs of tokens to queries behind the blocks and keys in them.

        Raises ValueError for a run without a query behind the blocks, with padding in front, or with a window that
        hides a block from such a query.
        """
        n = allowed.shape[-1]
        if n <= self.stop:
            raise ValueError(f"the blocks end at token {self.stop}, and this run has {n}: no query stands behind them")
        seen = allowed[..., self.stop :, self.starts[0] : self.stop]
        if not bool(allowed[..., 1, 0].all() & seen.all()):
            raise ValueError(
                "a query behind the blocks does not see all of them: blocks are counted from the first token of a run, "
                "so pad at its end; and leave out layers whose window is shorter than the blocks"
            )
        inside = torch.zeros(n, n, dtype=torch.bool, device=allowed.device)
        inside[self.stop :, self.tokens().flatten().to(allowed.device)] = True
        return allowed & inside

    def shuffled(
        self, difference: Float[Tensor, "batch jobs pos pos"], seeds: list[list[int]]
    ) -> Float[Tensor, "batch jobs pos pos"]:
        """Move what is removed from each block to another one, by a random cycle through all blocks for each job.

        Every query then loses the same numbers from other blocks: a random part of equal size.
        """
        moved, at = difference.clone(), self.tokens().to(difference.device)
        for job, seed in enumerate(seeds):
            cycle = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.starts))).to(at.device)
            moved[:, job][..., at[cycle]] = difference[:, job][..., at[cycle.roll(1)]]
        return moved


def block_places(model: Any, blocks: Any) -> BlockPlaces:
    """Return where the blocks of a `BlockPrompt` stand, or of a list of them that stand at the same places.

    Raises ValueError for blocks of unequal length, and for prompts whose blocks stand elsewhere.
    """
    if isinstance(blocks, BlockPlaces):
        return blocks
    prompts = list(blocks) if isinstance(blocks, list | tuple) else [blocks]
    strange = [type(one).__name__ for one in prompts if not hasattr(one, "tokenized")]
    if strange or not prompts:
        raise ValueError(
            f"blocks are those of a BlockPrompt, the keys, or of a list of them; found {[*strange, 'none'][0]}"
        )
    tokenized = [one.tokenized(model) for one in prompts]
    spans = [one.spans() for one in tokenized]
    widths = sorted({stop - start for one in spans for start, stop in one})
    if len(widths) > 1:
        raise ValueError(
            f"blocks of {widths[0]} to {widths[-1]} tokens: content and position are taken apart token by token, so "
            "give blocks of equal length"
        )
    elsewhere = [index for index, one in enumerate(spans) if one != spans[0]]
    if elsewhere:
        raise ValueError(
            f"the blocks of prompt {elsewhere[0]} begin at {[start for start, _ in spans[elsewhere[0]]]} and those of "
            f"prompt 0 at {[start for start, _ in spans[0]]}: give each its own part"
        )
    stop = spans[0][-1][1]
    ids = tuple(tuple(one.tokens()[:stop].tolist()) for one in tokenized)
    return BlockPlaces(tuple(start for start, _ in spans[0]), widths[0], ids)


@dataclass(frozen=True, eq=False, repr=False)
class BlockPart(Part):
    """A part of the scores between queries behind the blocks of a prompt (or their places) and keys in them."""

    control = "blocks"
    prompt: Any

    @property
    def settings(self) -> Mapping[str, Any]:
        """Where the blocks stand, of a settled part."""
        places = self.prompt
        known = isinstance(places, BlockPlaces)
        return {"block_starts": list(places.starts), "block_width": places.width} if known else {}

    def _settled(self, view: AttentionView, prompts: PackedTokens) -> "BlockPart":
        """Return the part with the places of its blocks in place of the prompt.

        Raises as `block_places`, and for prompts of a run that are not the part's.
        """
        places = block_places(view.model, self.prompt)
        places.require_own(prompts.tokens, torch.tensor(places.ids), f"{self.name}: prompt")
        return replace(self, prompt=places)

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, "BlockPart"]:
        """Bind the part to layers. Raises as `block_places`."""
        return dict.fromkeys(by_layer, replace(self, prompt=block_places(view.model, self.prompt)))

    def require_own(self, view: AttentionView, passed: Tensor) -> None:
        """Refuse a run of other prompts than the part's, by what passes `AttentionView.tokens_point`. ValueError."""
        own = view.passed_by(torch.tensor(self.prompt.ids, device=passed.device))
        self.prompt.require_own(passed, own, f"{self.name}: row")

    def change(
        self, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"]
    ) -> tuple[Float[Tensor, "batch heads pos pos"], Bool[Tensor, "*batch pos pos"]]:
        """Return what is added to the scaled scores, before a softcap, and the pairs of `BlockPlaces.read`.

        Raises as that. Biases are in it. Non-rotary columns do not depend on the place, so they are content; ALiBi is
        position.
        """
        read = self.prompt.read(allowed)
        return self._of(scores).neg_().masked_fill_(~read, 0.0), read

    def _of(self, scores: HeadScores) -> Float[Tensor, "batch heads pos pos"]:
        """Return the part of the scaled scores between queries behind the blocks and keys in them."""
        query, key, rotation = scores.query.whole, scores.key.whole, scores.key.rotation
        mean_keys, key_deviations = self.prompt.split(key)
        at_mean, at_deviations = scores, scores  # the scores with keys rotated to no place, and by how places differ
        if rotation is not None:
            tables = zip(self.prompt.split(rotation.cos), self.prompt.split(rotation.sin), strict=True)
            at_mean, at_deviations = (
                replace(scores, key=replace(scores.key, rotation=replace(rotation, cos=cos, sin=sin)))
                for cos, sin in tables
            )
        if isinstance(self, Content):
            return at_mean.between(query, key_deviations)
        if isinstance(self, Interaction):
            return at_deviations.turning_between(query, key_deviations)
        part = at_deviations.turning_between(query, mean_keys)
        if scores.layer.alibi is not None:
            bias = in_float64(scores.layer.alibi.bias(torch.arange(key.shape[-2]))[scores.heads])
            part = part + self.prompt.split(bias[..., None])[1].mT.to(part)
        return part


@dataclass(frozen=True, eq=False, repr=False)
class Content(BlockPart):
    """What of a head's scores depends on which content a block of a prompt has.

    `tlspectral.hooks.parts.blocks` has the formulas. Only scores of queries behind the blocks and keys in them change.

    Attributes:
        prompt: a `BlockPrompt` with blocks of equal length, or a list of them with blocks at the same places. Every
            sequence of a run has to begin with the tokens of one of them, up to the end of its last block; what follows
            is free. A sink in the first block is a block like the others; put it into the prefix to leave it out.

    Raises:
        ValueError: when a model is given, no `BlockPrompt`, blocks of unequal length or at other places; as it meets a
            task or the model runs, other tokens than those of the prompt (a start token in front, such as `model(text)`
            puts there), no query behind the blocks, or one that does not see all of them; or a run that begins behind
            the embedding (from embeddings, or `start_at_layer`), which shows no tokens.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(12)]
    >>> prompt = tls.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> with tls.ablate(model, "L1H0", tls.parts.Content(prompt)):
    ...     model(prompt.tokenized(model).tokens()).shape
    torch.Size([1, 26, 32])
    """

    name = "content"


@dataclass(frozen=True, eq=False, repr=False)
class Position(BlockPart):
    """What of a head's scores depends on where a block of a prompt stands; else as `Content`."""

    name = "position"


@dataclass(frozen=True, eq=False, repr=False)
class Interaction(BlockPart):
    """What of a head's scores depends on the content of a block and on its place together; else as `Content`."""

    name = "interaction"


def centred(values: Tensor, dim: int) -> Tensor:
    """Centre the values. The first value is subtracted beforehand, so that equal values give exactly 0."""
    from_first = values - values.narrow(dim, 0, min(1, values.shape[dim]))
    return from_first - from_first.mean(dim, keepdim=True)
