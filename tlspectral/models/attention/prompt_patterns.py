"""The attention patterns of some heads on one prompt, as the model computes them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.hooking.strips import Strip
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.long_prompts import strips_for
from tlspectral.models.running.passes import read_patterns
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text

MOST_TOKENS = 128
"""Largest number of tokens of a prompt whose attention is drawn. With more, the squares are too small to see."""


def prompt_patterns(
    view: AttentionView, by_layer: Mapping[int, list[int]], prompt: Any
) -> tuple[list[Float[np.ndarray, "query key"]], list[str]]:
    """Run the model in `view` on one prompt; return two lists: the attention pattern [query, key] of each head, and the
    text of each token.

    by_layer: from layer to heads; patterns are sorted by layer. prompt: text or token ids, at most `MOST_TOKENS`
    tokens. Hooks on the model act. Raises ValueError for several prompts or a longer one, UnsupportedArchitecture if a
    layer does not return its attention.
    """
    tokens = packed_prompts(view, prompt).tokens
    return patterns_of(view, by_layer, tokens), [token_text(view, int(token)) for token in tokens[0]]


def patterns_of(
    view: AttentionView,
    by_layer: Mapping[int, list[int]],
    tokens: Int[Tensor, "sequences pos"],
    queries: slice | None = None,
) -> list[Float[np.ndarray, "query key"]]:
    """Run the model in `view` on one prompt; return a list with the attention pattern [query, key] of each head, sorted
    by layer.

    by_layer: from layer to heads. tokens: the prompt's ids [1, pos]. queries: start and stop of the rows that are
    returned, at most `MOST_TOKENS`; None: all of a prompt of at most so many tokens. All keys are columns. The model
    runs once, under the hooks that are on it; of a long prompt no whole pattern is made. Raises ValueError for several
    prompts or too many tokens, UnsupportedArchitecture if a layer does not return its attention.
    """
    n_sequences, length = tokens.shape
    asked = queries or slice(0, length)
    if n_sequences != 1 or asked.stop - asked.start > MOST_TOKENS:
        raise ValueError(
            f"found {n_sequences} prompts of {length} tokens, and one prompt of up to {MOST_TOKENS} tokens can be "
            "drawn: give one short prompt"
        )
    strips_for(view, length)  # refuses a long prompt of a model that would make whole patterns
    rows: dict[int, list[Tensor]] = {}

    def keep(layer: int, pattern: Tensor, strip: Strip) -> None:
        first, last = (min(max(edge, strip.start), strip.stop) for edge in (asked.start, asked.stop))
        found = pattern[0, by_layer[layer], first - strip.start : last - strip.start].detach().float().cpu()
        rows.setdefault(layer, []).append(torch.nn.functional.pad(found, (0, length - found.shape[-1])))

    read_patterns(view, tokens, sorted(by_layer), keep)
    return [pattern for layer in sorted(by_layer) for pattern in torch.cat(rows[layer], dim=1).numpy()]
