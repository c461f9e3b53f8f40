"""The attention patterns of some heads on one prompt, as the model computes them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import capture_until
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
    view: AttentionView, by_layer: Mapping[int, list[int]], tokens: Int[Tensor, "sequences pos"]
) -> list[Float[np.ndarray, "query key"]]:
    """Run the model in `view` on one prompt; return a list with the attention pattern [query, key] of each head, sorted
    by layer.

    by_layer: from layer to heads. tokens: the prompt's ids [1, pos]. The model runs once, under the hooks that are on
    it. Raises ValueError for several prompts or more than `MOST_TOKENS` tokens, UnsupportedArchitecture if a layer does
    not return its attention.
    """
    n_sequences, length = tokens.shape
    if n_sequences != 1 or length > MOST_TOKENS:
        raise ValueError(
            f"found {n_sequences} prompts of {length} tokens, and one prompt of up to {MOST_TOKENS} tokens can be "
            "drawn: give one short prompt"
        )
    names = {layer: view.hook_names(layer)["pattern"] for layer in sorted(by_layer)}
    captured = capture_until(view, tokens, [*names.values()], last=[*names.values()][-1])
    whole = {layer: captured[name].float().mean(0).cpu().numpy() for layer, name in names.items()}
    return [whole[layer][head] for layer in names for head in by_layer[layer]]
