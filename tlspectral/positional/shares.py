"""How much of a head's logits is content, how much position, and how much needs both.

"Decoupling Positional and Symbolic Attention Behavior" (PS, section 6) conjectures that any head decomposes into heads
that are purely positional or purely symbolic. For a logit on a block of a prompt this is a sum of a function of the
content and one of the place. The interaction of a two-way table is what no such sum has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import einsum, rearrange
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.reading import measured
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.reading.view import heads_by_layer
from tlspectral.positional.readout import LastQuery, read_prompt
from tlspectral.selection import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.block_places import BlockPlaces, block_places
from tlspectral.tasks.block_prompt import BlockPrompt

LOGIT_SHARES = Schema(
    "logit_shares",
    (
        *HEAD,
        *columns("""
            content     | share | Of the table's squares about its mean, what depends on the content of a block alone.
                        |       | The three are NaN where a window hides a block.
            position    | share | What depends on the place alone.
            interaction | share | What is no sum of a function of the content and one of the place.
            table_std   | logit | Standard deviation of the logits over these tables.
        """),
    ),
    "`tlspectral.positional.logit_shares`",
)


class LogitSplit(NamedTuple):
    """Sums of squares of a two-way table of logits about its mean: they add up to the sum of squares of the table.

    Attributes:
        content: of what depends on the content alone, times the places.
        position: of what depends on the place alone, times the contents.
        interaction: of what is left.
    """

    content: Float64[Tensor, "*batch"]
    position: Float64[Tensor, "*batch"]
    interaction: Float64[Tensor, "*batch"]

    @property
    def total(self) -> Float64[Tensor, "*batch"]:
        """Sum of squares of the table about its mean."""
        return self.content + self.position + self.interaction

    def shares(self) -> Float64[Tensor, "3 *batch"]:
        """Return the three over their sum; NaN where all logits of a table are equal."""
        return torch.stack(tuple(self)) / self.total


def split_logits(logits: Float64[Tensor, "*batch n n"]) -> LogitSplit:
    """Take a table of logits apart into content, position and interaction.

        content = n sum_k (mean_j L[k, j] - mu)^2     position = n sum_j (mean_k L[k, j] - mu)^2
        interaction = sum_kj (L[k, j] - mean_j L[k, j] - mean_k L[k, j] + mu)^2     mu = mean_kj L[k, j]

    Args:
        logits: L[k, j], logit of content k at place j.

    Returns:
        Squared logits. Without interaction, `position / (position + content)` is the index of `exclusion_split`.

    Source: the two-way analysis of variance without replicates; PS, section 6, for why.

    What it does not establish: which contents or places the head prefers, nor that its output depends on them.
    """
    n = logits.shape[-1]
    mean = logits.mean((-2, -1), keepdim=True)
    content, position = logits.mean(-1, keepdim=True) - mean, logits.mean(-2, keepdim=True) - mean
    left = logits - mean - content - position
    return LogitSplit(
        n * content.square().sum((-2, -1)), n * position.square().sum((-2, -1)), left.square().sum((-2, -1))
    )


def logit_shares(model: Any, prompt: BlockPrompt, heads: Heads | None = None) -> pd.DataFrame:
    """Measure the shares of content, position and interaction in the logits that a prompt's last token gives blocks.

    The key of the content of each block is rotated to the place of each block with the model's own cos and sin, token
    by token, and `split_logits` takes the table of every token's offset apart; sums of squares are added up over the
    offsets. Nothing is sampled and no block is left out. Differences between offsets, the same in all blocks, are in no
    share. Logits are scaled, with biases and ALiBi, before a softcap.

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        prompt: with blocks of equal length. A sink in the first block is a content like the others: put it into the
            prefix to leave it out.
        heads: as in `ablate`; None for all.

    Returns:
        DataFrame, a row per head. Columns: `layer, head, name, content, position, interaction, table_std`. The three
        shares add up to 1.

    Raises:
        ValueError: no heads, blocks of unequal length, text that the tokenizer joins across blocks, or a prompt too
            long.
        BadHead: a head that does not exist.
        ScoreMismatch: a layer's attention is not the softmax of its captured queries and keys.
        UnsupportedArchitecture: a layer that cannot be read, or has no attention pattern.

    Source: PS, section 6, conjectures that heads are sums of positional and symbolic ones; these shares are ours. Keys
    swap as in `mode="key"` of `positional_symbolic`: without rotary positions or ALiBi all is content, a learned
    position too, as it is part of the key.

    What it does not establish: that the model needs the largest share: remove it, as `tls.parts.Content(prompt)`. A
    share says nothing about its size, which `table_std` does, nor this how much attention moves.

    Example:
        >>> import tlspectral as tls, torch
        >>> model = tls.load_model("tiny-rope")
        >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(12)]
        >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
        >>> shares = tls.positional.logit_shares(model, prompt)
        >>> float(shares[["content", "position", "interaction"]].sum(axis=1).round(6).min())
        1.0
    """
    with measured(model) as view:
        chosen = heads_by_layer(view, heads)
        tokenized = prompt.tokenized(view.model)
        places, tokens = block_places(view.model, tokenized), tokenized.tokens()
        rows: list[pd.DataFrame] = []
        read_prompt(
            view, tokens, chosen, lambda layer, seen: rows.append(_layer_rows(layer, chosen[layer], seen, places))
        )
        settings = {
            "n_blocks": len(places.starts),
            "block_width": places.width,
            "n_tokens": len(tokens),
            "tokens_sha256": digest_of([tokens]),
        }
        return Measurement(LOGIT_SHARES, settings, view.origin()).table(pd.concat(rows, ignore_index=True))


def _layer_rows(layer: int, heads: list[int], seen: LastQuery, places: BlockPlaces) -> pd.DataFrame:
    at = places.tokens().to(seen.contents.device)  # blocks width
    contents = seen.contents[heads][..., at]  # heads coordinates blocks width
    rotations = (seen.places if seen.places.ndim == 2 else seen.places[heads])[..., at]
    logits = seen.score_scale * einsum(
        contents,
        rotations.expand_as(contents),
        "head coordinate content width, head coordinate place width -> head width content place",
    )
    if seen.alibi is not None:
        bias = seen.alibi.bias(at.flatten())[heads]
        logits = logits + rearrange(bias, "head (place width) -> head width 1 place", width=at.shape[1])
    split = LogitSplit(*(squares.sum(-1) for squares in split_logits(logits)))
    visible = bool(seen.visible[at].all())
    shares = split.shares() if visible else torch.full((3, len(heads)), torch.nan)
    content, position, interaction = shares.cpu().numpy()
    return pd.DataFrame(
        {
            "layer": layer,
            "head": np.array(heads),
            "content": content,
            "position": position,
            "interaction": interaction,
            "table_std": (split.total / logits[0].numel()).sqrt().cpu().numpy(),
        }
    )
