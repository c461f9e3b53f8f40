"""Shares of content, of position and of their interaction in a head's logits.

"Decoupling Positional and Symbolic Attention Behavior" (PS, section 6) conjectures that any head decomposes into heads
that are purely positional or purely symbolic. The logit on a block of a prompt is then a function of the content plus a
function of the place. The interaction of a two-way table is the remainder that no such sum can express.
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
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.positional.readout import LastQuery, read_prompt
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.block_places import BlockPlaces, block_places
from tlspectral.tasks.block_prompt import BlockPrompt, require_block_prompt

LOGIT_SHARES = Schema(
    "logit_shares",
    (
        *HEAD,
        *columns("""
            content     | share | Share of the logits' variation (over contents and places of blocks) that depends on
                        |       | the content alone. The three shares are NaN where a window hides a block.
            position    | share | Share that depends on the place alone.
            interaction | share | Share that is left: content and place do not add up to it.
            table_std   | logit | Standard deviation of the logits over contents and places.
        """),
    ),
    "`tlspectral.positional.logit_shares`",
)


class LogitSplit(NamedTuple):
    """Sums of squares of a table of logits (content by place) about its mean; the three add up to the table's total.

    Attributes:
        content: sum of squares that depends on the content alone, in squared logits.
        position: sum of squares that depends on the place alone.
        interaction: the rest, which no sum of a content term and a place term explains.
    """

    content: Float64[Tensor, "*batch"]
    position: Float64[Tensor, "*batch"]
    interaction: Float64[Tensor, "*batch"]

    @property
    def total(self) -> Float64[Tensor, "*batch"]:
        """Sum of squares of the table about its mean, in squared logits."""
        return self.content + self.position + self.interaction

    def shares(self) -> Float64[Tensor, "3 *batch"]:
        """Return content, position and interaction, each over their sum [3, ...]; NaN if all logits are equal."""
        return torch.stack(tuple(self)) / self.total


def split_logits(logits: Float64[Tensor, "*batch n n"]) -> LogitSplit:
    """Split a table of logits into content, position and interaction (two-way analysis of variance).

        content = n sum_k (mean_j L[k, j] - mu)^2     position = n sum_j (mean_k L[k, j] - mu)^2
        interaction = sum_kj (L[k, j] - mean_j L[k, j] - mean_k L[k, j] + mu)^2     mu = mean_kj L[k, j]

    Args:
        logits: L[k, j], logit of content k at place j.

    Returns:
        `LogitSplit` with `content`, `position` and `interaction`, in squared logits, one number per table. If the
            interaction is 0, `position / (position + content)` equals the index of `exclusion_split`.

    Not established: which contents or places the head prefers, or that its output depends on them.
    """
    n = logits.shape[-1]
    mean = logits.mean((-2, -1), keepdim=True)
    content, position = logits.mean(-1, keepdim=True) - mean, logits.mean(-2, keepdim=True) - mean
    left = logits - mean - content - position
    return LogitSplit(
        n * content.square().sum((-2, -1)), n * position.square().sum((-2, -1)), left.square().sum((-2, -1))
    )


def logit_shares(model: Any, prompt: BlockPrompt, heads: Heads | None = None) -> pd.DataFrame:
    """Measure how much a head's logits on blocks depend on their content, on their place, and on both together.

    The logits are those of a prompt's last token. Use it to see by what a head finds a block.

    >>> import tlspectral as tls, torch
    >>> blocks = [torch.tensor([2 * number + 1, 2 * number + 2]) for number in range(12)]
    >>> prompt = tls.positional.BlockPrompt(torch.tensor([0]), blocks, torch.tensor([7]))
    >>> shares = tls.positional.logit_shares(tls.load_model("tiny-rope"), prompt, "L0H0")
    >>> shares[["content", "position", "interaction"]].round(2).values.tolist()
    [[0.08, 0.88, 0.04]]

    Every block's keys are rotated to every block's place, with the model's own cos and sin. This gives a table of
    logits, content by place, for each token offset inside a block. Each table is split into sums of squares of content,
    place and interaction, which are added over offsets. Nothing is sampled.

    Args:
        model: TransformerBridge or HookedTransformer; hooks on it act as usual.
        prompt: a `BlockPrompt` with blocks of equal length. An attention sink in the first block counts as content; put
            it into the prefix to leave it out.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a DataFrame with layer
            and head. Default: all.

    Returns:
        DataFrame, a row per head. Columns: `layer, head, name, content, position, interaction, table_std`. The three
            shares (0 to 1) add up to 1; `table_std` is the standard deviation of the table, in logits. Logits are
            scaled and include biases and ALiBi, before a softcap.

    Raises:
        ValueError: no heads, blocks of unequal length, text that the tokenizer merges across blocks, or a prompt that
            is too long.
        BadHead: a head that does not exist.
        ScoreMismatch: a layer's attention is not the softmax of its captured queries and keys.
        UnsupportedArchitecture: a layer that cannot be read, or has no attention pattern.

    Not established: that the model needs the largest share; remove it with `tls.parts.Content(prompt)` to see. A share
    does not tell the size of the logits (`table_std` does). More: docs/positional.md.
    """
    with measured(model) as view:
        chosen = heads_by_layer(view, heads)
        require_block_prompt(prompt)
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
    """Return a DataFrame with a row per head in `heads`, a part of the table of `logit_shares` for one layer.

    Columns: layer, head, the shares content, position and interaction of the logits' variance (NaN if a block is
    hidden), and table_std in logits. `seen`: factors of the last query's logits in this layer. `places`: token
    positions of the blocks.
    """
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
