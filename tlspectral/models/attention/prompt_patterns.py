"""The attention of some heads on one prompt, as the model computes it."""

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
"""Tokens of a prompt whose attention is drawn; beyond it the squares cannot be told apart."""


def prompt_patterns(
    view: AttentionView, by_layer: Mapping[int, list[int]], prompt: Any
) -> tuple[list[Float[np.ndarray, "query key"]], list[str]]:
    """Return `patterns_of` one prompt, and its tokens as text. Raises as `patterns_of` and `packed_prompts`."""
    tokens = packed_prompts(view, prompt).tokens
    return patterns_of(view, by_layer, tokens), [token_text(view, int(token)) for token in tokens[0]]


def patterns_of(
    view: AttentionView, by_layer: Mapping[int, list[int]], tokens: Int[Tensor, "sequences pos"]
) -> list[Float[np.ndarray, "query key"]]:
    """Return the attention of each head on the ids of one prompt, in the order of layers.

    The model runs once, under the hooks that are on it. Raises ValueError for more than one prompt, or more than
    `MOST_TOKENS` tokens, and UnsupportedArchitecture where a layer does not return its attention.
    """
    n_sequences, length = tokens.shape
    if n_sequences != 1 or length > MOST_TOKENS:
        raise ValueError(f"one prompt of up to {MOST_TOKENS} tokens can be drawn; found {n_sequences} of {length}")
    names = {layer: view.hook_names(layer)["pattern"] for layer in sorted(by_layer)}
    captured = capture_until(view, tokens, [*names.values()], last=[*names.values()][-1])
    whole = {layer: captured[name].float().mean(0).cpu().numpy() for layer, name in names.items()}
    return [whole[layer][head] for layer in names for head in by_layer[layer]]
